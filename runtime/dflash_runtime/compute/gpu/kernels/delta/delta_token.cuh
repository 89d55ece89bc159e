// One token through one head of a Gated DeltaNet layer, by a block that holds the head's state in
// registers: convolution, delta rule, norm, gate. Used by delta_step.cu and delta_tree.cu.
//
// Parameters, besides those of delta.cuh: WARPS; PADDED_COLUMNS of int8 rows (0: none are
// written).
#pragma once
#include "delta.cuh"
#include "quantise.cuh"

constexpr int THREADS = WARPS * LANES;
constexpr int ROWS = (VALUE_DIM + WARPS - 1) / WARPS;

struct State : StateRows<ROWS> {
    INLINE static int first_row() {
        const int row = warp_index() * ROWS;
        if constexpr (ROWS * WARPS == VALUE_DIM) assume(row <= VALUE_DIM - ROWS);
        return row;
    }
};

// Advances the state by one token. `a` has the arrays of DeltaStepArgs. input(tap, channel) is the
// convolution's input; keep(channel) is called once for each channel of the token, over all blocks. The
// results go to shared memory `results`, unless it is null. All threads call.
template <typename Args, typename Input, typename Keep>
INLINE void advance_head(const Args &a, State &state, int head, int token, float *results, Input input,
                         Keep keep) {
    SHARED(float, queries, KEY_DIM);
    SHARED(float, keys, KEY_DIM);
    SHARED(float, heads_values, VALUE_DIM);
    const int key_head = key_head_of(head), first_row = State::first_row();
    const bool is_first_of_key = TILED ? head < KEY_HEADS : head % (VALUE_HEADS / KEY_HEADS) == 0;
    for (int i = thread_index(); i < 2 * KEY_DIM + VALUE_DIM; i += THREADS) {
        const int part = i < KEY_DIM ? 0 : i < 2 * KEY_DIM ? 1 : 2, place = i - part * KEY_DIM;
        const int channel = part == 2 ? 2 * KEY_CHANNELS + head * VALUE_DIM + place
                                      : part * KEY_CHANNELS + key_head * KEY_DIM + place;
        const float value = convolved(a.taps, channel, [&](int tap) { return input(tap, channel); });
        float *target = part == 0 ? (float *)queries : part == 1 ? (float *)keys : (float *)heads_values;
        target[place] = value;
        if (part == 2 || is_first_of_key) keep(channel);
    }
    block_barrier();
    const auto query_at = [&](int i) { return queries[i]; };
    const auto key_at = [&](int i) { return keys[i]; };
    const float query_scale =
        reciprocal_length(KEY_DIM, 1.0f, a.key_eps, query_at) * reciprocal_root((float)KEY_DIM);
    const float key_scale = reciprocal_length(KEY_DIM, 1.0f, a.key_eps, key_at);
    float query[State::EACH], key[State::EACH], value[ROWS];
#pragma unroll
    for (int e = 0; e < State::EACH; e++) {
        const bool exists = State::element(e) < KEY_DIM;
        query[e] = exists ? queries[State::element(e)] * query_scale : 0.0f;
        key[e] = exists ? keys[State::element(e)] * key_scale : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        value[r] = first_row + r < VALUE_DIM ? heads_values[first_row + r] : 0.0f;
    const i64 of_token = (i64)token * VALUE_HEADS + head;
    state.advance(query, key,
                  rates_of(fresh(a.alpha + of_token), fresh(a.beta + of_token),
                           constant(a.decay + head), constant(a.bias + head)),
                  value);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (results && lane_index() == 0 && first_row + r < VALUE_DIM)
            results[first_row + r] = value[r];
    block_barrier();
}

// Writes a token's results from shared memory, normalised and gated. All threads call.
template <typename Args>
INLINE void write_results(const Args &a, int head, int token, const float *results) {
    const float norm = reciprocal_length(VALUE_DIM, (float)VALUE_DIM, a.norm_eps,
                                         [&](int i) { return results[i]; });
    for (int first = 0; first < VALUE_DIM; first += THREADS) {
        if (first + warp_index() * LANES >= VALUE_DIM) break;  // a whole warp
        const int row = first + thread_index();
        const i64 column = (i64)head * VALUE_DIM + row;
        float result = row < VALUE_DIM ? results[row] : 0.0f;
        if (row < VALUE_DIM) {
            result *= norm * constant(a.weight + row);
            result *= silu(fresh(a.gate + (i64)token * VALUE_CHANNELS + column));
        }
        if (a.values && row < VALUE_DIM) a.values[(i64)token * VALUE_CHANNELS + column] = result;
        if constexpr (PADDED_COLUMNS != 0) {
            float2 meta;
            const i8 byte = quantise1(result, meta);
            if (row >= VALUE_DIM) continue;
            a.quants[(i64)token * PADDED_COLUMNS + column] = byte;
            if (row % 16 == 0) a.meta[((i64)token * PADDED_COLUMNS + column) / 16] = meta;
        }
    }
    block_barrier();  // the next token reuses shared memory
}
