// gemm_gate_up: gate and up projections of a prompt chunk's routed experts and the activation, in one
// product. Reads the chunk's rows; writes the pairs' activations for gemm_down. Grid (ceil(NUM_ROWS /
// FEATURES), most tiles of rows), THREADS threads; blocks past the number of tiles exit.
//
// Parameters: those of gemm_tile.cuh; NUM_ROWS of gate and of up; OUT_PARTS: 1 or 2 rows of halves per row
// of activations, 0: floats; SEGMENT, the same for tiles of all sizes.
#include "group_rows.cuh"

#include "activation.cuh"
#include "halves.cuh"

// Columns of a tile alternate between eight rows of gate and the same eight of up, so that a thread
// holds both values of an activation:
//
//     column of the tile   0 … 7    8 … 15   16 … 23   24 … 31  …
//     row of               gate 0…7  up 0…7  gate 8…15  up 8…15  …
//
// Activations in halves are divided by a power of two where they would overflow (with two parts: always),
// each SEGMENT of a row by its own, stored in `shifts`; level_activations then makes it the same for the
// whole row.
constexpr int FEATURES = TILE_N / 2;
static_assert(COPIED_ROWS % 16 == 0, "a thread copies rows of gate alone, or of up");
constexpr int NUM_SEGMENTS = (NUM_ROWS + SEGMENT - 1) / SEGMENT, SEGMENT_N = 2 * SEGMENT / 8;
static_assert(NUM_ROWS % 8 == 0, "features are taken by eights");
static_assert(NUM_N % SEGMENT_N == 0, "a warp has whole segments");
static_assert(NUM_M * 16 == WARP_M && NUM_N % 2 == 0, "gate and up lie in the same warp");

struct GemmGateUpArgs {
    const GroupCounts *counts;
    const GroupTile *tiles;
    const int *token_indices;
    const u8 *hidden;            // [NUM_PARTS, T, NUM_COLUMNS]
    const float *hidden_scales;  // [T]; null: 1
    const u8 *gate, *up;
    const float *gate_bias, *up_bias;    // [E, NUM_ROWS]; null: none
    const float *gate_scale, *up_scale;  // [E]; null: none
    u8 *activations;                     // [OUT_PARTS, rows, NUM_ROWS]
    i8 *shifts;                          // [rows, NUM_SEGMENTS]; unused if OUT_PARTS is 0
    u64 hidden_part_bytes, activation_part_bytes;
    u64 gate_stride, up_stride;  // bytes from one expert's matrix to the next
    MatrixChoice choice;
    ActivationArgs form;
};

INLINE TileRows rows_of_tile(const GemmGateUpArgs &a, const GroupTile &tile) {
    const i64 matrix = matrix_of(a.choice, tile);
    const u8 *gate = a.gate + matrix * (i64)a.gate_stride, *up = a.up + matrix * (i64)a.up_stride;
    const int first_feature = block_index_x() * FEATURES, column = copied_row(0);
    const int feature = first_feature + column / 16 * 8 + column % 8;
    TileRows rows = rows_of_group(
        a.hidden, tile, [&](int row) { return load_int(a.token_indices + tile.first_row + row); });
    rows.w = (column / 8 % 2 ? up : gate) + (i64)feature * WEIGHT_ROW_BYTES;
    rows.num_w = copies_within(2 * (NUM_ROWS - first_feature));
    return rows;
}

struct Finish {
    float scale, bias0, bias1;  // the expert's scale, and biases of two neighbouring rows
};
INLINE Finish finish_of(const float *scales, const float *biases, int expert_id, int feature) {
    Finish finish = {1.0f, 0.0f, 0.0f};
    if (scales) finish.scale = load_float(scales + expert_id);
    if (biases) {
        const float *bias = biases + (i64)expert_id * NUM_ROWS + feature;
        finish.bias0 = load_float(bias), finish.bias1 = load_float(bias + 1);
    }
    return finish;
}

#ifdef STORED_TYPE
// The row of gate or up that this thread unpacks; columns past the matrix read row 0, which is not used.
INLINE const u8 *stored_row(const GemmGateUpArgs &a, const GroupTile &tile) {
    const i64 matrix = matrix_of(a.choice, tile);
    const int column = thread_index() % TILE_N;
    const int feature = block_index_x() * FEATURES + column / 16 * 8 + column % 8;
    const u8 *begin = column / 8 % 2 ? a.up + matrix * (i64)a.up_stride
                                     : a.gate + matrix * (i64)a.gate_stride;
    return begin + (i64)(feature < NUM_ROWS ? feature : 0) * WEIGHT_ROW_BYTES;
}
#endif

KERNEL(gemm_gate_up, GemmGateUpArgs, THREADS, BLOCKS_PER_SM) {
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
    multiply_tile<0>(totals, shared, rows_of_tile(a, tile), a.hidden_part_bytes,
                     tile.end_row - tile.first_row, stored);
#else
    multiply_tile<COPIED_ROWS / 2 * WEIGHT_ROW_BYTES>(
        totals, shared, rows_of_tile(a, tile), a.hidden_part_bytes,
        tile.end_row - tile.first_row);
#endif

#pragma unroll
    for (int m = 0; m < NUM_M; m++)
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const int row = tile.first_row + total_row(m, upper);
            const bool is_valid = row < tile.end_row;
            float hidden_scale = 1.0f;
            if (is_valid && a.hidden_scales)
                hidden_scale = load_float(a.hidden_scales + load_int(a.token_indices + row));
#pragma unroll
            for (int begin = 0; begin < NUM_N; begin += SEGMENT_N) {
                const int first_feature =
                    block_index_x() * FEATURES + warp_column() / 2 + 4 * begin;
                float largest = 0.0f;
#pragma unroll
                for (int n = begin; n < begin + SEGMENT_N; n += 2) {
                    const int feature = first_feature + 4 * (n - begin) + 2 * (tile_lane() % 4);
                    if (feature >= NUM_ROWS) continue;
                    float *gate = totals[m][n] + 2 * upper, *up = totals[m][n + 1] + 2 * upper;
                    const Finish g = finish_of(a.gate_scale, a.gate_bias, tile.expert_id, feature);
                    const Finish u = finish_of(a.up_scale, a.up_bias, tile.expert_id, feature);
                    gate[0] = activate(a.form, g.scale * (gate[0] * hidden_scale) + g.bias0,
                                       u.scale * (up[0] * hidden_scale) + u.bias0);
                    gate[1] = activate(a.form, g.scale * (gate[1] * hidden_scale) + g.bias1,
                                       u.scale * (up[1] * hidden_scale) + u.bias1);
                    largest = max_of(largest, max_of(size_of(gate[0]), size_of(gate[1])));
                }
                largest = lanes_max<4>(largest);
                const int shift = OUT_PARTS == 0   ? 0
                                  : OUT_PARTS == 1 ? overflow_shift(largest)
                                                   : level_shift(largest);
                if (!is_valid) continue;
                if (OUT_PARTS && tile_lane() % 4 == 0 && first_feature < NUM_ROWS)
                    a.shifts[(i64)row * NUM_SEGMENTS + first_feature / SEGMENT] = (i8)shift;
                const float divisor = power_of_two(-shift);
#pragma unroll
                for (int n = begin; n < begin + SEGMENT_N; n += 2) {
                    const int feature = first_feature + 4 * (n - begin) + 2 * (tile_lane() % 4);
                    if (feature >= NUM_ROWS) continue;
                    const float first = totals[m][n][2 * upper] * divisor;
                    const float second = totals[m][n][2 * upper + 1] * divisor;
                    const i64 place = (i64)row * NUM_ROWS + feature;
#if OUT_PARTS == 0
                    *(float2 *)((float *)a.activations + place) = make_float2(first, second);
#else
                    store_halves<OUT_PARTS>(
                        (u16 *)a.activations + place, a.activation_part_bytes, first, second);
#endif
                }
            }
        }
}
