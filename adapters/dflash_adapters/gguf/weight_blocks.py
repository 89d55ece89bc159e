"""Sampled blocks of a model's weights: two processes that hash the blocks that a nonce selects
compare their weights without reading all of them.

One block of 4 KiB is selected from each matrix of an expert, 64 from each other tensor; smaller
ones are taken whole. A block's position follows from the nonce, the tensor's name and the expert,
so that both sides select the same blocks and no file can be prepared in advance.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dflash_adapters.gguf.scanner import TensorInfo
from dflash_adapters.spec import ExpertProjection, MoeSpec
from dflash_protocol.errors import ProtocolError
from dflash_protocol.fingerprint import digest
from dflash_protocol.ids import I32Array, I64Array
from dflash_protocol.placement import OwnedExperts

BLOCK_BYTES = 4096
BLOCKS_OF_TENSOR = 64
"""Blocks of a tensor that is not a matrix of experts."""
NONCE_BYTES = 16

_GROUP = 256
"""Blocks read and hashed at once, 1 MiB. The digest depends on it."""
_WARM_THREADS, _COLD_THREADS = min(4, os.cpu_count() or 1), 8
"""Many threads read a disk faster: 18,432 blocks of a cold NVMe took 0.64 s with 4, 0.45 s with 16.
With blocks in the page cache, more threads than cores only contend for the GIL: on two cores 2 took
57 ms, 16 took 150."""
_COLD_GROUP_S = 0.01
"""A group that takes longer comes from a disk; from the cache it takes some 2 ms."""

Place: TypeAlias = tuple[int, int, int]
"""Shard, offset in it and length, in bytes."""
Read: TypeAlias = Callable[[Sequence[Place]], bytes]
"""Reads the bytes of some places, concatenated."""
OnGroup: TypeAlias = Callable[[int, int], None]
"""Called with the number of groups done and of all groups; an exception from it ends the hashing.
"""


def no_pause(num_done: int, num_total: int) -> None:
    """The default of `OnGroup`: go on."""


def nonce_from(text: str) -> bytes:
    """Parse a nonce from its wire form. Raises: ProtocolError if it is malformed."""
    try:
        nonce = bytes.fromhex(text)
    except ValueError:
        nonce = b""
    if len(nonce) != NONCE_BYTES or nonce.hex() != text:
        raise ProtocolError(f"a nonce must be {NONCE_BYTES} bytes as lower-case hexadecimal digits")
    return nonce


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Selected blocks, in the order in which they are hashed."""

    nonce: bytes
    places: list[Place]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, _, num_bytes in self.places)

    def digest(self, read: Read, on_group: OnGroup = no_pause, *, alone: bool = False) -> str:
        """Hash the blocks with several threads, or `alone` in the caller's, which may then pause in
        `on_group`.

        Raises: any exception of `read` or `on_group`.
        """
        groups = [self.places[at : at + _GROUP] for at in range(0, len(self.places), _GROUP)]
        hashed: list[bytes] = []
        started_s = time.perf_counter()
        for group in groups if alone else groups[:1]:
            hashed.append(_hash(read, group))
            on_group(len(hashed), len(groups))
        is_cold = time.perf_counter() - started_s > _COLD_GROUP_S
        with ThreadPoolExecutor(_COLD_THREADS if is_cold else _WARM_THREADS) as pool:
            try:
                for each in pool.map(lambda group: _hash(read, group), groups[len(hashed) :]):
                    hashed.append(each)
                    on_group(len(hashed), len(groups))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return digest("weight-blocks-v1", (self.nonce, *hashed))


def _hash(read: Read, group: Sequence[Place]) -> bytes:
    return hashlib.sha256(read(group)).digest()


def expert_blocks(
    nonce: bytes, moe: MoeSpec, owned: OwnedExperts, *, tensors: Iterable[TensorInfo]
) -> Blocks:
    """Blocks of an owner's weights: one of each matrix of each of its experts, and those of the
    `tensors` that have their biases and scales."""
    places: list[Place] = []
    vectors: set[str] = set()
    for layer_id, global_expert_ids in sorted(owned.by_layer.items()):
        layer = moe.by_layer_id[layer_id]
        for kind, projection in zip(("gate", "up", "down"), layer.projections, strict=True):
            label = f"{kind}\0{projection.tensor_name}"
            places += _of_experts(nonce, label, projection, global_expert_ids)
            vectors |= projection.tensor_names - {projection.tensor_name}
    return Blocks(nonce, [*places, *_of_tensors(nonce, tensors, vectors)])


def model_blocks(nonce: bytes, moe: MoeSpec, tensors: Iterable[TensorInfo]) -> Blocks:
    """Blocks of a whole model: one of each matrix of each expert, and those of other tensors."""
    tensors = list(tensors)
    every = OwnedExperts.from_lists(
        {layer.layer_id: range(layer.num_experts) for layer in moe.layers}
    )
    matrices = {place[:2] for place in _starts_of_experts(moe)}
    others = [each for each in tensors if (each.shard_index, each.offset_bytes) not in matrices]
    experts = expert_blocks(nonce, moe, every, tensors=())
    return Blocks(nonce, [*experts.places, *_of_tensors(nonce, others, {e.name for e in others})])


def _starts_of_experts(moe: MoeSpec) -> Iterator[tuple[int, int]]:
    """Shard and offset of each tensor that has matrices of experts."""
    for layer in moe.layers:
        for projection in layer.projections:
            yield from projection.places or (projection.place_of(0),)


def _of_experts(
    nonce: bytes, label: str, projection: ExpertProjection, global_expert_ids: I32Array
) -> list[Place]:
    if projection.places is None:
        shards = np.full(global_expert_ids.size, projection.shard_index, np.int64)
        starts = projection.offset_bytes + global_expert_ids.astype(np.int64) * (
            projection.stride_bytes
        )
    else:
        both = np.array(projection.places, np.int64)[global_expert_ids]
        shards, starts = both[:, 0], both[:, 1]
    num_bytes = projection.num_bytes
    size = min(BLOCK_BYTES, num_bytes)
    num_experts = int(global_expert_ids.max(initial=-1)) + 1
    offsets = _numbers(nonce, label, num_experts, num_bytes - size + 1)[global_expert_ids]
    sizes = np.full(shards.size, size, np.int64)
    return list(zip(shards.tolist(), (starts + offsets).tolist(), sizes.tolist(), strict=True))


def _of_tensors(nonce: bytes, tensors: Iterable[TensorInfo], names: set[str]) -> Iterator[Place]:
    for tensor in tensors:
        if tensor.name not in names:
            continue
        if tensor.num_bytes <= BLOCKS_OF_TENSOR * BLOCK_BYTES:
            for first in range(0, tensor.num_bytes, BLOCK_BYTES):
                size = min(BLOCK_BYTES, tensor.num_bytes - first)
                yield tensor.shard_index, tensor.offset_bytes + first, size
            continue
        bound = tensor.num_bytes - BLOCK_BYTES + 1
        for offset in _numbers(nonce, f"\0{tensor.name}", BLOCKS_OF_TENSOR, bound).tolist():
            yield tensor.shard_index, tensor.offset_bytes + offset, BLOCK_BYTES


def _numbers(nonce: bytes, label: str, count: int, bound: int) -> I64Array:
    """Pseudorandom numbers below `bound` from nonce and label; a longer result begins with a
    shorter one. Shapes: result [count]."""
    state = hashlib.shake_256(nonce + label.encode("utf-8", "surrogateescape"))
    drawn = np.frombuffer(state.digest(8 * count), "<u8") % np.uint64(bound)
    return drawn.astype(np.int64)
