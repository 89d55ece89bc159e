// gemm_dense: products of the rows of a prompt chunk with up to four matrices of the same type and number
// of columns, such as q, k and v. Reads halves (or floats) of activations and weights; writes floats.
// Grid (tiles of TILE_N columns, counted through all matrices, ceil(T / TILE_M)), THREADS threads.
//
// Parameters: those of gemm_tile.cuh.
#include "gemm_tile.cuh"

struct DenseMatrix {
    const u8 *weights;
    const float *add;  // [T, num_rows], added to the product, may be `out`; null: none
    float *out;        // [T, num_rows]
    i64 out_stride;    // elements from one token to the next, in `out` and `add`
    int num_rows, first_tile;
};
struct DenseArgs {
    const u8 *x;            // [NUM_PARTS, T, NUM_COLUMNS]
    const float *x_scales;  // [T]; null: 1
    u64 part_bytes;
    int num_tokens, num_matrices;
    DenseMatrix matrices[4];
};

INLINE TileRows rows_of_tile(
    const DenseArgs &a, const DenseMatrix &matrix, int first_token, int first_column) {
    TileRows rows;
    rows.a = a.x;
    rows.num_a = copies_within(a.num_tokens - first_token);
#pragma unroll
    for (int i = 0; i < A_COPIES; i++)
        rows.a_offsets[i] = i < rows.num_a ? offset_of_a(first_token + copied_row(i)) : 0;
    rows.w = matrix.weights + (i64)(first_column + copied_row(0)) * WEIGHT_ROW_BYTES;
    rows.num_w = copies_within(matrix.num_rows - first_column);
    return rows;
}

KERNEL(gemm_dense, DenseArgs, THREADS, BLOCKS_PER_SM) {
    DYNAMIC_SHARED(shared);
    let_next_begin();
    wait_for_previous();
    int which = 0;
    while (which + 1 < a.num_matrices && block_index_x() >= a.matrices[which + 1].first_tile)
        which++;
    const DenseMatrix matrix = a.matrices[which];
    const int first_token = block_index_y() * TILE_M;
    const int first_column = (block_index_x() - matrix.first_tile) * TILE_N;
    float totals[NUM_M][NUM_N][4];
    multiply_tile<COPIED_ROWS * WEIGHT_ROW_BYTES>(
        totals, shared, rows_of_tile(a, matrix, first_token, first_column), a.part_bytes,
        a.num_tokens - first_token);

    // Pairs of elements are stored at once if every row of the result begins at an aligned pair.
    const bool is_even = (matrix.out_stride | matrix.num_rows) % 2 == 0 &&
                         ((u64)matrix.out | (u64)matrix.add) % 8 == 0;
#pragma unroll
    for (int m = 0; m < NUM_M; m++)
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const int token = first_token + total_row(m, upper);
            if (token >= a.num_tokens) continue;
            const float scale =
                a.x_scales ? bits_to_float(load_fresh4(a.x_scales + token)) : 1.0f;
#pragma unroll
            for (int n = 0; n < NUM_N; n++) {
                const int column = first_column + total_column(n);
                const i64 place = token * matrix.out_stride + column;
                const float *total = totals[m][n] + 2 * upper;
                if (is_even && column < matrix.num_rows) {
                    float2 value = make_float2(total[0] * scale, total[1] * scale);
                    if (matrix.add) {
                        const uint2 add = load_fresh8(matrix.add + place);
                        value.x += bits_to_float(add.x), value.y += bits_to_float(add.y);
                    }
                    *(float2 *)(matrix.out + place) = value;
                    continue;
                }
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    if (column + c >= matrix.num_rows) continue;
                    float value = total[c] * scale;
                    if (matrix.add) value += bits_to_float(load_fresh4(matrix.add + place + c));
                    matrix.out[place + c] = value;
                }
            }
        }
}
