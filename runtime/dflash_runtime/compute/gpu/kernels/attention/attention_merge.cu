// attention_merge: combines the partial results of attention_decode or attention_tree, in ascending order
// of their runs. Writes the attention's output as floats, as int8 rows for the output projection, or
// both. Grid (NUM_HEADS, T), 256 threads: a block per head of a token.
//
// Parameters: NUM_HEADS, VALUE_DIM, VALUE_ROW, SPLIT_KEYS, NUM_SPLITS, PADDED_COLUMNS of int8 rows,
// WINDOW, CHUNK (attention_mask.cuh), HAS_SINKS.
#include "attention_mask.cuh"
#include "quantise.cuh"

constexpr int THREADS = 256, WARPS = THREADS / LANES;
constexpr int FOURS = VALUE_ROW / 4;
constexpr int SLICES = THREADS / FOURS;  // runs that are added at the same time
constexpr int EARLY = 4;                 // runs of each slice that are loaded before their weights are known
static_assert(FOURS <= THREADS, "a run in one go");
static_assert(FOURS % 4 == 0, "granules of four lanes");

struct AttentionMergeArgs {
    const int *positions;      // [T]
    const float *partials;     // [T, NUM_HEADS, NUM_SPLITS, VALUE_ROW]
    const float2 *statistics;  // [T, NUM_HEADS, NUM_SPLITS] {maximum score, sum of exponentials}
    const float *sinks;        // [NUM_HEADS], if HAS_SINKS: a score that has no value
    float *values;             // [T, NUM_HEADS, VALUE_DIM], or null
    i8 *quants;                // [T, PADDED_COLUMNS], or null; only if 16 divides VALUE_DIM
    float2 *meta;              // [T, PADDED_COLUMNS / 16]
};

INLINE float4 load_partial(const float *p) {
    const uint4 bits = load_fresh16(p);
    return make_float4(bits_to_float(bits.x), bits_to_float(bits.y), bits_to_float(bits.z),
                       bits_to_float(bits.w));
}
INLINE void add_scaled(float4 &sum, float weight, float4 x) {
    sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
}

KERNEL(attention_merge, AttentionMergeArgs, THREADS, 1) {
    SHARED(float, weights, NUM_SPLITS);
    SHARED(float, warp_maxima, WARPS);
    SHARED(float, warp_totals, WARPS);
    SHARED(float4, sums, SLICES *FOURS);
    let_next_begin();
    const int head = block_index_x(), token = block_index_y();
    const int position = (int)load_weights4(a.positions + token);
    const int first_run = first_visible(position) / SPLIT_KEYS, num_runs = position / SPLIT_KEYS + 1;
    const i64 first = ((i64)token * NUM_HEADS + head) * NUM_SPLITS;
    const int slice = thread_index() / FOURS, element = thread_index() % FOURS * 4;
    const float *mine = a.partials + first * VALUE_ROW + element;
    wait_for_previous();
    float4 early[EARLY];
#pragma unroll
    for (int i = 0; i < EARLY; i++) {
        const int run = first_run + slice + SLICES * i;
        if (slice < SLICES && run < num_runs) early[i] = load_partial(mine + (i64)run * VALUE_ROW);
    }

    // Each run's weight, exp(its maximum - the highest maximum), and the sum of all exponentials.
    constexpr int LANE_RUNS = (NUM_SPLITS + THREADS - 1) / THREADS;
    float maximum[LANE_RUNS], total[LANE_RUNS], highest = -1e30f;
#pragma unroll
    for (int i = 0; i < LANE_RUNS; i++) {
        const int run = thread_index() + THREADS * i;
        maximum[i] = -1e30f, total[i] = 0.0f;
        if (run < first_run || run >= num_runs) continue;
        const uint2 bits = load_fresh8(a.statistics + first + run);
        maximum[i] = bits_to_float(bits.x), total[i] = bits_to_float(bits.y);
        highest = max_of(highest, maximum[i]);
    }
    highest = lanes_max(highest);
    if (lane_index() == 0) warp_maxima[warp_index()] = highest;
    block_barrier();
    for (int warp = 0; warp < WARPS; warp++) highest = max_of(highest, warp_maxima[warp]);
    float sum_of_totals = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_RUNS; i++) {
        const int run = thread_index() + THREADS * i;
        const float weight = exp_fast(maximum[i] - highest);
        sum_of_totals += weight * total[i];
        if (run < num_runs) weights[run] = run < first_run ? 0.0f : weight;
    }
    sum_of_totals = lanes_sum(sum_of_totals);
    if (lane_index() == 0) warp_totals[warp_index()] = sum_of_totals;
    block_barrier();

    if (slice < SLICES) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < EARLY; i++)
            if (first_run + slice + SLICES * i < num_runs)
                add_scaled(sum, weights[first_run + slice + SLICES * i], early[i]);
#pragma unroll 4
        for (int run = first_run + slice + SLICES * EARLY; run < num_runs; run += SLICES)
            add_scaled(sum, weights[run], load_partial(mine + (i64)run * VALUE_ROW));
        sums[slice * FOURS + element / 4] = sum;
    }
    block_barrier();
    // All lanes go on, those of other slices with zeros, as quantise4 needs whole warps.
    float all = 0.0f;
    for (int warp = 0; warp < WARPS; warp++) all += warp_totals[warp];
    if constexpr (HAS_SINKS) all += exp_fast(bits_to_float(load_weights4(a.sinks + head)) - highest);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (slice == 0)
        for (int i = 0; i < SLICES; i++) add_scaled(sum, 1.0f, sums[i * FOURS + element / 4]);
    const float share = 1.0f / all;
    const float4 result =
        make_float4(sum.x * share, sum.y * share, sum.z * share, sum.w * share);
    const bool is_mine = slice == 0 && element < VALUE_DIM;
    const int column = head * VALUE_DIM + element;
    if (a.values && is_mine) {
        float *out = a.values + (i64)token * NUM_HEADS * VALUE_DIM + column;
        const float value[4] = {result.x, result.y, result.z, result.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (element + i < VALUE_DIM) out[i] = value[i];
    }
    if (a.quants) {
        float2 meta;
        const u32 bytes = quantise4(result, meta);
        if (!is_mine) return;
        *(u32 *)(a.quants + (i64)token * PADDED_COLUMNS + column) = bytes;
        if (element % 16 == 0) a.meta[((i64)token * PADDED_COLUMNS + column) / 16] = meta;
    }
}
