// What CUDA and HIP name alike. Included by vendor_cuda.cuh and vendor_hip.cuh.
#pragma once

INLINE void block_barrier() { __syncthreads(); }
INLINE int block_index_x() { return blockIdx.x; }
INLINE int block_index_y() { return blockIdx.y; }
INLINE int block_index_z() { return blockIdx.z; }
INLINE int num_blocks_x() { return gridDim.x; }
INLINE int thread_index() { return threadIdx.x; }
INLINE int num_threads() { return blockDim.x; }

INLINE u32 atomic_add(u32 *p, u32 value) { return atomicAdd(p, value); }
INLINE void memory_fence_of_system() { __threadfence_system(); }
