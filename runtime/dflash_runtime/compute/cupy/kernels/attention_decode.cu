// Attention of 1 to 8 tokens over a cache: norm and rotation of queries and keys, the cache's new rows,
// and the softmax, split over runs of SPLIT_KEYS positions; attention_merge puts the runs together.
//
// Runs begin at position 0 and do not depend on how many tokens there are or how long the context is,
// nor does what a row does inside one: its bits depend on its own query and position alone.
// Grid: (NUM_SPLITS, NUM_KV_HEADS, rows / BLOCK_ROWS); blocks past the last position leave at once. So
// one launch serves every context up to NUM_SPLITS * SPLIT_KEYS; so do those of runs that nobody sees. Positions are those of this whole step:
// nothing that overlaps with this kernel may write them, nor rows of the cache before them.
//
// Defines beside attention_heads.cuh's: NUM_TOKENS, SPLIT_KEYS, NUM_SPLITS, ROW_WARPS.
#include "attention_heads.cuh"

constexpr int KEY_WARPS = 4;  // take tiles of keys in turn
constexpr int WARPS = KEY_WARPS * ROW_WARPS;
constexpr int THREADS = WARPS * LANES;
constexpr int BLOCK_ROWS = WARP_ROWS * ROW_WARPS;
constexpr int NUM_ROWS = NUM_TOKENS * GROUP;
// Keys and values of a block of one row of warps are needed once; of more, by several warps.
constexpr int SOURCE = ROW_WARPS == 1 ? READ_ONCE : READ_OFTEN;
// What registers allow: whether a warp holds a tile's values while it waits for its keys, and how many
// blocks a multiprocessor takes.
constexpr bool EARLY_VALUES = ROW_WARPS <= 2 && VALUE_ROW <= 128;
enum {
    BLOCKS_AT_ONCE =
        ROW_WARPS > 1 || LANES > 32 || KV_F32 ? 1 : VALUE_ROW > 128 || !USE_MMA ? 2 : 3
};
static_assert(SPLIT_KEYS % TILE_KEYS == 0, "whole tiles");

struct AttentionDecodeArgs {
    NewRows rows;
    const int *positions;  // [T], ascending by one
    LayerCache cache;
    float *partials;     // [T, NUM_HEADS, NUM_SPLITS, VALUE_ROW]
    float2 *statistics;  // [T, NUM_HEADS, NUM_SPLITS] {maximum, total}
};

constexpr int MERGE_ROW = VALUE_ROW + 4;  // rows begin in different banks
constexpr int QUERY_BYTES = ROW_WARPS * QUERY_ELEMENTS * (int)sizeof(QueryElement);
constexpr int MERGE_BYTES = BLOCK_ROWS * MERGE_ROW * 4;
constexpr int NEW_KEYS_BYTES = NUM_TOKENS * KEY_ROW * KV_ELEMENT_BYTES;
constexpr int NEW_BYTES = NEW_KEYS_BYTES + NUM_TOKENS * VALUE_ROW * KV_ELEMENT_BYTES;
constexpr int KEY_SCALES = NUM_TOKENS * KEY_ROW / Q8_BLOCK;
constexpr int VALUE_SCALES = NUM_TOKENS * VALUE_ROW / Q8_BLOCK;

// The step's own keys and values, for this block's kv head: as floats, and as the cache has them.
struct StepRows {
    float *keys, *values;
    HeadRows stored_keys, stored_values;
};

// Where row r of a block belongs.
INLINE int row_token(int row) { return (block_index_z() * BLOCK_ROWS + row) / GROUP; }
INLINE int row_head(int row) {
    return block_index_y() * GROUP + (block_index_z() * BLOCK_ROWS + row) % GROUP;
}
INLINE bool is_row(int row) { return block_index_z() * BLOCK_ROWS + row < NUM_ROWS; }

// Each warp prepares two of the block's queries and, where the block has them, some new rows: the first
// NUM_TOKENS warps begin with a key, the next with a value. All loads of a warp begin before it waits
// for the first of them.
struct Preparation {
    static constexpr int WARP_QUERIES = BLOCK_ROWS / WARPS;
    RotatedHead query[WARP_QUERIES], key;
    ValueHead value;
    float scale[WARP_QUERIES];
    int num_jobs;

    static INLINE int query_row(int i) { return warp_index() + WARPS * i; }

    INLINE void load_constants(const NewRows &rows, int first_position, bool has_new) {
        num_jobs = has_new ? 2 * NUM_TOKENS : 0;
#pragma unroll
        for (int i = 0; i < WARP_QUERIES; i++)
            if (is_row(query_row(i))) {
                const int position = first_position + row_token(query_row(i));
                query[i].load_constants(rows.query_weight, angles_at(rows, position));
                scale[i] = query_scale(rows, position);
            }
        if (warp_index() < num_jobs) load_job_constants(rows, first_position, warp_index());
    }
    INLINE void load_job_constants(const NewRows &rows, int first_position, int job) {
        if (job < NUM_TOKENS)
            key.load_constants(rows.key_weight, angles_at(rows, first_position + job));
        else value.load_constants(nullptr, nullptr);
    }
    INLINE void load_job(const NewRows &rows, int job) {
        if (job < NUM_TOKENS) key.load(new_key(rows, job, block_index_y()));
        else value.load(new_value(rows, job - NUM_TOKENS, block_index_y()));
    }

    INLINE void load(const NewRows &rows) {
#pragma unroll
        for (int i = 0; i < WARP_QUERIES; i++) {
            const int row = query_row(i);
            if (is_row(row)) query[i].load(new_query(rows, row_token(row), row_head(row)));
        }
        if (warp_index() < num_jobs) load_job(rows, warp_index());
    }

    INLINE void put_queries(const NewRows &rows, QueryElement *queries) {
#pragma unroll
        for (int i = 0; i < WARP_QUERIES; i++) {
            const int row = query_row(i), place = row % WARP_ROWS;
            QueryElement *target = queries + row / WARP_ROWS * QUERY_ELEMENTS;
            if (is_row(row)) {
                query[i].normalise_and_rotate(rows.eps);
                query[i].give([&](int element, float x) {
                    WarpRows::put_query(target, place, element, x * scale[i]);
                });
            }
            for (int d = (is_row(row) ? KEY_DIM : 0) + lane_index(); d < QUERY_COLUMNS; d += LANES)
                WarpRows::put_query(target, place, d, 0.0f);
        }
    }

    INLINE void put_new_rows(const NewRows &rows, const StepRows &step, int first_position) {
        for (int job = warp_index(); job < num_jobs; job += WARPS) {
            if (job != warp_index()) {
                load_job_constants(rows, first_position, job);
                load_job(rows, job);
            }
            if (job < NUM_TOKENS) {
                float *target = step.keys + job * KEY_ROW;
                key.normalise_and_rotate(rows.eps);
                key.give([&](int element, float x) { target[element] = x; });
                clear_rest<KEY_DIM, KEY_ROW>(target);
            } else {
                float *target = step.values + (job - NUM_TOKENS) * VALUE_ROW;
                value.give([&](int element, float x) { target[element] = x; });
                clear_rest<VALUE_DIM, VALUE_ROW>(target);
            }
        }
    }
};

// New rows as the cache has them, and into it those that lie in this block's run.
template <int ROW>
INLINE void write_rows(HeadRows cache, const HeadRows &stored, int first_position, int begin, int end) {
    constexpr int ROW_BYTES = ROW * KV_ELEMENT_BYTES, CHUNKS = ROW_BYTES / 16;
    for (int i = thread_index(); i < NUM_TOKENS * CHUNKS; i += THREADS) {
        const int position = first_position + i / CHUNKS;
        if (position < begin || position >= end) continue;
        *(uint4 *)(cache.elements + (i64)cache_row(position) * ROW_BYTES + i % CHUNKS * 16) =
            *(const uint4 *)(stored.elements + 16 * i);
    }
    if constexpr (KV_Q8_0) {
        constexpr int BLOCKS = ROW / Q8_BLOCK;
        for (int i = thread_index(); i < NUM_TOKENS * BLOCKS; i += THREADS) {
            const int position = first_position + i / BLOCKS;
            if (position >= begin && position < end)
                cache.scales[(i64)cache_row(position) * BLOCKS + i % BLOCKS] = stored.scales[i];
        }
    }
}

// One result of all warps of a row: statistics first, then sums in the order of the warps.
INLINE void merge_warps(const AttentionDecodeArgs &a, WarpRows &rows, float *merged) {
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
            maxima[warp * BLOCK_ROWS + row] = factor;  // from here on, what results are worth
        }
        if (is_row(row)) a.statistics[place_of(row)] = make_float2(highest, total);
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
        if (is_row(row))
            *(float4 *)(a.partials + place_of(row) * VALUE_ROW + element) =
                *(const float4 *)(merged + row * MERGE_ROW + element);
    }
}

KERNEL(attention_decode, AttentionDecodeArgs, THREADS, BLOCKS_AT_ONCE) {
    SHARED(u8, room, QUERY_BYTES > MERGE_BYTES ? QUERY_BYTES : MERGE_BYTES);
    SHARED(float, new_floats, NUM_TOKENS *(KEY_ROW + VALUE_ROW));
    SHARED(u8, new_bytes, KV_F32 ? 16 : NEW_BYTES);
    SHARED(u16, new_scales, KV_Q8_0 ? KEY_SCALES + VALUE_SCALES : 8);
    SHARED(int, row_positions, BLOCK_ROWS);
    let_next_begin();
    const int first_position = (int)load_weights4(a.positions);
    const int end_position = first_position + NUM_TOKENS;
    const int begin = block_index_x() * SPLIT_KEYS, end = min_of(begin + SPLIT_KEYS, end_position);
    if (begin >= end || end <= first_visible(first_position)) return;
    const bool has_new = end > first_position;
    const HeadRows keys = key_rows(a.cache, block_index_y());
    const HeadRows values = value_rows(a.cache, block_index_y());
    const StepRows step = {
        new_floats, new_floats + NUM_TOKENS * KEY_ROW,
        {KV_F32 ? (u8 *)new_floats : new_bytes, new_scales},
        {KV_F32 ? (u8 *)(new_floats + NUM_TOKENS * KEY_ROW) : new_bytes + NEW_KEYS_BYTES,
         new_scales + (KV_Q8_0 ? KEY_SCALES : 0)}};

    // Old rows do not wait for the projections. Where there is no old row, any row will do: it is
    // replaced by a new one below.
    const int last_old = first_position > 0 ? first_position - 1 : 0;
    int tile = begin + warp_index() % KEY_WARPS * TILE_KEYS;
    WarpRows rows;
    auto old_row = [&](int key) {
        const int position = min_of(tile + key, last_old);
        // Rows of a ring that this step writes were those of positions that none of it sees.
        if constexpr (RING_ROWS != 0)
            return cache_row(position < end_position - RING_ROWS ? last_old : position);
        return position;
    };
    if (tile < end) {
        rows.load_keys<SOURCE>(keys, old_row);
        if (EARLY_VALUES) rows.load_values<SOURCE>(values, old_row);
    }
    if (thread_index() < BLOCK_ROWS)
        row_positions[thread_index()] =
            is_row(thread_index()) ? first_position + row_token(thread_index()) : -1;
    Preparation preparation;
    preparation.load_constants(a.rows, first_position, has_new);
    wait_for_previous();
    preparation.load(a.rows);
    preparation.put_queries(a.rows, (QueryElement *)room);
    preparation.put_new_rows(a.rows, step, first_position);
    block_barrier();
    if (has_new) {
        if constexpr (!KV_F32) {
            for (int job = warp_index(); job < 2 * NUM_TOKENS; job += WARPS) {
                const int token = job % NUM_TOKENS;
                if (job < NUM_TOKENS)
                    store_row<KEY_ROW>(step.keys + token * KEY_ROW, step.stored_keys, token);
                else store_row<VALUE_ROW>(step.values + token * VALUE_ROW, step.stored_values, token);
            }
            block_barrier();
        }
        if (block_index_z() == 0) {
            write_rows<KEY_ROW>(keys, step.stored_keys, first_position, begin, end);
            write_rows<VALUE_ROW>(values, step.stored_values, first_position, begin, end);
        }
    }

    const int row_warp = warp_index() / KEY_WARPS;
    const QueryElement *queries = (const QueryElement *)room + row_warp * QUERY_ELEMENTS;
    rows.begin(row_positions + row_warp * WARP_ROWS);
    // Of the step's own rows, that of a key; keys past the last are hidden, but must be numbers.
    auto step_row = [&](int key) {
        const int token = min_of(tile + key - first_position, NUM_TOKENS - 1);
        return token < 0 ? -1 : token;
    };
    while (tile < end) {
        const bool has_new_rows = tile + TILE_KEYS > first_position;
        if (has_new_rows) rows.load_keys<READ_OFTEN>(step.stored_keys, step_row);
        rows.score(queries, tile);
        if (!EARLY_VALUES) rows.load_values<SOURCE>(values, old_row);
        if (has_new_rows) rows.load_values<READ_OFTEN>(step.stored_values, step_row);
        tile += KEY_WARPS * TILE_KEYS;
        if (EARLY_VALUES && tile < end) rows.load_keys<SOURCE>(keys, old_row);
        rows.mix();
        if (EARLY_VALUES && tile < end) rows.load_values<SOURCE>(values, old_row);
        if (!EARLY_VALUES && tile < end) rows.load_keys<SOURCE>(keys, old_row);
    }
    merge_warps(a, rows, (float *)room);
}
