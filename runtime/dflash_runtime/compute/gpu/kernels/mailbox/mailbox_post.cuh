// Sends a layer's request to one peer's mailbox, in the parent: by mail_post, or by a block of
// experts_gate_up, where this device has some of the layer's experts itself.
//
// Parameters: TOKENS, TOP_K, EXPERTS; ROUTE: experts are chosen here, from logits, with NORMALISE and GATE
// of route.cuh; MOST_PEERS.
#pragma once
#include "mailbox.cuh"
#include "route.cuh"

struct MailPost {
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

// Posts to one peer; all threads of a block call. Writes the choice (if ROUTE) and counts it where
// `writes_choice`. Rows are sent while the first warps route, one token each if there are enough, and an
// expert's id is sent before the next one is chosen, so that the peer loads its weights meanwhile.
template <int Threads>
INLINE void post_request(const MailPost &a, int peer, bool writes_choice) {
    constexpr int MostChoosers = Threads / LANES / 2;
    constexpr int Choosers = !ROUTE ? 0 : TOKENS < MostChoosers ? TOKENS : MostChoosers;
    using Choice = Router<EXPERTS, TOP_K, NORMALISE != 0, (Gate)GATE>;
    SHARED(int, ids, POST_PAIRS);
    SHARED(float, weights, POST_PAIRS);
    SHARED(int, is_asked, 1);
    if (thread_index() == 0) *is_asked = a.always >> peer & 1;
    const bool chooses = warp_index() < Choosers;
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
        for (int token = warp_index(); token < TOKENS; token += MostChoosers) {
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
        constexpr int First = Choosers * LANES, Step = Threads - First;
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
    for (int pair = thread_index(); pair < POST_PAIRS; pair += Threads) {
        const int expert = ROUTE ? ids[pair] : (int)load_fresh4(a.topk_ids + pair);
        const u32 weight = ROUTE ? float_to_bits(weights[pair]) : load_fresh4(a.topk_weights + pair);
        const bool exists = (u32)expert < (u32)EXPERTS;
        const u32 local = exists ? load_weights4(a.local_ids[peer] + expert) : ~0u;
        if (!ROUTE && posts) send_line(line_at(lines, pair), epoch, local ^ rounds, weight);
        if ((int)local >= 0) *is_asked = 1;
        if (!writes_choice) continue;
        if (ROUTE) a.topk_ids[pair] = expert, a.topk_weights[pair] = bits_to_float(weight);
        if (a.selections && exists) atomic_add(a.selections + expert, 1);
    }
    block_barrier();
    if (thread_index() == 0) a.asked[peer] = *is_asked;
}
