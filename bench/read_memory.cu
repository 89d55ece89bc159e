// Reads memory and does nothing else worth mentioning: how fast weights could be read at best.
//
// Defines: THREADS, DEPTH (loads of 16 bytes that a thread has under way at once).
#include "common.cuh"

struct ReadMemoryArgs {
    const uint4 *words;  // [num_words], a multiple of THREADS * DEPTH
    u32 *sums;           // [blocks, THREADS]: of all 32-bit words, so that none is left out
    i64 num_words;
};

KERNEL(read_memory, ReadMemoryArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const i64 step = (i64)num_blocks_x() * THREADS * DEPTH;
    u32 sum = 0;
    for (i64 first = (i64)block_index_x() * THREADS * DEPTH; first < a.num_words; first += step) {
        uint4 words[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; i++)
            words[i] = load_weights16(a.words + first + i * THREADS + thread_index());
#pragma unroll
        for (int i = 0; i < DEPTH; i++) sum += words[i].x + words[i].y + words[i].z + words[i].w;
    }
    a.sums[block_index_x() * THREADS + thread_index()] = sum;
}
