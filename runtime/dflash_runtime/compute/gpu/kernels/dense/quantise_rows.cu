// quantise_rows: rows of activations as int8 with scales; as they are, normalised (RMS norm), or multiplied
// by a factor per row. Used where quantising in every block that reads the rows would cost more. Grid: rows,
// WARPS * LANES threads: a block per row.
//
// Parameters: COLUMNS, WARPS, INPUT: PLAIN, NORM or SCALED.
#include "staging.cuh"

struct QuantiseRowsArgs {
    const float *x;            // [rows, COLUMNS]
    const float *norm_weight;  // [COLUMNS], if INPUT is NORM
    const float *factors;      // [rows], if INPUT is SCALED
    SideOutputs out;           // all rows; values may be null
    float eps;
};

KERNEL(quantise_rows, QuantiseRowsArgs, WARPS *LANES, 1) {
    using Input = FloatInput<1, COLUMNS, WARPS * LANES, (InputMode)INPUT, false, false>;
    using Rows = Staged<1, COLUMNS, false, false>;
    const i64 row = block_index_x();
    Input input;
    let_next_begin();
    input.before_wait(a.norm_weight);
    wait_for_previous();
    const SideOutputs out = {a.out.values ? a.out.values + row * COLUMNS : nullptr,
                             a.out.quants + row * Rows::PADDED, a.out.meta + row * Rows::GRANULES};
    const float *other = INPUT == SCALED ? a.factors + row : a.norm_weight;
    input.stage(Rows(nullptr), a.x + row * COLUMNS, other, a.eps, &out);
}
