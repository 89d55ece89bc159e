// Payloads in memory that is shared with other processes.
//
//   move_payload  copies rows, and computes their digest on the way. Grid: any number of blocks, which take
//                 rows in turn. Every byte is read once, so that a process which writes the source meanwhile
//                 cannot make copy and digest differ
//   add_to_rows   adds float64 sums to rows of another array, and may clear them. Grid num_rows: a block per row
//
// Parameters: THREADS.
#include "common.cuh"

constexpr int WARPS = THREADS / LANES;

// The contribution of 8 bytes to the digest, which is the sum over all: see device_payload.digest_of.
INLINE u64 mixed(u32 low, u32 high, i64 place) {
    const u64 odd = 0x9E3779B97F4A7C15ull;
    u64 word = (low | (u64)high << 32) ^ (u64)place * odd;
    word = (word ^ word >> 32) * odd;
    return word ^ word >> 29;
}

// 1 if the double with this high word is NaN or infinite.
INLINE u32 no_number(u32 high) { return (high & 0x7ff00000u) == 0x7ff00000u; }

struct MovePayloadArgs {
    const u8 *source;  // rows
    const int *rows;   // [num_rows] indices of source rows; null: the first num_rows
    u8 *target;        // [num_rows] rows
    u64 *shares;       // [blocks]: each block's part of the digest
    u32 *not_finite;   // [blocks]: whether a block found a double that is NaN or infinite; null: not
                       // checked
    int num_rows;
    int row_pieces;  // row size in units of 16 bytes
};

KERNEL(move_payload, MovePayloadArgs, THREADS, 1) {
    SHARED(u64, sums, WARPS);
    SHARED(u32, bad_warps, WARPS);
    wait_for_previous();
    u64 sum = 0;
    u32 bad = 0;
    for (int row = block_index_x(); row < a.num_rows; row += num_blocks_x()) {
        const i64 first = (i64)row * a.row_pieces;
        const i64 from = a.rows ? (i64)(int)load_fresh4(a.rows + row) * a.row_pieces : first;
        for (int i = thread_index(); i < a.row_pieces; i += THREADS) {
            const uint4 piece = load_fresh16(a.source + 16 * (from + i));
            *(uint4 *)(a.target + 16 * (first + i)) = piece;
            sum += mixed(piece.x, piece.y, 2 * (first + i) + 1);
            sum += mixed(piece.z, piece.w, 2 * (first + i) + 2);
            bad |= no_number(piece.y) | no_number(piece.w);
        }
    }
#pragma unroll
    for (int mask = LANES / 2; mask; mask >>= 1) {
        sum += lane_xor(sum, mask);
        bad |= lane_xor(bad, mask);
    }
    if (lane_index() == 0) sums[warp_index()] = sum, bad_warps[warp_index()] = bad;
    block_barrier();
    if (thread_index()) return;
    for (int warp = 1; warp < WARPS; warp++) sum += sums[warp], bad |= bad_warps[warp];
    a.shares[block_index_x()] = sum;
    if (a.not_finite) a.not_finite[block_index_x()] = bad;
}

struct AddToRowsArgs {
    double *sums;     // [num_rows, columns]
    const int *rows;  // [num_rows] distinct indices of rows of `out`; null: the first num_rows
    double *out;      // rows of `columns`
    int num_rows;
    int columns;
    int clears;  // whether sums are zero afterwards
};

KERNEL(add_to_rows, AddToRowsArgs, THREADS, 1) {
    wait_for_previous();
    const i64 row = block_index_x();
    double *sums = a.sums + row * a.columns;
    double *out = a.out + (a.rows ? (i64)(int)load_fresh4(a.rows + row) : row) * a.columns;
    for (int column = thread_index(); column < a.columns; column += THREADS) {
        out[column] += sums[column];
        if (a.clears) sums[column] = 0.0;
    }
}
