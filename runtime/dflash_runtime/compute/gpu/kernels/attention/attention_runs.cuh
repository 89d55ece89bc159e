// Shared by attention_decode and attention_tree (split-KV, "flash decoding"): a block computes some rows
// over one run of SPLIT_KEYS positions. QueryRows prepares their queries; merge_warps combines the
// block's warps and writes the run's partial result, which attention_merge combines with other runs'.
//
// Parameters, besides those of attention_heads.cuh: SPLIT_KEYS, NUM_SPLITS runs at most, ROW_WARPS.
#pragma once
#include "attention_heads.cuh"

constexpr int KEY_WARPS = 4;  // warps that divide a run's tiles of keys among themselves
constexpr int WARPS = KEY_WARPS * ROW_WARPS;
constexpr int THREADS = WARPS * LANES;
constexpr int BLOCK_ROWS = WARP_ROWS * ROW_WARPS;
// With ROW_WARPS > 1 several warps of a block read the same keys and values.
constexpr int SOURCE = ROW_WARPS == 1 ? READ_ONCE : READ_OFTEN;
// Chosen by the registers they need: whether a warp loads a tile's values before it has computed the
// scores, and how many blocks share a multiprocessor.
constexpr bool EARLY_VALUES = HOLDS_TILE && ROW_WARPS <= 2 && VALUE_ROW <= 128;
enum {
    BLOCKS_AT_ONCE =
        ROW_WARPS > 1 || LANES > 32 || KV_F32 ? 1 : VALUE_ROW > 128 || !USE_MMA ? 2 : 3
};
static_assert(SPLIT_KEYS % TILE_KEYS == 0, "whole tiles");

struct RunResults {
    float *partials;     // [T, NUM_HEADS, NUM_SPLITS, VALUE_ROW]
    float2 *statistics;  // [T, NUM_HEADS, NUM_SPLITS] {maximum score, sum of exponentials}
};

constexpr int MERGE_ROW = VALUE_ROW + 4;  // padded against bank conflicts
constexpr int QUERY_BYTES = ROW_WARPS * QUERY_ELEMENTS * (int)sizeof(QueryElement);
constexpr int MERGE_BYTES = BLOCK_ROWS * MERGE_ROW * 4;
constexpr int ROOM_BYTES = QUERY_BYTES > MERGE_BYTES ? QUERY_BYTES : MERGE_BYTES;

// Token and query head of row r of a block.
INLINE int row_token(int row) { return (block_index_z() * BLOCK_ROWS + row) / GROUP; }
INLINE int row_head(int row) {
    return block_index_y() * GROUP + (block_index_z() * BLOCK_ROWS + row) % GROUP;
}
INLINE bool is_row(int row, int num_rows) { return block_index_z() * BLOCK_ROWS + row < num_rows; }

// The block's queries, normalised, rotated and scaled; each warp prepares two.
struct QueryRows {
    static constexpr int WARP_QUERIES = BLOCK_ROWS / WARPS;
    RotatedHead query[WARP_QUERIES];
    float scale[WARP_QUERIES];

    static INLINE int query_row(int i) { return warp_index() + WARPS * i; }

    template <typename PositionOf>
    INLINE void load_constants(const NewRows &rows, int num_rows, PositionOf position_of) {
#pragma unroll
        for (int i = 0; i < WARP_QUERIES; i++)
            if (is_row(query_row(i), num_rows)) {
                const int position = position_of(row_token(query_row(i)));
                query[i].load_constants(rows.query_weight, angles_at(rows, position));
                scale[i] = query_scale(rows, position);
            }
    }
    INLINE void load(const NewRows &rows, int num_rows) {
#pragma unroll
        for (int i = 0; i < WARP_QUERIES; i++) {
            const int row = query_row(i);
            if (is_row(row, num_rows)) query[i].load(new_query(rows, row_token(row), row_head(row)));
        }
    }
    INLINE void put(const NewRows &rows, int num_rows, QueryElement *queries) {
#pragma unroll
        for (int i = 0; i < WARP_QUERIES; i++) {
            const int row = query_row(i), place = row % WARP_ROWS;
            QueryElement *target = queries + row / WARP_ROWS * QUERY_ELEMENTS;
            if (is_row(row, num_rows)) {
                query[i].normalise_and_rotate(rows.eps);
                query[i].give([&](int element, float x) {
                    WarpRows::put_query(target, place, element, x * scale[i]);
                });
            }
            for (int d = (is_row(row, num_rows) ? KEY_DIM : 0) + lane_index(); d < QUERY_COLUMNS;
                 d += LANES)
                WarpRows::put_query(target, place, d, 0.0f);
        }
    }
};

// Combines the results of the KEY_WARPS warps of each row, in the order of the warps, and writes them.
INLINE void merge_warps(const RunResults &results, int num_rows, WarpRows &rows, float *merged) {
    SHARED(float, maxima, KEY_WARPS * BLOCK_ROWS);
    SHARED(float, totals, KEY_WARPS * BLOCK_ROWS);
    const int key_warp = warp_index() % KEY_WARPS, first_row = warp_index() / KEY_WARPS * WARP_ROWS;
    rows.end();
    rows.give_statistics([&](int row, float maximum, float total) {
        maxima[key_warp * BLOCK_ROWS + first_row + row] = maximum;
        totals[key_warp * BLOCK_ROWS + first_row + row] = total;
    });
    block_barrier();
    auto place_of = [&](int row) {
        return ((i64)row_token(row) * NUM_HEADS + row_head(row)) * NUM_SPLITS + block_index_x();
    };
    if (thread_index() < BLOCK_ROWS) {
        const int row = thread_index();
        float highest = LOWEST, total = 0.0f;
        for (int warp = 0; warp < KEY_WARPS; warp++)
            highest = max_of(highest, maxima[warp * BLOCK_ROWS + row]);
        for (int warp = 0; warp < KEY_WARPS; warp++) {
            const float factor = exp_fast(maxima[warp * BLOCK_ROWS + row] - highest);
            total += factor * totals[warp * BLOCK_ROWS + row];
            maxima[warp * BLOCK_ROWS + row] = factor;  // from here on, the weight of the warp's result
        }
        if (is_row(row, num_rows)) results.statistics[place_of(row)] = make_float2(highest, total);
    }
    block_barrier();
    for (int warp = 0; warp < KEY_WARPS; warp++) {
        if (key_warp == warp)
            rows.give_results([&](int row, int element, float4 sum) {
                float4 *place = (float4 *)(merged + (first_row + row) * MERGE_ROW + element);
                const float factor = maxima[warp * BLOCK_ROWS + first_row + row];
                const float4 before = warp ? *place : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                *place = make_float4(before.x + factor * sum.x, before.y + factor * sum.y,
                                     before.z + factor * sum.z, before.w + factor * sum.w);
            });
        block_barrier();
    }
    constexpr int FOURS = VALUE_ROW / 4;
    for (int i = thread_index(); i < BLOCK_ROWS * FOURS; i += THREADS) {
        const int row = i / FOURS, element = i % FOURS * 4;
        if (is_row(row, num_rows))
            *(float4 *)(results.partials + place_of(row) * VALUE_ROW + element) =
                *(const float4 *)(merged + row * MERGE_ROW + element);
    }
}
