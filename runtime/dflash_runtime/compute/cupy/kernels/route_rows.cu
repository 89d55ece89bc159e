// Choice of experts from router logits that are there already: a block a token.
//
// Defines: EXPERTS, TOP_K, NORMALISE, GATE, THREADS.
#include "route.cuh"

struct RouteRowsArgs {
    const float *logits;  // [T, EXPERTS]
    int *topk_ids;        // [T, TOP_K]
    float *topk_weights;
};

KERNEL(route_rows, RouteRowsArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const i64 token = block_index_x();
    Router<1, EXPERTS, TOP_K, NORMALISE != 0, (Gate)GATE, THREADS>::run(
        a.logits + token * EXPERTS, a.topk_ids + token * TOP_K, a.topk_weights + token * TOP_K);
}
