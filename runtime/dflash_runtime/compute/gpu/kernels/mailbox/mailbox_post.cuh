// Sends a layer's request to one peer's mailbox, in the parent: by mail_post, or by a block of
// experts_gate_up, where this device has some of the layer's experts itself.
//
// Parameters: TOKENS, TOP_K, EXPERTS; ROUTE: experts are chosen here, from logits, with NORMALISE and GATE
// of route.cuh; MOST_PEERS, CHECK_FACTOR.
#pragma once
#include "fetch_decision.cuh"
#include "mailbox.cuh"
#include "route.cuh"

// What was done in a layer, in steps that were posted.
struct FetchCounts {
    u32 found;    // pairs whose expert was in a slot, or is fetched for an earlier pair
    u32 fetched;  // experts
    u32 kept;     // of these
};

// The experts of a layer that steps keep besides those that are here always: slots that follow what is
// chosen. Of the experts that `peer` would be asked for the second one, in the order of the pairs, is not:
// this device reads it over the bus (fetch_expert.cu), and keeps it if it was used more of late than one of
// those. A step of several tokens counts as one use of all that it chooses. What was used infinitely often
// is pinned.
struct MailFetch {
    float *scores;       // [EXPERTS]: uses, older ones count less
    int *slot_experts;   // null: there are no slots; or [num_slots], negative: empty
    FetchDecision *decision;  // written here
    FetchCounts *counts;  // null, or increased here
    float decay, margin;  // of scores at each step; by which one must be used more than what it replaces
    int peer, num_slots;
};

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
    MailFetch fetch;
};

constexpr int POST_PAIRS = TOKENS * TOP_K;

// The expert in the lane's slot; negative: it has none, or that is empty.
INLINE int kept_expert(const MailFetch &a) {
    return lane_index() < a.num_slots ? (int)load_fresh4(a.slot_experts + lane_index()) : -1;
}

// How many of the pairs are of an expert, and counted as found. Nothing waits for what is added.
INLINE int count_found(const MailFetch &a, const int *ids, int kept, bool posts) {
    int found = 0;
#pragma unroll
    for (int pair = 0; pair < POST_PAIRS; pair++) found += kept >= 0 && ids[pair] == kept;
    if (found && posts && a.counts) atomic_add(&a.counts->found, (u32)found);
    return found;
}

// The first pair whose expert the peer would be asked for, but for one expert; POST_PAIRS: there is none.
INLINE int first_asked(const int *local_ids, const int *ids, int but) {
    int first = POST_PAIRS;
    for (int pair = lane_index(); pair < POST_PAIRS; pair += LANES) {
        const int expert = ids[pair];
        const bool exists = (u32)expert < (u32)EXPERTS && expert != but;
        if (exists && (int)load_weights4(local_ids + expert) >= 0) first = min_of(first, pair);
    }
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) first = min_of(first, lane_xor(first, mask));
    return first;
}

// The first pair of the second expert that the peer would be asked for; -1: it is asked for one at most.
INLINE int pair_to_fetch(const int *local_ids, const int *ids) {
    int pair = -1;
    if constexpr (TOKENS == 1) {
        int num_asked = 0;
#pragma unroll
        for (int k = 0; k < TOP_K; k++) {
            const bool exists = (u32)ids[k] < (u32)EXPERTS;
            if (exists && (int)load_weights4(local_ids + ids[k]) >= 0 && num_asked++ == 1) pair = k;
        }
    } else {
        const int first = first_asked(local_ids, ids, -1);
        const int second = first < POST_PAIRS ? first_asked(local_ids, ids, ids[first]) : POST_PAIRS;
        if (second < POST_PAIRS) pair = second;
    }
    return pair;
}

// Decides what a step fetches, and into which slot; the last of these is for what is not kept. One warp
// calls; `ids`: the choice.
INLINE void decide_fetch(const MailFetch &a, const int *local_ids, const int *ids, bool posts) {
    const int pair = pair_to_fetch(local_ids, ids);
    const int expert = pair < 0 ? 0 : ids[pair], place = lane_index();
    const bool is_slot = place < a.num_slots;
    const int kept = kept_expert(a);
    float worth = kept < 0 ? -1.0f : a.decay * bits_to_float(load_fresh4(a.scores + kept));
    const float wanted = a.decay * bits_to_float(load_fresh4(a.scores + expert)) + 1.0f;
    const bool is_used = count_found(a, ids, kept, posts) > 0 || !is_slot;
    // The least worth, of equals the first: worths are at least -1, so that their bits plus one are ordered.
    u32 order = is_used ? ~0u : float_to_bits(worth + 1.0f);
    int best = place;
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) {
        const u32 other = lane_xor(order, mask);
        const int other_place = lane_xor(best, mask);
        const bool takes = other < order || (other == order && other_place < best);
        order = takes ? other : order;
        best = takes ? other_place : best;
    }
    const int leaving = lane_read(kept, best);
    const float least = lane_read(worth, best);
    const bool is_kept = order != ~0u && (leaving < 0 || wanted > least + a.margin);
    for (int e = lane_index(); e < EXPERTS; e += LANES) {
        float score = a.decay * bits_to_float(load_fresh4(a.scores + e));
        if constexpr (TOKENS == 1) {
            for (int k = 0; k < TOP_K; k++) score += ids[k] == e ? 1.0f : 0.0f;
        } else {
            bool is_chosen = false;
            for (int k = 0; k < POST_PAIRS; k++) is_chosen |= ids[k] == e;
            score += is_chosen ? 1.0f : 0.0f;
        }
        if (posts) a.scores[e] = score;
    }
    if (lane_index() != 0) return;
    const bool fetches = posts && pair >= 0;
    a.decision->pair = fetches ? pair : -1;
    a.decision->slot = is_kept ? best : a.num_slots;
    a.decision->expert = expert;
    a.decision->leaving = is_kept ? leaving : FETCH_NOT_KEPT;
    if (!fetches) return;
    if (is_kept) a.slot_experts[best] = expert;
    if (!a.counts) return;
    atomic_add(&a.counts->fetched, 1);
    if (is_kept) atomic_add(&a.counts->kept, 1);
    if constexpr (TOKENS > 1) {
        int others = 0;
        for (int k = pair + 1; k < POST_PAIRS; k++) others += ids[k] == expert;
        if (others) atomic_add(&a.counts->found, (u32)others);
    }
}

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
        if (!ROUTE) ids[pair] = expert;
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
    if (!a.fetch.slot_experts || peer != a.fetch.peer || warp_index() != 0) return;
    decide_fetch(a.fetch, a.local_ids[peer], ids, posts);
}
