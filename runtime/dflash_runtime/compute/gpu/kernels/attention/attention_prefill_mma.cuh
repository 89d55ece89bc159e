// attention_prefill on tensor cores, in halves. Tiles of 32 keys and values are staged in shared memory
// while the tile before is computed; each warp has ROW_TILES tiles of 16 rows.
//
// Fragments have the layout of attention_mma.cuh, but rows g and g + 8 of a product are different rows.
// In shared memory, rows of keys are 4 chunks of 16 bytes apart (mod 8) and rows of values an odd number
// of chunks, so that the reads of eight lanes do not conflict in banks.
#pragma once

constexpr int BLOCK_ROWS = WARPS * ROW_TILES * 16;
constexpr int STAGE_KEYS = 32, KEY_TILES = STAGE_KEYS / 8;
constexpr int KEY_CHUNKS = KEY_ROW / 8, VALUE_CHUNKS = VALUE_ROW / 8;  // of 8 elements
constexpr int QUERY_STRIDE = QUERY_ROW / 8, KEY_STRIDE = QUERY_STRIDE;  // in chunks
constexpr int VALUE_STRIDE = VALUE_CHUNKS | 1;
constexpr int STAGE_CHUNKS = STAGE_KEYS * (KEY_STRIDE + VALUE_STRIDE);
constexpr int SPANS = (VALUE_ROW + 63) / 64;
static_assert(SHARED_BYTES == 16 * (BLOCK_ROWS * QUERY_STRIDE + 2 * STAGE_CHUNKS),
              "the launcher asks for what is used here");

// Stages rows [first_key, first_key + STAGE_KEYS) of keys or of values; zeros past the last.
template <int ROW, int STRIDE>
INLINE void stage_rows(uint4 *stage, HeadRows rows, int first_key, int last_key) {
    constexpr int CHUNKS = ROW / 8;
    for (int i = thread_index(); i < STAGE_KEYS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool is_row = first_key + row <= last_key;
        const int source = cache_row(min_of(first_key + row, last_key));
        uint4 *place = stage + row * STRIDE + chunk;
        if constexpr (KV_F16)
            copy_async16(place, rows.elements + 2 * ((i64)source * ROW + 8 * chunk), is_row);
        else {
            Eight eight;
            eight.template load<READ_FRESH, ROW>(rows, source, 8 * chunk);
            *place = is_row ? eight.halves() : make_uint4(0, 0, 0, 0);
        }
    }
}

struct ChunkRows {
    float out[ROW_TILES][SPANS][8][4];
    float maximum[ROW_TILES][2], total[ROW_TILES][2];
    int last_visible[ROW_TILES][2];
    float scores[ROW_TILES][KEY_TILES][4];
    u32 probabilities[ROW_TILES][KEY_TILES / 2][4];

    // This lane's rows, counted from the warp's first.
    static INLINE int row(int tile, int upper) { return 16 * tile + lane_index() / 4 + 8 * upper; }

    // The key of the tile to which score e of product n belongs.
    static INLINE int key_of(int n, int e) { return 8 * n + 2 * (lane_index() % 4) + e; }

    INLINE void begin(int first_position, int first_row, int num_rows) {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const int row_of_head = first_row + row(m, u);
                maximum[m][u] = LOWEST;
                total[m][u] = 0.0f;
                last_visible[m][u] =
                    row_of_head < num_rows ? first_position + row_of_head / GROUP : -1;
            }
#pragma unroll
            for (int span = 0; span < SPANS; span++)
#pragma unroll
                for (int i = 0; i < 8; i++)
#pragma unroll
                    for (int k = 0; k < 4; k++) out[m][span][i][k] = 0.0f;
        }
    }

    INLINE void score(const uint4 *queries, const uint4 *keys) {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) scores[m][n][k] = 0.0f;
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) {
            const int chunk = 4 * step + lane_index() % 4;
            u32 a[ROW_TILES][2][4];
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                const uint4 lower = queries[row(m, 0) * QUERY_STRIDE + chunk];
                const uint4 upper = queries[row(m, 1) * QUERY_STRIDE + chunk];
                a[m][0][0] = lower.x, a[m][0][1] = upper.x, a[m][0][2] = lower.y;
                a[m][0][3] = upper.y, a[m][1][0] = lower.z, a[m][1][1] = upper.z;
                a[m][1][2] = lower.w, a[m][1][3] = upper.w;
            }
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) {
                uint4 key = make_uint4(0, 0, 0, 0);
                if (4 * step + 3 < KEY_CHUNKS || chunk < KEY_CHUNKS)
                    key = keys[(8 * n + lane_index() / 4) * KEY_STRIDE + chunk];
                const u32 b[2][2] = {{key.x, key.y}, {key.z, key.w}};
#pragma unroll
                for (int m = 0; m < ROW_TILES; m++) {
                    mma_f16(scores[m][n], a[m][0], b[0]);
                    mma_f16(scores[m][n], a[m][1], b[1]);
                }
            }
        }
    }

    // Online softmax of the tile that begins at `first_key`. Tiles that all rows see entirely skip the
    // mask.
    INLINE void soften(int first_key) {
        if (hides(first_key)) soften_tile<true>(first_key);
        else soften_tile<false>(first_key);
    }
    INLINE bool hides(int first_key) const {
        bool is_hidden = false;
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const int position = last_visible[m][u];
                is_hidden |= first_key + STAGE_KEYS - 1 > position;
                if (IS_MASKED) is_hidden |= first_key < first_visible(position);
            }
        return lanes_largest((u32)is_hidden) != 0;
    }

    template <bool Hides>
    INLINE void soften_tile(int first_key) {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const int position = last_visible[m][u];
                float highest = maximum[m][u];
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (!Hides || is_visible_at(first_key + key_of(n, e), position))
                            highest = max_of(highest, scores[m][n][2 * u + e]);
                highest = lanes_max<4>(highest);
                const float correction = exp2_fast(maximum[m][u] - highest);
                maximum[m][u] = highest;
                float sum = total[m][u] * correction;
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++) {
                    float p[2];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const bool is_visible =
                            !Hides || is_visible_at(first_key + key_of(n, e), position);
                        p[e] = is_visible ? exp2_fast(scores[m][n][2 * u + e] - highest) : 0.0f;
                        sum += p[e];
                    }
                    probabilities[m][n / 2][2 * (n % 2) + u] = to_halves(p[0], p[1]);
                }
                total[m][u] = sum;
                // Skipped when no row of the warp has a new maximum.
                if (lanes_largest((u32)(correction != 1.0f)) == 0) continue;
#pragma unroll
                for (int span = 0; span < SPANS; span++)
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        out[m][span][i][2 * u] *= correction;
                        out[m][span][i][2 * u + 1] *= correction;
                    }
            }
    }

    INLINE void mix(const uint4 *values) {
#pragma unroll
        for (int half = 0; half < KEY_TILES / 2; half++)
#pragma unroll
            for (int span = 0; span < SPANS; span++) {
                const int chunk = 8 * span + lane_index() / 4;
                uint4 value[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int key = 16 * half + 2 * (lane_index() % 4) + i % 2 + 8 * (i / 2);
                    value[i] = make_uint4(0, 0, 0, 0);
                    if (8 * span + 7 < VALUE_CHUNKS || chunk < VALUE_CHUNKS)
                        value[i] = values[key * VALUE_STRIDE + chunk];
                }
                mix_span(half, span, value);
            }
    }
    INLINE void mix_span(int half, int span, const uint4 value[4]) {
        ValueFragments fragments;
        fragments.set(value);
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++)
                mma_f16(out[m][span][i], probabilities[m][half], fragments.of_element[i]);
    }
};

INLINE void write_chunk(const AttentionPrefillArgs &a, const ChunkRows &rows, int first_row,
                        int num_rows) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int row = first_row + rows.row(m, u);
            const float sink = sink_share(a, row, rows.maximum[m][u] * (1.0f / CHUNK_SCORE_UNIT));
            const float share = 1.0f / (lanes_sum<4>(rows.total[m][u]) + sink);
            if (row >= num_rows) continue;
#pragma unroll
            for (int span = 0; span < SPANS; span++)
#pragma unroll
                for (int e = 0; e < 2; e++)
#pragma unroll
                    for (int i = 0; i < 8; i += 4) {
                        const float(*out)[4] = rows.out[m][span] + i;
                        const int k = 2 * u + e;
                        write_result(a, row, 64 * span + 8 * (2 * (lane_index() % 4) + e) + i,
                                     make_float4(out[0][k] * share, out[1][k] * share,
                                                 out[2][k] * share, out[3][k] * share));
                    }
        }
}

KERNEL(attention_prefill, AttentionPrefillArgs, THREADS, VALUE_ROW > 128 ? 1 : 2) {
    DYNAMIC_SHARED(room);
    const int first_row = block_rows_begin(BLOCK_ROWS), num_rows = a.num_tokens * GROUP;
    const int first_position = (int)load_weights4(a.first_position);
    const int last_row = min_of(first_row + BLOCK_ROWS, num_rows) - 1;
    const int last_key = first_position + last_row / GROUP;
    const HeadRows keys = key_rows(a.cache, block_index_y());
    const HeadRows values = value_rows(a.cache, block_index_y());
    uint4 *queries = (uint4 *)room, *stages = queries + BLOCK_ROWS * QUERY_STRIDE;
    auto stage = [&](int tile) {
        uint4 *place = stages + tile % 2 * STAGE_CHUNKS;
        const int first_key = tile * STAGE_KEYS;
        if (first_key <= last_key) {
            stage_rows<KEY_ROW, KEY_STRIDE>(place, keys, first_key, last_key);
            stage_rows<VALUE_ROW, VALUE_STRIDE>(place + STAGE_KEYS * KEY_STRIDE, values, first_key,
                                                last_key);
        }
        copy_async_commit();
    };
    wait_for_previous();
    let_next_begin();  // only after attention_store has ended: the next kernel may read the cache early
    for (int i = thread_index(); i < BLOCK_ROWS * (QUERY_COLUMNS / 8); i += THREADS) {
        const int row = i / (QUERY_COLUMNS / 8), chunk = i % (QUERY_COLUMNS / 8);
        const int source = min_of(first_row + row, num_rows - 1);
        copy_async16(queries + row * QUERY_STRIDE + chunk,
                     (const uint4 *)a.queries + head_of_row(source) * (QUERY_COLUMNS / 8) + chunk,
                     first_row + row < num_rows);
    }
    const int first_tile = first_visible(first_position + first_row / GROUP) / STAGE_KEYS;
    stage(first_tile);
    ChunkRows rows;
    const int warp_row = warp_index() * ROW_TILES * 16;
    rows.begin(first_position, first_row + warp_row, num_rows);
    const uint4 *warp_queries = queries + warp_row * QUERY_STRIDE;
    for (int tile = first_tile; tile * STAGE_KEYS <= last_key; tile++) {
        stage(tile + 1);
        copy_async_wait<1>();
        block_barrier();
        const uint4 *staged = stages + tile % 2 * STAGE_CHUNKS;
        rows.score(warp_queries, staged);
        rows.soften(tile * STAGE_KEYS);
        rows.mix(staged + STAGE_KEYS * KEY_STRIDE);
        block_barrier();
    }
    write_chunk(a, rows, first_row + warp_row, num_rows);
}
