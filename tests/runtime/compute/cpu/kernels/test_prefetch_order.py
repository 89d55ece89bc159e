"""Which rows are prefetched while others are multiplied: each panel once, in the order of reading.

The tasks run with a stand-in for the products that keeps addresses; nothing is read from them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dflash_protocol.ids import AnyArray, I64Array
from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task, helper, variant
from dflash_runtime.compute.cpu.kernels import experts_kernel as experts
from dflash_runtime.compute.cpu.kernels import linear_kernel as linear
from dflash_runtime.compute.cpu.kernels.products import LEAD_BYTES, REPACKED_ROWS, TOTALS_BYTES
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.weights.matrix import NUM_FIELDS
from dflash_runtime.compute.cpu.weights.rows import COLUMNS, ROW_BYTES, UNPACK

COLUMNS_OF_ALL = 256
SHORT, LONGER, LONG = 144, 210, LEAD_BYTES
FIRST = 1 << 40
"""Address of the first matrix."""

Panels = list[tuple[int, int]]
"""Addresses: of a panel, and of what is prefetched meanwhile."""


@helper
def keep_addresses(
    layout: int,
    rows: int,
    num_rows: int,
    vectors: tuple[int, int, int, int, int],
    first: int,
    end: int,
    ahead: int,
    totals: int,
    scratch: int,
) -> None:
    count = v.load_i64(scratch)
    v.store_i64(scratch, count + 1)
    v.store_i64(scratch + 16 * (count + 1), rows)
    v.store_i64(scratch + 16 * (count + 1) + 8, ahead)


def recorded(task: Callable[..., None]) -> RowFunction:
    return compile_task(variant(task, f"recorded_{task.__name__}", multiply_rows=keep_addresses))


def run(task: RowFunction, args: I64Array, words: I64Array, first_kept: int) -> Panels:
    """Run a task alone; `words` is its scratch memory, of which it uses bytes up to `first_kept`
    for sums."""
    counter = np.zeros(1, np.int64)
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)
    prototype(task.address)(args.ctypes.data, counter.ctypes.data, 0)
    kept = words[first_kept // 8 :]
    return [(kept[2 * i + 2], kept[2 * i + 3]) for i in range(kept[0])]


def layout_of(row_bytes: int) -> I64Array:
    layout = np.zeros(NUM_FIELDS, np.int64)
    layout[ROW_BYTES], layout[COLUMNS], layout[UNPACK] = row_bytes, COLUMNS_OF_ALL, 1
    return layout


def panels_of(address: int, row_bytes: int, rows: range) -> list[int]:
    return [address + row * row_bytes for row in rows[::REPACKED_ROWS]]


def scratch_words() -> I64Array:
    return np.zeros(1 << 15, np.int64)


@pytest.fixture(scope="module")
def multiply() -> RowFunction:
    return recorded(linear._multiply)


@pytest.mark.parametrize(
    ("row_bytes", "distance"), [((SHORT, LONGER), 2), ((LONGER, SHORT), 2), ((LONG, LONG), 1)]
)
def test_matrices_one_after_another(
    multiply: RowFunction, row_bytes: tuple[int, int], distance: int
) -> None:
    rows, addresses = (96, 64), (FIRST, 2 * FIRST)
    layouts = [layout_of(each) for each in row_bytes]
    fields = np.zeros((2, linear.NUM_MATRIX_FIELDS), np.int64)
    for index, matrix in enumerate(fields):
        matrix[linear.LAYOUT] = layouts[index].ctypes.data
        matrix[linear.WEIGHTS], matrix[linear.ROWS] = addresses[index], rows[index]
        matrix[linear.ROWS_BEFORE] = sum(rows[:index])
        matrix[linear.RUN_ROWS] = 32
        matrix[linear.RUNS_BEFORE] = sum(rows[:index]) // 32
    out, words = np.zeros(sum(rows), np.float32), scratch_words()
    args = np.zeros(linear.SCRATCH + 1, np.int64)
    args[linear.NUM_MATRICES], args[linear.NUM_RUNS] = 2, sum(rows) // 32
    args[linear.CLAIMS_AHEAD] = 1
    args[linear.NUM_TOKENS], args[linear.OUT_ROOM], args[linear.COLUMNS] = 1, 1, COLUMNS_OF_ALL
    args[linear.OUT], args[linear.SCRATCH] = out.ctypes.data, words.ctypes.data
    args[linear.MATRICES] = fields.ctypes.data

    kept = run(multiply, args, words, TOTALS_BYTES)
    expected = [
        panel
        for address, stride, count in zip(addresses, row_bytes, rows, strict=True)
        for panel in panels_of(address, stride, range(count))
    ]
    assert [here for here, _ in kept] == expected
    ahead = [following for _, following in kept]
    assert ahead[:-distance] == expected[distance:]
    # Behind the last panel nothing is known: what was just read is still in the cache.
    assert set(ahead[-distance:]) <= set(expected[-2:])


def expert_args(row_bytes: int, words: I64Array, kept: list[Any]) -> I64Array:
    """Two chosen experts of three, 64 rows each in gate and up, and in down. `kept` owns arrays."""
    layouts = np.stack([layout_of(row_bytes)] * 3)
    addresses = FIRST * np.arange(1, 10, dtype=np.int64).reshape(3, 3)
    ids, starts = np.array([2, 0], np.int32), np.array([0, 1, 2], np.int32)
    tokens, weights = np.zeros(2, np.int32), np.ones(2, np.float32)
    activation = np.array([1e9, 1, 0], np.float32)
    hidden, activations = np.zeros((1, 64), np.float32), np.zeros((2, 64), np.float32)
    out = np.zeros((1, 64), np.float64)
    arrays: dict[int, AnyArray] = {
        experts.ADDRESSES: addresses,
        experts.LAYOUTS: layouts,
        experts.ACTIVATION: activation,
        experts.HIDDEN: hidden,
        experts.EXPERT_IDS: ids,
        experts.GROUP_STARTS: starts,
        experts.TOKEN_INDICES: tokens,
        experts.WEIGHTS: weights,
        experts.OUT: out,
        experts.ACTIVATIONS: activations,
        experts.SCRATCH: words,
    }
    kept.append(arrays)
    args = np.zeros(experts.NUM_ARGUMENTS, np.int64)
    for word, array in arrays.items():
        args[word] = array.ctypes.data
    args[experts.NUM_EXPERTS], args[experts.NUM_GROUPS] = 3, 2
    args[experts.FFN_SIZE] = args[experts.HIDDEN_SIZE] = 64
    args[experts.NUM_TOKENS] = 1
    return args


@pytest.mark.parametrize(("row_bytes", "distance"), [(SHORT, 2), (LONG, 1)])
@pytest.mark.parametrize("phase", [experts.gate_up, experts.down_phase])
def test_experts_matrices(phase: Callable[..., None], row_bytes: int, distance: int) -> None:
    words, kept_alive = scratch_words(), list[Any]()
    args = expert_args(row_bytes, words, kept_alive)
    kept = run(recorded(phase), args, words, 2 * TOTALS_BYTES)
    gate, up, down = (
        {expert: FIRST * (1 + 3 * expert + projection) for expert in (2, 0)}
        for projection in range(3)
    )
    if phase is experts.gate_up:
        expected = [
            panel
            for expert in (2, 0)
            for pair in zip(
                *(panels_of(each[expert], row_bytes, range(64)) for each in (gate, up)),
                strict=True,
            )
            for panel in pair
        ]
    else:
        expected = [
            panel
            for first in (0, 32)
            for expert in (2, 0)
            for panel in panels_of(down[expert], row_bytes, range(first, first + 32))
        ]
    assert [here for here, _ in kept] == expected
    ahead = [following for _, following in kept]
    assert ahead[:-distance] == expected[distance:]
    assert set(ahead[-distance:]) <= set(expected[-4:])
