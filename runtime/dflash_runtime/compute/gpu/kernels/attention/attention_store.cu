// attention_store: first kernel of a prompt chunk's attention. Normalises and rotates queries and keys,
// writes the chunk's rows of the KV cache, and the scaled queries for attention_prefill.
// Grid (T, ceil((NUM_HEADS + 2 * NUM_KV_HEADS) / WARPS)); a logical warp per head of a token.
//
// Parameters: those of attention_heads.cuh.
#include "attention_heads.cuh"

constexpr int WARPS = 8, THREADS = WARPS * LANES;
constexpr int NUM_JOBS = NUM_HEADS + 2 * NUM_KV_HEADS;
constexpr int LONGEST_ROW = KEY_ROW > VALUE_ROW ? KEY_ROW : VALUE_ROW;

#if USE_MMA
typedef u16 ChunkQuery;
INLINE u16 chunk_query(float x) { return float_to_half(x); }
#else
typedef float ChunkQuery;
INLINE float chunk_query(float x) { return x; }
#endif

struct AttentionStoreArgs {
    NewRows rows;
    const int *first_position;  // of the chunk
    LayerCache cache;
    ChunkQuery *queries;  // [T, NUM_HEADS, QUERY_COLUMNS], scaled, and times CHUNK_SCORE_UNIT
};

INLINE void store_query(const AttentionStoreArgs &a, RotatedHead &query, int token, int head,
                        float scale) {
    ChunkQuery *target = a.queries + ((i64)token * NUM_HEADS + head) * QUERY_COLUMNS;
    query.load(new_query(a.rows, token, head));
    query.normalise_and_rotate(a.rows.eps);
    query.give([&](int element, float x) { target[element] = chunk_query(x * (scale * CHUNK_SCORE_UNIT)); });
    for (int d = KEY_DIM + lane_index(); d < QUERY_COLUMNS; d += LANES) target[d] = 0;
}

KERNEL(attention_store, AttentionStoreArgs, THREADS, 1) {
    SHARED(float, room, WARPS *LONGEST_ROW);
    let_next_begin();
    const int token = block_index_x(), job = block_index_y() * WARPS + warp_index();
    const int position = (int)load_weights4(a.first_position) + token;
    const int kv_head = (job - NUM_HEADS) % NUM_KV_HEADS;
    const bool is_key = job >= NUM_HEADS && job < NUM_HEADS + NUM_KV_HEADS;
    const bool is_value = job >= NUM_HEADS + NUM_KV_HEADS && job < NUM_JOBS;
    float *row = room + warp_index() * LONGEST_ROW;
    RotatedHead head;
    if (job < NUM_HEADS || is_key)
        head.load_constants(is_key ? a.rows.key_weight : a.rows.query_weight,
                            angles_at(a.rows, position));
    wait_for_previous();
    if (job < NUM_HEADS) store_query(a, head, token, job, query_scale(a.rows, position));
    else if (is_key) {
        head.load(new_key(a.rows, token, kv_head));
        head.normalise_and_rotate(a.rows.eps);
        head.give([&](int element, float x) { row[element] = x; });
        clear_rest<KEY_DIM, KEY_ROW>(row);
    } else if (is_value) {
        ValueHead value;
        value.load(new_value(a.rows, token, kv_head));
        value.give([&](int element, float x) { row[element] = x; });
        clear_rest<VALUE_DIM, VALUE_ROW>(row);
    }
    block_barrier();
    if (is_key) store_row<KEY_ROW>(row, key_rows(a.cache, kv_head), cache_row(position));
    else if (is_value) store_row<VALUE_ROW>(row, value_rows(a.cache, kv_head), cache_row(position));
}
