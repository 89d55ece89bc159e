// The emulation's scheduler, compiled once for all kernels: see scheduler.h.
#include "scheduler.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

namespace emulated {

Block block;

#if defined(__x86_64__)
// Saves the callee-saved registers and switches to another stack.
extern "C" void emulated_switch(void **saved_stack, void *stack);
asm(R"(
.text
.type emulated_switch, @function
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulated_switch, . - emulated_switch
)");
static void switch_to(Context &from, Context &to) { emulated_switch(&from, to); }
#else
static void switch_to(Context &from, Context &to) { swapcontext(&from, &to); }
#endif

// The next thread of this round that can go on, or else the scheduler, which begins the next round.
static Context &next_context() {
    int num_threads = block.launch->num_threads;
    while (!block.has_failed && ++block.turn < num_threads) {
        block.current = block.launch->runs_backward ? num_threads - 1 - block.turn : block.turn;
        if (current_fiber().state != READY) continue;
        block.num_moves++;
        return current_fiber().context;
    }
    return block.scheduler;
}

void yield() {
    Context &mine = current_fiber().context;
    switch_to(mine, next_context());
}

// Lets other threads of the block run, which may write what the caller waits for.
void spin_pause() {
    block.num_pauses++;
    yield();
}
// All threads are polling: another process must write, so give up the CPU for a moment.
static void rest() {
    const struct timespec interval = {0, 20'000};
    nanosleep(&interval, nullptr);
}

static void note_error(const char *format, va_list arguments) {
    if (block.has_failed) return;  // only the first error counts
    block.has_failed = true;
    int used = snprintf(block.error, sizeof block.error, "%s: block (%d, %d, %d), thread %d: ",
                        block.kernel_name, block.index_x, block.index_y, block.index_z,
                        block.current);
    vsnprintf(block.error + used, sizeof block.error - used, format, arguments);
}

// Returns to the scheduler, which ends the block.
__attribute__((format(printf, 1, 2))) static void report(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    note_error(format, arguments);
    va_end(arguments);
}

void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    note_error(format, arguments);
    va_end(arguments);
    while (true) yield();
}

static u8 *stack_of(int thread) { return block.launch->stacks + thread * stack_bytes; }

static void thread_main() {
    block.kernel(block.launch->args);
    current_fiber().state = ENDED;
    block.num_running--;
    block.anybody_waited |= current_fiber().has_waited;
    while (true) yield();
}

static void prepare_fiber(int thread) {
    Fiber &fiber = block.fibers[thread];
    fiber.state = READY;
    fiber.has_waited = false;
    fiber.num_exchanges = 0;
#if defined(__x86_64__)
    // Stacks that began at the same place of a page would take turns in the same few cache lines.
    int unused_bytes = 64 + thread % 64 * 1088;
    void **top = (void **)(stack_of(thread) + stack_bytes - unused_bytes);
    *--top = nullptr;  // return address of thread_main, which never returns
    *--top = (void *)thread_main;
    for (int saved_register = 0; saved_register < 6; saved_register++) *--top = nullptr;
    fiber.context = top;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack_of(thread);
    fiber.context.uc_stack.ss_size = stack_bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, thread_main, 0);
#endif
}

static bool same_site(Site a, Site b) {
    return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file));
}

// A barrier of threads begin, …. The last one to arrive continues at once.
static void meet(Site site, State state, int begin, int end, int *num_arrived) {
    Fiber &mine = current_fiber();
    mine.site = site;
    if (++*num_arrived < end - begin) {
        mine.state = state;
        yield();
        return;
    }
    *num_arrived = 0;
    for (int thread = begin; thread < end; thread++) {
        Fiber &other = block.fibers[thread];
        if (!same_site(other.site, site))
            fail("is at %s:%d while thread %d is at %s:%d", site.file, site.line, thread,
                 other.site.file, other.site.line);
        other.state = READY;
    }
}

void barrier(const char *file, int line) {
    meet({file, line}, AT_BARRIER, 0, block.launch->num_threads, &block.num_at_barrier);
}

u64 exchange_bits(u64 value, int source_lane, const char *file, int line) {
    int thread = block.current, warp = thread / LANES;
    u64 *slots = block.exchanged[current_fiber().num_exchanges++ & 1] + warp * LANES;
    slots[thread % LANES] = value;
    meet({file, line}, AT_EXCHANGE, warp * LANES, (warp + 1) * LANES, block.num_at_exchange + warp);
    return slots[source_lane];
}

void SharedSlot::make(u64 num_bytes) {
    block.static_bytes += num_bytes;
    if (block.static_bytes > max_static_shared_bytes)
        fail("more than %llu bytes of static shared memory", max_static_shared_bytes);
    if (block.num_shared_arrays == max_shared_arrays)
        fail("more than %d shared arrays", max_shared_arrays);
    generation = block.generation;
    begin = block.shared + block.shared_used;
    u64 used_bytes = (num_bytes + 15) / 16 * 16 + shared_gap_bytes;
    memset(begin, 0xFF, used_bytes);
    block.shared_used += used_bytes;
    block.shared_arrays[block.num_shared_arrays++] = {begin, num_bytes};
}

static bool is_poison(const u8 *begin, const u8 *end) {
    for (; begin < end && ((u64)begin % 8 || end - begin < 8); begin++)
        if (*begin != 0xFF) return false;
    for (; end - begin >= 8; begin += 8)
        if (*(const u64 *)begin != ~(u64)0) return false;
    return begin == end || is_poison(begin, end);
}

static void check_shared_gaps() {
    const u8 *end_of_shared = block.shared + block.shared_used;
    for (int array = 0; array < block.num_shared_arrays; array++) {
        const u8 *begin = block.shared_arrays[array].begin + block.shared_arrays[array].num_bytes;
        const u8 *end = array + 1 < block.num_shared_arrays ? block.shared_arrays[array + 1].begin
                                                            : end_of_shared;
        if (!is_poison(begin, end)) report("something was written behind a shared array");
    }
    const u8 *dynamic_end = block.dynamic_shared + block.launch->shared_bytes;
    if (!is_poison(dynamic_end, dynamic_end + shared_gap_bytes))
        report("something was written behind the dynamic shared memory");
}

u64 clock_ns() {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (u64)now.tv_sec * 1000000000u + (u64)now.tv_nsec;
}

// Reports a damaged guard once, and repairs it.
static void check_guards() {
    for (u64 index = 0; index < block.launch->num_ranges; index++) {
        const Range &range = block.launch->ranges[index];
        u8 *const guards[2] = {(u8 *)range.begin - range.guard_bytes, (u8 *)range.end};
        for (u8 *guard : guards) {
            if (is_poison(guard, guard + range.guard_bytes)) continue;
            report("something was written outside of an array of %llu bytes",
                   (range.end - range.begin));
            memset(guard, 0xFF, range.guard_bytes);
        }
    }
}

void check_read(const void *pointer, int num_bytes, int alignment) {
    u64 begin = (u64)pointer, end = begin + num_bytes;
    if (begin % alignment) fail("reads %d bytes at %p, which is not aligned", num_bytes, pointer);
    if (begin >= block.last_range.begin && end <= block.last_range.end) return;
    const Range *ranges = block.launch->ranges;
    u64 low = 0, high = block.launch->num_ranges;
    while (low < high) {  // the first range that ends after `begin`
        u64 middle = (low + high) / 2;
        if (ranges[middle].end <= begin) low = middle + 1;
        else high = middle;
    }
    if (low == block.launch->num_ranges || begin < ranges[low].begin || end > ranges[low].end)
        fail("reads %d bytes at %p, outside of every array", num_bytes, pointer);
    block.last_range = ranges[low];
}

void check_fresh_read(const void *pointer, int num_bytes) {
    check_read(pointer, num_bytes, num_bytes);
    if (block.launch->overlaps_previous && !current_fiber().has_waited)
        fail("reads what an earlier kernel wrote before wait_for_previous()");
}

// Deadlock: report what each thread waits for.
static void describe_deadlock() {
    int begin = 0, end = block.launch->num_threads;
    while (block.fibers[begin].state == ENDED) begin++;
    Fiber &fiber = block.fibers[block.current = begin];
    const char *what = fiber.state == AT_BARRIER ? "block_barrier" : "a lane exchange";
    begin = fiber.state == AT_BARRIER ? 0 : block.current / LANES * LANES;
    if (fiber.state == AT_EXCHANGE) end = begin + LANES;
    for (int thread = begin; thread < end; thread++) {
        Fiber &other = block.fibers[thread];
        if (other.state == ENDED) {
            report("waits in %s at %s:%d, thread %d has ended", what, fiber.site.file,
                   fiber.site.line, thread);
        } else if (other.state != fiber.state || !same_site(other.site, fiber.site)) {
            report("waits in %s at %s:%d, thread %d waits at %s:%d", what, fiber.site.file,
                   fiber.site.line, thread, other.site.file, other.site.line);
        }
    }
}

static void run_block() {
    int num_threads = block.launch->num_threads;
    block.generation++;
    block.num_at_barrier = block.num_shared_arrays = 0;
    block.shared_used = block.static_bytes = 0;
    memset(block.num_at_exchange, 0, sizeof block.num_at_exchange);
    memset(block.dynamic_shared, 0xFF, block.launch->shared_bytes + shared_gap_bytes);
    for (int thread = 0; thread < num_threads; thread++) prepare_fiber(thread);
    block.num_running = num_threads;
    while (block.num_running && !block.has_failed) {
        block.num_moves = block.num_pauses = 0;
        block.turn = -1;
        Context &first = next_context();
        if (!block.num_moves) describe_deadlock();
        else switch_to(block.scheduler, first);
        if (block.num_pauses && block.num_pauses == block.num_moves) rest();
    }
    if (!block.has_failed) check_shared_gaps();
}

const char *run(const char *name, int threads, void (*kernel)(const void *), const Launch *launch) {
    block.launch = launch;
    block.kernel_name = name;
    block.kernel = kernel;
    block.current = block.index_x = block.index_y = block.index_z = 0;
    block.anybody_waited = block.has_failed = false;
    block.last_range = {0, 0, 0};
    if (launch->num_threads < 1 || launch->num_threads > threads ||
        launch->num_threads > max_threads || launch->num_threads % LANES)
        report("%d threads a block; declared for at most %d, in whole logical warps of %d",
               launch->num_threads, threads, LANES);
    if (launch->shared_bytes > launch->max_shared_bytes)
        report("%llu bytes of dynamic shared memory, the device has %llu",
               launch->shared_bytes,
               launch->max_shared_bytes);
    if (launch->grid_x < 1 || launch->grid_y < 1 || launch->grid_z < 1 ||
        launch->grid_y > 65535 || launch->grid_z > 65535)
        report("a grid of (%d, %d, %d) blocks", launch->grid_x, launch->grid_y, launch->grid_z);
    if (block.has_failed) return block.error;
    u64 dynamic_bytes = (launch->shared_bytes + shared_gap_bytes + 63) / 64 * 64;
    block.dynamic_shared = (u8 *)aligned_alloc(64, dynamic_bytes);
    if (!block.dynamic_shared) report("no memory on the host");
    long long num_blocks = (long long)launch->grid_x * launch->grid_y * launch->grid_z;
    for (long long turn = 0; turn < num_blocks && !block.has_failed; turn++) {
        long long index = launch->runs_backward ? num_blocks - 1 - turn : turn;
        block.index_x = index % launch->grid_x;
        block.index_y = index / launch->grid_x % launch->grid_y;
        block.index_z = index / launch->grid_x / launch->grid_y;
        run_block();
    }
    // Otherwise the next kernel could start before the previous one has ended.
    if (!block.has_failed && launch->overlaps_previous && !block.anybody_waited)
        report("no thread has called wait_for_previous()");
    free(block.dynamic_shared);
    check_guards();
    return block.has_failed ? block.error : nullptr;
}

}  // namespace emulated

// Called by code of -fsanitize for undefined behaviour that breaks on GPUs too: unaligned vectors,
// indices out of bounds, shifts by too many bits.
struct emulated_place {
    const char *file;
    u32 line, column;
};

#define EMULATED_FINDING(NAME, WHAT)                                                   \
    extern "C" __attribute__((noreturn, visibility("hidden"))) void NAME(              \
        const emulated_place *place, ...) {                                            \
        emulated::fail("%s:%u: %s", place->file, place->line, WHAT);                   \
    }
EMULATED_FINDING(__ubsan_handle_type_mismatch_v1_abort, "a pointer is null or not aligned")
EMULATED_FINDING(__ubsan_handle_out_of_bounds_abort, "an index outside of its array")
EMULATED_FINDING(__ubsan_handle_shift_out_of_bounds_abort, "a shift by too many bits")
EMULATED_FINDING(__ubsan_handle_divrem_overflow_abort, "a division by zero")
#undef EMULATED_FINDING
