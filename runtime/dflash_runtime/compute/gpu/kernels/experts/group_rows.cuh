// Rows of A for a tile of one expert's group, shared by gemm_gate_up.cu and gemm_down.cu.
#pragma once
#include "gemm_tile.cuh"
#include "groups.cuh"

// row_of(row of the tile) is the row of A. The caller sets the rows of W.
template <typename RowOf>
INLINE TileRows rows_of_group(const u8 *a, const GroupTile &tile, const RowOf &row_of) {
    TileRows rows;
    rows.a = a;
    rows.num_a = copies_within(tile.end_row - tile.first_row);
#pragma unroll
    for (int i = 0; i < A_COPIES; i++)
        rows.a_offsets[i] = i < rows.num_a ? offset_of_a(row_of(copied_row(i))) : 0;
    return rows;
}
