"""Launches dense products: checks, scratch and arguments around the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_protocol.ids import F32Array, I64Array
from dflash_runtime.compute.cpu.kernels import linear_kernel as k
from dflash_runtime.compute.cpu.kernels.products import TOTALS_BYTES, product_scratch_bytes
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.cpu.weights.matrix import CpuMatrix
from dflash_runtime.compute.cpu.weights.repacked.kernels import Q8_BLOCK_BYTES
from dflash_runtime.compute.cpu.weights.repacked.quantising import quantise_function
from dflash_runtime.compute.cpu.weights.rows import UNPACK

_NOTHING = np.empty(0, np.float32)

_MOST_PLANS = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What calls with the same matrices have in common; `words` as in linear_kernel."""

    matrices: tuple[CpuMatrix, ...]
    columns: int
    rows: int
    thread_bytes: int
    q8_bytes: int
    """Bytes of one token's q8 blocks; 0 if no matrix needs them."""
    words: I64Array


class DenseProducts:
    """Dense products on one backend's threads and scratch memory."""

    def __init__(self, workers: Workers, scratch: Scratch) -> None:
        self._workers = workers
        self._scratch = scratch
        self._kernel = k.linear_kernel()
        functions = quantise_function(), *k.linear_tasks()
        self._functions = [function.address for function in functions]
        self._plans: dict[tuple[CpuMatrix, ...], _Plan] = {}

    def __call__(
        self,
        x: F32Array,
        matrices: tuple[CpuMatrix, ...],
        out: F32Array,
        addend: F32Array = _NOTHING,
    ) -> None:
        """``x @ matrix.T`` for each matrix, one after another in `out`, plus `addend` if not empty.

        Shapes: x [T, columns]; out, addend [T * sum of rows]; all contiguous.
        """
        plan = self._plans.get(matrices)
        if plan is None:
            plan = self._plans_of(matrices)
        num_tokens, columns = x.shape
        if columns != plan.columns:
            raise ValueError(f"x is {x.shape}, the matrix has {plan.columns} columns")
        size = num_tokens * plan.rows
        if out.size != size or addend.size not in (0, size):
            raise ValueError(f"{out.size} and {addend.size} values for {size} products")
        if size == 0:
            return
        workers = self._workers
        with self._scratch.take(
            8 * k.NUM_ARGUMENTS,
            num_tokens * plan.q8_bytes,
            workers.num_threads * plan.thread_bytes,
        ) as memory:
            self._kernel(x, out, addend, plan.words, memory, workers.address)

    def _plans_of(self, matrices: tuple[CpuMatrix, ...]) -> _Plan:
        if len(self._plans) == _MOST_PLANS:  # mostly of closed models
            self._plans.clear()
        plan = self._plans[matrices] = _plan(matrices, self._functions)
        return plan


def _plan(matrices: Sequence[CpuMatrix], functions: Sequence[int]) -> _Plan:
    columns = matrices[0].columns
    layouts = [matrix.layout for matrix in matrices]
    thread_bytes = TOTALS_BYTES + product_scratch_bytes(layouts)
    has_repacked = any(layout[UNPACK] for layout in layouts)
    q8_bytes = Q8_BLOCK_BYTES * (columns // 32) if has_repacked else 0
    words = np.zeros(k.NUM_PLAN_WORDS + len(matrices) * k.NUM_MATRIX_FIELDS, np.int64)
    num_rows = num_runs = 0
    fields = words[k.NUM_PLAN_WORDS :].reshape(len(matrices), k.NUM_MATRIX_FIELDS)
    for row, matrix in zip(fields, matrices, strict=True):
        if matrix.columns != columns:
            raise ValueError(f"matrices of {columns} and {matrix.columns} columns")
        row[k.LAYOUT] = matrix.layout.ctypes.data
        row[k.WEIGHTS] = matrix.address
        row[k.ROWS] = matrix.rows
        row[k.ROWS_BEFORE] = num_rows
        row[k.RUNS_BEFORE] = num_runs
        num_rows += matrix.rows
        num_runs += -(-matrix.rows // k.RUN_ROWS)
    words[k.NUM_MATRICES], words[k.NUM_RUNS] = len(matrices), num_runs
    words[k.SCRATCH_BYTES], words[k.Q8_BYTES] = thread_bytes, q8_bytes
    words[k.QUANTISE : k.NUM_PLAN_WORDS] = functions
    return _Plan(tuple(matrices), columns, num_rows, thread_bytes, q8_bytes, words)
