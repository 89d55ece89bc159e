// Tests a mailbox: round trips of pseudo-random words that both ends can compute. Checks that they arrive
// whole, and measures how long a round takes. The parent runs mail_ping, the daemon mail_echo. Grid 1,
// THREADS threads; each thread sends and receives every THREADS-th line.
//
// Parameters: IS_ECHO: which of the two is compiled; THREADS; MOST_PEERS, CHECK_FACTOR.
#include "mailbox.cuh"

enum FaultKind {
    WRONG,    // a word or a check that was not sent
    TORN,     // a word beside another word's check: half a line was transferred in two pieces
    STALE,    // a line that had arrived shows the previous round again
    MISSING,  // a line that has not arrived in time
    FAULT_KINDS,
};
constexpr int ODD_POLLS = 1 << 8;  // polls of a half that fits no round, before it counts as damaged
// The faults that an end has found, in its device's memory.
struct MailFaults {
    u32 counts[FAULT_KINDS];  // number of words; for MISSING of lines
    u32 num_found;
    u32 kind, epoch, line, word, expected, found;  // the first fault: words, or checks if the word is
                                                   // right, or epochs if MISSING

    INLINE void note(FaultKind fault, u32 in_epoch, u32 in_line, u32 which, u32 wanted, u32 is) {
        atomic_add(counts + fault, 1);
        if (atomic_add(&num_found, 1) != 0) return;
        kind = fault, epoch = in_epoch, line = in_line, word = which, expected = wanted, found = is;
    }
};

struct MailProbeArgs {
    Mail mail;
    void *requests;     // lines
    void *replies;      // lines
    MailFaults *faults;
    u64 *ticks;         // mail_ping: null, or [num_rounds], the time of each round
    int num_requests;   // lines
    int num_replies;
    int num_rounds;
    u32 seed;
    int follows;        // not 0: the lines hold the previous epoch's words, or are new memory
    u32 longest_pause;  // ticks. Not 0: a random pause up to this comes before each send, and lines
                        // that have arrived are read a second time
};

// The finaliser of MurmurHash3.
INLINE u32 mixed(u32 x) {
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}
INLINE u32 word_of(u32 seed, u32 epoch, u32 line, u32 which) {
    return mixed(mixed(seed + 0x9e3779b9u * epoch) + 2 * line + which);
}
INLINE void pause_before(u32 seed, u32 epoch, u32 longest) {
    if (!longest) return;
    const u64 until = clock_ticks() + word_of(seed, epoch, 0x7fffffff, 0) % longest;
    while (clock_ticks() < until) spin_pause();
}

// What the polls of one line have found so far.
struct ProbeLine {
    u32 words[2], checks[2];
    int odd[2];  // for each half: polls in which it fitted no round, and the last word then
    u32 odd_words[2];
    bool is_there;

    INLINE void load(const void *line) {
        const uint4 now = load_line(line);
        words[0] = now.x, checks[0] = now.y, words[1] = now.z, checks[1] = now.w;
    }
    // True if both halves have arrived, or are damaged for good. `follows`: before, the line held the
    // previous epoch's words, or was new memory.
    INLINE bool judge(u32 epoch, bool follows) {
        int num_there = 0;
#pragma unroll
        for (int which = 0; which < 2; which++) {
            const u32 word = words[which], check = checks[which];
            const bool is_new = check == check_of(epoch, word);
            const bool is_old = check == check_of(epoch - 1, word), is_unused = !(word | check);
            if (follows && !is_new && !is_old && !is_unused) odd[which]++, odd_words[which] = word;
            num_there += is_new || odd[which] > ODD_POLLS;
        }
        return num_there == 2;
    }
};

// The lines of one direction.
struct ProbeLines {
    void *lines;
    int num_lines;
    u32 seed;

    INLINE void send(u32 epoch) const {
        for (int i = thread_index(); i < num_lines; i += THREADS) {
            send_line(line_at(lines, i), epoch, word_of(seed, epoch, i, 0), word_of(seed, epoch, i, 1));
        }
    }
    // Waits for all lines, polling as Mail::receive does. False: the deadline has passed. `is_right`:
    // every word has the expected value and, if the round `follows` another, showed only the previous
    // round's value (or that of new memory) until then.
    INLINE bool receive(const Mail &mail, u32 epoch, bool follows, MailFaults *faults,
                        bool &is_right) const {
        const u64 deadline = clock_ticks() + mail.limit;
        is_right = true;
        for (int first = thread_index(); first < num_lines; first += LINES_AT_ONCE * THREADS) {
            ProbeLine found[LINES_AT_ONCE] = {};
            for (int poll = 1;; poll++) {
#pragma unroll
                for (int j = 0; j < LINES_AT_ONCE; j++) {
                    const int i = first + j * THREADS;
                    if (i < num_lines && !found[j].is_there) found[j].load(line_at(lines, i));
                }
                bool are_there = true;
#pragma unroll
                for (int j = 0; j < LINES_AT_ONCE; j++) {
                    const int i = first + j * THREADS;
                    if (i >= num_lines || found[j].is_there) continue;
                    found[j].is_there = found[j].judge(epoch, follows);
                    are_there &= found[j].is_there;
                    if (found[j].is_there) is_right &= is_fine(i, found[j], epoch, faults);
                }
                if (are_there) break;
                if (poll % POLLS == 0 && mail.is_over(0, epoch, deadline, poll % FAR_POLLS == 0)) {
                    u32 are_here = 0;
#pragma unroll
                    for (int j = 0; j < LINES_AT_ONCE; j++) are_here |= (u32)found[j].is_there << j;
                    note_missing(first, are_here, epoch, faults);
                    return false;
                }
                spin_pause();
            }
        }
        return true;
    }
    INLINE bool is_fine(int i, const ProbeLine &found, u32 epoch, MailFaults *faults) const {
        bool is_right = true;
        for (u32 which = 0; which < 2; which++) {
            const u32 word = found.words[which];
            if (is_fine(i, which, word, found.checks[which], epoch, faults)) {
                if (!found.odd[which]) continue;
                faults->note(TORN, epoch, i, which, word, found.odd_words[which]);
            }
            is_right = false;
        }
        return is_right;
    }
    INLINE bool is_fine(int line, u32 which, u32 word, u32 check, u32 epoch,
                        MailFaults *faults) const {
        const u32 expected = word_of(seed, epoch, line, which);
        const u32 expected_check = check_of(epoch, expected);
        if (word == expected && check == expected_check) return true;
        const u32 old = word_of(seed, epoch - 1, line, which);
        const bool is_of_both = word == expected ? check == check_of(epoch - 1, old)
                                                 : word == old && check == expected_check;
        const FaultKind fault = is_of_both ? TORN : WRONG;
        if (word != expected) {
            faults->note(fault, epoch, line, which, expected, word);
        } else {
            faults->note(fault, epoch, line, which, expected_check, check);
        }
        return false;
    }
    // Lines that were right must still be right: the peer writes them again only after our answer.
    INLINE void reread(u32 epoch, MailFaults *faults) const {
        for (int i = thread_index(); i < num_lines; i += THREADS) {
            const uint4 line = load_line(line_at(lines, i));
            const u32 words[2] = {line.x, line.z}, checks[2] = {line.y, line.w};
            for (u32 which = 0; which < 2; which++) {
                const u32 expected = word_of(seed, epoch, i, which), found = words[which];
                if (found == expected && checks[which] == check_of(epoch, found)) continue;
                const bool is_old = checks[which] == check_of(epoch - 1, found);
                faults->note(is_old ? STALE : WRONG, epoch, i, which, expected, found);
            }
        }
    }
    // Notes the lines of this thread that have not arrived. `are_here`: a bit for each of the lines being
    // polled, which begin at `first`.
    INLINE void note_missing(int first, u32 are_here, u32 epoch, MailFaults *faults) const {
        for (int j = 0, i = first; i < num_lines; j++, i += THREADS) {
            const uint4 line = load_line(line_at(lines, i));
            if (j < LINES_AT_ONCE ? are_here >> j & 1 : is_of_epoch(line, epoch)) continue;
            const bool is_first = line.y != check_of(epoch, line.x);
            const u32 is_of = is_first ? check_of(line.y, line.x) : check_of(line.w, line.z);
            faults->note(MISSING, epoch, i, is_first ? 0 : 1, epoch, is_of);
        }
    }
};

#if !IS_ECHO

KERNEL(mail_ping, MailProbeArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const u32 first_epoch = a.mail.epoch() + 1;
    const ProbeLines requests = {a.requests, a.num_requests, a.seed};
    const ProbeLines replies = {a.replies, a.num_replies, ~a.seed};
    bool goes_on = true, is_right = true;
    for (int round = 0; round < a.num_rounds; round++) {
        const u32 epoch = first_epoch + round;
        if (goes_on) pause_before(a.seed, epoch, a.longest_pause);
        const u64 began = clock_ticks();
        if (goes_on) {
            requests.send(epoch);
            goes_on = replies.receive(a.mail, epoch, round || a.follows, a.faults, is_right);
        }
        block_barrier();
        if (thread_index() == 0 && a.ticks) a.ticks[round] = clock_ticks() - began;
        if (!a.longest_pause) continue;
        if (goes_on && is_right) replies.reread(epoch, a.faults);
        block_barrier();  // no thread sends the next round before all have read
    }
    block_barrier();
    if (thread_index() == 0) a.mail.state->epoch = first_epoch + a.num_rounds - 1;
}

#else

KERNEL(mail_echo, MailProbeArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const u32 first_epoch = a.mail.epoch() + 1;
    const ProbeLines requests = {a.requests, a.num_requests, a.seed};
    const ProbeLines replies = {a.replies, a.num_replies, ~a.seed};
    bool goes_on = true, is_right = true;
    for (int round = 0; round < a.num_rounds; round++) {
        const u32 epoch = first_epoch + round;
        if (goes_on) goes_on = requests.receive(a.mail, epoch, round || a.follows, a.faults, is_right);
        block_barrier();  // an answer is sent only after all lines have arrived
        if (a.longest_pause) {
            if (goes_on && is_right) requests.reread(epoch, a.faults);
            if (goes_on) pause_before(~a.seed, epoch, a.longest_pause);
            block_barrier();  // and after all threads have read them again
        }
        if (goes_on) replies.send(epoch);
    }
    block_barrier();
    if (thread_index() == 0) a.mail.state->epoch = first_epoch + a.num_rounds - 1;
}

#endif
