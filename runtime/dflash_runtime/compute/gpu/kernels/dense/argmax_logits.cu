// argmax_logits: the argmax of each row of logits, from the partial argmax of each block of the head's
// product (linear_decode with ARGMAX). Writes token ids, positions and history. Grid 1, WARPS * LANES
// threads.
//
// Parameters: TOKENS, WARPS, ADVANCE: positions are incremented.
#include "argmax.cuh"

struct ArgmaxLogitsArgs {
    const u64 *partials;  // [blocks, T] keys of argmax.cuh
    int num_partials;     // blocks
    int capacity;         // of history
    int *token_ids;       // [T] out. Rows that are not finite: NOT_FINITE, or any valid id if ADVANCE
    int *positions;       // [T], incremented if ADVANCE
    int *history;         // null, or [capacity]: the token, or NOT_FINITE, at the next position
};

KERNEL(argmax_logits, ArgmaxLogitsArgs, WARPS *LANES, 1) {
    SHARED(u64, found, WARPS);
    let_next_begin();
    wait_for_previous();
    for (int t = 0; t < TOKENS; t++) {
        u64 best = 0;
        for (int i = thread_index(); i < a.num_partials; i += WARPS * LANES) {
            const uint2 key = load_fresh8(a.partials + (i64)i * TOKENS + t);
            best = larger_key(best, (u64)key.y << 32 | key.x);
        }
        best = lanes_largest(best);
        if (lane_index() == 0) found[warp_index()] = best;
        block_barrier();
        if (thread_index() == 0) {
            for (int warp = 1; warp < WARPS; warp++) best = larger_key(best, found[warp]);
            const int token = (int)argmax_index(best), said = is_finite_key(best) ? token : NOT_FINITE;
            const int next = (int)load_fresh4(a.positions + t) + 1;
            a.token_ids[t] = ADVANCE ? token : said;  // ADVANCE: the next step embeds this id
            if (a.history && next >= 0 && next < a.capacity) a.history[next] = said;
            if (ADVANCE) a.positions[t] = next;
        }
        block_barrier();
    }
}
