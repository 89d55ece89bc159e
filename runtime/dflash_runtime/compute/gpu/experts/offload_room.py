"""Memory on the device for weights of an ExpertOffload, counted before there is any.

Needs no compiled code: daemons without numba count memory too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_adapters.spec import MoeLayer
from dflash_runtime.compute.gpu.launch.layouts import is_native
from dflash_runtime.compute.gpu.layers.resident import expert_bytes

NUM_PLACES = 3
"""Parts of layers whose weights are on the device at once: one is computed while the next ones are
copied. Two of them last a bus of 40 GB/s for 6 ms, in which the next layer's experts are chosen."""
_PLACE_BYTES = 128 << 20
"""Of one part, unless a single expert is larger. Each part costs a pass over a chunk's sums, far
less than its copies."""
AHEAD_BYTES = (NUM_PLACES - 1) * _PLACE_BYTES
"""What is copied before it is known which of a layer's experts were chosen, at most."""
_ALIGNMENT = 256


def offload_bytes(missing: Iterable[tuple[MoeLayer, int]]) -> int:
    """Device memory for weights of an ExpertOffload, with so many remote experts of each layer."""
    missing = list(missing)
    place_bytes, laid_out_bytes = memory_of(missing)
    return num_places(missing) * place_bytes + laid_out_bytes


def memory_of(missing: Iterable[tuple[MoeLayer, int]]) -> tuple[int, int]:
    """Bytes of a place, and of memory for projections whose layout on the device differs."""
    place_bytes = laid_out_bytes = 0
    for layer, num_missing in missing:
        native, laid_out = part_bytes(layer, most_of_part(layer, num_missing))
        place_bytes, laid_out_bytes = max(place_bytes, native), max(laid_out_bytes, laid_out)
    return place_bytes, laid_out_bytes


def part_bytes(layer: MoeLayer, num_experts: int) -> tuple[int, int]:
    """The same for a part of so many experts."""
    native = sum(aligned(num_experts * each.num_bytes) for each in layer.projections)
    laid_out = sum(
        aligned(num_experts * expert_bytes(each))
        for each in layer.projections
        if not is_native(each.tensor_type, each.columns)
    )
    return native, laid_out


def num_places(missing: Iterable[tuple[MoeLayer, int]]) -> int:
    """How many places there are: no more than parts."""
    num_parts = sum(-(-num // most_of_part(layer, num)) for layer, num in missing if num)
    return min(NUM_PLACES, num_parts)


def parts_of_missing(
    expert_bytes: npt.NDArray[np.float64], missing: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """In how many parts so many experts come, of so many bytes in the file each. Shapes: any that
    can be broadcast."""
    most = np.maximum(1.0, _PLACE_BYTES // np.maximum(expert_bytes, 1.0))
    return np.asarray(np.ceil(missing / most))


def most_of_part(layer: MoeLayer, num_missing: int) -> int:
    """The most experts of a layer that are copied together."""
    of_expert = sum(each.num_bytes for each in layer.projections)
    return min(num_missing, max(1, _PLACE_BYTES // of_expert))


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
