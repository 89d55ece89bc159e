"""The cache of one sequence on a device: keys, values and states of its layers, and trees over it.

The owner keeps the number of positions in use: a truncated sequence is overwritten later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from dflash_adapters.spec import KvLayer, RecurrentLayer
from dflash_protocol.errors import ContextExceeded
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.layers.kept_rows import KeptRows
from dflash_runtime.compute.gpu.layers.kv_rows import check_capacity, layer_bytes, new_layer_cache
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.trees import Tree


class DeviceKvCache(KeptRows):
    """Implements kv_cache.KvCache. Rows that were never written are uninitialised, and never used.

    Owns: the device memory, freed with the object.
    Raises: SettingsError for heads or a capacity that the kernels cannot take; DeviceOutOfMemory.
    """

    def __init__(
        self,
        device: KernelDevice,
        layers: Iterable[KvLayer],
        *,
        capacity: int,
        kv_type: KvType,
        recurrent: Sequence[RecurrentLayer] = (),
    ) -> None:
        given = tuple(layers)
        check_capacity(capacity)
        for kv in given:
            layer_bytes(kv, capacity, kv_type)  # all are checked before anything is allocated
        self.capacity = capacity
        self.kv_type = kv_type
        self.layers = [
            new_layer_cache(device, kv, capacity=capacity, kv_type=kv_type) for kv in given
        ]
        super().__init__(device, given, capacity=capacity, recurrent=recurrent)
        for window, layer in zip(self.windows, self.layers, strict=True):
            window.arrays = tuple(
                array
                for rows in (layer.keys, layer.values)
                for array in (rows.elements, rows.scales)
                if array is not None
            )

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        kept = sum(layer_bytes(layer.kv, self.capacity, self.kv_type) for layer in self.layers)
        return kept + self.states.nbytes

    @contextmanager
    def branching(self, tree: Tree) -> Iterator[None]:
        """See KvCache.branching: a step's tree leaves the cache as it is until a path
        is accepted.

        Raises: ContextExceeded too."""
        self.check_tree(tree)
        yield

    def check_tree(self, tree: Tree) -> None:
        """Raises: ContextExceeded; CheckpointMissing if it cannot be resumed at the tree."""
        self.require(tree.position)
        self.check_fits(tree.position, int(tree.depths.max(initial=-1)) + 1)

    def check_fits(self, first_position: int, num_tokens: int) -> None:
        """Raises: ContextExceeded if tokens from `first_position` on do not fit."""
        if first_position < 0 or num_tokens < 0:
            raise ValueError(f"{num_tokens} tokens from position {first_position} on")
        if first_position + num_tokens > self.capacity:
            raise ContextExceeded(first_position + num_tokens, self.capacity)
