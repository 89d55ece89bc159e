// Keys and values of a draft tree, kept beside the cache until its accepted path is known.
//
//   attention_nodes   normalises and rotates each token's keys at its position in the tree, and writes
//                     keys and values in the cache's format to `nodes`. Grid (T, ceil(2 * NUM_KV_HEADS /
//                     WARPS)); a logical warp per key or value head of a token
//   attention_accept  copies the rows of the accepted path to the cache. Grid (L, NUM_KV_HEADS)
//
// Parameters: those of attention_heads.cuh.
#include "attention_heads.cuh"

constexpr int WARPS = 8, THREADS = WARPS * LANES;
constexpr int LONGEST_ROW = KEY_ROW > VALUE_ROW ? KEY_ROW : VALUE_ROW;

struct AttentionNodesArgs {
    NewRows rows;
    const int *positions;  // [T]
    LayerCache nodes;      // row t belongs to token t
};

KERNEL(attention_nodes, AttentionNodesArgs, THREADS, 1) {
    SHARED(float, room, WARPS *LONGEST_ROW);
    let_next_begin();
    const int token = block_index_x(), job = block_index_y() * WARPS + warp_index();
    const int kv_head = job % NUM_KV_HEADS;
    const bool is_key = job < NUM_KV_HEADS, is_value = !is_key && job < 2 * NUM_KV_HEADS;
    float *row = room + warp_index() * LONGEST_ROW;
    RotatedHead key;
    if (is_key)
        key.load_constants(a.rows.key_weight,
                           angles_at(a.rows, (int)load_weights4(a.positions + token)));
    wait_for_previous();
    if (is_key) {
        key.load(new_key(a.rows, token, kv_head));
        key.normalise_and_rotate(a.rows.eps);
        key.give([&](int element, float x) { row[element] = x; });
        clear_rest<KEY_DIM, KEY_ROW>(row);
    } else if (is_value) {
        ValueHead value;
        value.load_constants(nullptr, nullptr);
        value.load(new_value(a.rows, token, kv_head));
        value.give([&](int element, float x) { row[element] = x; });
        clear_rest<VALUE_DIM, VALUE_ROW>(row);
    }
    block_barrier();
    if (is_key) store_row<KEY_ROW>(row, key_rows(a.nodes, kv_head), token);
    else if (is_value) store_row<VALUE_ROW>(row, value_rows(a.nodes, kv_head), token);
}

struct AttentionAcceptArgs {
    const int *path;   // [L] accepted tokens
    const int *begin;  // the tree's first position
    LayerCache nodes, cache;
};

// Copies one stored row; called by a whole block.
template <int ROW>
INLINE void copy_row(const HeadRows &from, int node, const HeadRows &to, i64 row) {
    constexpr int BYTES = ROW * KV_ELEMENT_BYTES, BLOCKS = ROW / Q8_BLOCK;
    for (int i = thread_index(); i < BYTES / 16; i += THREADS)
        *(uint4 *)(to.elements + row * BYTES + 16 * i) =
            load_fresh16(from.elements + (i64)node * BYTES + 16 * i);
    if constexpr (KV_Q8_0)
        for (int i = thread_index(); i < BLOCKS; i += THREADS)
            to.scales[row * BLOCKS + i] =
                (u16)read_half<READ_FRESH>(from.scales + (i64)node * BLOCKS + i);
}

KERNEL(attention_accept, AttentionAcceptArgs, THREADS, 1) {
    let_next_begin();
    const int node = (int)load_weights4(a.path + block_index_x());
    const i64 row = cache_row((int)load_weights4(a.begin) + block_index_x());
    wait_for_previous();
    const int head = block_index_y();
    copy_row<KEY_ROW>(key_rows(a.nodes, head), node, key_rows(a.cache, head), row);
    copy_row<VALUE_ROW>(value_rows(a.nodes, head), node, value_rows(a.cache, head), row);
}
