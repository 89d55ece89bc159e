"""Pairs of a prefill chunk, sorted by expert on the device, in the arrays of groups.cuh.

Ids of experts are those of the choice, global or local.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from dflash_protocol.batch import RoutedBatch
from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.gpu.device.device import (
    FLOAT32,
    INT32,
    UINT32,
    DeviceArray,
    Kernel,
    KernelDevice,
    PreparedLaunch,
    address,
    optional_address,
)
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct

MAX_EXPERTS = 960
"""Most experts: the sort's block has a thread for each, in whole logical warps."""

CHUNK_PAIRS = 1024
_FIND_THREADS = 256
_ALIGNMENT = 64
_NUMBERS = itertools.count()
"""Numbers sets of arrays, to tell one from another that had the same address."""

GroupArgs = kernel_struct("group_experts.cu", "GroupArgs")
SortedArgs = kernel_struct("group_experts.cu", "SortedArgs")


def _padded(*sizes: int) -> int:
    """Elements of consecutive arrays."""
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


@dataclass(slots=True, eq=False)  # as DenseProduct is
class GroupedPairs:
    """The pairs of one chunk, grouped by expert; overwritten by the next chunk's.

    `max_groups` bounds the grids of the kernels that follow, since only the device knows the number
    of groups; `number` tells arrays at other addresses apart.
    Shapes: counts [4] int32: groups, tiles, rows; expert_ids [groups], token_indices [rows],
    rows_of_tokens [T * pairs_per_token] int32; weights [rows] float32; tiles [tiles, 4] int32.
    """

    counts: DeviceArray
    expert_ids: DeviceArray
    tiles: DeviceArray
    token_indices: DeviceArray
    weights: DeviceArray
    rows_of_tokens: DeviceArray
    num_tokens: int
    num_pairs: int
    pairs_per_token: int
    max_groups: int
    tile_rows: int
    number: int

    @property
    def max_tiles(self) -> int:
        """Upper bound of this chunk's tiles."""
        return self.num_pairs // self.tile_rows + self.max_groups

    @property
    def layout(self) -> tuple[int, ...]:
        """Identifies the addresses of the arrays and the grids of this chunk's kernels."""
        sizes = self.num_tokens, self.num_pairs, self.pairs_per_token, self.max_groups
        return self.number, *sizes


@dataclass(frozen=True, slots=True, eq=False)
class _Kernels:
    """See group_experts.cu: three that sort, two for pairs that came sorted."""

    count: Kernel
    lay_out: Kernel
    place: Kernel
    tile: Kernel
    find: Kernel
    num_threads: int
    chunk_pairs: int


class ExpertGroups:
    """Groups up to `max_pairs` pairs by expert, in arrays that each chunk overwrites."""

    def __init__(
        self,
        device: KernelDevice,
        *,
        num_experts: int,
        max_pairs: int,
        tile_rows: int,
        chunk_pairs: int = CHUNK_PAIRS,
    ) -> None:
        """`tile_rows`: see prefill_operands.Products."""
        if not 0 < num_experts <= MAX_EXPERTS or max_pairs <= 0:
            raise SettingsError(
                f"prefill of {max_pairs} pairs, {num_experts} experts; up to {MAX_EXPERTS} can be"
            )
        self.num_experts = num_experts
        self.max_pairs = max_pairs
        self._device = device
        defines = {"NUM_EXPERTS": num_experts, "CHUNK_PAIRS": chunk_pairs, "TILE_M": tile_rows}
        module = device.module("group_experts.cu", defines)
        self._kernels = _Kernels(
            count=module.kernel("count_pairs", GroupArgs),
            lay_out=module.kernel("lay_out_groups", GroupArgs),
            place=module.kernel("place_pairs", GroupArgs),
            tile=module.kernel("tile_groups", SortedArgs),
            find=module.kernel("find_rows", SortedArgs),
            num_threads=-(-num_experts // 64) * 64,
            chunk_pairs=chunk_pairs,
        )
        self._most_groups = most_groups = min(num_experts, max_pairs)
        most_tiles = -(-max_pairs // tile_rows) + most_groups
        num_chunks = -(-max_pairs // chunk_pairs)
        self._chosen = GroupedPairs(
            counts=device.zeros(4, np.int32),
            expert_ids=device.empty(most_groups, np.int32),
            tiles=device.empty((most_tiles, 4), np.int32),
            token_indices=device.empty(max_pairs, np.int32),
            weights=device.empty(max_pairs, np.float32),
            rows_of_tokens=device.empty(max_pairs, np.int32),
            num_tokens=0,
            num_pairs=0,
            pairs_per_token=0,
            max_groups=0,
            tile_rows=tile_rows,
            number=next(_NUMBERS),
        )
        """The last chunk that was sorted here, whose arrays all of them have."""
        group_starts = device.empty(most_groups + 1, np.int32)
        chunk_rows = device.empty((num_chunks, num_experts), np.int32)
        self._scratch = group_starts, chunk_rows
        self._group_args = GroupArgs(
            chunk_rows=address(chunk_rows),
            counts=address(self._chosen.counts),
            expert_ids=address(self._chosen.expert_ids),
            group_starts=address(group_starts),
            tiles=address(self._chosen.tiles),
            token_indices=address(self._chosen.token_indices),
            weights=address(self._chosen.weights),
            rows_of_tokens=address(self._chosen.rows_of_tokens),
        )
        """Arguments of sorting; those that differ from chunk to chunk are set for each."""
        self._known: dict[int, list[PreparedLaunch]] = {}
        # A batch's arrays are uploaded as one, each aligned for vector loads.
        self._loaded = device.empty(
            _padded(most_groups, most_groups + 1, *(max_pairs,) * 2), np.int32
        )
        self._loaded_number = next(_NUMBERS)

    def group_chosen(
        self,
        topk_ids: DeviceArray,
        topk_weights: DeviceArray,
        *,
        slot_of_expert: DeviceArray | None = None,
        num_resident: int | None = None,
        selections: DeviceArray | None = None,
    ) -> GroupedPairs:
        """Sort a chunk's choice. Pairs of experts without a slot, which are remote, get no row.

        `num_resident`: upper bound of the experts with a slot; default: all. Sorted pairs are
        counted in `selections` [E] uint32.
        Shapes: topk_ids [T, K] int32; topk_weights [T, K] float32; slot_of_expert [E] int32, below
        0: none.
        Raises: SettingsError for other shapes or more pairs than there is room for.
        """
        shape, experts = topk_ids.shape, (self.num_experts,)
        if len(shape) != 2 or not 0 < topk_ids.size <= self.max_pairs:
            raise SettingsError(f"a choice of {shape}, room for {self.max_pairs} pairs")
        for name, array, wanted, dtype in (
            ("ids", topk_ids, shape, INT32),
            ("weights", topk_weights, shape, FLOAT32),
            ("slots", slot_of_expert, experts, INT32),
            ("counts", selections, experts, UINT32),
        ):
            if array is not None and (array.shape != wanted or array.dtype != dtype):
                raise SettingsError(
                    f"{name}: {array.dtype} of {array.shape}, {dtype} of {wanted} wanted"
                )
        num_tokens, pairs_per_token = shape
        num_pairs = topk_ids.size
        most = self.num_experts if num_resident is None else min(num_resident, self.num_experts)
        grouped, max_groups = self._chosen, min(most, num_pairs)
        sizes = num_tokens, num_pairs, pairs_per_token, max_groups
        if grouped.layout[1:] != sizes:
            grouped = self._chosen = replace(
                grouped,
                num_tokens=num_tokens,
                num_pairs=num_pairs,
                pairs_per_token=pairs_per_token,
                max_groups=max_groups,
            )
        args = self._group_args
        args.topk_ids, args.topk_weights = address(topk_ids), address(topk_weights)
        args.slot_of_expert = optional_address(slot_of_expert)
        args.selections = optional_address(selections)
        args.num_pairs, args.pairs_per_token = num_pairs, pairs_per_token
        self._device.start(self._sorting(-(-num_pairs // self._kernels.chunk_pairs)))
        return grouped

    def _sorting(self, num_chunks: int) -> list[PreparedLaunch]:
        """The launches that sort so many chunks of pairs."""
        if num_chunks not in self._known:
            kernels, chunks = self._kernels, (num_chunks, 1, 1)
            self._known[num_chunks] = [
                PreparedLaunch(kernel, grid, kernels.num_threads, self._group_args)
                for kernel, grid in (
                    (kernels.count, chunks),
                    (kernels.lay_out, (1, 1, 1)),
                    (kernels.place, chunks),
                )
            ]
        return self._known[num_chunks]

    def load(self, batch: RoutedBatch) -> GroupedPairs:
        """Upload a batch, which is sorted already and must have been checked.

        Raises: SettingsError if there is no room for it, or no pair in it.
        """
        num_groups, num_pairs = batch.num_groups, batch.num_pairs
        if not num_pairs or num_groups > self._most_groups:
            raise SettingsError(f"a batch of {num_pairs} pairs in {num_groups} groups")
        pairs_per_token = int(np.bincount(batch.token_indices).max())
        num_places = batch.num_tokens * pairs_per_token
        if max(num_pairs, num_places) > self.max_pairs:
            raise SettingsError(
                f"a batch of {num_pairs} pairs, up to {pairs_per_token} a token of "
                f"{batch.num_tokens}; room for {self.max_pairs} pairs"
            )
        arrays = batch.expert_ids, batch.group_starts, batch.token_indices, batch.weights
        packed = np.empty(_padded(*(array.size for array in arrays)), np.int32)
        places, end = [], 0
        for array in arrays:
            place = slice(end, end + array.size)
            packed[place] = array.view(np.int32)
            places.append(place)
            end += _padded(array.size)
        self._device.write(self._loaded[: packed.size], packed)
        expert_ids, group_starts, token_indices, weights = (self._loaded[place] for place in places)
        own = self._chosen
        args = SortedArgs(
            expert_ids=address(expert_ids),
            group_starts=address(group_starts),
            token_indices=address(token_indices),
            counts=address(own.counts),
            tiles=address(own.tiles),
            rows_of_tokens=address(own.rows_of_tokens),
            num_groups=num_groups,
            num_tokens=batch.num_tokens,
            pairs_per_token=pairs_per_token,
        )
        kernels = self._kernels
        self._device.launch(kernels.tile, (1, 1, 1), kernels.num_threads, args)
        blocks = (-(-batch.num_tokens // _FIND_THREADS), 1, 1)
        self._device.launch(kernels.find, blocks, _FIND_THREADS, args)
        return replace(
            own,
            expert_ids=expert_ids,
            token_indices=token_indices,
            weights=weights.view(np.float32),
            num_tokens=batch.num_tokens,
            num_pairs=num_pairs,
            pairs_per_token=pairs_per_token,
            max_groups=num_groups,
            number=self._loaded_number,
        )
