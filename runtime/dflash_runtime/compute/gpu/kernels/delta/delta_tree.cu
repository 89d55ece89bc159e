// A draft tree through a Gated DeltaNet layer: each token continues from the state of its parent.
//
//   delta_tree    computes the results of all tokens; the sequence's state and ring stay as they are.
//                 Grid VALUE_HEADS: a block per value head, as in delta_step, walks the tree depth first;
//                 the state of a token with several children is saved until the last of them has begun
//   delta_accept  advances the sequence's state along the accepted path. Grid VALUE_HEADS
//   delta_keep    copies the path's last inputs to the ring; runs after delta_accept, which reads inputs
//                 from before the tree that these may overwrite. Grid min(L, RING)
//
// Parameters: those of delta_token.cuh.
#include "delta_token.cuh"

struct TreeStep {
    int token;
    int source;  // GOES_ON: the state as the previous token of the walk left it; FROM_SEQUENCE; or the
                 // place of a saved state
    int place;   // where to save its own state; -1: nowhere
};
enum { GOES_ON = -2, FROM_SEQUENCE = -1 };

struct DeltaTreeArgs {
    const float *inputs, *alpha, *beta, *gate;         // as DeltaStepArgs
    const float *taps, *decay, *bias, *weight;
    const TreeStep *walk;    // [T]
    const int *ancestors;    // [T, TAPS]: a token's last ancestors and itself; before the tree -1, -2, …
    const int *begin;        // the tree's first position
    const float *ring;       // [RING, CHANNELS]
    const float *state;      // [PLACES, VALUE_HEADS, VALUE_DIM, KEY_DIM]
    float *kept;             // [places, VALUE_HEADS, VALUE_DIM, KEY_DIM]
    float *values;           // as DeltaStepArgs
    i8 *quants;
    float2 *meta;
    float key_eps, norm_eps;
    int num_tokens;          // T
};

// The input that tap number `tap` multiplies, given one token's row of ancestors.
INLINE float tree_input(const float *inputs, const float *ring, const int *ancestors, int begin,
                        int tap, int channel) {
    const int node = (int)load_weights4(ancestors + tap);
    return input_at(inputs, ring, begin, node, channel);
}
INLINE void keep_nothing(int) {}

KERNEL(delta_tree, DeltaTreeArgs, THREADS, 1) {
    SHARED(float, results, VALUE_DIM);
    let_next_begin();
    const int head = block_index_x(), begin = (int)load_weights4(a.begin);
    const i64 of_head = (i64)head * VALUE_DIM * KEY_DIM;
    const float *before = a.state + begin % PLACES * STATE_ELEMENTS + of_head;
    State state;
    state.load(before, State::first_row());
    wait_for_previous();
    for (int i = 0; i < a.num_tokens; i++) {
        const int token = (int)load_weights4(&a.walk[i].token);
        const int source = (int)load_weights4(&a.walk[i].source);
        const int place = (int)load_weights4(&a.walk[i].place);
        if (source == FROM_SEQUENCE && i) state.load(before, State::first_row());
        if (source >= 0)
            state.load_stored(a.kept + source * STATE_ELEMENTS + of_head, State::first_row());
        const auto input = [&](int tap, int channel) {
            return tree_input(a.inputs, a.ring, a.ancestors + token * TAPS, begin, tap, channel);
        };
        advance_head(a, state, head, token, results, input, keep_nothing);
        write_results(a, head, token, results);
        if (place >= 0) state.store(a.kept + place * STATE_ELEMENTS + of_head, State::first_row());
    }
}

struct DeltaAcceptArgs {
    const float *inputs, *alpha, *beta;  // as DeltaTreeArgs
    const float *taps, *decay, *bias;
    const int *path;        // [L] tokens
    const int *ancestors;
    const int *begin;
    const float *ring;
    float *state;           // the state after the path is written
    float key_eps;
    int num_tokens;         // L
};

KERNEL(delta_accept, DeltaAcceptArgs, THREADS, 1) {
    let_next_begin();
    const int head = block_index_x(), begin = (int)load_weights4(a.begin);
    const i64 of_head = (i64)head * VALUE_DIM * KEY_DIM;
    State state;
    state.load(a.state + begin % PLACES * STATE_ELEMENTS + of_head, State::first_row());
    wait_for_previous();
    for (int i = 0; i < a.num_tokens; i++) {
        const int token = (int)load_weights4(a.path + i);
        const auto input = [&](int tap, int channel) {
            return tree_input(a.inputs, a.ring, a.ancestors + token * TAPS, begin, tap, channel);
        };
        advance_head(a, state, head, token, nullptr, input, keep_nothing);
    }
    state.store(a.state + (begin + a.num_tokens) % PLACES * STATE_ELEMENTS + of_head,
                State::first_row());
}

struct DeltaKeepArgs {
    const float *inputs;  // [T, CHANNELS]
    const int *path;      // [L]
    const int *begin;
    float *ring;          // [RING, CHANNELS]
    int num_tokens;       // L
};

// A block per token; the last tokens of the path that fit in the ring.
KERNEL(delta_keep, DeltaKeepArgs, THREADS, 1) {
    let_next_begin();
    const int i = a.num_tokens - num_blocks_x() + block_index_x();
    const int token = (int)load_weights4(a.path + i);
    const int position = (int)load_weights4(a.begin) + i;
    wait_for_previous();
    for (int channel = thread_index(); channel < CHANNELS; channel += THREADS)
        a.ring[(i64)(position % RING) * CHANNELS + channel] =
            fresh(a.inputs + (i64)token * CHANNELS + channel);
}
