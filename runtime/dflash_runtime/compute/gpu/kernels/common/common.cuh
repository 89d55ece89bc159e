// The base of every kernel: integer types, the logical warp, memory access, and everything that
// differs between vendors. Kernels contain no vendor-specific code and include no system header.
//
// The same text is compiled by NVRTC (CUDA), by hipRTC and hipcc (HIP), and by g++ with
// -DDFLASH_HOST, where threads are fibers (tests/support/emulated_device/device.h). LANES is the
// width of a logical warp: see below.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// Lanes of a logical warp: 32, or 64 on AMD devices with wavefronts of 64. With LANES = 64 on a
// device with warps of 32 (in tests), lanes exchange values through shared memory.
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

// vendor_cuda.cuh, vendor_hip.cuh and the emulation's device.h each define:
//
//   KERNEL(name, Args, threads, min_blocks)   begins a kernel; its only argument is `const Args a`
//                                             (device/kernel_structs.py reads Args from the file)
//   INLINE                                    a function that is always inlined
//   SHARED(type, name, count)                 an array in shared memory, 16-byte aligned
//   DYNAMIC_SHARED(name)                      u8 *name: shared memory whose size the launch gives
//   block_barrier()                           __syncthreads()
//   block_index_x/y/z(), num_blocks_x(), thread_index(), num_threads()   int; thread blocks have one
//                                             dimension
//   lane_xor(value, mask), lane_read(value, source_lane)      shuffles of u32, i32, float or u64; all
//                                             lanes of the logical warp must call
//   dot4(a, b, sum)                           sum + the dot product of two vectors of four signed bytes
//   half_to_float(u32 low 16 bits), float_to_half(float) -> u16 (rounds to nearest even)
//   round_to_int(float)                       rounds to nearest even
//   load_weights16/8/4/2/1(pointer)           uint4/uint2/u32/u32/u32; constant memory that no running
//                                             kernel writes; may be cached and loaded before the wait
//   load_fresh16(pointer), load_fresh8, load_fresh4           data that a preceding kernel wrote
//   let_next_begin(), wait_for_previous()     programmatic dependent launch: a kernel may start while its
//                                             predecessor still runs; before wait_for_previous() it must
//                                             neither read what the predecessor writes nor write
//   previous_has_waited()                     marks that wait_for_previous() is not needed: the
//                                             predecessor called let_next_begin() after its own wait, and
//                                             this kernel touches only what kernels before that one wrote
//   atomic_add(u32 *, u32) -> u32 before      integers only: float sums would depend on the order
//   memory_fence_of_system()                  __threadfence_system(): any reader, on the host or another
//                                             device, that sees later writes also sees earlier ones
//   store_line(pointer, uint4), load_line(pointer) -> uint4   16 bytes, uncached, each aligned 8-byte
//                                             half as one access: for memory that other devices access
//   store_half_line(pointer, u32, u32)        8 of these bytes
//   store_word(u32 *, u32), load_word(const u32 *)            the same for 4 bytes
//   clock_ticks() -> u64                      a clock of constant rate, the same for all blocks
//   spin_pause()                              between two polls of memory that another thread will write
//   read_anew()                               a compiler barrier: loads from shared memory that follow are
//                                             not hoisted above it, which would spill registers
//   settle(float & or int &)                  an optimisation barrier: the value is computed here, and the
//                                             compiler knows nothing about it afterwards
//   assume(bool)                              a fact for the compiler's optimiser
//   CLEARS_ROWS                               attention clears the registers of rows that it loads in parts
//   MOST_TILE_REGISTERS                       a lane's registers for a tile that attention loads early
//   exp_fast(float), exp2_fast(float), log_fast(float), reciprocal_root(float), reciprocal(float)
//   exp_double(double)                        accurate to a few units in the last place

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

// Sum over `WIDTH` neighbouring lanes; each of them gets the same bits.
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
// Maximum over lanes. A NaN may be lost: max_of(NaN, b) is b.
template <int WIDTH = LANES>
INLINE float lanes_max(float value) {
#pragma unroll
    for (int mask = WIDTH / 2; mask; mask >>= 1) value = max_of(value, lane_xor(value, mask));
    return value;
}

// Maximum over the lanes of the warp.
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
// True in the lowest lane whose `holds` is true. All lanes must call.
#ifndef HAS_IS_FIRST_LANE
INLINE bool is_first_lane(bool holds) {
    const u32 found = lanes_largest(holds ? (u32)(LANES - lane_index()) : 0u);
    return holds && found == (u32)(LANES - lane_index());
}
#endif

// Loads, before wait_for_previous(), memory that the preceding kernel writes. The value may be
// outdated: use it only to prefetch, and check it after the wait.
#ifndef HAS_LOAD_EARLY
INLINE u32 load_early4(const void *p) { return *(const volatile u32 *)p; }
#endif
