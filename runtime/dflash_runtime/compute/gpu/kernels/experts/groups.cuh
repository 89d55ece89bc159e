// Pairs of tokens and experts, sorted by expert on the device for prefill's kernels: the arrays of a
// RoutedBatch, and the tiles of rows that one block computes.
//
//   row                              place of a pair in that order
//   expert_ids   [groups]            ascending; every group has at least one row
//   group_starts [groups + 1]        rows of group g: group_starts[g] … group_starts[g + 1] - 1
//   token_indices, weights [rows]    of the row's pair; tokens ascend inside a group
//   tiles        [tiles]             rows first_row … end_row - 1 of one group, at most TILE_M
//   rows_of_tokens [T, pairs_per_token]   rows of a token in order of its choice, -1: not resident
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

// Which of the matrices that lie one after another are an expert's: by group, where those of groups
// first_group … end_group - 1 have been made for this chunk; else by slot, or by expert id where
// there are no slots.
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
