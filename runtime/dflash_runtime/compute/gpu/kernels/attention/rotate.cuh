// RMS norm and rotary position embedding (RoPE) of one head, by one logical warp, in registers.
#pragma once
#include "common.cuh"

INLINE float load_weight(const float *p) { return bits_to_float(load_weights4(p)); }
INLINE float load_fresh_float(const float *p) { return bits_to_float(load_fresh4(p)); }

// One lane's part of a head: pairs that are rotated, and elements from ROTATED_DIM on, which are not.
// Pairs are (x[p], x[p + ROTATED_DIM / 2]), or (x[2p], x[2p + 1]) if IS_INTERLEAVED.
template <int DIM, int ROTATED_DIM, bool IS_INTERLEAVED>
struct HeadPart {
    static constexpr int NUM_PAIRS = ROTATED_DIM / 2;
    static constexpr int PAIRS = (NUM_PAIRS + LANES - 1) / LANES;
    static constexpr int RESTS = (DIM - ROTATED_DIM + LANES - 1) / LANES;
    static constexpr int PAIR_SLOTS = PAIRS ? PAIRS : 1, REST_SLOTS = RESTS ? RESTS : 1;
    float first[PAIR_SLOTS], second[PAIR_SLOTS], rest[REST_SLOTS];
    float first_weight[PAIR_SLOTS], second_weight[PAIR_SLOTS], rest_weight[REST_SLOTS];
    float cosine[PAIR_SLOTS], sine[PAIR_SLOTS];
    bool has_norm;

    static INLINE int pair_of(int i) { return lane_index() + LANES * i; }
    static INLINE int first_of(int pair) { return IS_INTERLEAVED ? 2 * pair : pair; }
    static INLINE int second_of(int pair) { return IS_INTERLEAVED ? 2 * pair + 1 : pair + NUM_PAIRS; }
    static INLINE int rest_of(int i) { return ROTATED_DIM + lane_index() + LANES * i; }

    // Loads what does not depend on the preceding kernel: the norm's weight (null: no norm) and
    // {cos, sin} of each pair at this position (unused if ROTATED_DIM is 0).
    INLINE void load_constants(const float *weight, const float2 *angles) {
        has_norm = weight != nullptr;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            if (pair_of(i) >= NUM_PAIRS) continue;
            first_weight[i] = weight ? load_weight(weight + first_of(pair_of(i))) : 1.0f;
            second_weight[i] = weight ? load_weight(weight + second_of(pair_of(i))) : 1.0f;
            const uint2 bits = load_weights8(angles + pair_of(i));
            cosine[i] = bits_to_float(bits.x), sine[i] = bits_to_float(bits.y);
        }
#pragma unroll
        for (int i = 0; i < RESTS; i++)
            if (rest_of(i) < DIM) rest_weight[i] = weight ? load_weight(weight + rest_of(i)) : 1.0f;
    }

    INLINE void load(const float *x) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const bool is_mine = pair_of(i) < NUM_PAIRS;
            first[i] = is_mine ? load_fresh_float(x + first_of(pair_of(i))) : 0.0f;
            second[i] = is_mine ? load_fresh_float(x + second_of(pair_of(i))) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < RESTS; i++)
            rest[i] = rest_of(i) < DIM ? load_fresh_float(x + rest_of(i)) : 0.0f;
    }

    // weight * x / sqrt(mean(x^2) + eps), then the rotation.
    INLINE void normalise_and_rotate(float eps) {
        float factor = 1.0f;
        if (has_norm) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) sum += first[i] * first[i] + second[i] * second[i];
#pragma unroll
            for (int i = 0; i < RESTS; i++) sum += rest[i] * rest[i];
            factor = reciprocal_root(lanes_sum(sum) / (float)DIM + eps);
        }
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            if (pair_of(i) >= NUM_PAIRS) continue;
            const float x = first[i] * (factor * first_weight[i]);
            const float y = second[i] * (factor * second_weight[i]);
            first[i] = x * cosine[i] - y * sine[i];
            second[i] = x * sine[i] + y * cosine[i];
        }
#pragma unroll
        for (int i = 0; i < RESTS; i++)
            if (rest_of(i) < DIM) rest[i] *= factor * rest_weight[i];
    }

    // Calls take(element, value) for each element that this lane holds.
    template <typename Take>
    INLINE void give(Take take) const {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            if (pair_of(i) >= NUM_PAIRS) continue;
            take(first_of(pair_of(i)), first[i]);
            take(second_of(pair_of(i)), second[i]);
        }
#pragma unroll
        for (int i = 0; i < RESTS; i++)
            if (rest_of(i) < DIM) take(rest_of(i), rest[i]);
    }
};
