"""Keys and values of one sequence in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dflash_adapters.moe_spec import KvLayer
from dflash_adapters.ops import KvType
from dflash_protocol.ids import AnyArray


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer. Rows are padded with zeros to whole vectors of 32 lanes; halves are uint16.

    Shapes: keys [kv_heads, N, D padded]; values [kv_heads, N, V padded].
    """

    kv: KvLayer
    keys: AnyArray
    values: AnyArray


class CpuKvCache:
    """Implements ops.KvCache. Memory of positions that were never written is never touched."""

    def __init__(self, layers: Iterable[KvLayer], capacity: int, kv_type: KvType) -> None:
        dtype = np.uint16 if kv_type is KvType.F16 else np.float32
        self.capacity = capacity
        self.kv_type = kv_type
        self.layers = [
            LayerCache(
                kv,
                np.zeros((kv.num_heads, capacity, -(-kv.key_dim // 32) * 32), dtype),
                np.zeros((kv.num_heads, capacity, -(-kv.value_dim // 32) * 32), dtype),
            )
            for kv in layers
        ]
