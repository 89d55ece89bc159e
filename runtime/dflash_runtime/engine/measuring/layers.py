"""Which layers of a model are measured: a few of each kind. Pure: reads metadata alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import (
    Attention,
    Description,
    Ffn,
    Layer,
    MatrixTensor,
    RoutedFfn,
    Tensor,
    VectorTensor,
    parts_of,
)

_MOST_OF_FIRST = 16
"""Layers of the first kind: the difference between half and all of them is what is timed."""
_MOST_OF_OTHERS = 4


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of one structure, in the order in which they are measured."""

    layer_ids: tuple[int, ...]
    """Of the model."""
    num_all: int
    """How many the model has."""
    is_routed: bool
    sees_all: bool
    """Attention over all positions: no window, no recurrent state."""


@dataclass(frozen=True, slots=True)
class SampledLayers:
    """A model cut to the layers that are measured: half of the first kind, then its other half,
    then the other kinds."""

    description: Description
    kinds: tuple[LayerKind, ...]
    num_first: int
    """Layers of the first half; 0 if there is a single layer of the first kind."""

    def first_kind(self, num_layers: int) -> SampledLayers:
        """At most so many layers of the first kind alone."""
        kind = self.kinds[0]
        num = min(num_layers, len(kind.layer_ids))
        cut = replace(self.description, layers=self.description.layers[:num])
        return SampledLayers(cut, (replace(kind, layer_ids=kind.layer_ids[:num]),), num // 2)

    @property
    def ends(self) -> tuple[int, ...]:
        """The number of layers up to each part's end: the first half, then each kind."""
        ends, end = [self.num_first], 0
        for kind in self.kinds:
            end += len(kind.layer_ids)
            ends.append(end)
        return tuple(ends)


def sampled_layers(file: GgufFile, description: Description, *, limit_bytes: int) -> SampledLayers:
    """Choose layers of at most `limit_bytes`, but at least two of the first kind if there are two.
    Those of a kind are spread over the model, whose layers may differ in their types."""
    by_kind: dict[tuple[object, ...], list[int]] = {}
    for layer_id, layer in enumerate(description.layers):
        by_kind.setdefault(_structure(layer), []).append(layer_id)
    # A kind that sees all positions goes first: steps far into a context are timed with it alone.
    order = sorted(
        by_kind.items(), key=lambda kind: (not kind[0][0], not kind[0][1], -len(kind[1]))
    )
    sizes = [max(layer_bytes(file, description.layers[each]) for each in ids) for _, ids in order]
    kinds, left = list[LayerKind](), limit_bytes
    for index, ((is_routed, sees_all, *_), ids) in enumerate(order):
        reserved = sum(sizes[index + 1 :])  # at least one layer of each other kind
        num = min(len(ids), (left - reserved) // max(1, sizes[index]))
        if index:
            chosen = _spread(ids, max(1, min(num, _MOST_OF_OTHERS)))
        else:
            num = min(num, _MOST_OF_FIRST) // 2 * 2
            chosen = _halves_apart(_spread(ids, max(num, min(len(ids), 2))))
        left -= len(chosen) * sizes[index]
        kinds.append(LayerKind(chosen, len(ids), bool(is_routed), bool(sees_all)))
    layers = tuple(description.layers[each] for kind in kinds for each in kind.layer_ids)
    cut = replace(description, layers=layers, left_out=(*description.left_out, ""))
    return SampledLayers(cut, tuple(kinds), len(kinds[0].layer_ids) // 2)


def with_experts_used(description: Description, num_used: int) -> Description:
    """The same with another number of experts for each token, where a router chooses several."""
    return replace(
        description, layers=tuple(_with_used(layer, num_used) for layer in description.layers)
    )


def layer_bytes(file: GgufFile, layer: Layer) -> int:
    """Bytes of all tensors of a layer."""
    return _bytes_of(file, [each for each in parts_of(layer) if isinstance(each, Tensor)])


def trunk_bytes(file: GgufFile, layer: Layer) -> int:
    """Bytes of a layer's tensors that are not its routed experts'."""
    return _bytes_of(
        file, [each for each in parts_of(layer) if isinstance(each, MatrixTensor | VectorTensor)]
    )


def head_bytes(file: GgufFile, description: Description) -> int:
    """Bytes of the head's matrix."""
    return file.tensor(description.ends.head.weight.name).num_bytes


def _bytes_of(file: GgufFile, tensors: Sequence[Tensor]) -> int:
    return sum(file.tensor(name).num_bytes for name in {each.name for each in tensors})


def _structure(layer: Layer) -> tuple[object, ...]:
    """Layers of one kind have one structure: routed, sees all positions, types of its parts."""
    mixer, sees_all = layer.mixer, False
    if isinstance(mixer, Attention):
        sees_all = mixer.mask.span is None
    return not isinstance(layer.ffn, Ffn), sees_all, type(mixer), type(layer.ffn)


def _spread(ids: Sequence[int], num: int) -> tuple[int, ...]:
    """`num` of them, evenly spread."""
    return tuple(ids[(2 * index + 1) * len(ids) // (2 * num)] for index in range(num))


def _halves_apart(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Every second one first, so that each half is spread over the model."""
    return ids[::2] + ids[1::2]


def _with_used(layer: Layer, num_used: int) -> Layer:
    ffn = layer.ffn
    if not isinstance(ffn, RoutedFfn):
        return layer
    sizes = replace(ffn.experts.sizes, num_experts_used=num_used)
    experts = replace(ffn.experts, sizes=sizes)
    rule = replace(ffn.rule, num_experts_used=num_used)
    return replace(layer, ffn=replace(ffn, rule=rule, experts=experts))
