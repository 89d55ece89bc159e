// Runs the threads of a block as fibers of one host thread, block after block, and reports what a GPU
// would not: barriers and lane exchanges that not all threads reach, accesses outside of arrays, and
// reads before the kernel has waited for its predecessor.
//
// scheduler.cpp is compiled once and linked into each kernel, as compiling it takes longer than most
// kernels. For the same reason this header includes no system header.
#pragma once

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// Hidden symbols: each kernel library has its own scheduler.
#pragma GCC visibility push(hidden)

namespace emulated {

// The parameters of a launch; mirrored in emulated_device.py.
struct Range {
    u64 begin, end;
    u64 guard_bytes;  // before and after the array; writes to them are errors
};
struct Launch {
    const void *args;
    int grid_x, grid_y, grid_z, num_threads;
    u64 shared_bytes, max_shared_bytes;
    u8 *stacks;  // stack_bytes for each of max_threads
    const Range *ranges;  // arrays that exist, by address; none overlap
    u64 num_ranges;
    int runs_backward;      // last blocks and threads run first, which reveals missing barriers
    int overlaps_previous;  // the kernel must wait for the one before it
};

constexpr int max_threads = 1024;
constexpr int max_logical_warps = max_threads / LANES;
constexpr u64 stack_bytes = 256 * 1024;  // as in Python; kernels use up to 64 KiB, beginnings 68
constexpr u64 max_static_shared_bytes = 48 * 1024;
constexpr u64 shared_gap_bytes = 64;  // between two shared arrays; writes to it are errors
constexpr int max_shared_arrays = 64;

enum State { READY, AT_BARRIER, AT_EXCHANGE, ENDED };

struct Site {
    const char *file;
    int line;
};

#if defined(__x86_64__)
typedef void *Context;
#else
typedef ucontext_t Context;
#endif

struct Fiber {
    Context context;
    State state;
    Site site;
    bool has_waited;
    int num_exchanges;
};

struct SharedArray {
    u8 *begin;
    u64 num_bytes;
};

struct Block {
    const Launch *launch;
    const char *kernel_name;
    void (*kernel)(const void *args);
    int index_x, index_y, index_z, current;
    int turn, num_moves, num_running;  // of a round: the thread whose turn it is, and how many had one
    u64 generation;  // a number for each block that ever ran
    Fiber fibers[max_threads];
    Context scheduler;
    int num_at_barrier, num_at_exchange[max_logical_warps];
    u64 exchanged[2][max_threads];  // by parity: a lane may be one exchange ahead of another
    alignas(64) u8 shared[max_static_shared_bytes + max_shared_arrays * shared_gap_bytes];
    u64 shared_used, static_bytes;
    SharedArray shared_arrays[max_shared_arrays];
    int num_shared_arrays;
    u8 *dynamic_shared;
    bool anybody_waited, has_failed;
    int num_pauses;  // in this round over all threads
    Range last_range;
    char error[1024];
};

extern Block block;

inline Fiber &current_fiber() { return block.fibers[block.current]; }
void yield();
void spin_pause();
// Ends the device thread that calls it; does not return.
__attribute__((format(printf, 1, 2), noreturn)) void fail(const char *format, ...);
void barrier(const char *file, int line);
u64 exchange_bits(u64 value, int source_lane, const char *file, int line);
// Fails unless the bytes lie in one array. Called by the load functions of device.h.
void check_read(const void *pointer, int num_bytes, int alignment);
void check_fresh_read(const void *pointer, int num_bytes);
u64 clock_ns();
// Returns the error's text, or null. `threads` is the kernel's declared maximum.
const char *run(const char *name, int threads, void (*kernel)(const void *), const Launch *launch);

template <typename T>
inline T exchange(T value, int source_lane, const char *file, int line) {
    static_assert(sizeof(T) <= sizeof(u64), "lanes exchange up to 8 bytes");
    u64 bits = 0;
    __builtin_memcpy(&bits, &value, sizeof value);
    bits = exchange_bits(bits, source_lane, file, line);
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// A shared array of the block, made by the first thread that gets here.
struct SharedSlot {
    u8 *begin;
    u64 generation;
    inline u8 *bytes(u64 num_bytes) {
        if (generation != block.generation) make(num_bytes);
        return begin;
    }
    void make(u64 num_bytes);
};

}  // namespace emulated

#pragma GCC visibility pop
