// attention_tree: attention of the tokens of a draft tree. A token sees the sequence and its own ancestors
// in the tree. Reads queries, the KV cache and the tree's keys and values (attention_nodes); writes a
// partial result per run of SPLIT_KEYS positions (attention_merge combines them).
//
// Each token sees keys at the positions they would have if its path were a sequence. A tile with positions
// of the tree is therefore processed once per token of a warp's rows, with that token's ancestors in
// their places and the other rows masked. A fully masked tile leaves a row unchanged, so a token gets the
// bits that attention_decode would give it. Grid (NUM_SPLITS, NUM_KV_HEADS, ceil(rows / BLOCK_ROWS)),
// THREADS threads. No kernel that overlaps with this one may write positions, ancestors or cache rows.
// Parameters: those of attention_runs.cuh.
#include "attention_runs.cuh"

constexpr int MOST_NODES = 64;

struct AttentionTreeArgs {
    NewRows rows;
    const int *positions;  // [T]
    const int *ancestors;  // [T, MOST_NODES]: a token's path, from the tree's first position to itself
    const int *begin;      // the tree's first position
    LayerCache cache;
    LayerCache nodes;      // keys and values by node
    RunResults results;
    int num_tokens;        // T
};

INLINE int position_of(const AttentionTreeArgs &a, int token) {
    return (int)load_weights4(a.positions + token);
}

KERNEL(attention_tree, AttentionTreeArgs, THREADS, BLOCKS_AT_ONCE) {
    SHARED(u8, room, ROOM_BYTES);
    SHARED(int, row_positions, BLOCK_ROWS);
    let_next_begin();
    const int num_rows = a.num_tokens * GROUP, tree_begin = (int)load_weights4(a.begin);
    const int end_token = min_of(row_token(BLOCK_ROWS - 1) + 1, a.num_tokens);
    int end_position = 0;
    for (int token = row_token(0); token < end_token; token++) {
        const int position = position_of(a, token);
        if (position >= end_position) end_position = position + 1;
    }
    const int begin = block_index_x() * SPLIT_KEYS, end = min_of(begin + SPLIT_KEYS, end_position);
    if (begin >= end || end <= first_visible(tree_begin)) return;
    const HeadRows keys = key_rows(a.cache, block_index_y());
    const HeadRows values = value_rows(a.cache, block_index_y());

    // Tiles that lie wholly before the tree are loaded before the wait.
    const int sequence_end = min_of(end, tree_begin / TILE_KEYS * TILE_KEYS);
    int tile = begin + warp_index() % KEY_WARPS * TILE_KEYS;
    WarpRows rows;
    auto cached_row = [&](int key) {
        assume(tile + key >= 0);
        return cache_row(tile + key);
    };
    if (tile < sequence_end) {
        rows.load_keys<SOURCE>(keys, cached_row);
        if (EARLY_VALUES) rows.load_values<SOURCE>(values, cached_row);
    }
    if (thread_index() < BLOCK_ROWS)
        row_positions[thread_index()] =
            is_row(thread_index(), num_rows) ? position_of(a, row_token(thread_index())) : -1;
    QueryRows prepared;
    prepared.load_constants(a.rows, num_rows, [&](int token) { return position_of(a, token); });
    wait_for_previous();
    prepared.load(a.rows, num_rows);
    prepared.put(a.rows, num_rows, (QueryElement *)room);
    block_barrier();

    const int row_warp = warp_index() / KEY_WARPS, first_row = row_warp * WARP_ROWS;
    const QueryElement *queries = (const QueryElement *)room + row_warp * QUERY_ELEMENTS;
    rows.begin(row_positions + first_row);
    while (tile < sequence_end) {
        rows.score(queries, tile);
        if (!EARLY_VALUES) rows.load_values<SOURCE>(values, cached_row);
        tile += KEY_WARPS * TILE_KEYS;
        const bool goes_on = tile < sequence_end;
        if (EARLY_VALUES && goes_on) rows.load_keys<SOURCE>(keys, cached_row);
        rows.mix();
        if (EARLY_VALUES && goes_on) rows.load_values<SOURCE>(values, cached_row);
        if (!EARLY_VALUES && goes_on) rows.load_keys<SOURCE>(keys, cached_row);
    }
    const int end_of_warp = min_of(row_token(first_row + WARP_ROWS - 1) + 1, a.num_tokens);
    for (; tile < end; tile += KEY_WARPS * TILE_KEYS) {
        for (int token = row_token(first_row); token < end_of_warp; token++) {
            const int last = position_of(a, token);
            if (last < tile) continue;
            // Each key is loaded by one of these two, from the cache or from the tree. Keys past the
            // token's own are masked, but must not be NaN.
            auto before_tree = [&](int key) {
                return tile + key < tree_begin ? cache_row(tile + key) : -1;
            };
            auto node = [&](int key) {
                const int position = min_of(tile + key, last);
                if (position < tree_begin) return -1;
                return (int)load_weights4(a.ancestors + token * MOST_NODES + position - tree_begin);
            };
            rows.limit([&](int row) {
                return row_token(first_row + row) == token ? row_positions[first_row + row] : -1;
            });
            rows.forget_keys();
            rows.load_keys<SOURCE>(keys, before_tree);
            rows.load_keys<READ_FRESH>(key_rows(a.nodes, block_index_y()), node);
            rows.score(queries, tile);
            rows.forget_values();
            rows.load_values<SOURCE>(values, before_tree);
            rows.load_values<READ_FRESH>(value_rows(a.nodes, block_index_y()), node);
            rows.mix();
        }
    }
    merge_warps(a.results, num_rows, rows, (float *)room);
}
