"""Operations of models that have more than attention and experts: gates, dense FFNs, biases, and
recurrent layers. CupyOps has them from here.

A recurrent layer's convolution, delta rule, norm and gate are put off until the gate is there, and
then are one kernel in a step.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from dflash_adapters.ops import Gate, KvCache
from dflash_adapters.spec import DeltaShape
from dflash_protocol.errors import UnsupportedModel
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.launch.decode_arrays import MOST_TOKENS
from dflash_runtime.compute.gpu.launch.decode_experts import StepRows
from dflash_runtime.compute.gpu.launch.elementwise import ColumnsOf, Elementwise
from dflash_runtime.compute.gpu.layers.branch import Branch, Branching
from dflash_runtime.compute.gpu.layers.delta import (
    DeltaArrays,
    DeltaChunk,
    DeltaPlan,
    DeltaStep,
    DeltaWeights,
)
from dflash_runtime.compute.gpu.layers.delta_tree import DeltaTree
from dflash_runtime.compute.gpu.layers.kv_cache import DeviceKvCache
from dflash_runtime.compute.gpu.layers.values import (
    Activated,
    Chosen,
    Columns,
    Convolved,
    DeltaHeads,
    DeviceValue,
    F32Rows,
    GatedProduct,
    HeadRows,
    Normed,
    Product,
    StepPositions,
)
from dflash_runtime.compute.gpu.ops.steps import StepOps


class GatedOps:
    """What CupyOps is made of besides itself."""

    model_path: Path | None = None
    """The file that matrices were loaded from last, for messages."""

    steps: StepOps
    trees: Branching

    def __init__(self, device: KernelDevice) -> None:
        self.device = device
        self._elementwise = Elementwise(device)
        self._delta_steps: dict[tuple[DeltaPlan, int], DeltaStep] = {}
        self._delta_chunks: dict[DeltaPlan, DeltaChunk] = {}
        self._delta_trees: dict[DeltaPlan, DeltaTree] = {}

    def lacks(self, operation: str) -> NoReturn:
        """Refuse a model that needs what the host backends compute and this one does not.

        Raises: UnsupportedModel naming the operation.
        """
        raise UnsupportedModel(
            f"it needs {operation}, which is not computed on a GPU yet: use --backend cpu",
            path=self.model_path or "model",
        )

    def add_bias(self, x: Any, bias: Any, out: Any = None) -> F32Rows:
        rows = self._rows_of(x)
        result = self._result(rows, out)
        self._elementwise.add_bias(rows.array, bias, result.array)
        return result

    def scale_rows(self, x: Any, factors: Any, out: Any = None) -> F32Rows:
        """`factors` may be weights of one expert a token, which are then chosen now."""
        factor = factors
        if isinstance(factors, Chosen):
            if isinstance(x, Normed) and x.is_step and out is None:
                return self.steps.scaled(x, factors)
            self.steps.choose(factors)
            factor = factors.array
        elif not isinstance(factors, float):
            factor = self._rows_of(factors).array
        rows = self._rows_of(x)
        result = self._result(rows, out)
        self._elementwise.scale_rows(rows.array, factor, result.array)
        return result

    def gated(self, x: Any, gate: Any, kind: Gate, out: Any = None) -> F32Rows | GatedProduct:
        if isinstance(x, DeltaHeads) and x.norm is not None and kind is Gate.SILU and out is None:
            return self._delta(x, self._rows_of(gate))
        if isinstance(x, Product) and out is None and kind is Gate.SIGMOID:
            opening = self._rows_of(gate)
            if x.x.is_step and opening.columns == 1:
                return GatedProduct(x, opening)
            gate = opening
        rows = self._rows_of(x)
        columns = self._columns_of(gate)
        result = self._result(rows, out)
        self._elementwise.gated(rows.array, columns, kind, result.array)
        return result

    def swiglu(self, gate: Any, up: Any, out: Any = None) -> F32Rows | Activated:
        gates, ups = self._rows_of(gate), self._rows_of(up)
        if gates.is_step:
            return Activated(gates, ups)  # `out` is not needed
        return self._activated(gates, ups, out)

    def _activated(self, gates: F32Rows, ups: F32Rows, out: Any = None) -> F32Rows:
        result = self._result(ups, out)
        self._elementwise.swiglu(gates.array, ups.array, result.array)
        return result

    def columns(self, x: Any, first: int, last: int) -> HeadRows | Columns:
        if isinstance(x, HeadRows):
            before = 0 if x.part is None else x.part[0]
            return HeadRows(x.rows, x.num_heads, part=(before + first, before + last))
        return Columns(self._rows_of(x), 1, first, last)

    def causal_conv(
        self,
        x: Any,
        weight: Any,
        cache: KvCache,
        layer: int,
        positions: I32Array,
        out: Any = None,
    ) -> Convolved:
        """Put off until the delta rule, which must be that of the same layer."""
        assert isinstance(cache, DeviceKvCache)
        if out is not None:
            raise ValueError("a convolution is computed where it is used: out must be None")
        return Convolved(self._rows_of(x), weight, cache, layer)

    def delta_rule(
        self,
        mixed: Any,
        alpha: Any,
        beta: Any,
        shape: DeltaShape,
        *,
        a: Any,
        dt_bias: Any,
        cache: KvCache,
        layer: int,
        positions: I32Array,
        eps: float,
        out: Any = None,
    ) -> DeltaHeads:
        """Deferred until norm and gate are known, or it is read."""
        assert isinstance(cache, DeviceKvCache)
        if not isinstance(mixed, Convolved) or (mixed.cache, mixed.layer) != (cache, layer):
            self.lacks("a delta rule without its convolution")
        if out is not None:
            raise ValueError("a delta rule is computed where it is used: out must be None")
        tree = self.trees.current
        if tree is not None:
            tree.check_size(mixed.rows.num_tokens)
            where = tree.positions
        else:
            where = self._positions_of(positions, cache)
            if not isinstance(positions, StepPositions):
                cache.states.advance_layer(layer, int(positions[0]), positions.size)
        return DeltaHeads(
            mixed, self._rows_of(alpha), self._rows_of(beta), shape, a, dt_bias, eps, where
        )

    def _columns_of(self, value: DeviceValue) -> ColumnsOf:
        if isinstance(value, Columns):
            return ColumnsOf(value.rows.array, value.num_heads, value.first, value.last)
        return ColumnsOf.whole(self._rows_of(value).array)

    def _taken(self, columns: Columns) -> F32Rows:
        """Columns as rows of their own."""
        of = self._columns_of(columns)
        rows = self._new_rows(columns.rows.num_tokens, of.num_columns, of_step=columns.rows.of_step)
        self._elementwise.take_columns(of, rows.array)
        return rows

    def _whole(self, heads: HeadRows) -> HeadRows:
        """Heads that follow each other without gaps."""
        if heads.part is None:
            return heads
        columns = Columns(heads.rows, heads.num_heads, *heads.part)
        return replace(heads, rows=self._taken(columns), part=None)

    def _delta(self, heads: DeltaHeads, gate: F32Rows | None) -> F32Rows:
        """A recurrent layer's results; with its norm and gate if there is one."""
        inputs, num_tokens = heads.mixed.rows, heads.mixed.rows.num_tokens
        norm, norm_eps = heads.norm or (None, 0.0)
        plan = DeltaPlan(
            heads.shape, num_taps=heads.mixed.weight.shape[1], finishes=gate is not None
        )
        state = heads.mixed.cache.states.layers[heads.mixed.layer]
        given = DeltaArrays(
            inputs.array,
            heads.alpha.array,
            heads.beta.array,
            None if gate is None else gate.array,
        )
        weights = DeltaWeights(
            taps=heads.mixed.weight,
            decay=heads.a,
            bias=heads.dt_bias,
            norm=norm,
            key_eps=heads.eps,
            norm_eps=norm_eps,
        )
        positions, tree = heads.positions.array, self.trees.current
        if tree is None and num_tokens > MOST_TOKENS:
            if plan not in self._delta_chunks:
                self._delta_chunks[plan] = DeltaChunk(self.device, plan)
            rows = self._new_rows(num_tokens, plan.value_channels)
            self._delta_chunks[plan].launch(
                given, weights, state, first_position=positions[:1], out=rows.array
            )
            return rows
        rows = self.steps.attended_rows(
            num_tokens, plan.value_channels, head_dim=heads.shape.value_dim
        )
        out = rows.to_fill
        if tree is not None:
            self._delta_of_tree(heads, given, weights, tree, plan=plan, out=out)
            return rows
        key = plan, num_tokens
        if key not in self._delta_steps:
            self._delta_steps[key] = DeltaStep(self.device, plan, num_tokens)
        self._delta_steps[key].launch(given, weights, state, positions=positions, out=out)
        return rows

    def _delta_of_tree(
        self,
        heads: DeltaHeads,
        given: DeltaArrays,
        weights: DeltaWeights,
        tree: Branch,
        *,
        plan: DeltaPlan,
        out: StepRows,
    ) -> None:
        """The same of a tree's tokens, of which the accepted ones are to be gone on from."""
        if plan not in self._delta_trees:
            self._delta_trees[plan] = DeltaTree(self.device, plan)
        delta = self._delta_trees[plan]
        layer, states = heads.mixed.layer, heads.mixed.cache.states
        state = states.layers[layer]
        delta.launch(given, weights, state, branch=tree, out=out)
        inputs = replace(given, gate=None)
        kept = heads.mixed.rows, heads.alpha, heads.beta  # their buffers are in use until then

        def accept(path: I32Array) -> None:
            assert kept
            on_device = tree.path_on_device(path)
            delta.accept(inputs, weights, state, branch=tree, path=on_device)
            states.advance_layer(layer, tree.position, path.size)

        tree.keep(accept)

    def _result(self, like: F32Rows, out: Any) -> F32Rows:
        """New rows, or those of `out`, of which what was made of them before is forgotten."""
        if out is None:
            return self._rows_like(like)
        rows = self._rows_of(out)
        rows.version += 1
        rows.sides = None
        return rows

    def _rows_like(self, like: F32Rows) -> F32Rows:
        """New ones of the same shape."""
        return self._new_rows(like.num_tokens, like.columns, of_step=like.of_step)

    @abstractmethod
    def _rows_of(self, value: DeviceValue) -> F32Rows: ...
    @abstractmethod
    def _new_rows(self, num_tokens: int, columns: int, *, of_step: bool = False) -> F32Rows: ...
    @abstractmethod
    def _positions_of(self, positions: Any, cache: DeviceKvCache) -> StepPositions: ...
