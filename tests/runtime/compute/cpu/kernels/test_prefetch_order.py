"""The order in which threads take panels of weights, and which of them they prefetch meanwhile.

Where addresses matter, tasks run as they are, with weights where nothing is: the function that
would multiply a panel keeps its arguments instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dflash_adapters.quant import TensorType
from dflash_protocol.ids import AnyArray, I64Array
from dflash_runtime.compute.cpu.kernels import experts_kernel as experts
from dflash_runtime.compute.cpu.kernels import linear_kernel as linear
from dflash_runtime.compute.cpu.kernels.products import (
    LEAD_BYTES,
    REPACKED_ROWS,
    TOTALS_BYTES,
)
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.cpu.weights.matrix import NUM_FIELDS, as_matrix
from dflash_runtime.compute.cpu.weights.rows import COLUMNS, MULTIPLY_ONE, ROW_BYTES, UNPACK

NUM_COLUMNS = 256
ALONE, MANY = 1, 16
"""Threads: one takes runs of two panels, of many each takes one panel near the end."""
SHORT, LONGER, LONG = 144, 210, LEAD_BYTES
"""Bytes of a row."""
FIRST = 1 << 40
"""Address of the first matrix."""


class Kept:
    """Stands in for `multiply_one`: keeps addresses of panels, and of what is prefetched."""

    def __init__(self) -> None:
        self.panels: list[int] = []
        self.far: list[int] = []
        self.near: list[int] = []
        self._callback = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)(self._keep)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value or 0

    def _keep(self, panel: int, _stride: int, _blocks: int, _x: int, *addresses: int) -> None:
        far, near, _totals = addresses
        self.panels.append(panel)
        self.far.append(far)
        self.near.append(near)

    def layout(self, row_bytes: int) -> I64Array:
        layout = np.zeros(NUM_FIELDS, np.int64)
        layout[ROW_BYTES], layout[COLUMNS] = row_bytes, NUM_COLUMNS
        layout[UNPACK], layout[MULTIPLY_ONE] = 1, self.address
        return layout

    def check(self, panels: list[int], row_bytes: int, *, is_far_known: bool = True) -> None:
        """`panels`: addresses in the order of reading, of rows as long as these."""
        assert self.panels == panels
        if row_bytes < LEAD_BYTES:
            assert self.near[:-1] == panels[1:]
            assert self.far[:-2] == (panels[2:] if is_far_known else panels[1:-1])
        else:
            assert self.near == panels
            assert self.far[:-1] == panels[1:]
        # What comes after the last panel is not known: what was just read is still in the cache.
        assert {*self.near[-1:], *self.far[-2:]} <= {*panels[-4:]}


def run(task: Any, words: dict[int, int | AnyArray]) -> None:
    """Run a task alone, as one of a pool's threads would."""
    args, counter = (
        np.zeros(max(max(words) + 1, experts.NUM_ARGUMENTS), np.int64),
        np.zeros(1, np.int64),
    )
    for word, value in words.items():
        args[word] = value if isinstance(value, int) else value.ctypes.data
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)
    prototype(task.address)(args.ctypes.data, counter.ctypes.data, 0)


def panels_of(address: int, row_bytes: int, rows: range) -> list[int]:
    return [address + row * row_bytes for row in rows[::REPACKED_ROWS]]


@pytest.mark.parametrize("num_threads", [ALONE, MANY])
@pytest.mark.parametrize("row_bytes", [(SHORT, LONGER), (LONGER, SHORT), (LONG, LONG)])
def test_matrices_one_after_another(row_bytes: tuple[int, int], num_threads: int) -> None:
    rows, addresses, kept = (96, 64), (FIRST, 2 * FIRST), Kept()
    layouts = [kept.layout(each) for each in row_bytes]
    fields = np.zeros((2, linear.NUM_MATRIX_FIELDS), np.int64)
    for index, matrix in enumerate(fields):
        matrix[linear.LAYOUT] = layouts[index].ctypes.data
        matrix[linear.WEIGHTS], matrix[linear.ROWS] = addresses[index], rows[index]
        matrix[linear.ROWS_BEFORE] = sum(rows[:index])
        matrix[linear.PANELS_BEFORE] = sum(rows[:index]) // REPACKED_ROWS
        matrix[linear.END_PANEL] = sum(rows[: index + 1]) // REPACKED_ROWS
    words: dict[int, int | AnyArray] = {
        linear.NUM_PANELS: sum(rows) // REPACKED_ROWS,
        linear.RUN_PANELS: 2,
        linear.CLAIMS_AHEAD: 1,
        linear.NUM_THREADS: num_threads,
        linear.NUM_TOKENS: 1,
        linear.OUT_ROOM: 1,
        linear.COLUMNS: NUM_COLUMNS,
        linear.OUT: np.zeros(sum(rows), np.float32),
        linear.MATRICES: fields,
        linear.SCRATCH: np.zeros(2 * TOTALS_BYTES, np.uint8),
    }
    _, multiply = linear.linear_tasks()
    run(multiply, words)
    expected = [
        panel
        for address, stride, count in zip(addresses, row_bytes, rows, strict=True)
        for panel in panels_of(address, stride, range(count))
    ]
    kept.check(expected, row_bytes[0], is_far_known=num_threads == ALONE)


def expert_panels(phase: Callable[..., None], row_bytes: int, run_rows: int) -> list[int]:
    """Panels of experts 2 and 0, of 64 rows each in gate, up and down, in the order of reading."""

    def panels(expert: int, projection: int, rows: range) -> list[int]:
        return panels_of(FIRST * (1 + 3 * expert + projection), row_bytes, rows)

    if phase is experts.gate_up:
        both = (
            zip(*(panels(expert, each, range(64)) for each in (0, 1)), strict=True)
            for expert in (2, 0)
        )
        return [panel for expert in both for pair in expert for panel in pair]
    runs = [(first, expert) for first in range(0, 64, run_rows) for expert in (2, 0)]
    return [
        panel
        for first, expert in runs
        for panel in panels(expert, 2, range(first, first + run_rows))
    ]


@pytest.mark.parametrize("row_bytes", [SHORT, LONG])
@pytest.mark.parametrize("phase", [experts.gate_up, experts.down_phase])
@pytest.mark.parametrize("num_threads", [ALONE, MANY])
def test_matrices_of_chosen_experts(
    num_threads: int, phase: Callable[..., None], row_bytes: int
) -> None:
    kept = Kept()
    words: dict[int, int | AnyArray] = {
        experts.NUM_EXPERTS: 3,
        experts.FFN_SIZE: 64,
        experts.HIDDEN_SIZE: 64,
        experts.ADDRESSES: FIRST * np.arange(1, 10, dtype=np.int64),
        experts.LAYOUTS: np.concatenate([kept.layout(row_bytes)] * 3),
        experts.ACTIVATION: np.array([1e9, 1, 0], np.float32),
        experts.HIDDEN: np.zeros(64, np.float32),
        experts.NUM_THREADS: num_threads,
        experts.NUM_TOKENS: 1,
        experts.NUM_GROUPS: 2,
        experts.EXPERT_IDS: np.array([2, 0], np.int32),
        experts.GROUP_STARTS: np.array([0, 1, 2], np.int32),
        experts.TOKEN_INDICES: np.zeros(2, np.int32),
        experts.WEIGHTS: np.ones(2, np.float32),
        experts.OUT: np.zeros(64, np.float64),
        experts.ACTIVATIONS: np.zeros((2, 64), np.float32),
        experts.SCRATCH: np.zeros(3 * TOTALS_BYTES, np.uint8),
    }
    _, _, gate_up, _, down, _ = experts.expert_functions()
    run(gate_up if phase is experts.gate_up else down, words)
    run_rows = 2 * REPACKED_ROWS if num_threads == ALONE else REPACKED_ROWS
    kept.check(expert_panels(phase, row_bytes, run_rows), row_bytes)


def test_every_row_is_computed_once_however_many_are_taken_at_a_time() -> None:
    """An odd number of runs, of which three threads take two at a time, and one thread four."""
    num_rows, rng = 4017, np.random.default_rng(0)
    row_bytes = TensorType.Q4_0.row_bytes(NUM_COLUMNS)
    data = rng.integers(0x20, 0x3C, num_rows * row_bytes, dtype=np.uint8)
    matrix = as_matrix(data, TensorType.Q4_0, num_rows, NUM_COLUMNS)
    x = rng.standard_normal((1, NUM_COLUMNS)).astype(np.float32)
    results = []
    for num_threads in (1, 3):
        workers = Workers(num_threads)
        ops = CpuOps(workers, Scratch())
        results.append(ops.linear(x, matrix, np.full((1, num_rows), np.nan, np.float32)))
        workers.close()
    assert np.isfinite(results[0]).all()
    np.testing.assert_array_equal(results[0], results[1])
