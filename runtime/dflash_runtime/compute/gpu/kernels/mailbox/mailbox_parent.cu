// Requests and replies of a layer, in the parent.
//
//   mail_post         routes (if ROUTE) and sends rows, ids and weights, where this device has none of the
//                     layer's experts, or the host asks too. Grid: peers, THREADS threads
//   mail_add          waits for the replies and adds them to the residual, rounded once, for a layer
//                     without local experts, or with experts that the host asks for. (Elsewhere
//                     experts_down adds them to the local ones.) A thread per element
//   mail_add_rounded  the same for a single peer whose sums are rounded already. A thread per two elements
//
// Parameters: TOKENS, HIDDEN, TOP_K, EXPERTS; ROUTE: experts are chosen here, from logits, with NORMALISE
// and GATE of route.cuh; THREADS, ADD_THREADS; MOST_PEERS, CHECK_FACTOR.
#include "mailbox_post.cuh"

KERNEL(mail_post, MailPost, THREADS, 1) {
    post_request<THREADS>(a, block_index_x(), block_index_x() == 0);
}

struct MailAddArgs {
    MailReplies replies;
    float *residual;      // [T, HIDDEN], added to in place
    const double *local;  // null, or [T, HIDDEN]: sums of local experts
    const double *host;   // null, or [T, HIDDEN]: sums of owners that the host has asked
};

KERNEL(mail_add, MailAddArgs, ADD_THREADS, 1) {
    const int i = block_index_x() * ADD_THREADS + thread_index();
    let_next_begin();
    wait_for_previous();
    if (i >= TOKENS * HIDDEN) return;
    const float before = bits_to_float(load_fresh4(a.residual + i));
    const u32 waited = a.replies.waited(), epoch = a.replies.mail.epoch();
    double total = a.host ? a.host[i] : 0.0;
    if (waited && !a.replies.add(i, waited, epoch, a.replies.mail.deadline(), total)) return;
    if (a.local) total = a.local[i] + total;
    a.residual[i] = before + (float)total;
}

// Two float32 elements per line, so HIDDEN must be even.
KERNEL(mail_add_rounded, MailAddArgs, ADD_THREADS, 1) {
    const int i = 2 * (block_index_x() * ADD_THREADS + thread_index());
    let_next_begin();
    wait_for_previous();
    if (i >= TOKENS * HIDDEN) return;
    const uint2 before = load_fresh8(a.residual + i);
    const Mail &mail = a.replies.mail;
    const u32 epoch = mail.epoch();
    const u32 waited = a.replies.waited();
    if (mail.is_aborted() || !waited) return;
    uint4 found[1];
    auto line = [&](int) { return line_at(a.replies.lines[0], i / 2); };
    auto peer = [&](int) { return a.replies.peers[0]; };
    if (!a.replies.await_slow(0, i / 2, epoch, mail.deadline(), true)) return;
    if (!mail.receive(found, 1, line, peer, epoch, mail.deadline(), true)) return;
    a.residual[i] = bits_to_float(before.x) + bits_to_float(found[0].x);
    a.residual[i + 1] = bits_to_float(before.y) + bits_to_float(found[0].z);
}
