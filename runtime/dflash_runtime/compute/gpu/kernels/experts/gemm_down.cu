// gemm_down: the down projections of a prompt chunk's routed experts. Reads the activations of
// gemm_gate_up; writes one float32 term per pair and element, multiplied by the pair's weight (combine
// adds them). A launch computes num_columns of the terms' NUM_ROWS columns. Grid (ceil(num_columns /
// TILE_N), most tiles of rows), THREADS threads; only the device knows the number of tiles, and blocks past
// it exit.
//
// Parameters: those of gemm_tile.cuh; NUM_ROWS of the down projection.
#include "group_rows.cuh"

static_assert(NUM_ROWS % 2 == 0, "terms are written in twos");

struct GemmDownArgs {
    const GroupCounts *counts;
    const GroupTile *tiles;
    const u8 *activations;           // [NUM_PARTS, rows, NUM_COLUMNS]
    const float *activation_scales;  // [rows]; null: 1
    const float *weights;            // [rows]
    const u8 *down;             // from the row of the first column on
    const float *bias;          // [E, NUM_ROWS], from the first column on; null: none
    const float *scale;         // [E]; null: none
    float *terms;               // [rows, num_columns]
    u64 activation_part_bytes, stride;
    MatrixChoice choice;
    int num_columns, unused;
};

INLINE TileRows rows_of_tile(const GemmDownArgs &a, const GroupTile &tile) {
    const i64 matrix = matrix_of(a.choice, tile);
    const u8 *down = a.down + matrix * (i64)a.stride;
    const int first_column = block_index_x() * TILE_N;
    TileRows rows = rows_of_group(
        a.activations, tile, [&](int row) { return tile.first_row + row; });
    rows.w = down + (i64)(first_column + copied_row(0)) * WEIGHT_ROW_BYTES;
    rows.num_w = copies_within(a.num_columns - first_column);
    return rows;
}

#ifdef STORED_TYPE
// The row of down that this thread unpacks; columns past the matrix read row 0, which is not used.
INLINE const u8 *stored_row(const GemmDownArgs &a, const GroupTile &tile) {
    const int row = block_index_x() * TILE_N + thread_index() % TILE_N;
    return a.down + matrix_of(a.choice, tile) * (i64)a.stride +
           (i64)(row < a.num_columns ? row : 0) * WEIGHT_ROW_BYTES;
}
#endif

KERNEL(gemm_down, GemmDownArgs, THREADS, BLOCKS_PER_SM) {
    DYNAMIC_SHARED(shared);
    let_next_begin();
    wait_for_previous();
    if (block_index_y() >= load_counts(a.counts).num_tiles) return;
    const GroupTile tile = load_tile(a.tiles + block_index_y());
    if (!is_chosen(a.choice, tile.group)) return;
    float totals[NUM_M][NUM_N][4];
#ifdef STORED_TYPE
    StoredRows stored;
    stored.begin(stored_row(a, tile));
    multiply_tile<0>(totals, shared, rows_of_tile(a, tile), a.activation_part_bytes,
                     tile.end_row - tile.first_row, stored);
#else
    multiply_tile<COPIED_ROWS * WEIGHT_ROW_BYTES>(
        totals, shared, rows_of_tile(a, tile), a.activation_part_bytes,
        tile.end_row - tile.first_row);
#endif

    const float scale = a.scale ? load_float(a.scale + tile.expert_id) : 1.0f;
    const float *bias = a.bias ? a.bias + (i64)tile.expert_id * NUM_ROWS : nullptr;
#pragma unroll
    for (int m = 0; m < NUM_M; m++)
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const int row = tile.first_row + total_row(m, upper);
            if (row >= tile.end_row) continue;
            const float row_scale =
                a.activation_scales ? load_float(a.activation_scales + row) : 1.0f;
            const float weight = load_float(a.weights + row);
#pragma unroll
            for (int n = 0; n < NUM_N; n++) {
                const int column = block_index_x() * TILE_N + total_column(n);
                if (column >= a.num_columns) continue;
                float first = scale * (totals[m][n][2 * upper] * row_scale);
                float second = scale * (totals[m][n][2 * upper + 1] * row_scale);
                if (bias) {
                    first += load_float(bias + column);
                    second += load_float(bias + column + 1);
                }
                *(float2 *)(a.terms + (i64)row * a.num_columns + column) =
                    make_float2(weight * first, weight * second);
            }
        }
}
