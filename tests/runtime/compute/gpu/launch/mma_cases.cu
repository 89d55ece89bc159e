// For test_mma.py: one warp, one use of everything in mma.cuh.
// One module has all cases: a module takes longer to compile than to run.
#include "mma.cuh"

struct MmaArgs {
    const u16 *a, *b;   // [16, 16] and [8, 16], or if it is transposed [16, 8], row after row
    float *d;           // [16, 8], added to
    int is_transposed;
};

KERNEL(multiply, MmaArgs, 32, 1) {
    SHARED(u16, a_tile, 16 * 16);
    SHARED(u16, b_tile, 16 * 16);
    wait_for_previous();
    const int lane = lane_index();
    copy_async16(a_tile + 8 * lane, a.a + 8 * lane, true);
    copy_async16(b_tile + 8 * lane, a.b + 8 * lane, lane < 16);
    copy_async_commit();
    copy_async_wait<0>();
    block_barrier();
    u32 fragment_a[4], fragment_b[4];
    load_matrix_x4(fragment_a, a_tile + 16 * (lane % 16) + lane / 16 * 8);
    if (a.is_transposed) load_matrix_x4_trans(fragment_b, b_tile + 8 * (lane % 16));
    else load_matrix_x4(fragment_b, b_tile + 16 * (lane % 8) + lane / 8 % 2 * 8);
    const int g = lane / 4, t = lane % 4;
    float d[4] = {a.d[8 * g + 2 * t], a.d[8 * g + 2 * t + 1], a.d[8 * (g + 8) + 2 * t],
                  a.d[8 * (g + 8) + 2 * t + 1]};
    mma_f16(d, fragment_a, fragment_b);
    for (int i = 0; i < 4; i++) a.d[8 * (g + i / 2 * 8) + 2 * t + i % 2] = d[i];
}

struct CopyArgs {
    const u32 *source;  // [3, 32, 4]
    u32 *seen;          // [3, 32, 4]: what a thread sees after waiting for all but two groups, …
    int is_mistaken;
};

KERNEL(copy_in_groups, CopyArgs, 32, 1) {
    SHARED(u32, places, 3 * 32 * 4);
    wait_for_previous();
    const int thread = thread_index();
    for (int group = 0; group < 3; group++) {
        u32 *place = places + 128 * group + 4 * thread;
        copy_async16(place, a.source + 128 * group + 4 * thread, thread % 3 != group);
        copy_async_commit();
    }
    const u32 *mine = places + 4 * thread;
    copy_async_wait<2>();
    for (int i = 0; i < 4; i++) a.seen[4 * thread + i] = mine[i];
    if (a.is_mistaken) copy_async_wait<2>();
    else copy_async_wait<1>();
    for (int i = 0; i < 4; i++) a.seen[128 + 4 * thread + i] = mine[128 + i];
    copy_async_wait<0>();
    for (int i = 0; i < 4; i++) a.seen[256 + 4 * thread + i] = mine[256 + i];
}
