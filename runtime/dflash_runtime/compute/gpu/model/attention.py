"""Attention layers: norm, q, k and v in one product; attention; gate; output onto the residual."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import (
    Attention,
    Gate,
    GateBesideQueries,
    HeadNormRotary,
    HeadOrElementGate,
    Rotary,
    RotaryUnitNorm,
    RowNormRotary,
    VectorTensor,
)
from dflash_adapters.rope import AttentionTemperature, RopeTable
from dflash_protocol.errors import UnsupportedModel
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.launch.row_kernels import ColumnsOf
from dflash_runtime.compute.gpu.layers.attention import AttentionForm
from dflash_runtime.compute.gpu.layers.placed_step import PlacedStep
from dflash_runtime.compute.gpu.layers.rows import Input, Rows
from dflash_runtime.compute.gpu.model.linear import LayerWeights, project
from dflash_runtime.compute.gpu.ops.kernels import LayerKernels


class AttentionLayer:
    """One attention layer of a model. Immutable."""

    def __init__(
        self,
        layer: Attention,
        norm: VectorTensor,
        cache_layer: int,
        *,
        weights: LayerWeights,
        forms: AttentionForms,
    ) -> None:
        vectors = weights.weights.vectors
        self._layer, self._cache_layer = layer, cache_layer
        self._ops, self._norm = weights.ops, weights.norm(norm)
        self._qkv = [weights.projection(each) for each in layer.qkv.linears]
        self._biases = [vectors[bias] for bias in layer.qkv.biases]
        self._row_norms = None
        match layer.positions:
            case RowNormRotary(q_norm=q_norm, k_norm=k_norm):
                self._row_norms = weights.norm(q_norm), weights.norm(k_norm)
                for columns in (layer.heads.query_size, layer.heads.kv_size):
                    self._ops.chunks.expect_floats(columns)
        self._gate, self._has_gate_beside = None, False
        match layer.gate:
            case HeadOrElementGate(linear=linear):
                self._gate = weights.projection(linear)
            case GateBesideQueries():
                self._has_gate_beside = True
        self._form = forms.of(layer)
        self._output = weights.projection(layer.output)

    def run(self, x: Rows, step: PlacedStep) -> None:
        """Add the layer's result to the residual. Shapes: x [T, H]."""
        kernels, heads = self._ops.kernels_for(x), self._layer.heads
        h = Input(x, self._norm)
        q, k, v = self._projected(kernels, h)
        both = q
        if self._row_norms is not None:
            q_norm, k_norm = self._row_norms
            q, k = kernels.normed(q, q_norm), kernels.normed(k, k_norm)
        if self._has_gate_beside:
            q = self._taken(kernels, ColumnsOf(both.array, heads.num, 0, heads.dim))
        # A chunk's queries are copied before what they find is written.
        out = q
        if x.is_step:
            out = kernels.head_rows(x.num_tokens, heads.query_size, head_dim=heads.dim)
        self._ops.attention.launch(
            self._form, (q.array, k.array, v.array), step, cache_layer=self._cache_layer, out=out
        )
        if self._has_gate_beside:
            gate = ColumnsOf(both.array, heads.num, heads.dim, 2 * heads.dim)
            self._multiply_by_gate(out, gate, Gate.SIGMOID)
        elif self._gate is not None:
            (opening,) = project(kernels, h, (self._gate,))
            self._multiply_by_gate(out, ColumnsOf.whole(opening.array), Gate.SOFTPLUS)
        self._output.add_to(x, Input(out), kernels)

    def _projected(self, kernels: LayerKernels, h: Input) -> tuple[Rows, Rows, Rows]:
        """Shapes: each [T, size]."""
        results = project(kernels, h, self._qkv)
        if len(results) == 1:
            (joint,), first = results, 0
            results = []
            for size in self._layer.qkv.sizes:
                results.append(self._taken(kernels, ColumnsOf(joint.array, 1, first, first + size)))
                first += size
        if self._biases:
            for each, bias in zip(results, self._biases, strict=True):
                self._ops.elementwise.add_bias(each.array, bias, each.array)
        q, k, v = results
        return q, k, v

    def _taken(self, kernels: LayerKernels, columns: ColumnsOf) -> Rows:
        """Columns as rows of their own."""
        rows = kernels.rows(columns.array.shape[0], columns.num_columns)
        self._ops.elementwise.take_columns(columns, rows.array)
        return rows

    def _multiply_by_gate(self, rows: Rows, gate: ColumnsOf, kind: Gate) -> None:
        rows.forget_int8()
        self._ops.elementwise.gated(rows.array, gate, kind, rows.array)


class AttentionForms:
    """Makes the forms of a model's attention layers, which share tables and norms."""

    def __init__(self, weights: LayerWeights, file: GgufFile) -> None:
        self._weights, self._file = weights, file
        self._ones: dict[int, DeviceArray] = {}
        self._unscaled: dict[int, tuple[RopeTable, float]] = {}

    def of(self, layer: Attention) -> AttentionForm:
        """Raises: UnsupportedModel for what no kernel computes."""
        vectors, kind = self._weights.weights.vectors, layer.positions
        form = AttentionForm(layer.heads.num, layer.scale)
        if layer.sinks is not None:
            form.sinks = vectors[layer.sinks]
        tables = self._weights.weights.rope_tables
        match kind:
            case AttentionTemperature():
                form.temperature = kind
            case HeadNormRotary():
                form.table = tables[kind.rope]
                form.query_weight, form.key_weight = vectors[kind.q_norm], vectors[kind.k_norm]
                form.eps = self._weights.eps
            case RotaryUnitNorm():
                self._norm_before(form, tables[kind.rope], layer.heads.dim)
            case Rotary() | RowNormRotary():
                form.table = tables[kind.rope]
        return form

    def _norm_before(self, form: AttentionForm, table: RopeTable, dim: int) -> None:
        """A norm without weights after the rotation is computed as one before it."""
        if table.scale != 1.0 and table.num_rotated != dim:
            raise UnsupportedModel(
                "norms after a rotation that scales a part of each head are not computed on a GPU "
                "yet: use --backend cpu",
                path=self._file.path,
            )
        if dim not in self._ones:
            self._ones[dim] = self._weights.ops.device.upload(np.ones(dim, np.float32))
        if id(table) not in self._unscaled:  # the model's weights keep the table
            self._unscaled[id(table)] = norm_before(table, self._weights.eps)
        form.query_weight = form.key_weight = self._ones[dim]
        form.table, form.eps = self._unscaled[id(table)]


def norm_before(table: RopeTable, eps: float) -> tuple[RopeTable, float]:
    """Table and eps for a norm before the rotation of whole heads that gives the same as one after
    it: a rotation changes no length but by its scale."""
    unscaled = table if table.scale == 1.0 else replace(table, scale=1.0)
    return unscaled, eps / table.scale**2
