// Mistakes that compute-sanitizer must find. Unlike those of emulated_device/mistakes.cu they end.
#include "common.cuh"

struct MistakeArgs {
    float *out;
    int size;
};

KERNEL(writes_behind, MistakeArgs, 128, 1) {
    wait_for_previous();
    if (thread_index() == 0) a.out[a.size] = 1;
}
// A race: thread 127 may read before the others have written.
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
