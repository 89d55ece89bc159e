"""The routers with which a layer predicts what the next layer will choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Layer, RoutedFfn
from dflash_adapters.registry import describe
from dflash_adapters.routing import Gating
from dflash_protocol.ids import AnyArray, F32Array, I64Array
from dflash_protocol.payloads import to_bf16
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import router_ahead as r
from dflash_runtime.compute.cpu.simd.types import LANES

_LEAST_NORM = 1e-3
"""Smaller weights of a norm are not divided by: these columns tell nothing of the residual."""


@dataclass(frozen=True, slots=True, eq=False)
class RouterAhead:
    """A layer's router, for rows of the layer before. Shapes: words [ROUTER_WORDS] int64."""

    words: I64Array
    arrays: tuple[AnyArray, ...]
    """What the words point to."""

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.arrays)


def routers_ahead(
    file: GgufFile, banks: Mapping[int, CpuExpertBank], *, most_bytes: int
) -> dict[int, RouterAhead]:
    """Routers of layers, by id, for rows of the layer before, whose bank is the one before; none if
    they take more than `most_bytes` in all. Layers that choose experts in groups have none, nor
    those whose rows are of a length that kernels do not read.

    Raises: ModelFileError; ValueError for tensors of other shapes than the layers say.
    """
    layers = describe(file).layers
    predicted = [
        layer_id
        for before, layer_id in pairwise(banks)
        if layer_id == before + 1 and _is_predictable(layers[layer_id], banks[layer_id])
    ]
    sizes = [banks[layer_id].layer for layer_id in predicted]
    if sum(2 * each.num_experts * each.hidden_size for each in sizes) > most_bytes:
        return {}
    return {
        layer_id: _router(file, layers[layer_id - 1], layers[layer_id], banks[layer_id])
        for layer_id in predicted
    }


def _is_predictable(layer: Layer, bank: CpuExpertBank) -> bool:
    """Whether its choice follows from single logits, in an order that a common factor of all does
    not change much."""
    ffn = layer.ffn
    if bank.layer.hidden_size % LANES:
        return False
    if not isinstance(ffn, RoutedFfn) or ffn.rule.num_groups > 1 or ffn.router.scale is not None:
        return False
    if ffn.bias is None or ffn.rule.selects_by_logits:
        return True
    return ffn.rule.gating is Gating.SIGMOID and ffn.router.bias is None


def _router(file: GgufFile, before: Layer, layer: Layer, bank: CpuExpertBank) -> RouterAhead:
    ffn, sizes = layer.ffn, bank.layer
    assert isinstance(ffn, RoutedFfn)
    stored = _floats(file, ffn.router.weight.name, sizes.num_experts, sizes.hidden_size)
    # Rows of the layer before have its norm's weights in them, in place of this one's.
    theirs, ours = (
        _floats(file, each.ffn_norm.name, sizes.hidden_size) for each in (before, layer)
    )
    is_small = np.abs(theirs) < _LEAST_NORM
    with np.errstate(all="ignore"):
        factors = np.where(is_small, np.float32(0), ours / np.where(is_small, 1, theirs))
        rows = to_bf16(stored * factors)
    bias = np.zeros(sizes.num_experts, np.float32)
    for each in (ffn.router.bias, ffn.bias):
        if each is not None:
            bias += _floats(file, each.name, sizes.num_experts)
    local_ids = np.full(sizes.num_experts, -1, np.int64)
    local_ids[bank.global_expert_ids] = np.arange(bank.num_experts)
    scores = np.zeros(sizes.num_experts)
    likely = np.zeros(sizes.num_experts_used, np.int64)
    counts = np.zeros(sizes.num_experts, np.int64)
    is_biased = ffn.bias is not None and not ffn.rule.selects_by_logits
    words = np.zeros(r.ROUTER_WORDS, np.int64)
    words[r.ROWS], words[r.BIAS] = rows.ctypes.data, bias.ctypes.data
    words[r.USES_SIGMOID] = is_biased  # without a bias sigmoids are in the order of logits
    words[r.NUM_ROUTED], words[r.HIDDEN_SIZE] = sizes.num_experts, sizes.hidden_size
    words[r.NUM_USED], words[r.LOCAL_IDS] = sizes.num_experts_used, local_ids.ctypes.data
    words[r.SCORES], words[r.LIKELY] = scores.ctypes.data, likely.ctypes.data
    words[r.COUNTS] = counts.ctypes.data
    return RouterAhead(words, (rows, bias, local_ids, scores, likely, counts))


def _floats(file: GgufFile, name: str, *shape: int) -> F32Array:
    """Raises: ValueError for a tensor of another shape."""
    info = file.tensor(name)
    if info.shape != shape:
        raise ValueError(f"{name} is {info.shape}, not {shape}")
    return file.floats(name)
