"""DeltaNet layers: norm and projections in one product; convolution, delta rule, norm and gate in
one kernel of a step; output onto the residual."""

from __future__ import annotations

from dataclasses import replace

from dflash_adapters.layers import DeltaNet, VectorTensor
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.layers.delta import (
    DeltaArrays,
    DeltaChunk,
    DeltaPlan,
    DeltaStep,
    DeltaTree,
    DeltaWeights,
)
from dflash_runtime.compute.gpu.layers.placed_step import PlacedStep
from dflash_runtime.compute.gpu.layers.rows import Input, Rows
from dflash_runtime.compute.gpu.model.linear import LayerWeights, project
from dflash_runtime.compute.step_order import MOST_TOKENS


class DeltaNetLayer:
    """One recurrent layer of a model. Its kernels are compiled when they are first needed."""

    def __init__(
        self, layer: DeltaNet, norm: VectorTensor, cache_layer: int, *, weights: LayerWeights
    ) -> None:
        vectors, eps = weights.weights.vectors, weights.eps
        self._ops, self._norm, self._cache_layer = weights.ops, weights.norm(norm), cache_layer
        self._inputs = [weights.projection(each) for each in layer.inputs]
        taps = vectors[layer.conv]
        self._plan = DeltaPlan(layer.state.delta, num_taps=taps.shape[1])
        self._weights = DeltaWeights(
            taps=taps,
            decay=vectors[layer.a],
            bias=vectors[layer.dt_bias],
            norm=vectors[layer.norm],
            key_eps=eps,
            norm_eps=eps,
        )
        self._output = weights.projection(layer.output)
        self._steps: dict[int, DeltaStep] = {}
        self._chunk: DeltaChunk | None = None
        self._tree: DeltaTree | None = None

    def run(self, x: Rows, step: PlacedStep) -> None:
        """Add the layer's result to the residual. Shapes: x [T, H].

        Raises: CheckpointMissing if the layer's state is not that before the first position.
        """
        kernels, plan = self._ops.kernels_for(x), self._plan
        mixed, gate, alpha, beta = project(kernels, Input(x, self._norm), self._inputs)
        out = kernels.head_rows(x.num_tokens, plan.value_channels, head_dim=plan.delta.value_dim)
        given = DeltaArrays(mixed.array, alpha.array, beta.array, gate.array)
        if step.branch is not None:
            self._launch_tree(given, step, out, kept=(mixed, alpha, beta))
        else:
            self._launch(given, step, out)
        self._output.add_to(x, Input(out), kernels)

    def _launch(self, given: DeltaArrays, step: PlacedStep, out: Rows) -> None:
        """Successive tokens: a step's or a chunk's."""
        device, states, num_tokens = self._ops.device, step.cache.states, out.num_tokens
        if step.first_position is not None:
            states.advance_layer(self._cache_layer, step.first_position, num_tokens)
        state = states.layers[self._cache_layer]
        if num_tokens <= MOST_TOKENS:
            if num_tokens not in self._steps:
                self._steps[num_tokens] = DeltaStep(device, self._plan, num_tokens)
            self._steps[num_tokens].launch(
                given, self._weights, state, positions=step.positions, out=out.forms
            )
            return
        if self._chunk is None:
            self._chunk = DeltaChunk(device, self._plan)
        first = step.positions[:1]
        self._chunk.launch(given, self._weights, state, first_position=first, out=out.array)

    def _launch_tree(
        self, given: DeltaArrays, step: PlacedStep, out: Rows, *, kept: tuple[Rows, ...]
    ) -> None:
        """A tree's tokens, of which the accepted ones are to be gone on from. `kept` are rows of
        `given` whose buffers are in use until then."""
        tree, branch, states = step.tree, step.branch, step.cache.states
        assert tree is not None
        assert branch is not None
        if self._tree is None:
            self._tree = DeltaTree(self._ops.device, self._plan)
        delta, weights, cache_layer = self._tree, self._weights, self._cache_layer
        state = states.layers[cache_layer]
        delta.launch(given, weights, state, branch=branch, out=out.forms)
        inputs = replace(given, gate=None)

        def accept(path: I32Array) -> None:
            assert kept
            on_device = branch.path_on_device(path)
            delta.accept(inputs, weights, state, branch=branch, path=on_device)
            states.advance_layer(cache_layer, branch.position, path.size)

        tree.keep(accept)
