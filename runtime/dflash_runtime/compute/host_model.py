"""The model of the host's backends: every kind of layer, written in Ops; and its routed experts.

How each kind of layer is computed stands here once; which kinds a model has, in its description.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import (
    Attention,
    DeltaNet,
    Description,
    Ffn,
    Gate,
    GateBesideQueries,
    HeadNormRotary,
    InputScaledFfn,
    Linear,
    Mixer,
    PositionKind,
    Qkv,
    RotaryUnitNorm,
    RoutedFfn,
    RowNormRotary,
    parts_of,
)
from dflash_adapters.loading import load_weights, model_spec
from dflash_adapters.rope import AttentionTemperature
from dflash_protocol.batch import HostHidden
from dflash_protocol.ids import AnyArray, F32Array, I32Array, Phase
from dflash_runtime.compute.backend import RemoteExperts
from dflash_runtime.compute.host_ops import DeltaInputs, Ops
from dflash_runtime.compute.model import Pausable, RoutedExperts, Step


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer with the weights of its norms."""

    mixer: Mixer
    ffn: Ffn | RoutedFfn | InputScaledFfn
    mixer_norm: F32Array
    ffn_norm: F32Array
    cache_layer: int
    """Its index among layers of the same kind, which the cache keeps."""


class HostModel:
    """A described model with its weights on the device of `ops`. Implements model.Model.

    Immutable; computes on the thread that calls it.
    """

    def __init__(self, file: GgufFile, ops: Ops, description: Description) -> None:
        """Raises: as loading.model_spec and loading.load_weights."""
        self.spec = model_spec(file, description)
        self._ops, self._ends, self._eps = ops, description.ends, description.rms_eps
        weights = load_weights(file, ops, description)
        self._vectors, self._matrices = weights.vectors, weights.matrices
        self._rope_tables = weights.rope_tables
        self._factors = {
            tensor: np.full((1, 1), scale, np.float32) for tensor, scale in weights.scales.items()
        }
        self._is_plain = not any(
            isinstance(part, Linear) and (part.bias or part.scale) for part in parts_of(description)
        )
        """No product with a matrix is scaled or has a bias: most models, and quicker."""
        self._layers: list[_Layer] = []
        num_of_kind: dict[type[Mixer], int] = {Attention: 0, DeltaNet: 0}
        for layer in description.layers:
            kind = type(layer.mixer)
            norms = self._vectors[layer.mixer_norm], self._vectors[layer.ffn_norm]
            self._layers.append(_Layer(layer.mixer, layer.ffn, *norms, num_of_kind[kind]))
            num_of_kind[kind] += 1

    def with_ops(self, ops: Ops) -> HostModel:
        """The same model with other operations on the same weights."""
        other = copy(self)
        other._ops = ops
        return other

    def first_layers(self, num_layers: int) -> HostModel:
        other = copy(self)
        other.spec = self.spec.first_layers(num_layers)
        return other

    def place(self, step: Step) -> Step:
        """The step itself; that it fits is checked by the operations."""
        step.cache.touch(step.context)
        return step

    def embed(self, step: Step) -> F32Array:
        return self._ops.embed(self._matrices[self._ends.embedding], step.token_ids)

    def layer(
        self, layer_id: int, x: F32Array, step: Step, experts: RoutedExperts[AnyArray]
    ) -> Pausable[F32Array]:
        """Updates `x` in place."""
        ops, eps, layer = self._ops, self._eps, self._layers[layer_id]
        mixer, ffn = layer.mixer, layer.ffn
        h = ops.rms_norm(x, layer.mixer_norm, eps)
        if isinstance(mixer, Attention):
            x = self._attention(mixer, layer.cache_layer, h, step, add=x)
        else:
            x = self._delta_net(mixer, layer.cache_layer, h, step, add=x)
        h = ops.rms_norm(x, layer.ffn_norm, eps)
        if isinstance(ffn, Ffn):
            return self._end_ffn(ffn, self._begin_ffn(ffn, h), add=x)
        logits = self._linear(ffn.router, h)
        if isinstance(ffn, RoutedFfn):
            bias = None if ffn.bias is None else self._vectors[ffn.bias]
            topk_ids, topk_weights = ops.route(logits, ffn.rule, bias=bias)
        else:
            topk_ids, topk_weights = ops.route(logits, ffn.choice)
            _, input_scales = ops.route(logits, ffn.input_scale)
        shared = None if ffn.shared is None else self._begin_ffn(ffn.shared, h)
        if isinstance(ffn, InputScaledFfn):
            ops.multiply(h, input_scales)
        ops.add(x, (yield from experts(layer_id, h, topk_ids, topk_weights)))
        if ffn.shared is None or shared is None:
            return x
        return self._end_ffn(ffn.shared, shared, add=x)

    def head(self, x: F32Array) -> F32Array:
        normed = self._ops.rms_norm(x, self._vectors[self._ends.norm], self._eps)
        return self._linear(self._ends.head, normed)

    # What follows computes a part of a layer. Shapes: x, h, add, result [T, H] unless said
    # otherwise; the result is added to `add`, in place.

    # -- matrices ---------------------------------------------------------------------------------

    def _linear(self, linear: Linear, x: F32Array, *, add: F32Array | None = None) -> F32Array:
        """Shapes: x [T, columns]; add, result [T, rows]."""
        matrix = self._matrices[linear.weight]
        if linear.bias is None and linear.scale is None:
            return self._ops.linear(x, matrix, out=add, add=add)
        result = self._finished(linear, self._ops.linear(x, matrix))
        if add is None:
            return result
        self._ops.add(add, result)
        return add

    def _finished(self, linear: Linear, product: F32Array) -> F32Array:
        """What follows the product with the matrix, in place."""
        if linear.scale is not None:
            self._ops.multiply(product, self._factors[linear.scale])
        if linear.bias is not None:
            self._ops.add(product, self._vectors[linear.bias])
        return product

    def _project(self, linears: Sequence[Linear], x: F32Array) -> list[F32Array]:
        """The products of the same rows with several matrices."""
        matrices = self._matrices
        products = self._ops.project(x, [matrices[each.weight] for each in linears])
        if self._is_plain:
            return products
        return [
            self._finished(linear, product)
            for linear, product in zip(linears, products, strict=True)
        ]

    # -- mixers -----------------------------------------------------------------------------------

    def _attention(
        self, layer: Attention, cache_layer: int, h: F32Array, step: Step, *, add: F32Array
    ) -> F32Array:
        ops, heads = self._ops, layer.heads
        q, k, v = self._qkv(layer.qkv, h)
        if isinstance(layer.positions, RowNormRotary):
            q = ops.rms_norm(q, self._vectors[layer.positions.q_norm], self._eps)
            k = ops.rms_norm(k, self._vectors[layer.positions.k_norm], self._eps)
        q, k = _split_heads(q, heads.num), _split_heads(k, heads.num_kv)
        v = _split_heads(v, heads.num_kv)
        gate: F32Array | None = None
        if layer.gate is None:
            pass
        elif isinstance(layer.gate, GateBesideQueries):
            both, dim = q, heads.dim
            q, gate = ops.columns(both, 0, dim), ops.columns(both, dim, 2 * dim)
        else:
            gate = self._linear(layer.gate.linear, h)
        self._mark_positions(layer.positions, q, k, step.positions)
        sinks = None if layer.sinks is None else self._vectors[layer.sinks]
        cache, positions, scale = step.cache, step.positions, layer.scale
        attended = ops.attention(
            q, k, v, cache, cache_layer, positions, scale=scale, sinks=sinks, tree=step.tree
        )
        merged = _merge_heads(attended)
        if gate is not None:
            if isinstance(layer.gate, GateBesideQueries):
                merged = ops.gated(merged, _merge_heads(gate), Gate.SIGMOID)
            else:
                merged = ops.gated(merged, gate, Gate.SOFTPLUS, out=merged)
        return self._linear(layer.output, merged, add=add)

    def _qkv(self, qkv: Qkv, x: F32Array) -> tuple[F32Array, F32Array, F32Array]:
        """Queries, keys and values of rows. Shapes: results [T, size]."""
        results = self._project(qkv.linears, x)
        if len(results) == 1:
            both, end = qkv.sizes[0] + qkv.sizes[1], sum(qkv.sizes)
            bounds = ((0, qkv.sizes[0]), (qkv.sizes[0], both), (both, end))
            results = [self._ops.columns(results[0], *bound) for bound in bounds]
        if qkv.biases:
            for each, bias in zip(results, qkv.biases, strict=True):
                self._ops.add(each, self._vectors[bias])
        q, k, v = results
        return q, k, v

    def _mark_positions(
        self, kind: PositionKind, q: F32Array, k: F32Array, positions: I32Array
    ) -> None:
        """In place. Shapes: q [T, heads, D]; k [T, kv_heads, D]."""
        ops = self._ops
        if isinstance(kind, AttentionTemperature):
            ops.temper(q, kind, positions)
            return
        table = self._rope_tables[kind.rope]
        if isinstance(kind, RotaryUnitNorm):
            ops.norm_and_rotate(q, k, positions, table, eps=self._eps, norms_after=True)
        elif isinstance(kind, HeadNormRotary):
            q_weight, k_weight = self._vectors[kind.q_norm], self._vectors[kind.k_norm]
            ops.norm_and_rotate(
                q, k, positions, table, q_weight=q_weight, k_weight=k_weight, eps=self._eps
            )
        else:
            ops.norm_and_rotate(q, k, positions, table)

    def _delta_net(
        self, layer: DeltaNet, cache_layer: int, h: F32Array, step: Step, *, add: F32Array
    ) -> F32Array:
        ops, vectors = self._ops, self._vectors
        mixed, gate, alpha, beta = self._project(layer.inputs, h)
        conv = vectors[layer.conv]
        cache, positions, tree = step.cache, step.positions, step.tree
        mixed = ops.causal_conv(mixed, conv, cache, cache_layer, positions, tree=tree)
        a, dt_bias = vectors[layer.a], vectors[layer.dt_bias]
        inputs = DeltaInputs(mixed, alpha, beta, layer.state.delta, a, dt_bias, self._eps)
        heads = ops.delta_rule(inputs, cache, cache_layer, positions, tree=tree)
        normed = _merge_heads(ops.rms_norm(heads, vectors[layer.norm], self._eps))
        return self._linear(layer.output, ops.gated(normed, gate, Gate.SILU), add=add)

    # -- FFNs -------------------------------------------------------------------------------------

    def _begin_ffn(self, ffn: Ffn, h: F32Array) -> list[F32Array]:
        """What `_end_ffn` makes the result of; `h` need not stay as it is."""
        linears = (ffn.gate, ffn.up) if ffn.share is None else (ffn.gate, ffn.up, ffn.share)
        return self._project(linears, h)

    def _end_ffn(self, ffn: Ffn, begun: list[F32Array], *, add: F32Array) -> F32Array:
        ops = self._ops
        gate, up, *share = begun
        activated = ops.gated(up, gate, Gate.SILU, out=up)
        if not share:
            return self._linear(ffn.down, activated, add=add)
        ops.add(add, ops.gated(self._linear(ffn.down, activated), share[0], Gate.SIGMOID))
        return add


def _split_heads(x: F32Array, num_heads: int) -> F32Array:
    """View [T, heads*D] as [T, heads, D]."""
    return x.reshape(x.shape[0], num_heads, x.shape[1] // num_heads)


def _merge_heads(x: F32Array) -> F32Array:
    """View [T, heads, D] as [T, heads*D]."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2])


class HostExperts:
    """The routed experts of a host backend's model. Implements model.RoutedExperts.

    Partial sums are added in float64 and rounded once, so the split does not show in the bits.
    """

    def __init__(self, remote: RemoteExperts, phase: Phase) -> None:
        self._remote, self._phase = remote, phase

    def __call__(
        self, layer_id: int, hidden: F32Array, topk_ids: I32Array, topk_weights: F32Array
    ) -> Pausable[F32Array]:
        """Raises: DaemonUnavailable if all owners of an expert are lost, without a fallback."""
        remote, phase = self._remote, self._phase
        rows = HostHidden(hidden)
        ticket = remote.begin(layer_id, rows, topk_ids, topk_weights, phase=phase)
        if phase is Phase.PREFILL:
            try:
                yield None
            except BaseException:
                remote.abandon(ticket)
                raise
        return remote.finish(ticket).to_host().astype(np.float32)
