"""DeltaNet layers: norm and projections in one product; convolution, delta rule, norm and gate in
one kernel of a step; output onto the residual."""

from __future__ import annotations

from dflash_adapters.layers import DeltaNet, VectorTensor
from dflash_runtime.compute.gpu.layers.delta import DeltaPlan, DeltaWeights
from dflash_runtime.compute.gpu.layers.placed_step import PlacedStep
from dflash_runtime.compute.gpu.layers.rows import Input, Rows
from dflash_runtime.compute.gpu.model.linear import LayerWeights, project


class DeltaNetLayer:
    """One recurrent layer of a model. Immutable."""

    def __init__(
        self, layer: DeltaNet, norm: VectorTensor, cache_layer: int, weights: LayerWeights
    ) -> None:
        vectors, eps = weights.weights.vectors, weights.eps
        self._ops, self._norm, self._cache_layer = weights.ops, weights.norm(norm), cache_layer
        self._inputs = [weights.projection(each) for each in layer.inputs]
        taps = vectors[layer.conv]
        self._plan = DeltaPlan(layer.state.delta, num_taps=taps.shape[1], finishes=True)
        self._weights = DeltaWeights(
            taps=taps,
            decay=vectors[layer.a],
            bias=vectors[layer.dt_bias],
            norm=vectors[layer.norm],
            key_eps=eps,
            norm_eps=eps,
        )
        self._output = weights.projection(layer.output)

    def run(self, x: Rows, step: PlacedStep) -> None:
        """Add the layer's result to the residual. Shapes: x [T, H]."""
        way, plan = self._ops.way_of(x), self._plan
        mixed, gate, alpha, beta = project(way, Input(x, self._norm), self._inputs)
        out = way.attended_rows(x.num_tokens, plan.value_channels, head_dim=plan.delta.value_dim)
        self._ops.delta.launch(
            plan,
            (mixed, gate, alpha, beta),
            self._weights,
            step,
            cache_layer=self._cache_layer,
            out=out,
        )
        self._output.add_to(x, Input(out), way)
