// Gated DeltaNet: what steps and chunks share. Source: Yang et al. 2024 (arXiv 2412.06464).
//
// KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM; TAPS of the convolution; TILED: value head h has key
// head h % KEY_HEADS, else h / (VALUE_HEADS / KEY_HEADS).
// A row of inputs is q | k | v, heads one after the other: CHANNELS in all. The inputs of the last
// positions are kept in a ring [RING, CHANNELS], position p in row p % RING; the state before
// position p in place p % PLACES of [PLACES, VALUE_HEADS, VALUE_DIM, KEY_DIM], which counts for nothing
// where p = 0.
// So a few steps that were started too much have spoilt nothing that the one before them needs again.
#pragma once
#include "gates.cuh"

constexpr int KEY_CHANNELS = KEY_HEADS * KEY_DIM, VALUE_CHANNELS = VALUE_HEADS * VALUE_DIM;
constexpr int CHANNELS = 2 * KEY_CHANNELS + VALUE_CHANNELS;
constexpr int RING = 16;  // a step's tokens, and TAPS - 1 before them
constexpr int PLACES = 4;  // of states
constexpr i64 STATE_ELEMENTS = (i64)VALUE_HEADS * VALUE_DIM * KEY_DIM;
static_assert(TAPS - 1 + 8 <= RING, "a step writes over what it reads");

INLINE float fresh(const float *p) { return bits_to_float(load_fresh4(p)); }
INLINE float constant(const float *p) { return bits_to_float(load_weights4(p)); }
INLINE int key_head_of(int value_head) {
    return TILED ? value_head % KEY_HEADS : value_head / (VALUE_HEADS / KEY_HEADS);
}

// The input of a channel at a position: of this call, of one before it, or zero.
INLINE float input_at(const float *inputs, const float *ring, int first_position, int token,
                      int channel) {
    if (token >= 0) return fresh(inputs + (i64)token * CHANNELS + channel);
    const int position = first_position + token;
    return position < 0 ? 0.0f : fresh(ring + (i64)(position % RING) * CHANNELS + channel);
}
// Causal convolution of one channel, and SiLU. `taps` [CHANNELS, TAPS], the newest input's last;
// `input(tap)` gives what each is multiplied by.
template <typename Input>
INLINE float convolved(const float *taps, int channel, Input input) {
    float sum = 0.0f;
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++)
        sum += constant(taps + (i64)channel * TAPS + tap) * input(tap);
    return silu(sum);
}

// 1 / sqrt(sum of squares / divisor + eps) of `count` values, in every lane of the warp that calls;
// `read(i)` gives one.
template <typename Read>
INLINE float reciprocal_length(int count, float divisor, float eps, Read read) {
    float sum = 0.0f;
    for (int i = lane_index(); i < count; i += LANES) {
        const float value = read(i);
        sum += value * value;
    }
    return reciprocal_root(lanes_sum(sum) / divisor + eps);
}

// How much of a state stays, and how much of what is new is written: exp(a * softplus(alpha + dt)) and
// sigmoid(beta), of a value head.
struct Rates { float kept, written; };
INLINE Rates rates_of(float alpha, float beta, float decay, float bias) {
    return {exp_fast(decay * softplus(alpha + bias)), sigmoid(beta)};
}

// Rows of one head's state in registers: a warp has ROWS of them, a lane every LANES-th element.
template <int ROWS>
struct StateRows {
    static constexpr int EACH = (KEY_DIM + LANES - 1) / LANES;
    float values[ROWS][EACH];

    INLINE static int element(int e) { return lane_index() + LANES * e; }
    INLINE static bool exists(int row, int e) { return row < VALUE_DIM && element(e) < KEY_DIM; }
    // `state`: of the head, [VALUE_DIM, KEY_DIM], finished long ago; null: zeros.
    INLINE void load(const float *state, int first_row) {
        settle(first_row);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int e = 0; e < EACH; e++)
                values[r][e] = state && exists(first_row + r, e)
                                   ? constant(state + (i64)(first_row + r) * KEY_DIM + element(e))
                                   : 0.0f;
    }
    // The same of what this very thread has stored.
    INLINE void load_stored(const float *state, int first_row) {
        settle(first_row);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int e = 0; e < EACH; e++)
                if (exists(first_row + r, e))
                    values[r][e] = state[(i64)(first_row + r) * KEY_DIM + element(e)];
    }
    INLINE void store(float *state, int first_row) const {
        settle(first_row);  // addresses are not kept from where it was loaded
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int e = 0; e < EACH; e++)
                if (exists(first_row + r, e))
                    state[(i64)(first_row + r) * KEY_DIM + element(e)] = values[r][e];
    }
    // One token: `query` (scaled) and `key` are this lane's elements, 0 where there are none; `value`
    // of each row, of which the results take the place. With M the state that is kept:
    // d = written * (v - M k), M += d k^T, o = M q = (M before) q + d (k q).
    INLINE void advance(const float *query, const float *key, Rates rates, float *value) {
        float with_key[ROWS], with_query[ROWS], keys_query = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++) keys_query += key[e] * query[e];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            with_key[r] = with_query[r] = 0.0f;
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                values[r][e] *= rates.kept;
                with_key[r] += values[r][e] * key[e];
                with_query[r] += values[r][e] * query[e];
            }
        }
        keys_query = lanes_sum(keys_query);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            with_key[r] = lanes_sum(with_key[r]);
            with_query[r] = lanes_sum(with_query[r]);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float change = rates.written * (value[r] - with_key[r]);
            value[r] = with_query[r] + change * keys_query;
#pragma unroll
            for (int e = 0; e < EACH; e++) values[r][e] += change * key[e];
        }
    }
};
