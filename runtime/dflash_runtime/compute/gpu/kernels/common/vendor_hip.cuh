// What common.cuh lists, for AMD: gfx906 and newer, compiled by hipRTC or hipcc. A logical warp is a
// wavefront.
#pragma once

#if !defined(__HIPCC_RTC__)
#include <hip/hip_runtime.h>
#endif

#if defined(__AMDGCN_WAVEFRONT_SIZE) && __AMDGCN_WAVEFRONT_SIZE != LANES
#error "LANES must be the lanes of a wavefront"
#endif

#define INLINE __device__ inline __attribute__((always_inline))
#define KERNEL(NAME, ARGS, THREADS, MIN_BLOCKS) \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const ARGS a)
#define ALIGNED_16 __attribute__((aligned(16)))
#define SHARED(TYPE, NAME, COUNT) __shared__ ALIGNED_16 TYPE NAME[COUNT]
#define DYNAMIC_SHARED(NAME) extern __shared__ ALIGNED_16 u8 NAME[]

#include "vendor_both.cuh"

// Instead of __shfl and __shfl_xor, which also check that the other lane is in the same part of the
// wavefront; a logical warp is always a whole one. Source: AMD's instruction set manuals.
// DS_BPERMUTE_B32 takes the source lane as a byte address, four bytes per lane. DS_SWIZZLE_B32 encodes
// it in the instruction, without a register: five bits each for xor, or, and, within 32 lanes.
INLINE u32 word_read(u32 value, int source_lane) {
    return __builtin_amdgcn_ds_bpermute(source_lane << 2, value);
}
INLINE u32 word_xor(u32 value, int mask) {
#if __clang_major__ >= 17  // older versions do not unroll the loop over masks that calls this
    switch (mask) {
        case 1: return __builtin_amdgcn_ds_swizzle(value, 1 << 10 | 0x1F);
        case 2: return __builtin_amdgcn_ds_swizzle(value, 2 << 10 | 0x1F);
        case 4: return __builtin_amdgcn_ds_swizzle(value, 4 << 10 | 0x1F);
        case 8: return __builtin_amdgcn_ds_swizzle(value, 8 << 10 | 0x1F);
        case 16: return __builtin_amdgcn_ds_swizzle(value, 16 << 10 | 0x1F);
    }
#endif
    return word_read(value, __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)) ^ mask);
}
template <typename T, typename Of>
INLINE T word_by_word(T value, Of of) {
    static_assert(sizeof(T) % 4 == 0, "lanes exchange words");
    union {
        T whole;
        u32 words[sizeof(T) / 4];
    } both;
    both.whole = value;
#pragma unroll
    for (u32 &word : both.words) word = of(word);
    return both.whole;
}
template <typename T>
INLINE T lane_xor(T value, int mask) {
    return word_by_word(value, [=](u32 word) { return word_xor(word, mask); });
}
template <typename T>
INLINE T lane_read(T value, int source_lane) {
    return word_by_word(value, [=](u32 word) { return word_read(word, source_lane); });
}

// Which architecture has which dot product instruction; device/capabilities.py has the same table.
#if defined(__gfx906__) || defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx940__) || \
    defined(__gfx941__) || defined(__gfx942__) || defined(__gfx1011__) ||                       \
    defined(__gfx1012__) || defined(__gfx1030__) || defined(__gfx1031__) ||                     \
    defined(__gfx1032__) || defined(__gfx1033__) || defined(__gfx1034__) ||                     \
    defined(__gfx1035__) || defined(__gfx1036__)
INLINE int dot4(int a, int b, int sum) { return __builtin_amdgcn_sdot4(a, b, sum, false); }
#elif defined(__GFX11__) || defined(__GFX12__)
INLINE int dot4(int a, int b, int sum) {
    return __builtin_amdgcn_sudot4(true, a, true, b, sum, false);
}
#else
INLINE int dot4(int a, int b, int sum) {
#pragma unroll
    for (int byte = 0; byte < 4; byte++) sum += (i8)(a >> (8 * byte)) * (i8)(b >> (8 * byte));
    return sum;
}
#endif

union HalfBits {
    u16 bits;
    _Float16 value;
};
INLINE float half_to_float(u32 half) {
    HalfBits both;
    both.bits = (u16)half;
    return (float)both.value;
}
INLINE u16 float_to_half(float value) {
    HalfBits both;
    both.value = (_Float16)value;
    return both.bits;
}
INLINE int round_to_int(float value) { return (int)__builtin_rintf(value); }
INLINE float exp_fast(float value) { return __expf(value); }
INLINE float exp2_fast(float value) { return __builtin_exp2f(value); }
INLINE float log_fast(float value) { return __logf(value); }
INLINE double exp_double(double value) { return exp(value); }
INLINE float reciprocal_root(float value) { return rsqrtf(value); }
INLINE float reciprocal(float value) { return 1.0f / value; }

// Weights are read once, so they should not evict anything from the caches.
typedef u32 Words4 __attribute__((ext_vector_type(4)));
typedef u32 Words2 __attribute__((ext_vector_type(2)));
INLINE uint4 load_weights16(const void *p) {
    Words4 v = __builtin_nontemporal_load((const Words4 *)p);
    return make_uint4(v.x, v.y, v.z, v.w);
}
INLINE uint2 load_weights8(const void *p) {
    Words2 v = __builtin_nontemporal_load((const Words2 *)p);
    return make_uint2(v.x, v.y);
}
INLINE u32 load_weights4(const void *p) { return __builtin_nontemporal_load((const u32 *)p); }
INLINE u32 load_weights2(const void *p) { return __builtin_nontemporal_load((const u16 *)p); }
INLINE u32 load_weights1(const void *p) { return __builtin_nontemporal_load((const u8 *)p); }

// Bypasses the first-level cache, which is not coherent with writes of other blocks.
INLINE u64 load_past_cache(const void *p) {
    return __hip_atomic_load((const u64 *)p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
INLINE uint2 load_fresh8(const void *p) {
    u64 v = load_past_cache(p);
    return make_uint2((u32)v, (u32)(v >> 32));
}
INLINE uint4 load_fresh16(const void *p) {
    uint2 low = load_fresh8(p), high = load_fresh8((const u8 *)p + 8);
    return make_uint4(low.x, low.y, high.x, high.y);
}
INLINE u32 load_fresh4(const void *p) {
    return __hip_atomic_load((const u32 *)p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// HIP programming guide, memory model: accesses of system scope to fine-grained memory (memory that
// hipHostRegister maps, and memory of a peer) bypass caches that other devices do not see. An aligned
// 8-byte access is not torn.
INLINE void store_half_line(void *p, u32 low, u32 high) {
    __hip_atomic_store((u64 *)p, (u64)high << 32 | low, __ATOMIC_RELAXED,
                       __HIP_MEMORY_SCOPE_SYSTEM);
}
INLINE void store_line(void *p, uint4 v) {
    store_half_line(p, v.x, v.y);
    store_half_line((u8 *)p + 8, v.z, v.w);
}
INLINE u64 load_half_line(const void *p) {
    return __hip_atomic_load((const u64 *)p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
INLINE uint4 load_line(const void *p) {
    const u64 low = load_half_line(p), high = load_half_line((const u8 *)p + 8);
    return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
}
INLINE void store_word(u32 *p, u32 value) {
    __hip_atomic_store(p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
INLINE u32 load_word(const u32 *p) {
    return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
INLINE u64 clock_ticks() { return wall_clock64(); }
INLINE void spin_pause() { __builtin_amdgcn_s_sleep(1); }

// LLVM hoists loads out of loops and sinks sums to their uses until registers spill: hundreds of them in
// attention with heads of 128. These barriers stop it. `python -m bench.check_kernels --table` prints the
// registers of each kernel.
INLINE void read_anew() {
    asm volatile("" ::: "memory");
#if __has_builtin(__builtin_amdgcn_sched_barrier)
    __builtin_amdgcn_sched_barrier(0);
#endif
}
template <typename T>
INLINE void settle(T &value) { asm volatile("" : "+v"(value)); }
INLINE void assume(bool holds) { __builtin_assume(holds); }
constexpr bool CLEARS_ROWS = true;
constexpr int MOST_TILE_REGISTERS = 64;

// There is no programmatic dependent launch: a kernel starts when the one before it has ended.
INLINE void let_next_begin() {}
INLINE void wait_for_previous() {}
INLINE void previous_has_waited() {}
