// Shared by the kernels that sample a token. A token's weight is an integer, so that sums have the same
// bits in any order. Tokens are sorted into bins by their distance below the largest logit.
#pragma once
#include "argmax.cuh"

// Weight of the token with the largest logit; the sum over all tokens must fit in 63 bits.
constexpr u64 PEAK_WEIGHT = 1ull << (VOCAB <= 1 << 19 ? 44 : 36);
static_assert(VOCAB <= 1 << 27, "sums of weights");

// Tokens less than 2^5 temperatures below the largest logit are in bins, 256 for each doubling of the
// distance, so that a bin has few tokens even where logits lie close together. Others weigh nothing.
constexpr int FIRST_OCTAVE = 127 - 7, LAST_OCTAVE = 127 + 5, BINS_AN_OCTAVE = 256;
constexpr int BINS = (LAST_OCTAVE - FIRST_OCTAVE) * BINS_AN_OCTAVE;
constexpr int NO_BIN = -1;

// launch/sample_tokens.py fills `options` in the order of Option.
struct SampleArgs {
    float *logits;             // [VOCAB]; sample_change and sample_mask write them
    u64 *partials;             // [num_partials] keys of argmax.cuh, from the head's linear_decode; likewise
    const u32 *mask;           // [(VOCAB + 31) / 32] a bit for each token, lowest first: it may be sampled
    const int *num_changes;    // [1] of the following
    const int *changed_ids;    // [most_changes] tokens whose logits change, none twice
    const float *divisors;     // [most_changes] by these, or their reciprocals if not above zero
    const float *offsets;      // [most_changes] taken off then
    const double *options;     // [5]: 1 / temperature, or 0 for argmax; top_k; top_p; -log(min_p); ruled
    const double *numbers;     // [capacity]: random numbers in [0, 1), by position of the sampled token
    u32 *counts;               // [BINS] tokens of each bin; zero between steps, like the next two
    u32 *placed;               // [BINS] tokens of each bin that sample_place has placed
    u32 *weights;              // [BINS, 2] sums of weights, low words first
    u64 *keys;                 // [VOCAB] keys of argmax.cuh, sorted by bin
    int *token_ids;            // [1] out
    int *positions;            // [1], incremented
    int *history;              // [capacity]: the token at its position, or UNDECIDED, or NOT_FINITE
    int num_partials, capacity, most_changes;
};

enum Option { INVERSE_TEMPERATURE, TOP_K, TOP_P, MIN_P_DISTANCE, IS_RULED };

INLINE u64 load_fresh_u64(const void *p) {
    const uint2 words = load_fresh8(p);
    return (u64)words.y << 32 | words.x;
}
INLINE double load_fresh_double(const double *p) {
    union { u64 bits; double value; } both;
    both.bits = load_fresh_u64(p);
    return both.value;
}

INLINE float value_of_key(u64 key) {
    const u32 bits = (u32)(key >> 32);
    return bits_to_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

// The largest key over the block, in every thread. All threads of the block call it, once.
INLINE u64 block_largest(u64 key) {
    SHARED(u64, found, WARPS);
    key = lanes_largest(key);
    if (lane_index() == 0) found[warp_index()] = key;
    block_barrier();
    for (int warp = 0; warp < WARPS; warp++) key = larger_key(key, found[warp]);
    return key;
}

// The largest key over all logits. All threads of the block call it, once.
INLINE u64 best_key(const SampleArgs &a) {
    u64 best = 0;
    for (int i = thread_index(); i < a.num_partials; i += WARPS * LANES) {
        best = larger_key(best, load_fresh_u64(a.partials + i));
    }
    return block_largest(best);
}

// Converts a logit to its distance below the largest one (the peak), in units of the temperature.
struct Scale {
    double inverse_temperature;
    float peak;

    INLINE double distance(float logit) const {
        return ((double)peak - (double)logit) * inverse_temperature;
    }
    // False if there is no distribution (infinite logits), or if it is beyond the range of weights.
    INLINE bool is_good() const {
        return peak - peak == 0.0f && inverse_temperature > 0.0 && inverse_temperature <= 1e30;
    }
};

INLINE u64 weight_at(double distance) {
    return (u64)(exp_double(-distance) * (double)PEAK_WEIGHT + 0.5);
}
INLINE int bin_at(double distance) {
    const int steps = (int)(float_to_bits((float)distance) >> 15);
    if (steps >= LAST_OCTAVE * BINS_AN_OCTAVE) return NO_BIN;
    const int bin = steps - FIRST_OCTAVE * BINS_AN_OCTAVE;
    return bin > 0 ? bin : 0;
}

// Calls take(four, token) for this thread's share of all tokens, with the logits of tokens `token` to
// `token + 3`; past the last token they are -inf.
template <typename Take>
INLINE void each_four(const float *logits, Take take) {
    const int first = block_index_x() * num_threads() + thread_index();
    for (int token = 4 * first; token < VOCAB; token += 4 * num_blocks_x() * num_threads()) {
        uint4 bits = make_uint4(0xff800000u, 0xff800000u, 0xff800000u, 0xff800000u);
        if (VOCAB % 4 == 0 || token + 4 <= VOCAB) {
            bits = load_fresh16(logits + token);
        } else {
            bits.x = load_fresh4(logits + token);
            if (VOCAB % 4 > 1) bits.y = load_fresh4(logits + token + 1);
            if (VOCAB % 4 > 2) bits.z = load_fresh4(logits + token + 2);
        }
        const float four[4] = {bits_to_float(bits.x), bits_to_float(bits.y), bits_to_float(bits.z),
                               bits_to_float(bits.w)};
        take(four, token);
    }
}

// Exclusive prefix sum over the block's threads; `total` is the sum over all. All threads call it.
INLINE u64 block_sum_before(u64 value, u64 &total) {
    SHARED(u64, sums, WARPS);
    u64 inclusive = value;
    for (int step = 1; step < LANES; step *= 2) {
        const u64 other = lane_read(inclusive, (lane_index() + LANES - step) % LANES);
        if (lane_index() >= step) inclusive += other;
    }
    if (lane_index() == LANES - 1) sums[warp_index()] = inclusive;
    block_barrier();
    u64 before = inclusive - value;
    total = 0;
    for (int warp = 0; warp < WARPS; warp++) {
        if (warp < warp_index()) before += sums[warp];
        total += sums[warp];
    }
    block_barrier();
    return before;
}
