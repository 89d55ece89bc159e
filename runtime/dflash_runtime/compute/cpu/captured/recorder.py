"""Records a model's operations as calls of compiled code, and makes a program of them.

The model runs once, through `Recorder`, which computes nothing: its results are memory that the
calls will write. Words that depend on the number of tokens or their position are remembered, so
that the program serves any.
"""

from __future__ import annotations

import numpy as np

from dflash_adapters.rope import AttentionTemperature, RopeTable
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute.cpu import attention as attending
from dflash_runtime.compute.cpu.captured.program import BetweenCalls, Program
from dflash_runtime.compute.cpu.kernels import step_tasks as tasks
from dflash_runtime.compute.cpu.kernels.words import Call
from dflash_runtime.compute.cpu.kv_cache import BlockedState, LayerCache
from dflash_runtime.compute.cpu.ops import CpuOps, turns_of
from dflash_runtime.compute.cpu.recurrent import Recurrent, Runner
from dflash_runtime.compute.cpu.threads.scratch import zeros_on_lines
from dflash_runtime.compute.host_ops import DeltaInputs

_TABLE_POSITIONS = 512
"""Positions of a block, whose angles are computed at once."""


class PositionTables:
    """Values that depend on a position alone, computed when a step first needs them.

    Shapes: angles [2, N, pairs], of each rotary embedding; temperatures [N].
    """

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self._ready: set[int] = set()
        """Blocks of positions."""
        self._angles: dict[RopeTable, F32Array] = {}
        self._temperatures: dict[AttentionTemperature, F32Array] = {}

    def angles(self, table: RopeTable) -> F32Array:
        if table not in self._angles:
            shape = 2, self._num_positions, table.inv_freq.shape[0]
            self._angles[table] = np.zeros(shape, np.float32)
        return self._angles[table]

    def temperatures(self, temperature: AttentionTemperature) -> F32Array:
        if temperature not in self._temperatures:
            self._temperatures[temperature] = np.zeros(self._num_positions, np.float32)
        return self._temperatures[temperature]

    def extend(self, first: int, end: int) -> None:
        """Have values for the positions from `first` to `end` - 1."""
        for block in range(first // _TABLE_POSITIONS, (end - 1) // _TABLE_POSITIONS + 1):
            if block not in self._ready:
                self._compute(block * _TABLE_POSITIONS)
                self._ready.add(block)

    def _compute(self, first: int) -> None:
        some = slice(first, min(first + _TABLE_POSITIONS, self._num_positions))
        positions = np.arange(some.start, some.stop, dtype=np.int32)
        for table, angles in self._angles.items():
            angles[:, some] = turns_of(table, positions)
        for temperature, factors in self._temperatures.items():
            factors[some] = temperature.factors(positions)


class RecordedRecurrent(Recurrent):
    """Operations on states whose positions the cache notes, step by step."""

    def causal_conv(
        self,
        runner: Runner,
        x: F32Array,
        weight: F32Array,
        state: BlockedState,
        positions: I32Array,
    ) -> F32Array:
        return self.convolve(runner, x, weight, state, first=0)

    def delta_rule(
        self, runner: Runner, inputs: DeltaInputs, state: BlockedState, positions: I32Array
    ) -> F32Array:
        return self.apply_rule(runner, inputs, state, first=0)


class Recorder(CpuOps):
    """Implements host_ops.Ops for rows of one sequence at successive positions.

    Used once, on one thread: the model's operations are recorded, then `program` is called.
    """

    def __init__(self, ops: CpuOps, num_rows: int, num_positions: int) -> None:
        """`num_rows`: the most rows that a step will have."""
        super().__init__(ops.workers, ops.scratch)
        self.recurrent = RecordedRecurrent()
        self.num_rows = num_rows
        self.tables = PositionTables(num_positions)
        self._num_positions = num_positions
        self._calls: list[Call] = []
        self._instead: dict[int, BetweenCalls] = {}
        self._kept: list[object] = []
        self._is_first = True
        # Results of this layer and of the last one, and those that new ones may replace.
        self._made: list[F32Array] = []
        self._last: list[F32Array] = []
        self._free: list[F32Array] = []

    # -- recording --------------------------------------------------------------------------------

    def run(self, call: Call, *, instead: BetweenCalls | None = None) -> None:
        """Record a call. `instead`: what the host does in its place if it stops for that."""
        if instead is not None:
            self._instead[len(self._calls)] = instead
        self._calls.append(call)

    def new(self, shape: tuple[int, ...]) -> F32Array:
        """Memory of the program's own; within a layer, what the layer before the last one had."""
        size = int(np.prod(shape, dtype=np.int64))
        place = next((i for i, each in enumerate(self._free) if each.size == size), None)
        if place is not None:
            values = self._free.pop(place)
        else:
            values = zeros_on_lines(4 * size).view(np.float32)
            self.keep(values)
        self._made.append(values)
        return values.reshape(shape)

    def end_layer(self) -> None:
        """A layer's results are read by the next layer at most, but for those of the first one:
        the rows to which all layers add are among them."""
        if self._is_first:
            self._is_first, self._made = False, []
            return
        self._free += self._last
        self._last, self._made = self._made, []

    def keep(self, *owners: object) -> None:
        """Keep the owners of memory that recorded words point into."""
        self._kept += owners

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def program(self) -> Program:
        """What was recorded."""
        self.keep(self.recurrent, *self._plans.values())
        return Program(self._calls, self._kept, self.num_rows, instead=self._instead)

    # -- operations that are something else on the host, or depend on the position ----------------

    def add(self, x: F32Array, y: F32Array) -> None:
        self.run(tasks.add_call(x, y))

    def multiply(self, x: F32Array, factors: F32Array) -> None:
        self.run(tasks.multiply_call(x, factors))

    def columns(self, x: F32Array, first: int, last: int) -> F32Array:
        out = self.new((*x.shape[:-1], last - first))
        self.run(tasks.columns_call(x, first, out))
        return out

    def temper(self, q: F32Array, temperature: AttentionTemperature, positions: I32Array) -> None:
        factors = self.tables.temperatures(temperature)
        self.run(tasks.multiply_call(q, factors, is_by_position=True))

    def angles(self, table: RopeTable, positions: I32Array) -> F32Array:
        return self.tables.angles(table)

    def attend(
        self,
        rows: tuple[F32Array, F32Array, F32Array],
        layer: LayerCache,
        positions: I32Array,
        *,
        scale: float,
        sinks: F32Array | None,
    ) -> F32Array:
        q, _, v = rows
        out = self.new((*q.shape[:2], v.shape[2]))
        self.run(
            attending.attention_call(
                rows,
                layer,
                out,
                0,
                scale=scale,
                sinks=sinks,
                num_threads=self.num_threads,
                end_position=self._num_positions,
            )
        )
        return out
