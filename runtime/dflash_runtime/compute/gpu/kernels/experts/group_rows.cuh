// Rows of A in a tile of a group, as gemm_gate_up.cu and gemm_down.cu take them.
#pragma once
#include "gemm_tile.cuh"
#include "groups.cuh"

// `row_of` says which row of A a row of the tile is; rows of W are left to the caller.
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
