// delta_step: a step of TOKENS tokens through a Gated DeltaNet layer, between its projections:
// convolution, delta rule, norm of each head, gate. Reads the projections, the ring and the state before
// the step; writes the ring, the state after the step, and results as floats, int8 rows, or both.
// Grid VALUE_HEADS, THREADS threads: a block per value head, whose state stays in registers.
//
// Parameters, besides those of delta_token.cuh: TOKENS.
#include "delta_token.cuh"

struct DeltaStepArgs {
    const float *inputs;    // [T, CHANNELS] before the convolution
    const float *alpha;     // [T, VALUE_HEADS]
    const float *beta;      // [T, VALUE_HEADS]
    const float *gate;      // [T, VALUE_CHANNELS]
    const float *taps;      // [CHANNELS, TAPS]
    const float *decay;     // [VALUE_HEADS]
    const float *bias;      // [VALUE_HEADS]
    const float *weight;    // [VALUE_DIM] of the norm
    const int *positions;   // [T]
    float *ring;            // [RING, CHANNELS]
    float *state;           // [PLACES, VALUE_HEADS, VALUE_DIM, KEY_DIM]
    float *values;          // [T, VALUE_CHANNELS], or null
    i8 *quants;             // [T, PADDED_COLUMNS], or null; only if 16 divides VALUE_DIM
    float2 *meta;           // [T, PADDED_COLUMNS / 16]
    float key_eps, norm_eps;
};

KERNEL(delta_step, DeltaStepArgs, THREADS, 1) {
    SHARED(float, results, VALUE_DIM);
    let_next_begin();
    const int head = block_index_x();
    // The preceding step wrote positions and state, not the preceding kernel, so they are read early.
    const int first_position = (int)load_weights4(a.positions);
    const i64 of_head = (i64)head * VALUE_DIM * KEY_DIM;
    const float *before = a.state + first_position % PLACES * STATE_ELEMENTS + of_head;
    State state;
    state.load(first_position ? before : nullptr, State::first_row());
    wait_for_previous();
    for (int token = 0; token < TOKENS; token++) {
        const int position = first_position + token;
        const auto input = [&](int tap, int channel) {
            return input_at(a.inputs, a.ring, first_position, token - (TAPS - 1) + tap, channel);
        };
        const auto keep = [&](int channel) {
            a.ring[(i64)(position % RING) * CHANNELS + channel] =
                fresh(a.inputs + (i64)token * CHANNELS + channel);
        };
        advance_head(a, state, head, token, results, input, keep);
        write_results(a, head, token, results);
    }
    state.store(a.state + (first_position + TOKENS) % PLACES * STATE_ELEMENTS + of_head,
                State::first_row());
}
