// What common.cuh lists, for NVIDIA: compute capability 6.1 and newer, compiled by NVRTC or nvcc.
#pragma once

#define INLINE __device__ __forceinline__
// A block has 15 named barriers beside barrier 0, one for each logical warp of 64 lanes.
#define KERNEL(NAME, ARGS, THREADS, MIN_BLOCKS)                                          \
    static_assert(LANES == 32 || (THREADS) <= 15 * 64, "too many logical warps");        \
    extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) NAME(const ARGS a)
#define SHARED(TYPE, NAME, COUNT) __shared__ __align__(16) TYPE NAME[COUNT]
#define DYNAMIC_SHARED(NAME) extern __shared__ __align__(16) u8 NAME[]

#include "vendor_both.cuh"

#if LANES == 32
template <typename T>
INLINE T lane_xor(T value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
template <typename T>
INLINE T lane_read(T value, int source_lane) { return __shfl_sync(~0u, value, source_lane); }
#if __CUDA_ARCH__ >= 800
#define HAS_LANES_LARGEST
INLINE u32 lanes_largest(u32 value) { return __reduce_max_sync(~0u, value); }
#endif
#define HAS_IS_FIRST_LANE
INLINE bool is_first_lane(bool holds) {
    u32 lower;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(lower));
    const u32 all = __ballot_sync(~0u, holds);  // called by every lane, whatever `holds` is
    return holds && !(all & lower);
}
#else
// Two warps make one logical warp: values go through shared memory, between barriers of 64 threads.
INLINE u64 *exchange_slots() {
    __shared__ u64 slots[1024];
    return slots + (threadIdx.x & ~63u);
}
INLINE void logical_warp_barrier() {
    asm volatile("bar.sync %0, 64;" ::"r"((threadIdx.x >> 6) + 1) : "memory");
}
template <typename T>
INLINE T exchange(T value, int source_lane) {
    u64 *slots = exchange_slots();
    *(T *)(slots + (threadIdx.x & 63)) = value;
    logical_warp_barrier();
    T other = *(T *)(slots + source_lane);
    logical_warp_barrier();
    return other;
}
template <typename T>
INLINE T lane_xor(T value, int mask) { return exchange(value, (threadIdx.x & 63) ^ mask); }
template <typename T>
INLINE T lane_read(T value, int source_lane) { return exchange(value, source_lane & 63); }
#endif

INLINE int dot4(int a, int b, int sum) { return __dp4a(a, b, sum); }
INLINE float half_to_float(u32 half) {
    float value;
    asm("{.reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t;}" : "=f"(value) : "r"(half));
    return value;
}
INLINE u16 float_to_half(float value) {
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}
INLINE int round_to_int(float value) { return __float2int_rn(value); }
INLINE float exp_fast(float value) { return __expf(value); }
INLINE float exp2_fast(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}
INLINE float log_fast(float value) { return __logf(value); }
INLINE double exp_double(double value) { return exp(value); }
INLINE float reciprocal_root(float value) { return rsqrtf(value); }
INLINE float reciprocal(float value) { return __frcp_rn(value); }

// Conversions of integers take longer than additions: the byte becomes the lowest bits of a float from 2^23
// on, which is then subtracted.
#define HAS_SIGNED_BYTE
INLINE float signed_byte(u32 word, int index) {
    const u32 bits = __byte_perm(word ^ 0x80808080u, 0x4b000000u, 0x7440u | index);
    return __uint_as_float(bits) - 8388736.0f;
}
#define HAS_PERMUTE_BYTES
INLINE u32 permute_bytes(u32 a, u32 b, u32 selector) {
    return __byte_perm(a, b, selector & 0x7777u);
}

// Weights are read once, so they should not evict anything from the L1 cache. Where each thread reads a
// row of its own, several loads are of the same 32 bytes: WEIGHTS_IN_L1.
#if __CUDA_ARCH__ >= 700 && !defined(WEIGHTS_IN_L1)
#define LOAD_WEIGHTS "ld.global.nc.L1::no_allocate"
#else
#define LOAD_WEIGHTS "ld.global.nc"
#endif
INLINE uint4 load_weights16(const void *p) {
    uint4 v;
    asm volatile(LOAD_WEIGHTS ".v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
INLINE uint2 load_weights8(const void *p) {
    uint2 v;
    asm volatile(LOAD_WEIGHTS ".v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
INLINE u32 load_weights4(const void *p) {
    u32 v;
    asm volatile(LOAD_WEIGHTS ".u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
INLINE u32 load_weights2(const void *p) {
    u16 v;
    asm volatile(LOAD_WEIGHTS ".u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
INLINE u32 load_weights1(const void *p) {
    u32 v;
    asm volatile(LOAD_WEIGHTS ".u8 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// Never through the read-only path: the kernel that writes the data may still run when this one starts.
INLINE uint4 load_fresh16(const void *p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
INLINE uint2 load_fresh8(const void *p) {
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}
INLINE u32 load_fresh4(const void *p) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
#define HAS_LOAD_EARLY
INLINE u32 load_early4(const void *p) { return load_fresh4(p); }

// PTX ISA, memory consistency model: volatile accesses are relaxed at system scope, and a vector access
// counts as one access per element. That 8-byte halves are not torn is what NCCL's LL protocol relies on.
INLINE void store_line(void *p, uint4 v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};"
                 :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
INLINE void store_half_line(void *p, u32 low, u32 high) {
    asm volatile("st.volatile.global.v2.u32 [%0], {%1,%2};" :: "l"(p), "r"(low), "r"(high) : "memory");
}
INLINE uint4 load_line(const void *p) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
INLINE void store_word(u32 *p, u32 value) { *(volatile u32 *)p = value; }
INLINE u32 load_word(const u32 *p) { return *(const volatile u32 *)p; }
INLINE u64 clock_ticks() {
    u64 ticks;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ticks));
    return ticks;
}
INLINE void spin_pause() {
#if __CUDA_ARCH__ >= 700
    asm volatile("nanosleep.u32 20;");  // leaves memory bandwidth to the awaited writer
#endif
}

// ptxas schedules loads within the register limit by itself, so these do nothing here.
INLINE void read_anew() {}
template <typename T>
INLINE void settle(T &) {}
INLINE void assume(bool) {}
constexpr bool CLEARS_ROWS = false;
constexpr int MOST_TILE_REGISTERS = 256;

INLINE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
INLINE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
INLINE void previous_has_waited() {}
