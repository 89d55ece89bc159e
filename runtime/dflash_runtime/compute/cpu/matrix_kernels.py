"""Kernels over the rows of matrices: linear, embed, and the routed experts' FFN.

A row is expanded once for all the vectors it meets. A product's bits depend on its row and vector
alone (see rows_dense), so they are the same for one token or many, and for any range of rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from dflash_protocol.ids import F32Array, F64Array, I32Array, I64Array
from dflash_runtime.compute.cpu import vector as v
from dflash_runtime.compute.cpu.compiling import Kernel, compile_kernel, helper
from dflash_runtime.compute.cpu.matrix import (
    COLUMNS,
    DOT,
    DOT_F32,
    DOT_F32_BY_4,
    EXPAND,
    ROW_BYTES,
)
from dflash_runtime.compute.cpu.untyped import types

ITEMS_AT_ONCE = 64
"""Vectors that one expanded row meets before the next row: few enough to stay in the L2 cache."""

GATE_UP, DOWN = 1, 2
"""Stages of the expert FFN, to be added: the second needs all rows of the first."""


@helper
def _multiply_rows(
    weights: int,
    layout: I64Array,
    first_row: int,
    end_row: int,
    x: int,
    x_stride: int,
    indices: int,
    first_item: int,
    end_item: int,
    out: int,
    out_stride: int,
    scratch: int,
) -> None:
    """``out[item, row] = weights[row] · x[indices[item]]``, or ``x[item]`` if `indices` is 0.

    `scratch` has room for one row of float32. Strides are bytes.
    """
    row_bytes, columns = layout[ROW_BYTES], layout[COLUMNS]
    expand, dot = layout[EXPAND], layout[DOT]
    dot_f32, dot_f32_by_4 = layout[DOT_F32], layout[DOT_F32_BY_4]
    if dot != 0 and end_item - first_item == 1:
        only = x + x_stride * (v.load_i32(indices + 4 * first_item) if indices else first_item)
        for row in range(first_row, end_row):
            product = v.call_dot(dot, weights + row * row_bytes, columns, only)
            v.store_float(out + first_item * out_stride + 4 * row, product)
        return
    for first in range(first_item, end_item, ITEMS_AT_ONCE):
        end = min(first + ITEMS_AT_ONCE, end_item)
        for row in range(first_row, end_row):
            values = weights + row * row_bytes
            if expand != 0:
                v.call_expand(expand, values, columns, scratch)
                values = scratch
            place = out + first * out_stride + 4 * row
            item = first
            while item + 4 <= end:
                if indices:
                    x0 = x + x_stride * v.load_i32(indices + 4 * item)
                    x1 = x + x_stride * v.load_i32(indices + 4 * item + 4)
                    x2 = x + x_stride * v.load_i32(indices + 4 * item + 8)
                    x3 = x + x_stride * v.load_i32(indices + 4 * item + 12)
                else:
                    x0 = x + x_stride * item
                    x1 = x0 + x_stride
                    x2 = x1 + x_stride
                    x3 = x2 + x_stride
                v.call_dot_by_4(dot_f32_by_4, values, columns, x0, x1, x2, x3, place, out_stride)
                place += 4 * out_stride
                item += 4
            while item < end:
                x0 = x + x_stride * (v.load_i32(indices + 4 * item) if indices else item)
                v.store_float(place, v.call_dot(dot_f32, values, columns, x0))
                place += out_stride
                item += 1


def _linear(
    x: F32Array,
    weights: int,
    layout: I64Array,
    first_row: int,
    end_row: int,
    out: F32Array,
    scratch: F32Array,
) -> None:
    """Shapes: x [T, columns]; out [T, rows]; scratch [columns]."""
    _multiply_rows(
        weights,
        layout,
        first_row,
        end_row,
        v.address_of(x),
        4 * x.shape[1],
        0,
        0,
        x.shape[0],
        v.address_of(out),
        4 * out.shape[1],
        v.address_of(scratch),
    )


def _embed(
    token_ids: I32Array, weights: int, expand: int, row_bytes: int, rows: int, out: F32Array
) -> int:
    """The first place whose id is no row, or -1. Shapes: token_ids [T]; out [T, columns]."""
    columns = out.shape[1]
    for token in range(token_ids.shape[0]):
        row = token_ids[token]
        if row < 0 or row >= rows:
            return token
        place = v.address_of(out) + 4 * token * columns
        v.call_expand(expand, weights + row * row_bytes, columns, place)
    return -1


def _expert_ffn(
    stages: int,
    hidden: F32Array,
    expert_ids: I32Array,
    group_starts: I32Array,
    token_indices: I32Array,
    pair_weights: F32Array,
    addresses: I64Array,
    layouts: I64Array,
    first_row: int,
    end_row: int,
    activations: F32Array,
    terms: F32Array,
    scratch: F32Array,
    out: F64Array,
) -> bool:
    """Rows first_row … end_row - 1 of every group: of gate and up, or of down. False: bad indices.

    ``activations[0]`` takes the gates and then ``silu(gate) * up``, ``activations[1]`` the ups.
    A row of `out` gets its terms in the order of the pairs, whoever computes which rows.
    Shapes: hidden [T, H]; expert_ids [G]; group_starts [G+1]; token_indices, pair_weights [P];
    addresses [E, 3]; layouts [3, NUM_FIELDS]; activations [2, P, F]; terms [ITEMS_AT_ONCE, H];
    scratch [max(H, F)]; out [T, H].
    """
    num_groups, num_pairs = expert_ids.shape[0], token_indices.shape[0]
    # Cheap beside the products, and a bug elsewhere cannot make us read outside the mapping.
    if group_starts[0] != 0 or group_starts[num_groups] != num_pairs:
        return False
    for group in range(num_groups):
        if expert_ids[group] < 0 or expert_ids[group] >= addresses.shape[0]:
            return False
        if group_starts[group] > group_starts[group + 1]:
            return False
    for pair in range(num_pairs):
        if token_indices[pair] < 0 or token_indices[pair] >= hidden.shape[0]:
            return False
    hidden_stride, ffn_stride = 4 * hidden.shape[1], 4 * activations.shape[2]
    gates, ups = v.address_of(activations), v.address_of(activations) + num_pairs * ffn_stride
    rows = v.address_of(scratch)
    if stages & GATE_UP:
        for group in range(num_groups):
            expert = expert_ids[group]
            first, end = group_starts[group], group_starts[group + 1]
            for projection in range(2):
                _multiply_rows(
                    addresses[expert, projection],
                    layouts[projection],
                    first_row,
                    end_row,
                    v.address_of(hidden),
                    hidden_stride,
                    v.address_of(token_indices),
                    first,
                    end,
                    ups if projection else gates,
                    ffn_stride,
                    rows,
                )
            for pair in range(first, end):
                for row in range(first_row, end_row):
                    gate = activations[0, pair, row]
                    silu = gate / (np.float32(1) + v.exp_scalar(-gate))
                    activations[0, pair, row] = silu * activations[1, pair, row]
    if stages & DOWN:
        for group in range(num_groups):
            expert = expert_ids[group]
            end = group_starts[group + 1]
            for first in range(group_starts[group], end, ITEMS_AT_ONCE):
                last = min(first + ITEMS_AT_ONCE, end)
                _multiply_rows(
                    addresses[expert, 2],
                    layouts[2],
                    first_row,
                    end_row,
                    gates + first * ffn_stride,
                    ffn_stride,
                    0,
                    0,
                    last - first,
                    v.address_of(terms),
                    hidden_stride,
                    rows,
                )
                for pair in range(first, last):
                    token, weight = token_indices[pair], pair_weights[pair]
                    for row in range(first_row, end_row):
                        # Rounded to float32 as a remote owner's term would be, then added wide.
                        out[token, row] += np.float64(weight * terms[pair - first, row])
    return True


def _input(dtype: Any, ndim: int) -> Any:
    return types.Array(dtype, ndim, "C", readonly=True)


_INT32, _LAYOUT, _LAYOUTS = types.int32, _input(v.i64, 1), _input(v.i64, 2)


@cache
def linear_kernel() -> Kernel:
    return compile_kernel(
        _linear, _input(v.f32, 2), v.i64, _LAYOUT, v.i64, v.i64, v.f32[:, ::1], v.f32[::1]
    )


@cache
def embed_kernel() -> Kernel:
    return compile_kernel(_embed, _input(_INT32, 1), v.i64, v.i64, v.i64, v.i64, v.f32[:, ::1])


@cache
def expert_ffn_kernel() -> Kernel:
    ids = _input(_INT32, 1)
    return compile_kernel(
        _expert_ffn,
        v.i64,
        _input(v.f32, 2),
        ids,
        ids,
        ids,
        _input(v.f32, 1),
        _LAYOUTS,
        _LAYOUTS,
        v.i64,
        v.i64,
        v.f32[:, :, ::1],
        v.f32[:, ::1],
        v.f32[::1],
        v.f64[:, ::1],
    )
