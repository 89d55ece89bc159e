// exchange: copies up to three arrays between the device and mapped host memory, then sets a signal word
// in host memory. Grid 1, THREADS threads: the arrays are small, so latency counts, not bandwidth.
//
// The host wrote the sources before the launch, and reads the targets only after it has seen the signal:
// each thread's stores come before its fence, and all fences come before the store of the signal.
//
// Parameters: THREADS.
#include "common.cuh"

#define MOST_COPIES 3

struct ExchangeArgs {
    const void *sources[MOST_COPIES];
    void *targets[MOST_COPIES];
    int num_words[MOST_COPIES];  // of 4 bytes; 0: no copy
    int *signal;                 // null, or set to 1 at the end
};

KERNEL(exchange, ExchangeArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    for (int copy = 0; copy < MOST_COPIES; copy++) {
        const u32 *source = (const u32 *)a.sources[copy];
        u32 *target = (u32 *)a.targets[copy];
        const int num_words = a.num_words[copy], num_wide = num_words / 4;
        for (int i = thread_index(); i < num_wide; i += THREADS) {
            ((uint4 *)target)[i] = load_fresh16(source + 4 * i);
        }
        const int i = 4 * num_wide + thread_index();
        if (i < num_words) target[i] = load_fresh4(source + i);
    }
    if (!a.signal) return;
    memory_fence_of_system();
    block_barrier();
    if (thread_index() == 0) *(volatile int *)a.signal = 1;
}
