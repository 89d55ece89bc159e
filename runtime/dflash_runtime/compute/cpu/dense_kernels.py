"""Kernels without weights of their own: RMS norm, rotary embedding, routing."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.cpu import vector as v
from dflash_runtime.compute.cpu.compiling import Kernel, compile_kernel
from dflash_runtime.compute.cpu.untyped import types

_TAKEN = np.float32(-1)  # no softmax score is negative
_SMALLEST_NORMAL_HALF = np.float32(6.103515625e-05)


def _rms_norm(x: F32Array, weight: F32Array, eps: float, out: F32Array) -> None:
    """Squares are summed in float64. `out` may be `x`. Shapes: x, out [rows, n]; weight [n]."""
    num_rows, columns = x.shape
    rest = columns % 32
    for row in range(num_rows):
        place = v.address_of(x) + 4 * row * columns
        total = v.double_zeros()
        for _ in range(columns // 32):
            total = v.add_squares(v.load_floats(place), total)
            place += 128
        if rest:
            total = v.add_squares(v.load_padded(place, rest), total)
        scale = np.float32(1.0 / math.sqrt(v.sum_of_doubles(total) / columns + eps))
        for column in range(columns):
            out[row, column] = x[row, column] * scale * weight[column]


def _rope(x: F32Array, cos: F32Array, sin: F32Array, is_interleaved: bool, out: F32Array) -> None:
    """`out` may be `x`. Shapes: x, out [T, heads, D]; cos, sin [T, num_rotated / 2]."""
    num_tokens, num_heads, head_dim = x.shape
    half = cos.shape[1]
    step, partner = (2, 1) if is_interleaved else (1, half)
    for token in range(num_tokens):
        for head in range(num_heads):
            for pair in range(half):
                first = step * pair
                a, b = x[token, head, first], x[token, head, first + partner]
                c, s = cos[token, pair], sin[token, pair]
                out[token, head, first] = a * c - b * s
                out[token, head, first + partner] = a * s + b * c
            for passed in range(2 * half, head_dim):
                out[token, head, passed] = x[token, head, passed]


def _route(
    logits: F32Array, normalise: bool, scores: F32Array, ids: I32Array, weights: F32Array
) -> None:
    """Softmax, then K times the best score left; of equal scores the lowest id.

    Shapes: logits [T, E]; scores [E], scratch; ids, weights [T, K].
    """
    num_tokens, num_experts = logits.shape
    for token in range(num_tokens):
        highest = logits[token, 0]
        for expert in range(num_experts):
            highest = max(highest, logits[token, expert])
        total = np.float32(0)
        for expert in range(num_experts):
            scores[expert] = v.exp_scalar(logits[token, expert] - highest)
            total += scores[expert]
        for expert in range(num_experts):
            scores[expert] /= total
        chosen_total = np.float32(0)
        for rank in range(ids.shape[1]):
            # Even of NaNs some expert is chosen: ids are indices, whatever the logits were.
            best = -1
            for expert in range(num_experts):
                if scores[expert] != _TAKEN and (best < 0 or scores[expert] > scores[best]):
                    best = expert
            ids[token, rank] = best
            weights[token, rank] = scores[best]
            chosen_total += scores[best]
            scores[best] = _TAKEN
        if normalise:
            for rank in range(ids.shape[1]):
                weights[token, rank] /= max(chosen_total, _SMALLEST_NORMAL_HALF)


def _input(ndim: int) -> Any:
    return types.Array(v.f32, ndim, "C", readonly=True)


@cache
def rms_norm_kernel() -> Kernel:
    return compile_kernel(_rms_norm, _input(2), _input(1), v.f64, v.f32[:, ::1])


@cache
def rope_kernel() -> Kernel:
    return compile_kernel(_rope, _input(3), _input(2), _input(2), types.boolean, v.f32[:, :, ::1])


@cache
def route_kernel() -> Kernel:
    return compile_kernel(
        _route,
        _input(2),
        types.boolean,
        v.f32[::1],
        types.int32[:, ::1],
        v.f32[:, ::1],
    )
