// Choice of experts from router logits, by one warp. Every block that needs the choice repeats it, which
// is faster than a kernel in between; all get the same bits.
#pragma once
#include "common.cuh"

enum Gate { SOFTMAX_GATE };

// Experts of the highest logits, ties to the lower id, NaN last; weights are their scores, divided by
// the sum of these if Normalise. If any logit is NaN all weights are.
template <int Experts, int TopK, bool Normalise, Gate Gating>
struct Router {
    static_assert(TopK <= Experts && TopK <= LANES, "a lane has a choice's weight");
    static_assert(Gating == SOFTMAX_GATE, "another gate");
    static constexpr int EACH = (Experts + LANES - 1) / LANES;
    float logits[EACH];
    u32 keys[EACH];  // ordered as logits are; 0: taken, or no expert
    float chosen;    // the logit of choice number lane_index()

    // Lanes have neighbouring experts, so that the lowest lane has the lowest id.
    INLINE static int expert(int j) { return lane_index() * EACH + j; }
    INLINE static u32 key_of(float logit) {
        const u32 bits = float_to_bits(logit + 0.0f);  // -0 is 0
        if (logit != logit) return 1;
        return bits >> 31 ? ~bits : bits | 0x80000000u;
    }
    INLINE static float logit_of(u32 key) {
        if (key <= 1) return bits_to_float(0x7fc00000u);
        return bits_to_float(key >> 31 ? key & 0x7fffffffu : ~key);
    }

    // One warp calls this and what follows. `read(e)` gives the logit of an expert.
    template <typename Read>
    INLINE void load(Read read) {
        chosen = 0.0f;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            logits[j] = bits_to_float(0xff800000u);
            if (expert(j) < Experts) logits[j] = read(expert(j));
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) keys[j] = expert(j) < Experts ? key_of(logits[j]) : 0;
    }
    // The first `count` choices: the lane that has the expert of choice k calls take(k, j).
    template <typename Take>
    INLINE void choose(int count, Take take) {
#pragma unroll 1
        for (int k = 0; k < count; k++) {
            u32 own = keys[0];
#pragma unroll
            for (int j = 1; j < EACH; j++) own = keys[j] > own ? keys[j] : own;
            const u32 highest = lanes_largest(own);
            bool is_mine = is_first_lane(own == highest);
            if (lane_index() == k) chosen = logit_of(highest);
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                if (!is_mine || keys[j] != highest) continue;
                keys[j] = 0;
                is_mine = false;
                take(k, j);
            }
        }
    }
    // Of choice number lane_index(), once all TopK are made.
    INLINE float weight() const {
        float highest = logits[0], total = 0.0f;
#pragma unroll
        for (int j = 1; j < EACH; j++) highest = max_of(logits[j], highest);
        highest = lanes_max(highest);
#pragma unroll
        for (int j = 0; j < EACH; j++) total += exp_fast(logits[j] - highest);
        float score = exp_fast(chosen - highest) / lanes_sum(total);
        if constexpr (Normalise) {
            const float sum = lanes_sum(lane_index() < TopK ? score : 0.0f);
            // Not max_of, which could lose a NaN.
            score /= sum < 6.103515625e-05f ? 6.103515625e-05f : sum;
        }
        return score;
    }
};
