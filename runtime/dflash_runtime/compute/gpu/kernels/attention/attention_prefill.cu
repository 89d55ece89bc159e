// attention_prefill: attention of a prompt chunk whose keys and values are already in the cache
// (attention_store). Reads scaled queries and the cache; writes the attention's output as floats.
//
// Grid (ceil(rows / BLOCK_ROWS), NUM_KV_HEADS), THREADS threads: a block computes some rows (query heads
// of one kv head, token after token) over all positions up to theirs. The last rows have the most keys,
// so their blocks come first. Tiles of keys are counted from position 0, and a masked tile leaves a row
// unchanged: a row's bits depend on its own query and position alone, not on how the prompt is cut.
//
// Parameters, besides those of attention_heads.cuh, with USE_MMA: ROW_TILES of 16 rows per warp,
// SHARED_BYTES.
#include "attention_heads.cuh"

constexpr int WARPS = 4, THREADS = WARPS * LANES;

struct AttentionPrefillArgs {
    const void *queries;        // [T, NUM_HEADS, QUERY_COLUMNS], written by attention_store
    const int *first_position;  // of the chunk
    LayerCache cache;
    const float *sinks;         // [NUM_HEADS], if HAS_SINKS: a score that has no value
    float *out;                 // [T, NUM_HEADS, VALUE_DIM]
    int num_tokens;
};

// First row of this block; blocks count from the last rows.
INLINE int block_rows_begin(int block_rows) {
    return (num_blocks_x() - 1 - block_index_x()) * block_rows;
}
INLINE i64 head_of_row(int row) {
    return (i64)(row / GROUP) * NUM_HEADS + block_index_y() * GROUP + row % GROUP;
}
// The sink's term of a row's softmax denominator; `maximum` is in natural units (base e).
INLINE float sink_share(const AttentionPrefillArgs &a, int row, float maximum) {
    if constexpr (HAS_SINKS) {
        const int head = block_index_y() * GROUP + row % GROUP;
        return exp_fast(bits_to_float(load_weights4(a.sinks + head)) - maximum);
    }
    return 0.0f;
}
INLINE void write_result(const AttentionPrefillArgs &a, int row, int element, float4 x) {
    float *out = a.out + head_of_row(row) * VALUE_DIM + element;
    const float value[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (element + i < VALUE_DIM) out[i] = value[i];
}

#if USE_MMA
#include "attention_prefill_mma.cuh"
#else
#include "attention_prefill_fma.cuh"
#endif
