// Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): what the kernels for steps, chunks and trees share.
//
// A row of inputs is q | k | v, head after head: CHANNELS values. The convolution needs the inputs of the
// last positions: a ring [RING, CHANNELS] keeps them, position p in row p % RING. The recurrent state
// before position p lies in place p % PLACES of [PLACES, VALUE_HEADS, VALUE_DIM, KEY_DIM] (before position
// 0 it is zero, whatever lies there). As a step overwrites neither the state nor the inputs it began
// from, a step can be repeated after up to PLACES - 1 later ones.
//
// Parameters (-D): KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM; TAPS of the convolution; TILED: value head h
// uses key head h % KEY_HEADS, otherwise h / (VALUE_HEADS / KEY_HEADS).
#pragma once
#include "gates.cuh"

constexpr int KEY_CHANNELS = KEY_HEADS * KEY_DIM, VALUE_CHANNELS = VALUE_HEADS * VALUE_DIM;
constexpr int CHANNELS = 2 * KEY_CHANNELS + VALUE_CHANNELS;
constexpr int RING = 16;  // at least a step's tokens and the TAPS - 1 before them
constexpr int PLACES = 4;  // number of states that are kept
constexpr i64 STATE_ELEMENTS = (i64)VALUE_HEADS * VALUE_DIM * KEY_DIM;
static_assert(TAPS - 1 + 8 <= RING, "a step writes over what it reads");

INLINE float fresh(const float *p) { return bits_to_float(load_fresh4(p)); }
INLINE float constant(const float *p) { return bits_to_float(load_weights4(p)); }
INLINE int key_head_of(int value_head) {
    return TILED ? value_head % KEY_HEADS : value_head / (VALUE_HEADS / KEY_HEADS);
}

// The input of a channel for token number `token` of this call; negative: of an earlier call, from the
// ring, or zero before position 0.
INLINE float input_at(const float *inputs, const float *ring, int first_position, int token,
                      int channel) {
    if (token >= 0) return fresh(inputs + (i64)token * CHANNELS + channel);
    const int position = first_position + token;
    return position < 0 ? 0.0f : fresh(ring + (i64)(position % RING) * CHANNELS + channel);
}
// Causal convolution of one channel, then SiLU. `taps` is [CHANNELS, TAPS], the newest input's last;
// input(tap) is the value that a tap multiplies.
template <typename Input>
INLINE float convolved(const float *taps, int channel, Input input) {
    float sum = 0.0f;
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++)
        sum += constant(taps + (i64)channel * TAPS + tap) * input(tap);
    return silu(sum);
}

// 1 / sqrt(sum of squares / divisor + eps) of the values read(0), …, read(count - 1), in every lane of the
// calling warp.
template <typename Read>
INLINE float reciprocal_length(int count, float divisor, float eps, Read read) {
    float sum = 0.0f;
    for (int i = lane_index(); i < count; i += LANES) {
        const float value = read(i);
        sum += value * value;
    }
    return reciprocal_root(lanes_sum(sum) / divisor + eps);
}

// A value head's decay of the state, exp(a * softplus(alpha + dt)), and strength of the update,
// sigmoid(beta).
struct Rates { float kept, written; };
INLINE Rates rates_of(float alpha, float beta, float decay, float bias) {
    return {exp_fast(decay * softplus(alpha + bias)), sigmoid(beta)};
}

// ROWS rows of one head's state in a warp's registers; a lane holds every LANES-th element.
template <int ROWS>
struct StateRows {
    static constexpr int EACH = (KEY_DIM + LANES - 1) / LANES;
    float values[ROWS][EACH];

    INLINE static int element(int e) { return lane_index() + LANES * e; }
    INLINE static bool exists(int row, int e) { return row < VALUE_DIM && element(e) < KEY_DIM; }
    // `state`: the head's [VALUE_DIM, KEY_DIM], which no running kernel writes; null: zeros.
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
    // Loads what this thread itself has stored in the same kernel.
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
        settle(first_row);  // recompute addresses instead of keeping those of load() in registers
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int e = 0; e < EACH; e++)
                if (exists(first_row + r, e))
                    state[(i64)(first_row + r) * KEY_DIM + element(e)] = values[r][e];
    }
    // One token. `query` (scaled) and `key` are this lane's elements, 0 past KEY_DIM; `value` has one
    // element per row, and is replaced by the result. With M the decayed state:
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
