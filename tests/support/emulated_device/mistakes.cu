// One kernel for each mistake that the emulation finds; never run on a device.
#include "common.cuh"

struct MistakeArgs {
    float *out;
    int size;
};

KERNEL(barrier_not_reached, MistakeArgs, 128, 1) {
    wait_for_previous();
    if (thread_index() == 5) return;
    block_barrier();
}
KERNEL(two_barriers, MistakeArgs, 128, 1) {
    wait_for_previous();
    if (thread_index() < 64) block_barrier();
    else block_barrier();
}
KERNEL(exchange_not_reached, MistakeArgs, 128, 1) {
    wait_for_previous();
    if (lane_index() != 3) a.out[0] = lanes_sum(1.0f);
}
KERNEL(waits_for_each_other, MistakeArgs, 128, 1) {
    wait_for_previous();
    if (thread_index() == 0) block_barrier();
    else a.out[0] = lanes_sum(1.0f);
}
KERNEL(writes_behind, MistakeArgs, 128, 1) {
    wait_for_previous();
    if (thread_index() == 0) a.out[a.size] = 1;
}
KERNEL(writes_before, MistakeArgs, 128, 1) {
    wait_for_previous();
    if (thread_index() == 0) a.out[-1] = 1;
}
KERNEL(reads_behind, MistakeArgs, 128, 1) {
    wait_for_previous();
    a.out[0] = bits_to_float(load_weights4(a.out + a.size));
}
KERNEL(reads_unaligned, MistakeArgs, 128, 1) {
    wait_for_previous();
    a.out[0] = bits_to_float(load_weights16(a.out + 1).x);
}
KERNEL(reads_too_early, MistakeArgs, 128, 1) {
    a.out[0] = bits_to_float(load_fresh4(a.out));
    wait_for_previous();
}
KERNEL(never_waits, MistakeArgs, 128, 1) {
    if (thread_index() == 0) a.out[0] = 1;
}
KERNEL(unaligned_vector, MistakeArgs, 128, 1) {
    wait_for_previous();
    *(float4 *)(a.out + a.size) = make_float4(0, 0, 0, 0);
}
KERNEL(outside_of_local_array, MistakeArgs, 128, 1) {
    wait_for_previous();
    float values[4] = {1, 2, 3, 4};
    a.out[0] = values[a.size];
}
KERNEL(shifts_too_far, MistakeArgs, 128, 1) {
    wait_for_previous();
    a.out[0] = (float)(1u << (a.size + 32));
}
KERNEL(writes_behind_dynamic_shared, MistakeArgs, 128, 1) {
    DYNAMIC_SHARED(bytes);
    wait_for_previous();
    bytes[a.size] = 1;
}
KERNEL(writes_behind_shared, MistakeArgs, 128, 1) {
    SHARED(float, values, 4);
    wait_for_previous();
    float *place = values;
    place[a.size] = 1;
}
KERNEL(too_much_shared, MistakeArgs, 128, 1) {
    SHARED(float, values, 13000);
    wait_for_previous();
    values[0] = 1;
}
// A barrier is missing: correct in one order of the threads only.
KERNEL(misses_a_barrier, MistakeArgs, 128, 1) {
    SHARED(float, values, 128);
    wait_for_previous();
    values[thread_index()] = 1;
    if (thread_index() == 127) {
        float sum = 0;
        for (int i = 0; i < 128; i++) sum += values[i];
        a.out[0] = sum;
    }
}
KERNEL(reads_shared_of_the_block_before, MistakeArgs, 128, 1) {
    SHARED(float, values, 128);
    wait_for_previous();
    if (block_index_x() == 0) values[thread_index()] = 1;
    a.out[block_index_x() * num_threads() + thread_index()] = values[thread_index()];
}
