// Copies arrays between a device and mapped host memory, and sets a word when they have arrived.
//
// One block: what goes through here is small, and the time counts that the first byte takes. What is
// in memory of the host was written before this was launched, or is read by the host after it has
// seen the word: all of a thread's stores come before its fence, all fences before the word.
//
// Defines: THREADS.
#include "common.cuh"

#define MOST_COPIES 3

struct ExchangeArgs {
    const void *sources[MOST_COPIES];
    void *targets[MOST_COPIES];
    int num_words[MOST_COPIES];  // of 4 bytes; 0: nothing
    int *signal;                 // null, or set to 1 in the end
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
