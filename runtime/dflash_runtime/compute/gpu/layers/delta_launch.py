"""The delta rule of a layer in steps, chunks and trees: picks the kernels."""

from __future__ import annotations

from dataclasses import replace

from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.launch.decode_arrays import MOST_TOKENS
from dflash_runtime.compute.gpu.layers.delta import (
    DeltaArrays,
    DeltaChunk,
    DeltaPlan,
    DeltaStep,
    DeltaWeights,
)
from dflash_runtime.compute.gpu.layers.delta_tree import DeltaTree
from dflash_runtime.compute.gpu.layers.placed_step import PlacedStep
from dflash_runtime.compute.gpu.layers.rows import Rows


class DeltaLauncher:
    """Launches of the delta rule; one object serves a whole model."""

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._steps: dict[tuple[DeltaPlan, int], DeltaStep] = {}
        self._chunks: dict[DeltaPlan, DeltaChunk] = {}
        self._trees: dict[DeltaPlan, DeltaTree] = {}

    def launch(
        self,
        plan: DeltaPlan,
        inputs: tuple[Rows, Rows, Rows, Rows],
        weights: DeltaWeights,
        step: PlacedStep,
        *,
        cache_layer: int,
        out: Rows,
    ) -> None:
        """Convolution, delta rule, norm of each head, and gate.

        Shapes: inputs as DeltaArrays has them: mixed, gate, alpha, beta; out [T, value channels],
        as int8 too in a step if the plan has these.
        Raises: CheckpointMissing if the layer's state is not that before the first position.
        """
        mixed, gate, alpha, beta = inputs
        given = DeltaArrays(mixed.array, alpha.array, beta.array, gate.array)
        if step.branch is not None:
            kept = mixed, alpha, beta
            self._tree(plan, given, weights, step, cache_layer=cache_layer, out=out, kept=kept)
            return
        states, num_tokens = step.cache.states, out.num_tokens
        if step.first_position is not None:
            states.advance_layer(cache_layer, step.first_position, num_tokens)
        state = states.layers[cache_layer]
        if num_tokens > MOST_TOKENS:
            if plan not in self._chunks:
                self._chunks[plan] = DeltaChunk(self._device, plan)
            self._chunks[plan].launch(
                given, weights, state, first_position=step.positions[:1], out=out.array
            )
            return
        key = plan, num_tokens
        if key not in self._steps:
            self._steps[key] = DeltaStep(self._device, plan, num_tokens)
        self._steps[key].launch(given, weights, state, positions=step.positions, out=out.forms)

    def _tree(
        self,
        plan: DeltaPlan,
        given: DeltaArrays,
        weights: DeltaWeights,
        step: PlacedStep,
        *,
        cache_layer: int,
        out: Rows,
        kept: tuple[Rows, ...],
    ) -> None:
        """A tree's tokens, of which the accepted ones are to be gone on from. `kept` are rows of
        `given` whose buffers are in use until then."""
        tree, branch, states = step.tree, step.branch, step.cache.states
        assert tree is not None
        assert branch is not None
        if plan not in self._trees:
            self._trees[plan] = DeltaTree(self._device, plan)
        delta, state = self._trees[plan], states.layers[cache_layer]
        delta.launch(given, weights, state, branch=branch, out=out.forms)
        inputs = replace(given, gate=None)

        def accept(path: I32Array) -> None:
            assert kept
            on_device = branch.path_on_device(path)
            delta.accept(inputs, weights, state, branch=branch, path=on_device)
            states.advance_layer(cache_layer, branch.position, path.size)

        tree.keep(accept)
