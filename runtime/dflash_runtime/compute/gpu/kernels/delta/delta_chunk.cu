// A prompt chunk of T tokens through a Gated DeltaNet layer, between its projections. In this order:
//
//   delta_inputs  convolution, and normalisation of queries and keys. Grid T * ceil((2 * KEY_HEADS +
//                 VALUE_HEADS) / WARPS), a warp per head of a token. Writes `mixed` and `rates`
//   delta_scan    the delta rule, token after token. Grid (VALUE_HEADS, ceil(VALUE_DIM / (WARPS *
//                 SCAN_ROWS))); a warp advances SCAN_ROWS rows of a head's state, independently of others.
//                 Reads the state before the chunk; writes the state after it, and results
//   delta_finish  norm and gate, and the chunk's last inputs, to the ring. Grid T *
//                 ceil(VALUE_HEADS / WARPS), a warp per head of a token
//
// Parameters, besides those of delta.cuh: WARPS, SCAN_ROWS.
#include "delta.cuh"

constexpr int THREADS = WARPS * LANES;
constexpr int AHEAD = 4;  // tokens that are loaded ahead of the one that is computed

// -- inputs -------------------------------------------------------------------------------------

struct DeltaInputsArgs {
    const float *inputs;  // [T, CHANNELS] before the convolution
    const float *alpha;   // [T, VALUE_HEADS]
    const float *beta;    // [T, VALUE_HEADS]
    const float *taps;    // [CHANNELS, TAPS]
    const float *decay;   // [VALUE_HEADS]
    const float *bias;    // [VALUE_HEADS]
    const int *first_position;
    const float *ring;    // [RING, CHANNELS]
    float *mixed;         // [T, CHANNELS]: queries (scaled) and keys, both of unit length, and values
    float2 *rates;        // [T, VALUE_HEADS]
    int num_tokens;
    float key_eps;
};

KERNEL(delta_inputs, DeltaInputsArgs, THREADS, 1) {
    constexpr int HEADS = 2 * KEY_HEADS + VALUE_HEADS, BLOCKS = (HEADS + WARPS - 1) / WARPS;
    constexpr int LARGER_DIM = KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM;
    constexpr int EACH = (LARGER_DIM + LANES - 1) / LANES;
    const int token = block_index_x() / BLOCKS;
    const int head = block_index_x() % BLOCKS * WARPS + warp_index();
    let_next_begin();
    const int first_position = (int)load_weights4(a.first_position);
    wait_for_previous();
    if (head >= HEADS) return;
    const bool is_value = head >= 2 * KEY_HEADS;
    const int dim = is_value ? VALUE_DIM : KEY_DIM;
    const int first = is_value ? 2 * KEY_CHANNELS + (head - 2 * KEY_HEADS) * VALUE_DIM : head * KEY_DIM;
    float values[EACH], sum = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int i = lane_index() + LANES * e;
        const auto input = [&](int tap) {
            return input_at(a.inputs, a.ring, first_position, token - (TAPS - 1) + tap, first + i);
        };
        values[e] = i < dim ? convolved(a.taps, first + i, input) : 0.0f;
        sum += values[e] * values[e];
    }
    float scale = 1.0f;
    if (!is_value) {
        scale = reciprocal_root(lanes_sum(sum) + a.key_eps);
        if (head < KEY_HEADS) scale *= reciprocal_root((float)KEY_DIM);
    } else if (lane_index() == 0) {
        const int h = head - 2 * KEY_HEADS;
        const i64 place = (i64)token * VALUE_HEADS + h;
        const Rates rates = rates_of(fresh(a.alpha + place), fresh(a.beta + place),
                                     constant(a.decay + h), constant(a.bias + h));
        a.rates[place] = make_float2(rates.kept, rates.written);
    }
    float *out = a.mixed + (i64)token * CHANNELS + first;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int i = lane_index() + LANES * e;
        if (i < dim) out[i] = values[e] * scale;
    }
}

// -- the delta rule -----------------------------------------------------------------------------

struct DeltaScanArgs {
    const float *mixed;   // both written by delta_inputs
    const float2 *rates;
    const int *first_position;
    float *state;         // [PLACES, VALUE_HEADS, VALUE_DIM, KEY_DIM]
    float *results;       // [T, VALUE_CHANNELS]
    int num_tokens;
};

// One lane's part of a token's query, key, value and rates.
struct TokenRows {
    float query[StateRows<SCAN_ROWS>::EACH], key[StateRows<SCAN_ROWS>::EACH], value[SCAN_ROWS];
    Rates rates;

    INLINE void load(const DeltaScanArgs &a, int token, int head, int first_row) {
        const float *row = a.mixed + (i64)token * CHANNELS;
        const float *of_key = row + key_head_of(head) * KEY_DIM;
        const float *of_value = row + 2 * KEY_CHANNELS + head * VALUE_DIM;
#pragma unroll
        for (int e = 0; e < StateRows<SCAN_ROWS>::EACH; e++) {
            const int i = StateRows<SCAN_ROWS>::element(e);
            query[e] = i < KEY_DIM ? fresh(of_key + i) : 0.0f;
            key[e] = i < KEY_DIM ? fresh(of_key + KEY_CHANNELS + i) : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < SCAN_ROWS; r++)
            value[r] = first_row + r < VALUE_DIM ? fresh(of_value + first_row + r) : 0.0f;
        const uint2 bits = load_fresh8(a.rates + (i64)token * VALUE_HEADS + head);
        rates = {bits_to_float(bits.x), bits_to_float(bits.y)};
    }
};

KERNEL(delta_scan, DeltaScanArgs, THREADS, 1) {
    let_next_begin();
    const int head = block_index_x();
    const int first_row = (block_index_y() * WARPS + warp_index()) * SCAN_ROWS;
    const int first_position = (int)load_weights4(a.first_position);
    const i64 of_head = (i64)head * VALUE_DIM * KEY_DIM;
    const float *before = a.state + first_position % PLACES * STATE_ELEMENTS + of_head;
    StateRows<SCAN_ROWS> state;
    state.load(first_position ? before : nullptr, first_row);
    wait_for_previous();
    if (first_row >= VALUE_DIM) return;
    TokenRows next[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) next[i].load(a, min_of(i, a.num_tokens - 1), head, first_row);
    for (int first = 0; first < a.num_tokens; first += AHEAD) {
        TokenRows now[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            now[i] = next[i];
            next[i].load(a, min_of(first + AHEAD + i, a.num_tokens - 1), head, first_row);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (first + i >= a.num_tokens) break;
            state.advance(now[i].query, now[i].key, now[i].rates, now[i].value);
            float *out = a.results + (i64)(first + i) * VALUE_CHANNELS + head * VALUE_DIM + first_row;
#pragma unroll
            for (int r = 0; r < SCAN_ROWS; r++)
                if (lane_index() == r % LANES && first_row + r < VALUE_DIM) out[r] = now[i].value[r];
        }
    }
    state.store(a.state + (first_position + a.num_tokens) % PLACES * STATE_ELEMENTS + of_head, first_row);
}

// -- results ------------------------------------------------------------------------------------

struct DeltaFinishArgs {
    const float *inputs;   // [T, CHANNELS] before the convolution
    const float *results;  // [T, VALUE_CHANNELS]
    const float *gate;     // [T, VALUE_CHANNELS]
    const float *weight;   // [VALUE_DIM]
    const int *first_position;
    float *ring;           // [RING, CHANNELS]
    float *out;            // [T, VALUE_CHANNELS], may be results
    int num_tokens;
    float norm_eps;
};

KERNEL(delta_finish, DeltaFinishArgs, THREADS, 1) {
    constexpr int BLOCKS = (VALUE_HEADS + WARPS - 1) / WARPS;
    const int token = block_index_x() / BLOCKS, part = block_index_x() % BLOCKS;
    const int head = part * WARPS + warp_index();
    let_next_begin();
    const int first_position = (int)load_weights4(a.first_position);
    wait_for_previous();
    if (token >= a.num_tokens - RING) {
        float *kept = a.ring + (i64)((first_position + token) % RING) * CHANNELS;
        for (int i = part * THREADS + thread_index(); i < CHANNELS; i += BLOCKS * THREADS)
            kept[i] = fresh(a.inputs + (i64)token * CHANNELS + i);
    }
    if (head >= VALUE_HEADS) return;
    const i64 place = (i64)token * VALUE_CHANNELS + head * VALUE_DIM;
    const float norm = reciprocal_length(VALUE_DIM, (float)VALUE_DIM, a.norm_eps,
                                         [&](int i) { return fresh(a.results + place + i); });
    for (int i = lane_index(); i < VALUE_DIM; i += LANES) {
        const float value = fresh(a.results + place + i) * norm * constant(a.weight + i);
        a.out[place + i] = value * silu(fresh(a.gate + place + i));
    }
}
