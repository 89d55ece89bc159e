"""A described model on a GPU: rows go through layers that fuse their work inside.

::

    place ─ embed ─┬─ attention or DeltaNet ─ dense, routed or input-scaled FFN ─┬─ head
                   └──────────────────── for each layer ─────────────────────────┘

A layer's kind is an object of attention.py, delta_net.py or ffns.py, made when the model is loaded.
Each computes steps of up to 8 tokens and trees with other kernels than chunks of prompts, see
ops/kernels.py.
"""

from __future__ import annotations

from copy import copy
from itertools import pairwise
from typing import TypeAlias

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import (
    Attention,
    DeltaNet,
    Description,
    Ffn,
    InputScaledFfn,
    Layer,
    Mixer,
    RoutedFfn,
)
from dflash_adapters.loading import load_weights, model_spec
from dflash_protocol.errors import UnsupportedModel
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.launch.decode_tokens import Embed
from dflash_runtime.compute.gpu.launch.sample_tokens import ChooseTokens, SampleInputs
from dflash_runtime.compute.gpu.layers.placed_step import PlacedStep, place
from dflash_runtime.compute.gpu.layers.rows import Input, Rows
from dflash_runtime.compute.gpu.model.attention import AttentionForms, AttentionLayer
from dflash_runtime.compute.gpu.model.delta_net import DeltaNetLayer
from dflash_runtime.compute.gpu.model.ffns import (
    DenseFfnLayer,
    DeviceExperts,
    InputScaledFfnLayer,
    RoutedFfnLayer,
)
from dflash_runtime.compute.gpu.model.linear import DeviceLoader, LayerWeights
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.model import Pausable, Step

MixerLayer: TypeAlias = AttentionLayer | DeltaNetLayer
FfnLayer: TypeAlias = DenseFfnLayer | RoutedFfnLayer | InputScaledFfnLayer


class GpuModel:
    """Implements model.Model[Rows, DeviceExperts]. Immutable; used by one thread at a time.

    Rows are changed in place from layer to layer.
    """

    def __init__(
        self, file: GgufFile, description: Description, ops: GpuOps, *, loader: DeviceLoader
    ) -> None:
        """Raises: as loading.model_spec and loading.load_weights; UnsupportedModel for what no
        kernel computes; DeviceOutOfMemory."""
        self.spec = model_spec(file, description)
        self._path, self._ops = file.path, ops
        weights = LayerWeights(ops, load_weights(file, loader, description), description.rms_eps)
        ends = description.ends
        table = loader.load_matrix(file, ends.embedding.name)
        self._table = table
        self._embed = Embed(ops.device, table.tensor_type, rows=table.rows, columns=table.columns)
        self._norm, self._head = weights.norm(ends.norm), weights.projection(ends.head)
        self._choose_tokens = ChooseTokens(ops.device)
        forms = AttentionForms(weights, file)
        # A mixer is also counted among those of the same kind, which the cache keeps.
        num_of_kind: dict[type[Mixer], int] = {Attention: 0, DeltaNet: 0}
        self._layers: list[tuple[MixerLayer, FfnLayer]] = []
        for layer_id, layer in enumerate(description.layers):
            kind = type(layer.mixer)
            mixer = _mixer_layer(layer, num_of_kind[kind], weights, forms)
            self._layers.append((mixer, _ffn_layer(layer, layer_id, weights)))
            num_of_kind[kind] += 1
        for (_, before), (_, ffn) in pairwise(self._layers):
            if isinstance(before, RoutedFfnLayer) and isinstance(ffn, RoutedFfnLayer):
                before.following = ffn

    def first_layers(self, num_layers: int) -> GpuModel:
        other = copy(self)
        other.spec = self.spec.first_layers(num_layers)
        return other

    def place(self, step: Step) -> PlacedStep:
        """Raises: as placed_step.place."""
        if isinstance(step, PlacedStep):
            return step
        return place(step, self._ops.device, vocab_size=self.spec.vocab_size)

    def embed(self, step: Step) -> Rows:
        """The kernel before this one may have written the token ids."""
        step = self.place(step)
        kernels = self._ops.chunks if step.is_chunk else self._ops.steps
        rows = kernels.rows(step.num_tokens, self._table.columns)
        # What advances positions must have ended before attention, which reads them early.
        self._embed.launch(self._table.weights, step.token_ids, rows.array)
        return rows

    def layer(self, layer_id: int, x: Rows, step: Step, experts: DeviceExperts) -> Pausable[Rows]:
        """`x` is updated in place, and is the result."""
        mixer, ffn = self._layers[layer_id]
        mixer.run(x, self.place(step))
        yield from ffn.run(x, experts)
        return x

    def head(self, x: Rows) -> Rows:
        """Logits. Shapes: x [T, H]; result [T, V]."""
        logits = self._ops.kernels_for(x).logits(Input(x, self._norm), self._head.matrix)
        if not self._head.is_plain:
            self._head.finish(logits)
            logits.partials = ()
        return logits

    def step_logits(self, x: Rows) -> Rows:
        """Logits of up to MOST_TOKENS rows, with what a choice from them needs.

        Raises: UnsupportedModel for a head with a scale or bias.
        """
        self._require_plain_head("step")
        return self._ops.steps.logits(Input(x, self._norm), self._head.matrix)

    def choose_tokens(
        self,
        logits: Rows,
        *,
        token_ids: DeviceArray,
        positions: DeviceArray,
        history: DeviceArray,
        sampling: SampleInputs | None,
    ) -> None:
        """The most likely token of each row of `step_logits` into `token_ids` and `history`,
        positions one further. With `sampling` the token of one row is sampled."""
        (partials,) = logits.partials
        self._choose_tokens.launch(
            logits.array,
            partials,
            sampling,
            token_ids=token_ids,
            positions=positions,
            history=history,
        )

    def write_argmax(self, x: Rows, token_ids: DeviceArray) -> None:
        """The most likely token after each row of a step, whose logits are dropped.

        Shapes: token_ids [T] int32. Raises: UnsupportedModel as `step_logits`.
        """
        self._require_plain_head("tree")
        steps, matrix, h = self._ops.steps, self._head.matrix, Input(x, self._norm)
        for part in steps.head_parts(x.num_tokens, matrix):
            logits = steps.rows(part.stop - part.start, matrix.rows)
            partials = steps.head(h[part], matrix, logits.array)
            self._ops.write_argmax(partials.array, token_ids[part])

    def _require_plain_head(self, what: str) -> None:
        if not self._head.is_plain:
            raise UnsupportedModel(
                f"it needs a head whose logits are scaled, in a captured {what}, which is not "
                "computed on a GPU yet: use --backend cpu",
                path=self._path,
            )


def _mixer_layer(
    layer: Layer, cache_layer: int, weights: LayerWeights, forms: AttentionForms
) -> MixerLayer:
    match layer.mixer:
        case Attention() as attention:
            return AttentionLayer(
                attention, layer.mixer_norm, cache_layer, weights=weights, forms=forms
            )
        case DeltaNet() as delta_net:
            return DeltaNetLayer(delta_net, layer.mixer_norm, cache_layer, weights=weights)


def _ffn_layer(layer: Layer, layer_id: int, weights: LayerWeights) -> FfnLayer:
    norm = layer.ffn_norm
    match layer.ffn:
        case Ffn() as ffn:
            return DenseFfnLayer(ffn, norm, weights)
        case RoutedFfn() as routed:
            return RoutedFfnLayer(routed, norm, layer_id, weights=weights)
        case InputScaledFfn() as scaled:
            return InputScaledFfnLayer(scaled, norm, layer_id, weights=weights)
