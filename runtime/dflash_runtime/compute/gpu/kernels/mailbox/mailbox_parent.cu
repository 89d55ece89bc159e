// Requests and replies of a layer, in the parent.
//
//   mail_post         routes (if ROUTE) and sends rows, ids and weights. Grid: peers, THREADS threads
//   mail_add          waits for the replies and adds them to the residual, rounded once, for a layer
//                     without local experts, or with experts that the host asks for. (Elsewhere
//                     experts_down adds them to the local ones.) A thread per element
//   mail_add_rounded  the same for a single peer whose sums are rounded already. A thread per two elements
//
// Parameters: TOKENS, HIDDEN, TOP_K, EXPERTS; ROUTE: experts are chosen here, from logits, with NORMALISE
// and GATE of route.cuh; THREADS, ADD_THREADS; MOST_PEERS.
#include "mailbox.cuh"
#include "route.cuh"

struct MailPostArgs {
    Mail mail;
    MailParts parts;
    const float *logits;             // [T, EXPERTS], if ROUTE: the kernel writes the next two
    int *topk_ids;                   // [T, TOP_K] global ids
    float *topk_weights;             // [T, TOP_K]
    u32 *selections;                 // null, or [EXPERTS]: incremented for each expert that was chosen
    const int *local_ids[MOST_PEERS];  // [EXPERTS] per peer: its local ids; negative: not its expert
    void *requests[MOST_PEERS];      // lines
    u32 *asked;                      // [peers]: gets whether there is a reply to wait for
    u32 always;                      // a bit for each peer whose reply is waited for in any case
    int rounds;                      // not 0: the only peer may round its reply
};

constexpr int POST_PAIRS = TOKENS * TOP_K;
// Warps that route, one token each if there are enough; the others send rows meanwhile.
constexpr int MOST_CHOOSERS = THREADS / LANES / 2;
constexpr int CHOOSERS = !ROUTE ? 0 : TOKENS < MOST_CHOOSERS ? TOKENS : MOST_CHOOSERS;

// Rows are sent while the first warps route, and an expert's id is sent before the next one is chosen, so
// that the peer loads its weights meanwhile.
KERNEL(mail_post, MailPostArgs, THREADS, 1) {
    using Choice = Router<EXPERTS, TOP_K, NORMALISE != 0, (Gate)GATE>;
    SHARED(int, ids, POST_PAIRS);
    SHARED(float, weights, POST_PAIRS);
    SHARED(int, is_asked, 1);
    if (thread_index() == 0) *is_asked = a.always >> block_index_x() & 1;
    const int peer = block_index_x();
    const bool is_first = peer == 0, chooses = warp_index() < CHOOSERS;
    let_next_begin();
    int local_of[Choice::EACH];  // loaded before it is known which are needed
    if (chooses) {
#pragma unroll
        for (int j = 0; j < Choice::EACH; j++) {
            local_of[j] = (int)load_weights4(a.local_ids[peer] + min_of(Choice::expert(j), EXPERTS - 1));
        }
    }
    wait_for_previous();
    const u32 epoch = a.mail.epoch();
    const bool posts = !a.mail.is_aborted();
    const u32 rounds = a.rounds ? ROUNDS : 0;
    void *lines = a.requests[peer];
    if (chooses) {
        for (int token = warp_index(); token < TOKENS; token += MOST_CHOOSERS) {
            Choice router;
            const float *logits = a.logits + (i64)token * EXPERTS;
            router.load([&](int e) { return bits_to_float(load_fresh4(logits + e)); });
            router.choose(TOP_K, [&](int k, int j) {
                const int pair = token * TOP_K + k;
                if (posts) send_half(line_at(lines, pair), epoch, (u32)local_of[j] ^ rounds);
                ids[pair] = router.expert(j);
            });
            const float weight = router.weight();
            if (lane_index() < TOP_K) {
                const int pair = token * TOP_K + lane_index();
                if (posts) send_half(line_at(lines, pair) + HALF_BYTES, epoch, float_to_bits(weight));
                weights[pair] = weight;
            }
        }
    } else if (posts) {
        constexpr int First = CHOOSERS * LANES, Step = THREADS - First;
        const int num_lines = a.parts.num_lines();
        for (int first = thread_index() - First; first < num_lines; first += LINES_AT_ONCE * Step) {
            uint2 words[LINES_AT_ONCE];
#pragma unroll
            for (int j = 0; j < LINES_AT_ONCE; j++) {
                if (first + j * Step < num_lines) words[j] = a.parts.load(first + j * Step);
            }
#pragma unroll
            for (int j = 0; j < LINES_AT_ONCE; j++) {
                const int line = first + j * Step;
                if (line >= num_lines) break;
                send_line(line_at(lines, POST_PAIRS + line), epoch, words[j].x, words[j].y);
            }
        }
    }
    block_barrier();
    for (int pair = thread_index(); pair < POST_PAIRS; pair += THREADS) {
        const int expert = ROUTE ? ids[pair] : (int)load_fresh4(a.topk_ids + pair);
        const u32 weight = ROUTE ? float_to_bits(weights[pair]) : load_fresh4(a.topk_weights + pair);
        const bool exists = (u32)expert < (u32)EXPERTS;
        const u32 local = exists ? load_weights4(a.local_ids[peer] + expert) : ~0u;
        if (!ROUTE && posts) send_line(line_at(lines, pair), epoch, local ^ rounds, weight);
        if ((int)local >= 0) *is_asked = 1;
        if (!is_first) continue;
        if (ROUTE) a.topk_ids[pair] = expert, a.topk_weights[pair] = bits_to_float(weight);
        if (a.selections && exists) atomic_add(a.selections + expert, 1);
    }
    block_barrier();
    if (thread_index() == 0) a.asked[peer] = *is_asked;
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
    const u32 epoch = a.replies.mail.epoch();
    double total = a.host ? a.host[i] : 0.0;
    if (!a.replies.add(i, epoch, a.replies.mail.deadline(), total)) return;
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
    if (mail.is_aborted() || !a.replies.is_asked(0)) return;
    uint4 found[1];
    auto line = [&](int) { return line_at(a.replies.lines[0], i / 2); };
    auto peer = [&](int) { return a.replies.peers[0]; };
    if (!a.replies.await_slow(0, i / 2, epoch, mail.deadline(), true)) return;
    if (!mail.receive(found, 1, line, peer, epoch, mail.deadline(), true)) return;
    a.residual[i] = bits_to_float(before.x) + bits_to_float(found[0].x);
    a.residual[i + 1] = bits_to_float(before.y) + bits_to_float(found[0].z);
}
