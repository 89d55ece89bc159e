// Round trips through a mailbox with nothing but words that both sides can work out: whether they
// arrive whole, and how long they take. Daemon: mail_echo; parent: mail_ping.
//
// Defines: IS_ECHO: which of the two; THREADS; MOST_PEERS.
#include "mailbox.cuh"

// What a side has found, in the memory of its device.
enum FaultKind {
    WRONG,    // a word that nobody sent
    TORN,     // a word of the round before, beside this round's epoch: half of a line in two pieces
    STALE,    // what had come is again what it was a round ago
    MISSING,  // a line that has not come in time
    FAULT_KINDS,
};
struct MailFaults {
    u32 counts[FAULT_KINDS];  // words; of MISSING lines
    u32 num_found;
    u32 kind, epoch, line, word, expected, found;  // of the first; of MISSING the epochs of the line

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
    u64 *ticks;         // of mail_ping: null, or [num_rounds]: what each took
    int num_requests;   // lines
    int num_replies;
    int num_rounds;
    u32 seed;
    u32 longest_pause;  // ticks; before a side posts it waits for some time up to that, and whatever
                        // has come is looked at twice
};

// As murmur3 mixes 32 bits.
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

// One direction of a probe: each thread has some of its lines.
struct ProbeLines {
    void *lines;
    int num_lines;
    u32 seed;

    INLINE void send(u32 epoch) const {
        for (int i = thread_index(); i < num_lines; i += THREADS) {
            send_line(line_at(lines, i), epoch, word_of(seed, epoch, i, 0), word_of(seed, epoch, i, 1));
        }
    }
    // False: given up. `is_right`: every word is what it should be.
    INLINE bool receive(const Mail &mail, u32 epoch, MailFaults *faults, bool &is_right) const {
        const u64 deadline = clock_ticks() + mail.limit;
        is_right = true;
        for (int i = thread_index(); i < num_lines; i += THREADS) {
            u32 words[2];
            if (!mail.receive(line_at(lines, i), 0, epoch, deadline, words[0], words[1])) {
                note_missing(i, epoch, faults);
                return false;
            }
            for (u32 which = 0; which < 2; which++) {
                const u32 expected = word_of(seed, epoch, i, which), found = words[which];
                if (found == expected) continue;
                is_right = false;
                const bool is_old = found == word_of(seed, epoch - 1, i, which);
                faults->note(is_old ? TORN : WRONG, epoch, i, which, expected, found);
            }
        }
        return true;
    }
    // What was right must still be so: nobody writes it again before he is answered.
    INLINE void look_again(u32 epoch, MailFaults *faults) const {
        for (int i = thread_index(); i < num_lines; i += THREADS) {
            const uint4 line = load_line(line_at(lines, i));
            const u32 words[2] = {line.x, line.z}, epochs[2] = {line.y, line.w};
            for (u32 which = 0; which < 2; which++) {
                const u32 expected = word_of(seed, epoch, i, which), found = words[which];
                const bool is_old = found == word_of(seed, epoch - 1, i, which);
                if (epochs[which] == epoch - 1 || is_old) {
                    faults->note(STALE, epoch, i, which, expected, found);
                } else if (epochs[which] != epoch || found != expected) {
                    faults->note(WRONG, epoch, i, which, expected, found);
                }
            }
        }
    }
    // The first of ours that has not come, and all others that have not come either.
    INLINE void note_missing(int first, u32 epoch, MailFaults *faults) const {
        for (int i = first; i < num_lines; i += THREADS) {
            const uint4 line = load_line(line_at(lines, i));
            const bool is_first = line.y != epoch;
            if (i > first && !is_first && line.w == epoch) continue;
            faults->note(MISSING, epoch, i, is_first ? 0 : 1, epoch, is_first ? line.y : line.w);
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
            goes_on = replies.receive(a.mail, epoch, a.faults, is_right);
        }
        block_barrier();
        if (thread_index() == 0 && a.ticks) a.ticks[round] = clock_ticks() - began;
        if (!a.longest_pause) continue;
        if (goes_on && is_right) replies.look_again(epoch, a.faults);
        block_barrier();  // nothing is asked before all have looked
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
        if (goes_on) goes_on = requests.receive(a.mail, epoch, a.faults, is_right);
        block_barrier();  // an answer says that all has arrived
        if (a.longest_pause) {
            if (goes_on && is_right) requests.look_again(epoch, a.faults);
            if (goes_on) pause_before(~a.seed, epoch, a.longest_pause);
            block_barrier();  // and that all have looked
        }
        if (goes_on) replies.send(epoch);
    }
    block_barrier();
    if (thread_index() == 0) a.mail.state->epoch = first_epoch + a.num_rounds - 1;
}

#endif
