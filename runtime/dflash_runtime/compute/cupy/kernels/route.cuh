// Choice of experts by the last block that has written router logits, for all tokens.
#pragma once
#include "common.cuh"

enum Gate { SOFTMAX_GATE };

INLINE float fresh_float(const float *p) { return bits_to_float(load_fresh4(p)); }

// Whether this block is the last of `num_blocks` to come here, all of whose writes are then seen. The
// counter is zero again afterwards.
INLINE bool is_last_block(u32 *counter, int num_blocks) {
    SHARED(u32, before, 1);
    memory_fence();
    block_barrier();
    if (thread_index() == 0) {
        before[0] = atomic_add(counter, 1);
        if (before[0] == (u32)num_blocks - 1) *counter = 0;
    }
    block_barrier();
    memory_fence();
    return before[0] == (u32)num_blocks - 1;
}

// Top-k of the scores, ties to the lower id; weights are the scores of the chosen, divided by their
// sum if Normalise. Of NaNs the lowest ids are chosen too, with weights that are NaN.
template <int Tokens, int Experts, int TopK, bool Normalise, Gate Gating, int Threads>
struct Router {
    static_assert(TopK <= Experts, "more are chosen than there are");
    static constexpr int PADDED = (Experts + 3) / 4 * 4;  // with keys that come last

    // Orders scores, which are not negative: NaN comes last.
    INLINE static u32 rank_key(float score) { return score == score ? float_to_bits(score) + 1 : 0; }

    INLINE static int is_before(u32 key, int e, u32 own, int expert) {
        return key >= (e < expert ? own : own + 1);  // of equals the lower id
    }

    // By one warp: the scores of a token, and its keys.
    INLINE static void softmax(float *scores, u32 *keys, const float *logits) {
        float highest = bits_to_float(0xff800000u);
        for (int e = lane_index(); e < Experts; e += LANES) {
            scores[e] = fresh_float(logits + e);
            highest = max_of(scores[e], highest);
        }
        highest = lanes_max(highest);
        float total = 0.0f;
        for (int e = lane_index(); e < Experts; e += LANES) {
            scores[e] = exp_fast(scores[e] - highest);
            total += scores[e];
        }
        total = lanes_sum(total);
        for (int e = lane_index(); e < PADDED; e += LANES) {
            if (e < Experts) scores[e] /= total;
            keys[e] = e < Experts ? rank_key(scores[e]) : 0;
        }
    }

    // All threads call. Shapes: logits [T, E]; ids, weights [T, K].
    INLINE static void run(const float *logits, int *ids, float *weights) {
        SHARED(float, scores, Tokens *Experts);
        SHARED(u32, keys, Tokens *PADDED);
        SHARED(float, chosen, Tokens *TopK);
        for (int t = warp_index(); t < Tokens; t += Threads / LANES) {
            static_assert(Gating == SOFTMAX_GATE, "another gate");
            softmax(scores + t * Experts, keys + t * PADDED, logits + (i64)t * Experts);
        }
        block_barrier();
        // An expert's rank is how many come before it: no rounds, and no thread waits for another.
        for (int i = thread_index(); i < Tokens * Experts; i += Threads) {
            const int token = i / Experts, expert = i % Experts;
            const u32 *row = keys + token * PADDED, own = row[expert];
            int rank = 0;
#pragma unroll 4
            for (int e = 0; e < PADDED; e += 4) {
                const uint4 four = *(const uint4 *)(row + e);
                rank += is_before(four.x, e, own, expert) + is_before(four.y, e + 1, own, expert) +
                        is_before(four.z, e + 2, own, expert) + is_before(four.w, e + 3, own, expert);
            }
            if (rank < TopK) {
                ids[token * TopK + rank] = expert;
                chosen[token * TopK + rank] = scores[i];
            }
        }
        block_barrier();
        for (int i = thread_index(); i < Tokens * TopK; i += Threads) {
            float weight = chosen[i];
            if constexpr (Normalise) {
                float total = 0.0f;
                for (int k = 0; k < TopK; k++) total += chosen[i / TopK * TopK + k];
                // Not max_of, which could lose a NaN.
                weight /= total < 6.103515625e-05f ? 6.103515625e-05f : total;
            }
            weights[i] = weight;
        }
    }
};
