"""Memory on the device for weights of an ExpertOffload, counted before there is any.

Needs no compiled code: daemons without numba count memory too.
"""

from __future__ import annotations

from collections.abc import Iterable

from dflash_adapters.spec import MoeLayer
from dflash_runtime.compute.gpu.launch.layouts import is_native
from dflash_runtime.compute.gpu.layers.resident import expert_bytes

NUM_PLACES = 2
"""Layers whose weights are on the device at once: one is computed, the next one copied."""
_ALIGNMENT = 256


def offload_bytes(missing: Iterable[tuple[MoeLayer, int]]) -> int:
    """Device memory for weights of an ExpertOffload, with so many remote experts of each layer."""
    place_bytes, laid_out_bytes = memory_of(missing)
    return NUM_PLACES * place_bytes + laid_out_bytes


def memory_of(missing: Iterable[tuple[MoeLayer, int]]) -> tuple[int, int]:
    """Bytes of a place, and of memory for projections whose layout on the device differs."""
    place_bytes = laid_out_bytes = 0
    for layer, num in missing:
        native = sum(aligned(num * each.num_bytes) for each in layer.projections)
        laid_out = sum(
            aligned(num * expert_bytes(each))
            for each in layer.projections
            if not is_native(each.tensor_type, each.columns)
        )
        place_bytes, laid_out_bytes = max(place_bytes, native), max(laid_out_bytes, laid_out)
    return place_bytes, laid_out_bytes


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
