// attention_prefill in float32, without tensor cores: each logical warp computes eight rows on its own.
#pragma once

constexpr int BLOCK_ROWS = WARPS * WARP_ROWS;
constexpr bool EARLY_VALUES = HOLDS_TILE && VALUE_ROW <= 128;  // load values before scores are computed

KERNEL(attention_prefill, AttentionPrefillArgs, THREADS, 1) {
    SHARED(float, room, WARPS *QUERY_ELEMENTS);
    SHARED(int, row_positions, BLOCK_ROWS);
    wait_for_previous();
    let_next_begin();  // only after attention_store has ended: the next kernel may read the cache early
    const int first_position = (int)load_weights4(a.first_position);
    const int num_rows = a.num_tokens * GROUP;
    const int warp_row = warp_index() * WARP_ROWS;
    const int first_row = block_rows_begin(BLOCK_ROWS) + warp_row;
    float *queries = room + warp_index() * QUERY_ELEMENTS;
    for (int r = 0; r < WARP_ROWS; r++) {
        const int row = first_row + r;
        const bool is_row = row < num_rows;
        const float *query = (const float *)a.queries + head_of_row(row) * QUERY_COLUMNS;
        for (int d = lane_index(); d < QUERY_COLUMNS; d += LANES)
            queries[r * QUERY_ROW + d] = is_row ? load_fresh_float(query + d) : 0.0f;
        if (lane_index() == 0)
            row_positions[warp_row + r] = is_row ? first_position + row / GROUP : -1;
    }
    block_barrier();
    // A warp without rows loads no keys, but takes part in the barriers.
    const int last_row = min_of(first_row + WARP_ROWS, num_rows) - 1;
    const int last_key = first_row < num_rows ? first_position + last_row / GROUP : -1;
    const HeadRows keys = key_rows(a.cache, block_index_y());
    const HeadRows values = value_rows(a.cache, block_index_y());
    WarpRows rows;
    rows.begin(row_positions + warp_row);
    const int first_key = first_visible(first_position + first_row / GROUP);
    for (int tile = first_key / TILE_KEYS * TILE_KEYS; tile <= last_key; tile += TILE_KEYS) {
        auto row_of = [&](int key) {
            const int position = min_of(tile + key, last_key);
            assume(position >= 0);
            return cache_row(position);
        };
        rows.load_keys<READ_FRESH>(keys, row_of);
        if (EARLY_VALUES) rows.load_values<READ_FRESH>(values, row_of);
        rows.score(queries, tile);
        if (!EARLY_VALUES) rows.load_values<READ_FRESH>(values, row_of);
        rows.mix();
    }
    rows.end();
    // Statistics and results are in different lanes: statistics go through the queries' shared memory.
    float *shares = queries;
    block_barrier();
    rows.give_statistics([&](int row, float maximum, float total) {
        shares[row] = 1.0f / (total + sink_share(a, first_row + row, maximum));
    });
    block_barrier();
    rows.give_results([&](int row, int element, float4 x) {
        const float share = shares[row];
        if (first_row + row < num_rows)
            write_result(a, first_row + row, element,
                         make_float4(x.x * share, x.y * share, x.z * share, x.w * share));
    });
}
