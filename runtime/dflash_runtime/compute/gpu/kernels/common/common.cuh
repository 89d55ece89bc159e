// Base of every kernel: types, the logical warp, memory access, and all that differs between vendors.
// Kernels themselves contain no vendor's code and include no system header.
//
// The same text is compiled by NVRTC (CUDA), by hipRTC and hipcc (HIP), and by g++ with
// -DDFLASH_HOST, where threads are fibers (tests/support/emulated_device/device.h has that side).
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// Lanes of a logical warp: 32, or 64 where a wavefront has so many. With 64 on a device whose warps
// have 32, lanes exchange values through shared memory.
#ifndef LANES
#define LANES 32
#endif

#if defined(DFLASH_HOST)
#include "device.h"
#elif defined(__HIP__) || defined(__HIPCC_RTC__) || defined(__HIP_PLATFORM_AMD__)
#include "vendor_hip.cuh"
#else
#include "vendor_cuda.cuh"
#endif

// Each vendor's side, and the emulation, define:
//
//   KERNEL(name, Args, threads, min_blocks)   begins a kernel; its only argument is `const Args a`
//   INLINE                                    a function that is always inlined
//   SHARED(type, name, count)                 an array of a block, 16-byte aligned
//   DYNAMIC_SHARED(name)                      u8 *name: the bytes asked for at launch, aligned alike
//   block_barrier()                           all threads of the block
//   block_index_x/y/z(), num_blocks_x(), thread_index(), num_threads()   int; blocks of threads are
//                                             one-dimensional
//   lane_xor(value, mask), lane_read(value, source_lane)      u32, i32, float, u64; whole logical warp
//   dot4(a, b, sum)                           sum + products of four signed bytes each
//   half_to_float(u32 low 16 bits), float_to_half(float) -> u16 (to nearest even)
//   round_to_int(float)                       to nearest even
//   load_weights16/8/4/2/1(pointer)           uint4/uint2/u32/u32/u32; memory no running kernel writes
//   load_fresh16(pointer), load_fresh8, load_fresh4           what a kernel before this one wrote
//   let_next_begin(), wait_for_previous()     a kernel may start while its predecessor still runs; it
//                                             must not read what that wrote, nor write, before waiting
//   previous_has_waited()                     that one has let us begin after its own wait: instead of
//                                             ours, where only what came before it is read or written
//   atomic_add(u32 *, u32) -> u32 before      integers only: sums of floats would depend on the order
//   memory_fence_of_system()                  writes before it are visible to any reader, on the host and
//                                             other devices too, that sees writes after it
//   store_line(pointer, uint4), load_line(pointer) -> uint4   16 bytes, either half as one access, past
//                                             every cache: for what other devices read and write
//   store_half_line(pointer, u32, u32)        one of the halves
//   store_word(u32 *, u32), load_word(const u32 *)            the same for 4 bytes
//   clock_ticks() -> u64                      of a clock of constant rate, the same for all blocks
//   spin_pause()                              between two polls of memory that another thread will write
//   read_anew()                               shared memory that is read after this is read after it, not
//                                             before a loop, into registers that are not there
//   settle(float & or int &)                  it is computed here, not where it is next used; what is
//                                             computed from it is not known before
//   assume(bool)                              holds; for the compiler alone
//   CLEARS_ROWS, MOST_TILE_REGISTERS          attention: rows that are loaded in parts are cleared first;
//                                             registers of a lane for a tile that is read early
//   exp_fast(float), exp2_fast(float), log_fast(float), reciprocal_root(float), reciprocal(float)
//   exp_double(double)                        within a few units of the last place

INLINE int lane_index() { return thread_index() % LANES; }
INLINE int warp_index() { return thread_index() / LANES; }

INLINE float bits_to_float(u32 bits) {
    union { u32 bits; float value; } both;
    both.bits = bits;
    return both.value;
}
INLINE u32 float_to_bits(float value) {
    union { u32 bits; float value; } both;
    both.value = value;
    return both.bits;
}
INLINE float bfloat_to_float(u32 bits) { return bits_to_float(bits << 16); }

INLINE float max_of(float a, float b) { return a > b ? a : b; }
INLINE int min_of(int a, int b) { return a < b ? a : b; }

// Sum over `WIDTH` neighbouring lanes, the same bits in each of them.
template <int WIDTH = LANES>
INLINE float lanes_sum(float value) {
#pragma unroll
    for (int mask = WIDTH / 2; mask; mask >>= 1) value += lane_xor(value, mask);
    return value;
}
template <int WIDTH = LANES>
INLINE int lanes_sum(int value) {
#pragma unroll
    for (int mask = WIDTH / 2; mask; mask >>= 1) value += lane_xor(value, mask);
    return value;
}
// Maximum over lanes; a NaN in any lane is lost, as max_of(a, NaN) is NaN only on one side.
template <int WIDTH = LANES>
INLINE float lanes_max(float value) {
#pragma unroll
    for (int mask = WIDTH / 2; mask; mask >>= 1) value = max_of(value, lane_xor(value, mask));
    return value;
}

// Largest over the lanes.
#ifndef HAS_LANES_LARGEST
INLINE u32 lanes_largest(u32 value) {
#pragma unroll
    for (int mask = LANES / 2; mask; mask >>= 1) {
        const u32 other = lane_xor(value, mask);
        value = other > value ? other : value;
    }
    return value;
}
#endif
// Whether this is the lowest lane for which it holds.
#ifndef HAS_IS_FIRST_LANE
INLINE bool is_first_lane(bool holds) {
    const u32 found = lanes_largest(holds ? (u32)(LANES - lane_index()) : 0u);
    return holds && found == (u32)(LANES - lane_index());
}
#endif

// Before the wait: what is there by now of what the kernel before this one writes. Only good for a
// guess that is checked after the wait.
#ifndef HAS_LOAD_EARLY
INLINE u32 load_early4(const void *p) { return *(const volatile u32 *)p; }
#endif
