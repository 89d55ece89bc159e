// Tensor cores: mma.m16n8k16 on halves, ldmatrix, and cp.async (asynchronous copies from global to
// shared memory).
//
// HAS_MMA is 1 where mma_f16 and load_matrix_x4 exist: on NVIDIA from compute capability 7.5 and in the
// emulation, with logical warps of 32. The copies exist everywhere; where the device has no
// asynchronous copies they are done at once.
//
// Fragments of mma_f16, d[16x8] += a[16x16] . b[16x8]. With g = lane / 4 and t = lane % 4, each
// register holds two neighbouring halves, lower k first:
//
//            k = 2t, 2t+1   k = 2t+8, 2t+9                    k = 2t, 2t+1   k = 2t+8, 2t+9
//   row g        a[0]           a[2]              column g        b[0]           b[1]
//   row g + 8    a[1]           a[3]
//                                                         column 2t    column 2t + 1
//                                             row g          d[0]          d[1]
//                                             row g + 8      d[2]          d[3]
//
// load_matrix_x4 reads four 8x8 matrices of halves from shared memory. Lane l passes the address of row
// l % 8 of matrix l / 8 (16 bytes, aligned to 16); r[i] receives columns 2t and 2t+1 of row g of matrix
// i. A row-major 16x16 tile becomes a[0..3] if the matrices are (rows 0-7, k 0-7), (rows 8-15, k 0-7),
// (rows 0-7, k 8-15), (rows 8-15, k 8-15). 16 rows of weights, k 16, become b[0], b[1] of rows 0-7 and
// then of rows 8-15 with (0-7, k 0-7), (0-7, k 8-15), (8-15, k 0-7), (8-15, k 8-15).
// load_matrix_x4_trans transposes each matrix: r[i] receives rows 2t and 2t+1 of column g.
#pragma once
#include "common.cuh"

// Packs two floats as halves, each rounded to nearest even.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
INLINE u32 floats_to_halves(float low, float high) {
    u32 halves;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
    return halves;
}
#else
INLINE u32 floats_to_halves(float low, float high) {
    return float_to_half(low) | (u32)float_to_half(high) << 16;
}
#endif

#if LANES == 32 && (defined(DFLASH_HOST) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750))
#define HAS_MMA 1
#else
#define HAS_MMA 0
#endif

#if defined(DFLASH_HOST)
// Emulation. Lanes are fibers of one thread: between two lane exchanges each may read the variables
// whose addresses the others have published.
INLINE const void **shown_addresses() {
    static const void *addresses[1024];
    return addresses + (thread_index() - lane_index());
}
INLINE void lanes_meet() { lane_xor((u32)0, 0); }
INLINE const void **show_address(const void *p) {
    shown_addresses()[lane_index()] = p;
    lanes_meet();
    return shown_addresses();
}

// A lane shows its fragments as floats, so that each half is converted once; a row's twice, for both
// columns. By parity: a lane may be one exchange ahead of another, which still reads.
INLINE void mma_f16(float d[4], const u32 a[4], const u32 b[2]) {
    typedef float Four __attribute__((vector_size(16)));
    struct Fragments { Four a[2][2]; float b[2][2]; };
    static Fragments shown[2][1024];
    const int g = lane_index() / 4, t = lane_index() % 4;
    Fragments *all = shown[emulated::current_fiber().num_exchanges & 1] +
                     (thread_index() - lane_index());
    for (int upper = 0; upper < 2; upper++) {
        for (int half = 0; half < 2; half++) {
            const float row = half_to_float(a[2 * upper] >> (16 * half) & 0xffff);
            const float below = half_to_float(a[2 * upper + 1] >> (16 * half) & 0xffff);
            all[lane_index()].a[upper][half] = Four{row, row, below, below};
            all[lane_index()].b[upper][half] = half_to_float(b[upper] >> (16 * half) & 0xffff);
        }
    }
    lanes_meet();
    Four sums = {d[0], d[1], d[2], d[3]};
    for (int upper = 0; upper < 2; upper++) {
        for (int lane = 0; lane < 4; lane++) {
            const Fragments &row = all[4 * g + lane];
            const Fragments &left = all[8 * t + lane], &right = all[8 * t + 4 + lane];
            for (int half = 0; half < 2; half++) {
                const float l = left.b[upper][half], r = right.b[upper][half];
                sums += row.a[upper][half] * Four{l, r, l, r};
            }
        }
    }
    for (int i = 0; i < 4; i++) d[i] = sums[i];
}

INLINE void load_matrix_x4(u32 r[4], const void *row) {
    const void **rows = show_address(row);
    for (int i = 0; i < 4; i++)
        r[i] = ((const u32 *)rows[8 * i + lane_index() / 4])[lane_index() % 4];
    lanes_meet();
}
INLINE void load_matrix_x4_trans(u32 r[4], const void *row) {
    const void **rows = show_address(row);
    const int column = lane_index() / 4, first = 2 * (lane_index() % 4);
    for (int i = 0; i < 4; i++)
        r[i] = ((const u16 *)rows[8 * i + first])[column] |
               (u32)((const u16 *)rows[8 * i + first + 1])[column] << 16;
    lanes_meet();
}

// The emulation copies as late as the rules allow, in copy_async_wait, or with -DCOPY_EARLY=1 as early
// as they allow. Run both ways, tests find a missing wait and a target that is still being read.
struct HostCopies {
    struct Copy { void *shared; const void *global; bool is_valid; u32 group; };
    enum { MAX_COPIES = 512 };
    Copy pending[MAX_COPIES];
    u32 num_pending, group;
    u64 generation;  // of the block; copies that an earlier block left are dropped
};
INLINE HostCopies &host_copies() {
    static HostCopies all[1024];
    HostCopies &copies = all[thread_index()];
    if (copies.generation != emulated::block.generation) {
        copies.generation = emulated::block.generation;
        copies.num_pending = copies.group = 0;
    }
    return copies;
}
INLINE void host_copy(const HostCopies::Copy &copy) {
    uint4 bytes = {0, 0, 0, 0};
    if (copy.is_valid) bytes = load_fresh16(copy.global);
    *(uint4 *)copy.shared = bytes;
}
INLINE void copy_async16(void *shared, const void *global, bool is_valid) {
    HostCopies &all = host_copies();
    const HostCopies::Copy copy = {shared, global, is_valid, all.group};
#if defined(COPY_EARLY) && COPY_EARLY
    host_copy(copy);
#else
    if (all.num_pending == HostCopies::MAX_COPIES) emulated::fail("has too many copies under way");
    all.pending[all.num_pending++] = copy;
#endif
}
INLINE void copy_async_commit() { host_copies().group++; }
template <int N>
INLINE void copy_async_wait() {
    HostCopies &all = host_copies();
    u32 num_left = 0;
    for (u32 i = 0; i < all.num_pending; i++) {
        if (all.group - all.pending[i].group > (u32)N) host_copy(all.pending[i]);
        else all.pending[num_left++] = all.pending[i];
    }
    all.num_pending = num_left;
}
#define HAS_ASYNC_COPY 1
#else

#if HAS_MMA
INLINE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

INLINE void mma_f16(float d[4], const u32 a[4], const u32 b[2]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
    for (int half = 0; half < 2; half++)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#endif
}

INLINE void load_matrix_x4(u32 r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)) : "memory");
}
INLINE void load_matrix_x4_trans(u32 r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)) : "memory");
}
#endif

// Copies 16 bytes from global to shared memory; writes zeros, without reading, if not valid. The thread
// itself sees them after copy_async_wait, other threads after a barrier that follows. A thread's copies
// up to copy_async_commit form a group; copy_async_wait<N> waits until at most the N youngest groups
// are in flight.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
INLINE void copy_async16(void *shared, const void *global, bool is_valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     (u32)__cvta_generic_to_shared(shared)),
                 "l"(global), "r"(is_valid ? 16 : 0) : "memory");
}
INLINE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
INLINE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
#define HAS_ASYNC_COPY 1
#else
#define HAS_ASYNC_COPY 0
INLINE void copy_async16(void *shared, const void *global, bool is_valid) {
    uint4 bytes = make_uint4(0, 0, 0, 0);
    if (is_valid) bytes = load_fresh16(global);
    *(uint4 *)shared = bytes;
}
INLINE void copy_async_commit() {}
template <int N>
INLINE void copy_async_wait() {}
#endif

#endif

// COUNT copies; the i-th is from global(i) to shared(i) if is_valid(i). Without asynchronous copies all
// loads are issued before the first store, so that they overlap.
template <int COUNT, class Shared, class Global, class IsValid>
INLINE void copy_async16_each(
    const Shared &shared, const Global &global, const IsValid &is_valid) {
#if HAS_ASYNC_COPY
#pragma unroll
    for (int i = 0; i < COUNT; i++) copy_async16(shared(i), global(i), is_valid(i));
#else
    uint4 bytes[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        bytes[i] = make_uint4(0, 0, 0, 0);
        if (is_valid(i)) bytes[i] = load_fresh16(global(i));
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) *(uint4 *)shared(i) = bytes[i];
#endif
}
