// Groups the pairs (token, expert) of a prompt chunk by expert, on the device (groups.cuh has the result).
//
//   count_pairs, lay_out_groups, place_pairs   a stable counting sort. Grids ceil(pairs / CHUNK_PAIRS), 1,
//                             ceil(pairs / CHUNK_PAIRS), with a thread per expert. A block of the first
//                             and last has its pairs in shared memory, and each thread scans all of them
//                             for its expert: no atomics, and pairs keep their order. What it finds goes
//                             to shared memory too, as a scan that waited for global memory would take
//                             many times as long
//   tile_groups, find_rows    the same arrays for pairs that arrive sorted. Grids 1 and ceil(T / 256)
//
// Pairs with an invalid id, or whose expert is not resident, get no row.
// Parameters: NUM_EXPERTS (up to 960), CHUNK_PAIRS, TILE_M.
#include "groups.cuh"

constexpr int EXPERT_THREADS = (NUM_EXPERTS + 63) / 64 * 64;
constexpr int CHUNKS_AT_ONCE = 8;
static_assert(NUM_EXPERTS >= 1 && EXPERT_THREADS <= 960, "a thread for each expert");
static_assert(CHUNK_PAIRS % 4 == 0, "ids are looked at in fours");

struct GroupArgs {
    const int *topk_ids;        // [num_pairs]; pairs_per_token neighbours are one token's
    const float *topk_weights;  // [num_pairs]
    const int *slot_of_expert;  // [NUM_EXPERTS], negative: not resident; null: all are resident
    int *chunk_rows;            // [chunks, NUM_EXPERTS] scratch: number of pairs, then row of the first
    GroupCounts *counts;
    int *expert_ids, *group_starts;
    GroupTile *tiles;
    int *token_indices;
    float *weights;
    int *rows_of_tokens;
    u32 *selections;            // null, or [NUM_EXPERTS]: incremented by the pairs of resident experts
    int num_pairs, pairs_per_token;
};

INLINE bool is_resident(const GroupArgs &a, int expert) {
    return expert < NUM_EXPERTS && (!a.slot_of_expert || load_int(a.slot_of_expert + expert) >= 0);
}

// Loads the block's ids; -1 past the last pair.
INLINE void load_chunk(int *ids, const GroupArgs &a, int first_pair) {
    for (int i = thread_index(); i < CHUNK_PAIRS; i += num_threads())
        ids[i] = first_pair + i < a.num_pairs ? load_int(a.topk_ids + first_pair + i) : -1;
    block_barrier();
}

// Calls found(i) for each of the block's pairs of this expert, in order.
template <typename Found>
INLINE void scan_chunk(const int *ids, int expert, Found found) {
#pragma unroll 4
    for (int i = 0; i < CHUNK_PAIRS; i += 4) {
        const uint4 four = *(const uint4 *)(ids + i);
        if ((int)four.x == expert) found(i);
        if ((int)four.y == expert) found(i + 1);
        if ((int)four.z == expert) found(i + 2);
        if ((int)four.w == expert) found(i + 3);
    }
}

KERNEL(count_pairs, GroupArgs, EXPERT_THREADS, 1) {
    SHARED(int, ids, CHUNK_PAIRS);
    let_next_begin();
    wait_for_previous();
    const int first_pair = block_index_x() * CHUNK_PAIRS, expert = thread_index();
    load_chunk(ids, a, first_pair);
    if (expert >= NUM_EXPERTS) return;
    int num_pairs = 0;
    scan_chunk(ids, expert, [&](int) { num_pairs++; });
    a.chunk_rows[block_index_x() * NUM_EXPERTS + expert] = num_pairs;
}

// Exclusive prefix sum over the block's threads; `sums` is scratch, two ints per thread.
INLINE int sum_before(int *sums, int value) {
    const int thread = thread_index();
    int total = value;
    for (int distance = 1, turn = 0; distance < num_threads(); distance *= 2, turn ^= 1) {
        int *here = sums + turn * num_threads();
        here[thread] = total;
        block_barrier();
        if (thread >= distance) total += here[thread - distance];
    }
    block_barrier();
    return total - value;
}

INLINE int tiles_of(int num_rows) { return (num_rows + TILE_M - 1) / TILE_M; }
INLINE void write_tiles(GroupTile *tiles, int group, int expert_id, int first_row, int end_row) {
    for (int row = first_row; row < end_row; row += TILE_M, tiles++) {
        const GroupTile tile = {group, expert_id, row, min_of(row + TILE_M, end_row)};
        *tiles = tile;
    }
}

// Each thread writes the group of its expert, if it has rows: its start and tiles. The last thread writes
// the counts. Returns the group's first row.
INLINE int write_group(const GroupArgs &a, int *sums, int expert_id, int num_rows) {
    const int num_tiles = tiles_of(num_rows);
    const int group = sum_before(sums, num_rows > 0), first_row = sum_before(sums, num_rows);
    const int first_tile = sum_before(sums, num_tiles);
    const int end_row = first_row + num_rows;
    if (num_rows > 0) {
        a.expert_ids[group] = expert_id;
        a.group_starts[group] = first_row;
        write_tiles(a.tiles + first_tile, group, expert_id, first_row, end_row);
    }
    if (thread_index() == num_threads() - 1) {
        const int num_groups = group + (num_rows > 0);
        const GroupCounts counts = {num_groups, first_tile + num_tiles, end_row, 0};
        a.group_starts[num_groups] = end_row;
        *a.counts = counts;
    }
    return first_row;
}

KERNEL(lay_out_groups, GroupArgs, EXPERT_THREADS, 1) {
    SHARED(int, sums, 2 * EXPERT_THREADS);
    let_next_begin();
    wait_for_previous();
    const int expert = thread_index();
    const int num_chunks = (a.num_pairs + CHUNK_PAIRS - 1) / CHUNK_PAIRS;
    const bool is_here = is_resident(a, expert);
    int *chunk_rows = a.chunk_rows + expert, num_rows = 0;
    if (is_here) {
#pragma unroll CHUNKS_AT_ONCE
        for (int c = 0; c < num_chunks; c++) num_rows += load_int(chunk_rows + c * NUM_EXPERTS);
    }
    int row = write_group(a, sums, expert, num_rows);
    if (!is_here) return;
    if (a.selections) atomic_add(a.selections + expert, (u32)num_rows);
    // Several chunks at once, as each load would wait for the store before it.
    for (int first = 0; first < num_chunks; first += CHUNKS_AT_ONCE) {
        int sizes[CHUNKS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < CHUNKS_AT_ONCE; i++)
            sizes[i] =
                first + i < num_chunks ? load_int(chunk_rows + (first + i) * NUM_EXPERTS) : 0;
#pragma unroll
        for (int i = 0; i < CHUNKS_AT_ONCE; i++) {
            if (first + i < num_chunks) chunk_rows[(first + i) * NUM_EXPERTS] = row;
            row += sizes[i];
        }
    }
}

KERNEL(place_pairs, GroupArgs, EXPERT_THREADS, 1) {
    SHARED(int, ids, CHUNK_PAIRS);
    SHARED(int, rows, CHUNK_PAIRS);
    let_next_begin();
    wait_for_previous();
    const int first_pair = block_index_x() * CHUNK_PAIRS, expert = thread_index();
    for (int i = thread_index(); i < CHUNK_PAIRS; i += num_threads()) rows[i] = -1;
    load_chunk(ids, a, first_pair);
    if (is_resident(a, expert)) {
        int row = load_int(a.chunk_rows + block_index_x() * NUM_EXPERTS + expert);
        scan_chunk(ids, expert, [&](int i) { rows[i] = row++; });
    }
    block_barrier();
    const int num_here = min_of(CHUNK_PAIRS, a.num_pairs - first_pair);
    for (int i = thread_index(); i < num_here; i += num_threads()) {
        const int pair = first_pair + i, row = rows[i];
        a.rows_of_tokens[pair] = row;
        if (row < 0) continue;
        a.token_indices[row] = pair / a.pairs_per_token;
        a.weights[row] = load_float(a.topk_weights + pair);
    }
}

// Pairs that arrive sorted: expert_ids, group_starts and token_indices are inputs.
struct SortedArgs {
    const int *expert_ids, *group_starts, *token_indices;
    GroupCounts *counts;
    GroupTile *tiles;
    int *rows_of_tokens;
    int num_groups, num_tokens, pairs_per_token;
};

KERNEL(tile_groups, SortedArgs, EXPERT_THREADS, 1) {
    SHARED(int, sums, 2 * EXPERT_THREADS);
    let_next_begin();
    wait_for_previous();
    const int group = thread_index();
    int first_row = 0, end_row = 0, expert_id = -1;
    if (group < a.num_groups) {
        first_row = load_int(a.group_starts + group);
        end_row = load_int(a.group_starts + group + 1);
        expert_id = load_int(a.expert_ids + group);
    }
    const int num_tiles = tiles_of(end_row - first_row);
    const int first_tile = sum_before(sums, num_tiles);
    write_tiles(a.tiles + first_tile, group, expert_id, first_row, end_row);
    if (thread_index() == num_threads() - 1) {
        const int num_rows = load_int(a.group_starts + a.num_groups);
        const GroupCounts counts = {a.num_groups, first_tile + num_tiles, num_rows, 0};
        *a.counts = counts;
    }
}

// A thread per token searches for it in every group.
KERNEL(find_rows, SortedArgs, 256, 1) {
    let_next_begin();
    wait_for_previous();
    const int token = block_index_x() * num_threads() + thread_index();
    if (token >= a.num_tokens) return;
    int *rows = a.rows_of_tokens + (i64)token * a.pairs_per_token, num_found = 0;
    for (int group = 0; group < a.num_groups && num_found < a.pairs_per_token; group++) {
        int low = load_int(a.group_starts + group);
        const int end = load_int(a.group_starts + group + 1);
        for (int high = end; low < high;) {
            const int middle = (low + high) / 2;
            if (load_int(a.token_indices + middle) < token) low = middle + 1;
            else high = middle;
        }
        if (low < end && load_int(a.token_indices + low) == token) rows[num_found++] = low;
    }
    while (num_found < a.pairs_per_token) rows[num_found++] = -1;
}
