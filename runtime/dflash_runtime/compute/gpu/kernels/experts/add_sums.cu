// add_sums: adds the float64 sums of one or two owners of experts to the residual, rounded once.
// add_rows: adds two float arrays. Grid ceil(elements / THREADS): a thread per element.
//
// Parameters: THREADS.
#include "common.cuh"

INLINE float fresh(const float *p) { return bits_to_float(load_fresh4(p)); }

struct AddSumsArgs {
    const double *sums;   // [n]
    const double *more;   // [n], a second owner's sums; null: none
    float *residual;      // [n], added to in place
    i64 num_elements;
};

KERNEL(add_sums, AddSumsArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const i64 i = (i64)block_index_x() * THREADS + thread_index();
    if (i >= a.num_elements) return;
    a.residual[i] += (float)(a.sums[i] + (a.more ? a.more[i] : 0.0));
}

struct AddRowsArgs {
    const float *x;  // [n]
    const float *y;
    float *out;  // may be x or y
    i64 num_elements;
};

KERNEL(add_rows, AddRowsArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const i64 i = (i64)block_index_x() * THREADS + thread_index();
    if (i < a.num_elements) a.out[i] = fresh(a.x + i) + fresh(a.y + i);
}
