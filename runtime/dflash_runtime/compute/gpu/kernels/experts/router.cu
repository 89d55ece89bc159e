// router: router logits of 1 to 8 rows, with the RMS norm of the rows. Grid EXPERTS + 1, THREADS threads: a
// block per expert; the last block writes the normalised rows, as floats, int8, or both, for the experts.
//
// Parameters: TYPE of the weights (F32, F16 or BF16), EXPERTS, COLUMNS, TOKENS, THREADS.
#include "formats.cuh"
#include "staging.cuh"

struct RouterArgs {
    const u8 *weights;         // [EXPERTS] rows
    const float *norm_weight;  // [COLUMNS]
    const float *x;            // [T, COLUMNS]
    float *logits;             // [T, EXPERTS]
    SideOutputs side;
    float eps;
};

using Weights = FloatRow<TYPE, COLUMNS>;
constexpr int ELEMENTS = Weights::ELEMENTS, NUM_WARPS = THREADS / LANES;
constexpr int CHUNKS = (Weights::UNITS + THREADS - 1) / THREADS;
static_assert(COLUMNS % ELEMENTS == 0, "rows of whole units");
constexpr bool KEEPS_NORM = CHUNKS <= 2;

INLINE void load_floats(float (&to)[ELEMENTS], const float *from) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; i += 4) {
        const uint4 four = load_weights16(from + i);
        to[i] = bits_to_float(four.x), to[i + 1] = bits_to_float(four.y);
        to[i + 2] = bits_to_float(four.z), to[i + 3] = bits_to_float(four.w);
    }
}

INLINE void write_rows(const RouterArgs &a) {
    using Rows = FloatInput<TOKENS, COLUMNS, THREADS, NORM, false, false>;
    Rows rows;
    rows.before_wait(a.norm_weight);
    wait_for_previous();
    rows.stage(typename Rows::Rows(nullptr), a.x, a.norm_weight, a.eps, &a.side);
}

KERNEL(router, RouterArgs, THREADS, 1) {
    let_next_begin();
    const int expert = block_index_x();
    if (expert == EXPERTS) {
        write_rows(a);
        return;
    }
    const u8 *row = a.weights + (i64)expert * Weights::ROW_BYTES;
    Weights::Raw raw[CHUNKS];
    float norm[KEEPS_NORM ? CHUNKS : 1][ELEMENTS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int unit = c * THREADS + thread_index();
        if (unit >= Weights::UNITS) continue;
        Weights::load(raw[c], row, unit);
        if (KEEPS_NORM) load_floats(norm[KEEPS_NORM ? c : 0], a.norm_weight + unit * ELEMENTS);
    }
    wait_for_previous();
    // The norm's factor is applied last, so that squares and products are summed in one pass.
    SHARED(float, partial, 2 * TOKENS * NUM_WARPS);
    float squares[TOKENS], products[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) squares[t] = products[t] = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int unit = c * THREADS + thread_index();
        if (unit >= Weights::UNITS) continue;
        if (!KEEPS_NORM) load_floats(norm[0], a.norm_weight + unit * ELEMENTS);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
#pragma unroll
            for (int i = 0; i < ELEMENTS; i += 4) {
                const uint4 four = load_fresh16(a.x + t * COLUMNS + unit * ELEMENTS + i);
                const u32 bits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float x = bits_to_float(bits[e]);
                    const float weighted = x * norm[KEEPS_NORM ? c : 0][i + e];
                    squares[t] = fmaf(x, x, squares[t]);
                    products[t] = fmaf(weighted, Weights::value(raw[c], i + e), products[t]);
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const float of_squares = lanes_sum(squares[t]), of_products = lanes_sum(products[t]);
        if (lane_index() == 0) {
            partial[2 * t * NUM_WARPS + warp_index()] = of_squares;
            partial[(2 * t + 1) * NUM_WARPS + warp_index()] = of_products;
        }
    }
    block_barrier();
    const int t = thread_index();
    if (t >= TOKENS) return;
    float of_squares = 0.0f, of_products = 0.0f;
#pragma unroll
    for (int warp = 0; warp < NUM_WARPS; warp++) {
        of_squares += partial[2 * t * NUM_WARPS + warp];
        of_products += partial[(2 * t + 1) * NUM_WARPS + warp];
    }
    const float factor = reciprocal_root(of_squares / (float)COLUMNS + a.eps);
    a.logits[t * EXPERTS + expert] = of_products * factor;
}
