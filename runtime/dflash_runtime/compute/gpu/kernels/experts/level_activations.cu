// level_activations: gives each row of activations one power of two as its scale, the largest of those by
// which gemm_gate_up divided the row's segments. Works in place and writes `scales`. Grid ceil(rows /
// (256 / LANES)): a logical warp per row; most rows need no change.
//
// Parameters: NUM_COLUMNS, NUM_PARTS (see gemm_tile.cuh), NUM_SEGMENTS, SEGMENT (see gemm_gate_up.cu).
#include "groups.cuh"
#include "halves.cuh"

constexpr int ROW_THREADS = 256;

struct LevelArgs {
    const GroupCounts *counts;
    const i8 *shifts;    // [rows, NUM_SEGMENTS]
    u16 *activations;    // [NUM_PARTS, rows, NUM_COLUMNS]
    float *scales;       // [rows]
    u64 part_bytes;
};

KERNEL(level_activations, LevelArgs, ROW_THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const i64 row = block_index_x() * (ROW_THREADS / LANES) + warp_index();
    if (row >= load_counts(a.counts).num_rows) return;
    const i8 *shifts = a.shifts + row * NUM_SEGMENTS;
    int largest = -128, smallest = 127;
    for (int segment = lane_index(); segment < NUM_SEGMENTS; segment += LANES) {
        largest = shifts[segment] > largest ? shifts[segment] : largest;
        smallest = min_of(smallest, shifts[segment]);
    }
    largest = (int)lanes_max((float)largest);
    smallest = -(int)lanes_max(-(float)smallest);
    if (lane_index() == 0) a.scales[row] = power_of_two(largest);
    if (largest == smallest) return;
    for (int column = lane_index(); column < NUM_COLUMNS; column += LANES) {
        const int shift = shifts[column / SEGMENT] - largest;
        const float divisor = power_of_two(shift > SMALLEST_SHIFT ? shift : SMALLEST_SHIFT);
#pragma unroll
        for (int part = 0; part < NUM_PARTS; part++) {
            u16 *halves = (u16 *)((u8 *)a.activations + part * a.part_bytes);
            u16 *place = halves + row * NUM_COLUMNS + column;
            *place = float_to_half(half_to_float(*place) * divisor);
        }
    }
}
