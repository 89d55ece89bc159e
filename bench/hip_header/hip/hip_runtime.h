// As much of HIP's own header as our kernels use, for a compiler without HIP: clang knows the
// language and the mathematics, this is the rest. Written after the headers of ROCm, so that what
// is compiled is what they would have it be.
#pragma once

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
// Without it a block may have 1,024 threads, and has the registers of that.
#define __launch_bounds__(THREADS) __attribute__((amdgpu_flat_work_group_size(1, THREADS)))

// The mathematics of clang, without the headers of C that it would have otherwise.
#define __HIPCC_RTC__
#include <__clang_hip_runtime_wrapper.h>
#undef __HIPCC_RTC__

#define HIP_FUNCTION static __device__ inline __attribute__((always_inline))

struct Index3 {
    unsigned x, y, z;
};
HIP_FUNCTION Index3 hip_thread() {
    return {__builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(),
            __builtin_amdgcn_workitem_id_z()};
}
HIP_FUNCTION Index3 hip_block() {
    return {__builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(),
            __builtin_amdgcn_workgroup_id_z()};
}
// Blocks are whole: threads of all by threads of each.
HIP_FUNCTION Index3 hip_threads() {
    return {__builtin_amdgcn_workgroup_size_x(), __builtin_amdgcn_workgroup_size_y(),
            __builtin_amdgcn_workgroup_size_z()};
}
HIP_FUNCTION Index3 hip_blocks() {
    const Index3 block = hip_threads();
    return {__builtin_amdgcn_grid_size_x() / block.x, __builtin_amdgcn_grid_size_y() / block.y,
            __builtin_amdgcn_grid_size_z() / block.z};
}
#define threadIdx hip_thread()
#define blockIdx hip_block()
#define blockDim hip_threads()
#define gridDim hip_blocks()

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
HIP_FUNCTION uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
HIP_FUNCTION uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
HIP_FUNCTION float2 make_float2(float x, float y) { return {x, y}; }
HIP_FUNCTION float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

HIP_FUNCTION unsigned hip_lane() {
    return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
}
template <typename T>
HIP_FUNCTION T hip_permute(T value, int lane) {
    static_assert(sizeof(T) % sizeof(int) == 0, "lanes exchange words");
    int words[sizeof(T) / sizeof(int)];
    __builtin_memcpy(words, &value, sizeof(T));
    for (int &word : words) word = __builtin_amdgcn_ds_bpermute(lane << 2, word);
    __builtin_memcpy(&value, words, sizeof(T));
    return value;
}
template <typename T>
HIP_FUNCTION T __shfl(T value, int source_lane, int width) {
    return hip_permute(value, (source_lane & (width - 1)) + (hip_lane() & ~(width - 1)));
}
template <typename T>
HIP_FUNCTION T __shfl_xor(T value, int mask, int width) {
    const int self = hip_lane(), other = self ^ mask;
    return hip_permute(value, other >= ((self + width) & ~(width - 1)) ? self : other);
}

HIP_FUNCTION void __syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
HIP_FUNCTION void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
HIP_FUNCTION void __threadfence_system() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }
HIP_FUNCTION unsigned atomicAdd(unsigned *p, unsigned value) {
    return __hip_atomic_fetch_add(p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
// ROCm asks the device library for the same.
HIP_FUNCTION unsigned long long wall_clock64() {
#if defined(__GFX11__) || defined(__GFX12__)
    return __builtin_amdgcn_s_sendmsg_rtnl(0x83);
#else
    return __builtin_amdgcn_s_memrealtime();
#endif
}
