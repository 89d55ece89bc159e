// What common.cuh lists, for the emulation: kernels run as C++ on the host, without a GPU.
#pragma once

#include "scheduler.h"

// Declared here: C++'s <math.h> costs more time than most kernels take to compile.
extern "C" {
double exp(double) noexcept;
float expf(float) noexcept;
float exp2f(float) noexcept;
float fmaf(float, float, float) noexcept;
float logf(float) noexcept;
float rintf(float) noexcept;
float sqrtf(float) noexcept;
void *memcpy(void *, const void *, decltype(sizeof 0)) noexcept;
}

// Not always inlined: each copy would be compiled again.
#define INLINE inline

// NAME_launch runs the kernel; NAME_args_bytes is the size that Python's mirror of Args must have.
#define KERNEL(NAME, ARGS, THREADS, MIN_BLOCKS)                                               \
    static void NAME(const ARGS a);                                                           \
    static_assert((THREADS) <= emulated::max_threads && (MIN_BLOCKS) >= 1, "launch bounds");   \
    extern "C" __attribute__((visibility("default"))) u64 NAME##_args_bytes() {               \
        return sizeof(ARGS);                                                                  \
    }                                                                                         \
    extern "C" __attribute__((visibility("default"))) const char *NAME##_launch(              \
        const emulated::Launch *launch) {                                                     \
        auto call = [](const void *args) { NAME(*(const ARGS *)args); };                      \
        return emulated::run(#NAME, THREADS, call, launch);                                   \
    }                                                                                         \
    static void NAME([[maybe_unused]] const ARGS a)

#define SHARED(TYPE, NAME, COUNT)             \
    static emulated::SharedSlot NAME##_slot;  \
    TYPE(&NAME)[COUNT] = *(TYPE(*)[COUNT])NAME##_slot.bytes(sizeof(TYPE[COUNT]))
#define DYNAMIC_SHARED(NAME) u8 *const NAME = emulated::block.dynamic_shared

// Macros, so that errors name the line of the kernel.
#define block_barrier() emulated::barrier(__FILE__, __LINE__)
#define lane_xor(value, mask) \
    emulated::exchange(value, (lane_index() ^ (mask)) % LANES, __FILE__, __LINE__)
#define lane_read(value, source_lane) \
    emulated::exchange(value, (int)((u32)(source_lane) % LANES), __FILE__, __LINE__)

INLINE int block_index_x() { return emulated::block.index_x; }
INLINE int block_index_y() { return emulated::block.index_y; }
INLINE int block_index_z() { return emulated::block.index_z; }
INLINE int num_blocks_x() { return emulated::block.launch->grid_x; }
INLINE int thread_index() { return emulated::block.current; }
INLINE int num_threads() { return emulated::block.launch->num_threads; }

struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
INLINE int2 make_int2(int x, int y) { return {x, y}; }
INLINE int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
INLINE uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
INLINE uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
INLINE float2 make_float2(float x, float y) { return {x, y}; }
INLINE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

INLINE int dot4(int a, int b, int sum) {
    for (int byte = 0; byte < 4; byte++) sum += (i8)(a >> (8 * byte)) * (i8)(b >> (8 * byte));
    return sum;
}

#if defined(__F16C__)
typedef short halves8 __attribute__((vector_size(16)));
inline float half_to_float(u32 half) {
    return __builtin_ia32_vcvtph2ps(halves8{(short)half})[0];
}
#else
inline float half_to_float(u32 half) {
    u32 sign = (half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3FF, bits;
    if (exponent == 31) bits = 0x7F800000 | fraction << 13;
    else if (exponent) bits = (exponent + 112) << 23 | fraction << 13;
    else {
        float value = (float)fraction * 0x1p-24f;  // subnormal: exact
        memcpy(&bits, &value, 4);
    }
    bits |= sign;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
#endif

inline u16 float_to_half(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    u32 sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return (u16)(sign | 0x7FFF);  // NaN
    if (magnitude >= 0x477FF000) return (u16)(sign | 0x7C00);  // rounds to infinity
    if (magnitude < 0x38800000) {  // subnormal: counted in units of 2^-24, as rintf rounds to even
        float size;
        memcpy(&size, &magnitude, 4);
        return (u16)(sign | (u32)rintf(size * 0x1p24f));
    }
    u32 odd = magnitude >> 13 & 1;
    return (u16)(sign | ((magnitude - 0x38000000 + 0xFFF + odd) >> 13));
}

// As GPUs convert: saturating, and NaN gives 0.
INLINE int round_to_int(float value) {
    if (value != value) return 0;
    if (value >= 0x1p31f) return 0x7FFFFFFF;
    if (value < -0x1p31f) return -0x7FFFFFFF - 1;
    return (int)rintf(value);
}
INLINE float exp_fast(float value) { return expf(value); }
INLINE float exp2_fast(float value) { return exp2f(value); }
INLINE float log_fast(float value) { return logf(value); }
INLINE double exp_double(double value) { return exp(value); }
INLINE float reciprocal_root(float value) { return 1.0f / sqrtf(value); }
INLINE float reciprocal(float value) { return 1.0f / value; }

template <typename T>
INLINE T loaded(const void *pointer) {
    T value;
    memcpy(&value, pointer, sizeof value);
    return value;
}
template <typename T>
INLINE T loaded_weights(const void *pointer) {
    emulated::check_read(pointer, sizeof(T), sizeof(T));
    return loaded<T>(pointer);
}
template <typename T>
INLINE T loaded_fresh(const void *pointer) {
    emulated::check_fresh_read(pointer, sizeof(T));
    return loaded<T>(pointer);
}
INLINE uint4 load_weights16(const void *p) { return loaded_weights<uint4>(p); }
INLINE uint2 load_weights8(const void *p) { return loaded_weights<uint2>(p); }
INLINE u32 load_weights4(const void *p) { return loaded_weights<u32>(p); }
INLINE u32 load_weights2(const void *p) { return loaded_weights<u16>(p); }
INLINE u32 load_weights1(const void *p) { return loaded_weights<u8>(p); }
INLINE uint4 load_fresh16(const void *p) { return loaded_fresh<uint4>(p); }
INLINE uint2 load_fresh8(const void *p) { return loaded_fresh<uint2>(p); }
INLINE u32 load_fresh4(const void *p) { return loaded_fresh<u32>(p); }

// Memory that other threads or processes of the host access too.
INLINE void store_half_line(void *p, u32 low, u32 high) {
    emulated::check_read(p, 8, 8);
    __atomic_store_n((u64 *)p, (u64)high << 32 | low, __ATOMIC_RELAXED);
}
INLINE void store_line(void *p, uint4 v) {
    emulated::check_read(p, 16, 16);
    store_half_line(p, v.x, v.y);
    store_half_line((u8 *)p + 8, v.z, v.w);
}
INLINE uint4 load_line(const void *p) {
    emulated::check_fresh_read(p, 16);
    u64 halves[2];
    for (int i = 0; i < 2; i++) halves[i] = __atomic_load_n((const u64 *)p + i, __ATOMIC_RELAXED);
    return {(u32)halves[0], (u32)(halves[0] >> 32), (u32)halves[1], (u32)(halves[1] >> 32)};
}
INLINE void store_word(u32 *p, u32 value) {
    emulated::check_read(p, 4, 4);
    __atomic_store_n(p, value, __ATOMIC_RELAXED);
}
INLINE u32 load_word(const u32 *p) {
    emulated::check_fresh_read(p, 4);
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
INLINE u64 clock_ticks() { return emulated::clock_ns(); }
INLINE void spin_pause() { emulated::spin_pause(); }

// As in vendor_hip.cuh.
INLINE void read_anew() {}
template <typename T>
INLINE void settle(T &) {}
INLINE void assume(bool holds) {
    if (!holds) emulated::fail("assumes what does not hold");
}
constexpr bool CLEARS_ROWS = true;
constexpr int MOST_TILE_REGISTERS = 64;

INLINE void let_next_begin() {}
INLINE void wait_for_previous() { emulated::current_fiber().has_waited = true; }
INLINE void previous_has_waited() { wait_for_previous(); }
INLINE u32 atomic_add(u32 *p, u32 value) {
    emulated::check_read(p, 4, 4);
    u32 before = *p;
    *p = before + value;
    return before;
}
INLINE void memory_fence_of_system() {}
