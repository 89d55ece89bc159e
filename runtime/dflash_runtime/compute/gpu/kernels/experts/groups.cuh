// Pairs (token, expert) of a prompt chunk, grouped by expert on the device, and the tiles of rows that
// one block computes.
//
//   row                              index of a pair in the grouped order
//   expert_ids   [groups]            ascending; every group has at least one row
//   group_starts [groups + 1]        rows of group g: group_starts[g] … group_starts[g + 1] - 1
//   token_indices, weights [rows]    the pair's token and weight; tokens ascend inside a group
//   tiles        [tiles]             rows first_row … end_row - 1 of one group, at most TILE_M
//   rows_of_tokens [T, pairs_per_token]   a token's rows in the order of its choices; -1: not resident
#pragma once
#include "common.cuh"

struct GroupCounts {
    int num_groups, num_tiles, num_rows, unused;
};
struct GroupTile {
    int group, expert_id, first_row, end_row;
};

INLINE GroupCounts load_counts(const GroupCounts *p) {
    const uint4 bits = load_fresh16(p);
    return {(int)bits.x, (int)bits.y, (int)bits.z, (int)bits.w};
}
INLINE GroupTile load_tile(const GroupTile *p) {
    const uint4 bits = load_fresh16(p);
    return {(int)bits.x, (int)bits.y, (int)bits.z, (int)bits.w};
}
INLINE int load_int(const int *p) { return (int)load_fresh4(p); }
INLINE float load_float(const float *p) { return bits_to_float(load_fresh4(p)); }

// Index of an expert's matrix: by group, if the matrices of groups first_group … end_group - 1 have been
// dequantised for this chunk; otherwise by slot, or by expert id if slot_of_expert is null.
struct MatrixChoice {
    const int *slot_of_expert;
    int first_group, end_group, is_by_group, unused;
};
INLINE bool is_chosen(const MatrixChoice &choice, int group) {
    return group >= choice.first_group && group < choice.end_group;
}
INLINE i64 stored_matrix(const MatrixChoice &choice, int expert_id) {
    return choice.slot_of_expert ? load_int(choice.slot_of_expert + expert_id) : expert_id;
}
INLINE i64 matrix_of(const MatrixChoice &choice, const GroupTile &tile) {
    return choice.is_by_group ? tile.group - choice.first_group
                              : stored_matrix(choice, tile.expert_id);
}
