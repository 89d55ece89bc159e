// dequantise: matrices as rows of halves, for the products of a prompt chunk. One matrix, or those of the
// chosen groups of experts. F16 weights are copied. Grid (ceil(units of a matrix / 256), groups), 256
// threads; a thread unpacks one unit of 64 weights.
//
// A block's units are consecutive, across rows. Their halves go through shared memory so that a warp
// stores 512 consecutive bytes; chunks of 16 bytes are swizzled within each 128 bytes to avoid bank
// conflicts. Rows of the result are padded with zeros to whole units.
//
// Parameters: WEIGHT_TYPE (any but F32), NUM_COLUMNS.
#define WEIGHTS_IN_L1
#include "stored_units.cuh"

#include "groups.cuh"

constexpr int UNIT_THREADS = 256, UNIT_CHUNKS = 8;
constexpr int UNITS = (NUM_COLUMNS + 63) / 64;

struct DequantiseArgs {
    const GroupCounts *counts;  // null: one matrix, at `weights`
    const int *expert_ids;      // [groups]
    const u8 *weights;
    u8 *halves;  // [groups of `choice`, num_rows, UNITS * 64]
    u64 stride;  // bytes from one expert's matrix to the next
    MatrixChoice choice;
    int num_rows, unused;
};

#if WEIGHT_TYPE != 1 && WEIGHT_TYPE != 30  // F16, BF16
using Weights = Format<WEIGHT_TYPE, NUM_COLUMNS>;
constexpr int ROW_BYTES = Weights::ROW_BYTES;

INLINE void unpack_unit(u8 *shared, const u8 *row, int unit, int first_chunk) {
    typename Weights::Raw raw;
    Weights::load(raw, row, unit);
    store_unit<Weights>(shared, raw, unit, first_chunk);
}
#else
constexpr int ROW_BYTES = 2 * 64 * UNITS;

INLINE u32 halves_of(u32 pair) {
    if (WEIGHT_TYPE == F16) return pair;
    return floats_to_halves(bfloat_to_float(pair & 0xffff), bfloat_to_float(pair >> 16));
}
INLINE void unpack_unit(u8 *shared, const u8 *row, int unit, int first_chunk) {
#pragma unroll
    for (int i = 0; i < UNIT_CHUNKS; i++) {
        const uint4 bits = load_weights16(row + 128 * unit + 16 * i);
        *(uint4 *)(shared + swapped_place(first_chunk + UNIT_CHUNKS * unit + i)) = make_uint4(
            halves_of(bits.x), halves_of(bits.y), halves_of(bits.z), halves_of(bits.w));
    }
}
#endif

KERNEL(dequantise, DequantiseArgs, UNIT_THREADS, 4) {
    SHARED(u8, shared, UNIT_THREADS * UNIT_CHUNKS * 16);
    let_next_begin();
    wait_for_previous();
    const u8 *matrix = a.weights;
    const i64 matrix_units = (i64)a.num_rows * UNITS;
    const i64 first_unit = (i64)block_index_x() * UNIT_THREADS;
    u8 *halves = a.halves + 16 * UNIT_CHUNKS * (block_index_y() * matrix_units + first_unit);
    if (a.counts) {
        const int group = a.choice.first_group + block_index_y();
        if (group >= load_counts(a.counts).num_groups || group >= a.choice.end_group) return;
        matrix += stored_matrix(a.choice, load_int(a.expert_ids + group)) * (i64)a.stride;
    }
    const i64 index = first_unit + thread_index();
    if (index < matrix_units) {
        const i64 row = index / UNITS;
        const int first_chunk = (int)(row * UNITS - first_unit) * UNIT_CHUNKS;
        unpack_unit(shared, matrix + row * ROW_BYTES, (int)(index - row * UNITS), first_chunk);
    }
    block_barrier();
    const i64 num_units = matrix_units - first_unit;
    const int num_chunks = num_units < UNIT_THREADS ? (int)num_units * UNIT_CHUNKS
                                                    : UNIT_THREADS * UNIT_CHUNKS;
#pragma unroll
    for (int i = 0; i < UNIT_CHUNKS; i++) {
        const int chunk = i * UNIT_THREADS + thread_index();
        if (chunk < num_chunks)
            *(uint4 *)(halves + 16 * chunk) = *(const uint4 *)(shared + swapped_place(chunk));
    }
}
