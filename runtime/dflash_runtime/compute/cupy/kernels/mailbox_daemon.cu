// The daemon's side of a mailbox: what a layer is asked. Its answer is written by experts_decode.cu.
//
// Defines: PAIRS of a step; THREADS; MOST_PEERS.
#include "mailbox.cuh"

struct MailTakeArgs {
    Mail mail;
    MailParts parts;        // written to
    const void *request;    // lines
    int *topk_ids;          // [PAIRS], local; negative: none
    float *topk_weights;    // [PAIRS]
};

KERNEL(mail_take, MailTakeArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const u32 epoch = a.mail.epoch();
    const u64 deadline = a.mail.deadline();
    bool is_there = !a.mail.is_aborted();
    for (int pair = thread_index(); pair < PAIRS; pair += THREADS) {
        u32 expert, weight;
        if (is_there) {
            is_there = a.mail.receive(line_at(a.request, pair), 0, epoch, deadline, expert, weight);
        }
        const bool rounds = is_there && asks_rounded(expert);
        if (pair == 0) a.mail.state->rounds = rounds;
        if (rounds) expert ^= ROUNDS;
        a.topk_ids[pair] = is_there ? (int)expert : -1;  // nothing is computed, nor answered
        a.topk_weights[pair] = is_there ? bits_to_float(weight) : 0.0f;
    }
    a.parts.each_line(thread_index(), THREADS, [&](int line, u32 *word, bool has_second) {
        u32 first, second;
        if (!is_there) return;
        const u8 *from = line_at(a.request, PAIRS + line);
        is_there = a.mail.receive(from, 0, epoch, deadline, first, second);
        if (!is_there) return;
        word[0] = first;
        if (has_second) word[1] = second;
    });
}
