// attention_decode: attention of a step of 1 to 8 tokens. Reads the projections and the KV cache; writes
// the step's rows of the cache and a partial result per run of SPLIT_KEYS positions (attention_merge
// combines them). Norm and rotation of queries and keys are done here.
//
// Grid (NUM_SPLITS, NUM_KV_HEADS, ceil(rows / BLOCK_ROWS)), THREADS threads. Blocks whose run no query
// sees exit at once, so one launch serves every context up to NUM_SPLITS * SPLIT_KEYS. Runs begin at
// position 0 whatever the number of tokens or the context: a row's bits depend on its own query and
// position alone. No kernel that overlaps with this one may write positions, or earlier cache rows.
//
// Parameters, besides those of attention_runs.cuh: NUM_TOKENS.
#include "attention_runs.cuh"

constexpr int NUM_ROWS = NUM_TOKENS * GROUP;

struct AttentionDecodeArgs {
    NewRows rows;
    const int *positions;  // [T], ascending by one
    LayerCache cache;
    RunResults results;
};

constexpr int NEW_KEYS_BYTES = NUM_TOKENS * KEY_ROW * KV_ELEMENT_BYTES;
constexpr int NEW_BYTES = NEW_KEYS_BYTES + NUM_TOKENS * VALUE_ROW * KV_ELEMENT_BYTES;
constexpr int KEY_SCALES = NUM_TOKENS * KEY_ROW / Q8_BLOCK;
constexpr int VALUE_SCALES = NUM_TOKENS * VALUE_ROW / Q8_BLOCK;

// The step's own keys and values of this block's kv head, in shared memory: as floats and in the cache's
// format.
struct StepRows {
    float *keys, *values;
    HeadRows stored_keys, stored_values;
};

// Each warp prepares two of the block's queries and, if the step's positions lie in the block's run, some
// of the new keys and values (jobs): warp w begins with job w, first the keys, then the values. A warp
// issues all its loads before it waits for the first of them.
struct Preparation {
    QueryRows queries;
    RotatedHead key;
    ValueHead value;
    int num_jobs;

    INLINE void load_constants(const NewRows &rows, int first_position, bool has_new) {
        num_jobs = has_new ? 2 * NUM_TOKENS : 0;
        queries.load_constants(rows, NUM_ROWS, [&](int token) { return first_position + token; });
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
        queries.load(rows, NUM_ROWS);
        if (warp_index() < num_jobs) load_job(rows, warp_index());
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

// Writes to the cache those of the step's rows whose positions lie in [begin, end).
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

KERNEL(attention_decode, AttentionDecodeArgs, THREADS, BLOCKS_AT_ONCE) {
    SHARED(u8, room, ROOM_BYTES);
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

    // Rows of earlier positions are loaded before the projections have ended. Where a tile has positions
    // of this step, any valid row is loaded instead; the step's rows replace it below.
    const int last_old = first_position > 0 ? first_position - 1 : 0;
    int tile = begin + warp_index() % KEY_WARPS * TILE_KEYS;
    WarpRows rows;
    auto old_row = [&](int key) {
        const int position = min_of(tile + key, last_old);
        assume(position >= 0);
        // Rows of the ring that this step overwrites held positions that none of its tokens sees.
        if constexpr (WINDOW_ROWS != 0)
            return cache_row(position < end_position - WINDOW_ROWS ? last_old : position);
        return position;
    };
    if (tile < end) {
        rows.load_keys<SOURCE>(keys, old_row);
        if (EARLY_VALUES) rows.load_values<SOURCE>(values, old_row);
    }
    if (thread_index() < BLOCK_ROWS)
        row_positions[thread_index()] =
            is_row(thread_index(), NUM_ROWS) ? first_position + row_token(thread_index()) : -1;
    Preparation preparation;
    preparation.load_constants(a.rows, first_position, has_new);
    wait_for_previous();
    preparation.load(a.rows);
    preparation.queries.put(a.rows, NUM_ROWS, (QueryElement *)room);
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
    // The step's row for a key of the tile, or -1. Keys past the last are masked, but must not be NaN.
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
    merge_warps(a.results, NUM_ROWS, rows, (float *)room);
}
