// Top-k routing from router logits by one warp (softmax scores). In a step every block that needs the
// choice repeats it, which is faster than a separate kernel; all blocks get the same bits.
#pragma once
#include "common.cuh"

enum Gate { SOFTMAX_GATE };

// Chooses the experts with the highest logits; ties go to the lower id, NaN comes last. Weights are the
// softmax scores, divided by their sum if Normalise. If any logit is NaN, all weights are NaN.
template <int Experts, int TopK, bool Normalise, Gate Gating>
struct Router {
    static_assert(TopK <= Experts && TopK <= LANES, "a lane has a choice's weight");
    static_assert(Gating == SOFTMAX_GATE, "another gate");
    static constexpr int EACH = (Experts + LANES - 1) / LANES;
    float logits[EACH];
    u32 keys[EACH];  // same order as the logits; 0: already chosen, or no expert
    float chosen;    // logit of choice number lane_index()

    // A lane has consecutive experts, so that the lowest lane has the lowest ids.
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

    // One warp calls this and the functions below. read(e) is the logit of an expert.
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
    // Makes the first `count` choices. For choice k the lane that has its expert calls take(k, j), where
    // expert(j) is the expert.
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
    // The weight of choice number lane_index(), after all TopK choices.
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
