// Kernels for tests of the emulation and of real devices. All are correct; see mistakes.cu.
#include "common.cuh"

struct SumArgs {
    const float *in;
    float *out;
    int rows, columns;
};

// A block per row: sums over lanes, then over the logical warps in order.
KERNEL(sum_rows, SumArgs, 256, 1) {
    SHARED(float, partial, 16);
    let_next_begin();
    wait_for_previous();
    float sum = 0;
    i64 begin = (i64)block_index_x() * a.columns;
    for (int i = thread_index(); i < a.columns; i += num_threads())
        sum += bits_to_float(load_fresh4(a.in + begin + i));
    sum = lanes_sum(sum);
    if (lane_index() == 0) partial[warp_index()] = sum;
    block_barrier();
    if (thread_index() == 0) {
        float total = 0;
        for (int warp = 0; warp < num_threads() / LANES; warp++) total += partial[warp];
        a.out[block_index_x()] = total;
    }
}

struct NamesArgs {
    const u8 *in;
    u32 *out;
    u32 *counter;
    u64 wide;
    float value;
};

// Uses every function of common.cuh once, in one block; the test has the expected results.
KERNEL(every_name, NamesArgs, 64, 1) {
    DYNAMIC_SHARED(bytes);
    wait_for_previous();
    int thread = thread_index();
    uint4 in16 = load_weights16(a.in);
    uint2 in8 = load_weights8(a.in + 8);
    uint4 fresh16 = load_fresh16(a.in);
    uint2 fresh8 = load_fresh8(a.in + 8);
    u32 *words = (u32 *)bytes;
    words[thread] = thread * 3;
    block_barrier();
    u32 neighbour = words[num_threads() - 1 - thread];
    u64 wide = lane_read(a.wide + (u64)lane_index(), LANES - 1);
    u32 before = atomic_add(a.counter, 1u);
    memory_fence_of_system();
    u32 values[] = {
        neighbour,
        (u32)lane_xor(thread, LANES / 2),
        (u32)(wide >> 32),
        (u32)wide,
        (u32)dot4((int)in16.x, (int)in16.y, 7),
        float_to_bits(half_to_float(load_weights2(a.in + 2))),
        (u32)float_to_half(a.value),
        (u32)round_to_int(a.value),
        float_to_bits(exp_fast(a.value)),
        float_to_bits(reciprocal_root(a.value)),
        float_to_bits(reciprocal(a.value)),
        load_weights1(a.in + 3),
        (in16.z == in8.x) + 2u * (in16.w == in8.y) + 4u * (fresh16.z == fresh8.x),
        load_fresh4(a.in + 4) ^ load_weights4(a.in + 4),
        float_to_bits(lanes_max((float)lane_index()) + max_of(0.5f, 0.25f)),
        (u32)lanes_sum(1) + (u32)lanes_sum<8>(lane_index()) + (u32)min_of(thread, 0),
        float_to_bits(bfloat_to_float(0x4049)),
        before < 64,
        (u32)(block_index_y() + num_blocks_x() + block_index_z()),
    };
    for (u32 i = 0; i < sizeof values / sizeof values[0]; i++)
        a.out[i * (u32)num_threads() + (u32)thread] = values[i];
}

// A struct with padding, which C++ and ctypes must lay out alike.
struct PaddedArgs {
    u8 small;
    u64 wide;
    u16 half;
    const float *pointer;
    int tail;
};
KERNEL(padded, PaddedArgs, 64, 1) {
    wait_for_previous();
    if (thread_index() == 0) {
        float *out = (float *)a.pointer;
        out[0] = a.small;
        out[1] = (float)a.wide;
        out[2] = a.half;
        out[3] = (float)a.tail;
    }
}
