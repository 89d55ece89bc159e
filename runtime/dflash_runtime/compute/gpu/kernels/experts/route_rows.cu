// route_rows: top-k routing (route.cuh) from router logits in memory. Writes ids and weights. Grid T, one
// logical warp: a warp per token.
//
// Parameters: EXPERTS, TOP_K, NORMALISE, GATE.
#include "route.cuh"

struct RouteRowsArgs {
    const float *logits;  // [T, EXPERTS]
    int *topk_ids;        // [T, TOP_K]
    float *topk_weights;
};

KERNEL(route_rows, RouteRowsArgs, LANES, 1) {
    let_next_begin();
    wait_for_previous();
    const i64 token = block_index_x();
    const float *logits = a.logits + token * EXPERTS;
    Router<EXPERTS, TOP_K, NORMALISE != 0, (Gate)GATE> router;
    router.load([&](int e) { return bits_to_float(load_fresh4(logits + e)); });
    router.choose(TOP_K, [&](int k, int j) { a.topk_ids[token * TOP_K + k] = router.expert(j); });
    const float weight = router.weight();
    if (lane_index() < TOP_K) a.topk_weights[token * TOP_K + lane_index()] = weight;
}
