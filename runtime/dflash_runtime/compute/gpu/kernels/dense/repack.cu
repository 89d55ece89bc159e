// repack: rows of a GGUF file in the device layout (launch/layouts.py). Grid: any number of blocks; a
// thread gathers 16 bytes of the result at a time.
//
// Parameters: TYPE, COLUMNS, THREADS.
#include "formats.cuh"

struct RepackArgs {
    const u8 *native;  // [rows, bytes of a row in the file], any alignment
    u8 *out;           // [rows, ROW_BYTES]
    u64 num_pieces;    // rows * ROW_BYTES / 16
};

constexpr int ELEMENTS = Blocks<TYPE>::ELEMENTS;
constexpr int NATIVE_BLOCKS = COLUMNS / ELEMENTS;
constexpr int DEVICE_BLOCKS = (COLUMNS + 63) / 64 * 64 / ELEMENTS;
constexpr int NUM_FIELDS = Blocks<TYPE>::NUM_FIELDS;
constexpr int DEVICE_ROW_BYTES = ArrayOffset<TYPE, DEVICE_BLOCKS, NUM_FIELDS>::VALUE;

// Byte `offset` of a row in the device layout; padding is 0.
template <int INDEX>
INLINE u8 gathered(const u8 *row, int offset) {
    if constexpr (INDEX + 1 < NUM_FIELDS) {
        if (offset >= ArrayOffset<TYPE, DEVICE_BLOCKS, INDEX + 1>::VALUE) {
            return gathered<INDEX + 1>(row, offset);
        }
    }
    constexpr int BYTES = Field<TYPE, INDEX>::BYTES;
    const int inside = offset - ArrayOffset<TYPE, DEVICE_BLOCKS, INDEX>::VALUE;
    const int block = inside / BYTES;
    if (block >= NATIVE_BLOCKS) return 0;
    return row[block * Blocks<TYPE>::BYTES + Field<TYPE, INDEX>::OFFSET + inside % BYTES];
}

KERNEL(repack, RepackArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const u64 step = (u64)num_blocks_x() * THREADS;
    for (u64 i = (u64)block_index_x() * THREADS + thread_index(); i < a.num_pieces; i += step) {
        const u64 row = i / (DEVICE_ROW_BYTES / 16);
        const int offset = 16 * (int)(i % (DEVICE_ROW_BYTES / 16));
        const u8 *native = a.native + row * (u64)(NATIVE_BLOCKS * Blocks<TYPE>::BYTES);
        u32 words[4];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            words[w] = 0;
#pragma unroll
            for (int b = 0; b < 4; b++) {
                words[w] |= (u32)gathered<0>(native, offset + 4 * w + b) << (8 * b);
            }
        }
        *(uint4 *)(a.out + 16 * i) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}
