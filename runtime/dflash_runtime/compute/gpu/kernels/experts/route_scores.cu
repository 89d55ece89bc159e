// route_scores: top-k routing by any rule: several score functions, a bias that only affects the choice,
// group-limited choice, a scale of the weights. Writes ids and weights. Grid T, one logical warp: a warp
// per token. For plain softmax, route.cuh is used instead, inside the experts' kernels.
//
// Parameters: EXPERTS, TOP_K, SCORES (0 softmax, 1 sigmoid, 2 logits, then softmax over the chosen,
// 3 sqrt(softplus)), BY_LOGITS: the choice is by logits, NORMALISE, GROUPS, GROUPS_USED, SCALE (bits of a
// float).
#include "argmax.cuh"
#include "gates.cuh"

static_assert(TOP_K <= LANES && TOP_K <= EXPERTS / GROUPS * GROUPS_USED, "a lane has a choice's weight");

struct RouteScoresArgs {
    const float *logits;  // [T, EXPERTS]
    const float *bias;    // [EXPERTS], or null
    int *topk_ids;        // [T, TOP_K]
    float *topk_weights;
};

constexpr int EACH = (EXPERTS + LANES - 1) / LANES;

// A key with the order of the values. NaN is the lowest but for 0, which marks a chosen expert.
INLINE u32 key_of(float value) {
    const u32 bits = float_to_bits(value + 0.0f);  // -0 is 0
    if (value != value) return 1;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
INLINE float value_of(u32 key) { return bits_to_float(key >> 31 ? key & 0x7fffffffu : ~key); }
INLINE float minus_infinity() { return bits_to_float(0xff800000u); }
INLINE float square_root(float value) { return value > 0.0f ? value * reciprocal_root(value) : value; }
INLINE float score_of(float logit, float highest, float total) {
    if constexpr (SCORES == 0) return exp_fast(logit - highest) / total;
    if constexpr (SCORES == 1) return sigmoid(logit);
    if constexpr (SCORES == 3) return square_root(softplus(logit));
    return logit;
}

KERNEL(route_scores, RouteScoresArgs, LANES, 1) {
    SHARED(u32, keys, EXPERTS);
    SHARED(float, scores, EXPERTS);
    SHARED(u32, group_keys, GROUPS);
    let_next_begin();
    wait_for_previous();
    const i64 token = block_index_x();
    float logits[EACH], highest = minus_infinity(), total = 0.0f;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int e = lane_index() + LANES * j;
        logits[j] = e < EXPERTS ? bits_to_float(load_fresh4(a.logits + token * EXPERTS + e)) : minus_infinity();
        highest = max_of(logits[j], highest);
    }
    if constexpr (SCORES == 0) {
        highest = lanes_max(highest);
#pragma unroll
        for (int j = 0; j < EACH; j++) total += exp_fast(logits[j] - highest);
        total = lanes_sum(total);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int e = lane_index() + LANES * j;
        if (e >= EXPERTS) continue;
        const float score = score_of(logits[j], highest, total);
        float worth = BY_LOGITS ? logits[j] : score;
        if (a.bias) worth += bits_to_float(load_weights4(a.bias + e));
        scores[e] = score;
        keys[e] = key_of(worth);
    }
    block_barrier();
    if constexpr (GROUPS > 1) {
        constexpr int SIZE = EXPERTS / GROUPS;
        for (int group = lane_index(); group < GROUPS; group += LANES) {
            u32 first = 0, second = 0;
            for (int i = 0; i < SIZE; i++) {
                const u32 key = keys[group * SIZE + i];
                if (key > first) second = first, first = key;
                else if (key > second) second = key;
            }
            const float worth = value_of(first) + (SIZE > 1 ? value_of(second) : 0.0f);
            group_keys[group] = key_of(worth);
        }
        block_barrier();
        for (int group = lane_index(); group < GROUPS; group += LANES) {
            int better = 0;
            for (int other = 0; other < GROUPS; other++) {
                better += group_keys[other] > group_keys[group] ||
                          (group_keys[other] == group_keys[group] && other < group);
            }
            if (better < GROUPS_USED) continue;
            for (int i = 0; i < SIZE; i++) keys[group * SIZE + i] = 0;
        }
        block_barrier();
    }
    float weight = 0.0f;
    for (int k = 0; k < TOP_K; k++) {
        // The highest key; ties go to the lower id.
        u64 best = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int e = lane_index() + LANES * j;
            if (e >= EXPERTS) continue;
            const u64 key = (u64)keys[e] << 32 | (u32)(EXPERTS - 1 - e);
            best = key > best ? key : best;
        }
        best = lanes_largest(best);
        const int expert = EXPERTS - 1 - (int)(u32)best;
        if (lane_index() == k) {
            weight = scores[expert];
            a.topk_ids[token * TOP_K + k] = expert;
        }
        block_barrier();
        if (lane_index() == 0) keys[expert] = 0;
        block_barrier();
    }
    const bool has = lane_index() < TOP_K;
    if constexpr (SCORES == 2) {
        const float largest = lanes_max(has ? weight : minus_infinity());
        weight = exp_fast(weight - largest);
        weight /= lanes_sum(has ? weight : 0.0f);
    }
    if constexpr (NORMALISE != 0) {
        const float sum = lanes_sum(has ? weight : 0.0f);
        // Not max_of, which could lose a NaN.
        weight /= sum < 6.103515625e-05f ? 6.103515625e-05f : sum;
    }
    if (has) a.topk_weights[token * TOP_K + lane_index()] = weight * bits_to_float(SCALE);
}
