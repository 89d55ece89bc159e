// Shared by all attention kernels: the layer's shape, its cache, and the projections of a step.
//
// Parameters (-D): NUM_HEADS, NUM_KV_HEADS, KEY_DIM, VALUE_DIM; KEY_ROW, VALUE_ROW, KV_TYPE (see
// kv_rows.cuh); ROTATED dimensions of a head, INTERLEAVED (see rotate.cuh); WINDOW, CHUNK (see
// attention_mask.cuh); WINDOW_ROWS of a sliding-window cache; IS_TEMPERED: queries have a factor by
// position; HAS_SINKS; USE_MMA: tensor cores.
#pragma once
#include "attention_mask.cuh"
#include "kv_rows.cuh"
#include "mma.cuh"
#include "rotate.cuh"

// Query heads that share a kv head. A "row" is one of these query heads of one token.
constexpr int GROUP = NUM_HEADS / NUM_KV_HEADS;
constexpr int WARP_ROWS = 8;    // rows that a logical warp computes at a time
constexpr int TILE_KEYS = 16;   // keys that it loads at a time
constexpr float LOWEST = -1e30f;  // initial maximum; unlike -inf, LOWEST - LOWEST is a number

// On tensor cores a chunk's scores are scaled by log2(e), so that exp2 gives the probabilities.
constexpr float CHUNK_SCORE_UNIT = USE_MMA ? 1.44269504f : 1.0f;

static_assert(NUM_HEADS % NUM_KV_HEADS == 0, "whole groups");
static_assert(ROTATED % 2 == 0 && ROTATED <= KEY_DIM, "pairs of a head");
static_assert(KEY_DIM <= KEY_ROW && VALUE_DIM <= VALUE_ROW, "rows hold heads");
static_assert(KEY_ROW <= 256 && VALUE_ROW <= 256, "heads that registers can hold");
static_assert(KEY_ROW % (KV_Q8_0 ? 32 : 16) == 0 && VALUE_ROW % (KV_Q8_0 ? 32 : 16) == 0,
              "rows of whole loads and blocks");

// Whether a lane's registers hold its part of a whole tile, keys and values.
constexpr bool HOLDS_TILE =
    TILE_KEYS * (KEY_ROW + VALUE_ROW) * KV_ELEMENT_BYTES / (4 * LANES) <= MOST_TILE_REGISTERS;

// Rows of queries in shared memory: padded to steps of 32 elements, and again to avoid bank conflicts.
constexpr int KEY_STEPS = (KEY_ROW + 31) / 32;
constexpr int QUERY_COLUMNS = 32 * KEY_STEPS;
constexpr int QUERY_ROW = QUERY_COLUMNS + (QUERY_COLUMNS % 64 == 0 ? 32 : 0);

// KV cache of one layer: [kv head][position][row]. A sliding-window cache is a ring: position p lies in
// row p % WINDOW_ROWS (0: not a ring).
struct LayerCache {
    u8 *keys, *values;
    u16 *key_scales, *value_scales;
    i64 num_rows;  // of a head
};
INLINE int cache_row(int position) {
    constexpr int SIZE = WINDOW_ROWS != 0 ? WINDOW_ROWS : 1;  // so that no compiler sees a division by zero
    if constexpr (WINDOW_ROWS != 0) return position % SIZE;
    return position;
}
INLINE HeadRows key_rows(const LayerCache &cache, int kv_head) {
    return head_rows<KEY_ROW>(cache.keys, cache.key_scales, kv_head * cache.num_rows);
}
INLINE HeadRows value_rows(const LayerCache &cache, int kv_head) {
    return head_rows<VALUE_ROW>(cache.values, cache.value_scales, kv_head * cache.num_rows);
}

// Outputs of the projections, one row per token, `*_stride` floats apart.
struct NewRows {
    const float *queries, *keys, *values;
    const float *query_weight, *key_weight;  // weights of the heads' norms; null: no norm
    const float2 *angles;                    // [position][ROTATED / 2] {cos, sin}
    const float *query_factors;              // [position], if IS_TEMPERED
    int query_stride, key_stride, value_stride;
    float eps;
    float scale;  // of scores
};
INLINE const float2 *angles_at(const NewRows &rows, int position) {
    return rows.angles + (i64)position * (ROTATED / 2);
}
// The factor that a query at this position is multiplied by.
INLINE float query_scale(const NewRows &rows, int position) {
    if constexpr (IS_TEMPERED) return rows.scale * load_weight(rows.query_factors + position);
    return rows.scale;
}
INLINE const float *new_query(const NewRows &rows, int token, int head) {
    return rows.queries + (i64)token * rows.query_stride + head * KEY_DIM;
}
INLINE const float *new_key(const NewRows &rows, int token, int kv_head) {
    return rows.keys + (i64)token * rows.key_stride + kv_head * KEY_DIM;
}
INLINE const float *new_value(const NewRows &rows, int token, int kv_head) {
    return rows.values + (i64)token * rows.value_stride + kv_head * VALUE_DIM;
}

// Clears a row's padding past its DIM elements; called by one logical warp.
template <int DIM, int ROW>
INLINE void clear_rest(float *row) {
    for (int d = DIM + lane_index(); d < ROW; d += LANES) row[d] = 0.0f;
}

#if USE_MMA
#include "attention_mma.cuh"
#else
#include "attention_fma.cuh"
#endif

typedef HeadPart<KEY_DIM, ROTATED, INTERLEAVED> RotatedHead;
typedef HeadPart<VALUE_DIM, 0, false> ValueHead;
