// Sums over the lanes that share a row. A team is Team neighbouring lanes of a warp (a power of two).
#pragma once
#include "common.cuh"

INLINE constexpr int power_of_two_from(int value) {
    int power = 1;
    while (power < value) power *= 2;
    return power;
}

// Reduces Count values over Mask * 2 lanes at once: in each step lanes exchange half of their values,
// so that the number of values halves too. The order of additions does not depend on Count.
template <int Count, int Mask>
INLINE void fold_lanes(float *values) {
    if constexpr (Mask > 0) {
        if constexpr (Count > 1) {
            const bool is_upper = lane_index() & Mask;
#pragma unroll
            for (int i = 0; i < Count / 2; i++) {
                const float kept = is_upper ? values[i + Count / 2] : values[i];
                const float given = is_upper ? values[i] : values[i + Count / 2];
                values[i] = kept + lane_xor(given, Mask);
            }
            fold_lanes<Count / 2, Mask / 2>(values);
        } else {
            values[0] += lane_xor(values[0], Mask);
            fold_lanes<1, Mask / 2>(values);
        }
    }
}

// Count sums of a team. They end up spread over its lanes, WIDTH of them at a time (a chunk).
template <int Count, int Team>
struct TeamSums {
    static constexpr int PADDED = power_of_two_from(Count);
    static constexpr int WIDTH = PADDED < Team ? PADDED : Team, CHUNKS = PADDED / WIDTH;
    static constexpr int LANES_A_SUM = Team / WIDTH;

    float values[PADDED];

    INLINE void clear() {
#pragma unroll
        for (int i = 0; i < PADDED; i++) values[i] = 0.0f;
    }
    // Returns, in each lane, sum number `index(c)`. All lanes of the warp must call.
    INLINE float sum(int c) {
        fold_lanes<WIDTH, Team / 2>(values + c * WIDTH);
        return values[c * WIDTH];
    }
    INLINE static int index(int c) { return c * WIDTH + lane_index() % Team / LANES_A_SUM; }
    // Whether this lane is the one that writes the result of sum(c).
    INLINE static bool is_writer(int c) {
        return lane_index() % LANES_A_SUM == 0 && index(c) < Count;
    }
};
