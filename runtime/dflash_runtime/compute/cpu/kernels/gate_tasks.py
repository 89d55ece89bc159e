"""Rows times functions of gates.

A value's result depends on that value and its gate alone. The kernel, which Python calls, writes a
call's arguments as words; threads run the task on rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dflash_adapters.layers import Gate
from dflash_protocol.ids import F32Array
from dflash_runtime.compute.cpu.compile.compiling import (
    Kernel,
    RowFunction,
    compile_kernel,
    compile_task,
    helper,
    read_only,
)
from dflash_runtime.compute.cpu.kernels.words import set_word, word
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import f32, i64
from dflash_runtime.compute.cpu.simd.untyped import types
from dflash_runtime.compute.cpu.threads.parallel import claim, run_on

ROWS_AN_ITEM = 4

NUM_WORDS = 7

KINDS = {kind: number for number, kind in enumerate(Gate)}
_SIGMOID, _SOFTPLUS = KINDS[Gate.SIGMOID], KINDS[Gate.SOFTPLUS]


@helper
def _factor(gate: Any, kind: int) -> Any:
    if kind == _SOFTPLUS:
        return v.softplus_lanes(gate)
    share = v.splat(1.0) / (v.splat(1.0) + v.exp_lanes(v.zeros() - gate))
    return share if kind == _SIGMOID else gate * share


@helper
def _gate_row(x: int, gate: int, out: int, columns: int, num_gates: int, kind: int) -> None:
    width = columns // num_gates
    if width == 1:
        for column in range(0, columns - 31, 32):
            factor = _factor(v.load_floats(gate + 4 * column), kind)
            v.store_floats(out + 4 * column, v.load_floats(x + 4 * column) * factor)
        whole, rest = 4 * (columns // 32 * 32), columns % 32
        if rest:
            factor = _factor(v.load_padded(gate + whole, rest), kind)
            v.store_partial(out + whole, v.load_padded(x + whole, rest) * factor, rest)
        return
    for column in range(0, columns, width):
        factor = _factor(v.splat(v.load_float(gate)), kind)
        gate += 4
        place, target = x + 4 * column, out + 4 * column
        for lane in range(0, width - 31, 32):
            v.store_floats(target + 4 * lane, v.load_floats(place + 4 * lane) * factor)
        whole, rest = 4 * (width // 32 * 32), width % 32
        if rest:
            v.store_partial(target + whole, v.load_padded(place + whole, rest) * factor, rest)


def _gate_task(args: int, counter: int, worker_idx: int) -> None:
    """Words: x, gate, out, rows, columns, gates of a row, kind."""
    x, gate, out, num_rows = word(args, 0), word(args, 1), word(args, 2), word(args, 3)
    columns, num_gates, kind = word(args, 4), word(args, 5), word(args, 6)
    while True:
        first = claim(counter) * ROWS_AN_ITEM
        if first >= num_rows:
            return
        for row in range(first, min(first + ROWS_AN_ITEM, num_rows)):
            place = 4 * columns * row
            _gate_row(x + place, gate + 4 * num_gates * row, out + place, columns, num_gates, kind)


def _gate(
    x: F32Array,
    gate: F32Array,
    kind: int,
    out: F32Array,
    memory: tuple[int, ...],
    pool: int,
    task: int,
) -> None:
    """`out` may be `x`. Shapes: x, out [rows, C]; gate [rows, n]. Memory: NUM_WORDS words and the
    counter."""
    args, counter = memory
    set_word(args, 0, v.address_of(x))
    set_word(args, 1, v.address_of(gate))
    set_word(args, 2, v.address_of(out))
    set_word(args, 3, x.shape[0])
    set_word(args, 4, x.shape[1])
    set_word(args, 5, gate.shape[1])
    set_word(args, 6, kind)
    run_on(pool, task, args, counter)


@cache
def gate_kernel() -> tuple[Kernel, RowFunction]:
    """The kernel, and the task whose address it is passed."""
    rows = read_only(f32, 2)
    memory = types.UniTuple(i64, 2)
    arguments = [rows, rows, i64, f32[:, ::1], memory, i64, i64]
    task = compile_task(_gate_task)
    return compile_kernel(_gate, *arguments), task
