// A step of TOKENS tokens through a Gated DeltaNet layer, but for its projections: convolution, delta
// rule, norm of each head, gate. A block a value head, whose state stays in its registers.
//
// Defines: as delta.cuh, TOKENS, WARPS, FINISH: results are normalised and gated, PADDED_COLUMNS (of
// int8 rows; 0: none).
#include "delta.cuh"
#include "quantise.cuh"

constexpr int THREADS = WARPS * LANES;
constexpr int ROWS = (VALUE_DIM + WARPS - 1) / WARPS;
using State = StateRows<ROWS>;

struct DeltaStepArgs {
    const float *inputs;    // [T, CHANNELS] before the convolution
    const float *alpha;     // [T, VALUE_HEADS]
    const float *beta;      // [T, VALUE_HEADS]
    const float *gate;      // [T, VALUE_CHANNELS], if FINISH
    const float *taps;      // [CHANNELS, TAPS]
    const float *decay;     // [VALUE_HEADS]
    const float *bias;      // [VALUE_HEADS]
    const float *weight;    // [VALUE_DIM] of the norm, if FINISH
    const int *positions;   // [T]
    float *ring;            // [RING, CHANNELS]
    float *state;           // [PLACES, VALUE_HEADS, VALUE_DIM, KEY_DIM]
    float *values;          // [T, VALUE_CHANNELS], or null
    i8 *quants;             // [T, PADDED_COLUMNS], or null; only if 16 divides VALUE_DIM
    float2 *meta;           // [T, PADDED_COLUMNS / 16]
    float key_eps, norm_eps;
};

KERNEL(delta_step, DeltaStepArgs, THREADS, 1) {
    SHARED(float, queries, KEY_DIM);
    SHARED(float, keys, KEY_DIM);
    SHARED(float, heads_values, VALUE_DIM);
    SHARED(float, results, VALUE_DIM);
    let_next_begin();
    const int head = block_index_x(), key_head = key_head_of(head);
    const bool is_first_of_key = TILED ? head < KEY_HEADS : head % (VALUE_HEADS / KEY_HEADS) == 0;
    const int first_row = warp_index() * ROWS;
    // Written by the step before this one, and so is the state.
    const int first_position = (int)load_weights4(a.positions);
    const i64 of_head = (i64)head * VALUE_DIM * KEY_DIM;
    const float *before = a.state + first_position % PLACES * STATE_ELEMENTS + of_head;
    State state;
    state.load(first_position ? before : nullptr, first_row);
    wait_for_previous();
    for (int token = 0; token < TOKENS; token++) {
        const int position = first_position + token;
        for (int i = thread_index(); i < 2 * KEY_DIM + VALUE_DIM; i += THREADS) {
            const int part = i < KEY_DIM ? 0 : i < 2 * KEY_DIM ? 1 : 2, place = i - part * KEY_DIM;
            const int channel = part == 2 ? 2 * KEY_CHANNELS + head * VALUE_DIM + place
                                          : part * KEY_CHANNELS + key_head * KEY_DIM + place;
            const float value =
                convolved(a.inputs, a.ring, a.taps, first_position, token, channel);
            (part == 0 ? queries : part == 1 ? keys : heads_values)[place] = value;
            if (part == 2 || is_first_of_key) {
                a.ring[(i64)(position % RING) * CHANNELS + channel] =
                    fresh(a.inputs + (i64)token * CHANNELS + channel);
            }
        }
        block_barrier();
        const auto query_at = [&](int i) { return queries[i]; };
        const auto key_at = [&](int i) { return keys[i]; };
        const float query_scale = reciprocal_length(KEY_DIM, 1.0f, a.key_eps, query_at) *
                                  reciprocal_root((float)KEY_DIM);
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
            if (lane_index() == 0 && first_row + r < VALUE_DIM) results[first_row + r] = value[r];
        block_barrier();
        float norm = 1.0f;
        if constexpr (FINISH != 0) {
            norm = reciprocal_length(VALUE_DIM, (float)VALUE_DIM, a.norm_eps,
                                     [&](int i) { return results[i]; });
        }
        for (int first = 0; first < VALUE_DIM; first += THREADS) {
            if (first + warp_index() * LANES >= VALUE_DIM) break;  // a whole warp
            const int row = first + thread_index();
            const i64 column = (i64)head * VALUE_DIM + row;
            float result = row < VALUE_DIM ? results[row] : 0.0f;
            if (FINISH && row < VALUE_DIM) {
                result *= norm * constant(a.weight + row);
                result *= silu(fresh(a.gate + (i64)token * VALUE_CHANNELS + column));
            }
            if (a.values && row < VALUE_DIM)
                a.values[(i64)token * VALUE_CHANNELS + column] = result;
            if constexpr (PADDED_COLUMNS != 0) {
                float2 meta;
                const i8 byte = quantise1(result, meta);
                if (row >= VALUE_DIM) continue;
                a.quants[(i64)token * PADDED_COLUMNS + column] = byte;
                if (row % 16 == 0) a.meta[((i64)token * PADDED_COLUMNS + column) / 16] = meta;
            }
        }
        block_barrier();  // shared memory is the next token's
    }
    state.store(a.state + (first_position + TOKENS) % PLACES * STATE_ELEMENTS + of_head, first_row);
}
