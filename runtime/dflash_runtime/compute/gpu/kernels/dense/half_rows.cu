// half_rows: rows of floats, optionally normalised (RMS norm), as rows of halves for gemm_*.cu. Each row
// is divided by a power of two so that it fits the range of halves. Grid T, 256 threads: a block per row.
//
// Parameters: NUM_COLUMNS, NUM_PARTS (see gemm_tile.cuh).
#include "halves.cuh"

constexpr int ROW_THREADS = 256;
static_assert(NUM_COLUMNS % 4 == 0, "columns are read in fours");

struct HalfRowsArgs {
    const float *x;   // [T, NUM_COLUMNS]
    const float *norm;  // [NUM_COLUMNS] weights of the RMS norm; null: rows are not normalised
    u16 *halves;      // [NUM_PARTS, T, NUM_COLUMNS]; null: not written
    float *scales;    // [T]: a row is its halves times this
    float *floats;    // [T, NUM_COLUMNS], the normalised rows; null: not written
    u64 part_bytes;
    float eps;
};

// Sum and maximum over the block; each thread gets the same bits.
INLINE float block_sum(float *sums, float value) {
    value = lanes_sum(value);
    if (lane_index() == 0) sums[warp_index()] = value;
    block_barrier();
    value = 0.0f;
    for (int warp = 0; warp < ROW_THREADS / LANES; warp++) value += sums[warp];
    block_barrier();
    return value;
}
INLINE float block_max(float *sums, float value) {
    value = lanes_max(value);
    if (lane_index() == 0) sums[warp_index()] = value;
    block_barrier();
    value = 0.0f;
    for (int warp = 0; warp < ROW_THREADS / LANES; warp++) value = max_of(value, sums[warp]);
    block_barrier();
    return value;
}

constexpr int FOURS = (NUM_COLUMNS / 4 + ROW_THREADS - 1) / ROW_THREADS;

KERNEL(half_rows, HalfRowsArgs, ROW_THREADS, 1) {
    SHARED(float, sums, ROW_THREADS / LANES);
    let_next_begin();
    wait_for_previous();
    const i64 row = block_index_x();
    float values[FOURS][4], squares = 0.0f, largest = 0.0f;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        const int column = 4 * (i * ROW_THREADS + thread_index());
        uint4 bits = make_uint4(0, 0, 0, 0);
        if (column < NUM_COLUMNS) bits = load_fresh16(a.x + row * NUM_COLUMNS + column);
        values[i][0] = bits_to_float(bits.x), values[i][1] = bits_to_float(bits.y);
        values[i][2] = bits_to_float(bits.z), values[i][3] = bits_to_float(bits.w);
    }
    if (a.norm) {
#pragma unroll
        for (int i = 0; i < FOURS; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) squares += values[i][k] * values[i][k];
        const float mean = block_sum(sums, squares) * (1.0f / NUM_COLUMNS);
        const float factor = reciprocal_root(mean + a.eps);
#pragma unroll
        for (int i = 0; i < FOURS; i++) {
            const int column = 4 * (i * ROW_THREADS + thread_index());
            if (column >= NUM_COLUMNS) continue;
            const uint4 norm = load_fresh16(a.norm + column);
            values[i][0] *= factor * bits_to_float(norm.x);
            values[i][1] *= factor * bits_to_float(norm.y);
            values[i][2] *= factor * bits_to_float(norm.z);
            values[i][3] *= factor * bits_to_float(norm.w);
            if (a.floats)
                *(float4 *)(a.floats + row * NUM_COLUMNS + column) =
                    make_float4(values[i][0], values[i][1], values[i][2], values[i][3]);
        }
    }
    if (!a.halves) return;
#pragma unroll
    for (int i = 0; i < FOURS; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) largest = max_of(largest, size_of(values[i][k]));
    const int shift = level_shift(block_max(sums, largest));
    if (thread_index() == 0) a.scales[row] = power_of_two(shift);
    const float divisor = power_of_two(-shift);
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        const int column = 4 * (i * ROW_THREADS + thread_index());
        if (column >= NUM_COLUMNS) continue;
        u16 *place = a.halves + row * NUM_COLUMNS + column;
        const float *v = values[i];
        store_halves<NUM_PARTS>(place, a.part_bytes, v[0] * divisor, v[1] * divisor);
        store_halves<NUM_PARTS>(place + 2, a.part_bytes, v[2] * divisor, v[3] * divisor);
    }
}
