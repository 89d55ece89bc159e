// What compute-sanitizer must see. Unlike emulated_device/mistakes.cu these compile and end.
#include "common.cuh"

struct MistakeArgs {
    float *out;
    int size;
};

KERNEL(writes_behind, MistakeArgs, 128, 1) {
    wait_for_previous();
    if (thread_index() == 0) a.out[a.size] = 1;
}
// Thread 127 reads what others have written, perhaps.
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
