// repack: rows of a GGUF file in the device layout (launch/layouts.py). Grid: any number of blocks; a
// thread gathers 16 bytes of the result at a time.
//
// Parameters: TYPE, COLUMNS, THREADS.
#include "repack.cuh"

struct RepackArgs {
    const u8 *native;  // [rows, bytes of a row in the file], any alignment
    u8 *out;           // [rows, ROW_BYTES]
    u64 num_pieces;    // rows * ROW_BYTES / 16
};

using Rows = Repacked<TYPE, COLUMNS>;

KERNEL(repack, RepackArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const u64 step = (u64)num_blocks_x() * THREADS;
    for (u64 i = (u64)block_index_x() * THREADS + thread_index(); i < a.num_pieces; i += step) {
        const u8 *native = a.native + i / Rows::PIECES * (u64)Rows::NATIVE_BYTES;
        *(uint4 *)(a.out + 16 * i) = Rows::piece(native, (int)(i % Rows::PIECES));
    }
}
