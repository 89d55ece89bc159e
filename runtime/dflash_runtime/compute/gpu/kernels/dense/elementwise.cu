// Element-wise kernels between the products of a prompt chunk: gated, swiglu, add_bias, scale_rows,
// take_columns. Grid ceil(elements / THREADS): a thread per element of the result.
//
// Parameters: THREADS, GATE (0 sigmoid, 1 SiLU, 2 softplus).
#include "gates.cuh"

INLINE float fresh(const float *p) { return bits_to_float(load_fresh4(p)); }
INLINE i64 element_index() { return (i64)block_index_x() * THREADS + thread_index(); }

INLINE float gate_value(float g) {
    if constexpr (GATE == 0) return sigmoid(g);
    if constexpr (GATE == 1) return silu(g);
    return softplus(g);
}

// A view of columns of wider rows: column c of the view is column first + c / inner * stride + c % inner.
struct ColumnsOf {
    const float *values;
    i64 row_stride;
    int first, inner, stride;
};
INLINE float column(const ColumnsOf &of, i64 row, int c) {
    return fresh(of.values + row * of.row_stride + of.first + c / of.inner * of.stride + c % of.inner);
}

struct GatedArgs {
    const float *x;   // [T, C]
    ColumnsOf gate;   // [T, n]
    float *out;       // [T, C], may be x
    i64 num_elements;
    int num_columns;  // C
    int share;        // C / n: columns per gate
};
KERNEL(gated, GatedArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const i64 i = element_index();
    if (i >= a.num_elements) return;
    const int c = (int)(i % a.num_columns);
    a.out[i] = fresh(a.x + i) * gate_value(column(a.gate, i / a.num_columns, c / a.share));
}

struct SwigluArgs {
    const float *gate, *up;  // [n]
    float *out;              // [n], may be either
    i64 num_elements;
};
KERNEL(swiglu, SwigluArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const i64 i = element_index();
    if (i >= a.num_elements) return;
    const float g = fresh(a.gate + i);
    a.out[i] = silu(g) * fresh(a.up + i);
}

struct AddBiasArgs {
    const float *x;     // [T, C]
    const float *bias;  // [C]
    float *out;         // [T, C], may be x
    i64 num_elements;
    int num_columns;
};
KERNEL(add_bias, AddBiasArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const i64 i = element_index();
    if (i >= a.num_elements) return;
    a.out[i] = fresh(a.x + i) + bits_to_float(load_weights4(a.bias + i % a.num_columns));
}

struct ScaleRowsArgs {
    const float *x;        // [T, C]
    const float *factors;  // [T], or null: `factor` for all rows
    float *out;            // [T, C], may be x
    i64 num_elements;
    int num_columns;
    float factor;
};
KERNEL(scale_rows, ScaleRowsArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const i64 i = element_index();
    if (i >= a.num_elements) return;
    a.out[i] = fresh(a.x + i) * (a.factors ? fresh(a.factors + i / a.num_columns) : a.factor);
}

struct TakeColumnsArgs {
    ColumnsOf source;
    float *out;  // [T, C]
    i64 num_elements;
    int num_columns;
};
KERNEL(take_columns, TakeColumnsArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const i64 i = element_index();
    if (i >= a.num_elements) return;
    a.out[i] = column(a.source, i / a.num_columns, (int)(i % a.num_columns));
}
