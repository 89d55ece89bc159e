// Round trips through a mailbox with nothing but words that both sides can work out: whether they
// arrive whole, and how long they take. Daemon: mail_echo; parent: mail_ping.
//
// Defines: IS_ECHO: which of the two; THREADS; MOST_PEERS.
#include "mailbox.cuh"

struct MailProbeArgs {
    Mail mail;
    void *requests;     // lines
    void *replies;      // lines
    u32 *wrong;         // of mail_ping: lines that had other words than they should
    u64 *ticks;         // of mail_ping: null, or [num_rounds]: what each took
    int num_requests;   // lines
    int num_replies;
    int num_rounds;
    u32 seed;
    u32 longest_pause;  // ticks; before a side posts it waits for some time up to that
};

// As murmur3 mixes 32 bits.
INLINE u32 mixed(u32 x) {
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}
INLINE u32 word_of(u32 seed, u32 round, u32 line, u32 which) {
    return mixed(mixed(seed + 0x9e3779b9u * round) + 2 * line + which);
}
INLINE void pause_before(u32 seed, u32 round, u32 longest) {
    if (!longest) return;
    const u64 until = clock_ticks() + word_of(seed, round, 0x7fffffff, 0) % longest;
    while (clock_ticks() < until) spin_pause();
}

// What a side sends in a round, of which each thread has some lines.
INLINE void send_all(void *lines, int num_lines, u32 epoch, u32 seed, u32 round) {
    for (int i = thread_index(); i < num_lines; i += THREADS) {
        send_line(line_at(lines, i), epoch, word_of(seed, round, i, 0), word_of(seed, round, i, 1));
    }
}
// False: given up. Adds what is wrong.
INLINE bool receive_all(const Mail &mail, const void *lines, int num_lines, u32 epoch, u32 seed,
                        u32 round, u32 &wrong) {
    const u64 deadline = clock_ticks() + mail.limit;
    for (int i = thread_index(); i < num_lines; i += THREADS) {
        u32 first, second;
        if (!mail.receive(line_at(lines, i), 0, epoch, deadline, first, second)) return false;
        wrong += first != word_of(seed, round, i, 0) || second != word_of(seed, round, i, 1);
    }
    return true;
}

#if !IS_ECHO

KERNEL(mail_ping, MailProbeArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const u32 first_epoch = a.mail.epoch() + 1;
    u32 wrong = 0;
    bool goes_on = true;
    for (int round = 0; round < a.num_rounds; round++) {
        const u32 epoch = first_epoch + round;
        if (goes_on) pause_before(a.seed, round, a.longest_pause);
        const u64 began = clock_ticks();
        if (goes_on) {
            send_all(a.requests, a.num_requests, epoch, a.seed, round);
            goes_on = receive_all(a.mail, a.replies, a.num_replies, epoch, ~a.seed, round, wrong);
        }
        block_barrier();
        if (thread_index() == 0 && a.ticks) a.ticks[round] = clock_ticks() - began;
    }
    if (wrong || !goes_on) atomic_add(a.wrong, wrong + !goes_on);
    block_barrier();
    if (thread_index() == 0) a.mail.state->epoch = first_epoch + a.num_rounds - 1;
}

#else

KERNEL(mail_echo, MailProbeArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const u32 first_epoch = a.mail.epoch() + 1;
    u32 wrong = 0;
    bool goes_on = true;
    for (int round = 0; round < a.num_rounds; round++) {
        const u32 epoch = first_epoch + round;
        if (goes_on) {
            goes_on = receive_all(a.mail, a.requests, a.num_requests, epoch, a.seed, round, wrong);
        }
        block_barrier();  // an answer says that all has arrived
        if (goes_on) {
            pause_before(~a.seed, round, a.longest_pause);
            // What is wrong here is told by an answer that is.
            send_all(a.replies, a.num_replies, epoch, ~a.seed + (wrong != 0), round);
        }
    }
    block_barrier();
    if (thread_index() == 0) a.mail.state->epoch = first_epoch + a.num_rounds - 1;
}

#endif
