"""How fast one device computes a model's layers: curves from timed passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import KvLayer
from dflash_runtime.compute.backend import Chunking
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine.measuring.layers import SampledLayers, head_bytes, trunk_bytes
from dflash_runtime.engine.measuring.loaded_layers import LoadedLayers
from dflash_runtime.engine.measuring.timed_passes import Parts, TimedPasses
from dflash_runtime.engine.measuring.timing import TimeLeft
from dflash_runtime.placement.box import Curve, DeviceSpeed

_TREE_ROWS = (8, 2, 4)
"""Steps of several tokens, the most telling first."""
_CHUNKS = (64, 512, 4096)
CONTEXTS = (2048, 8192)
"""Cached positions that attention is timed with, where the model has so many."""
_PART_SHARE, _ATTENTION_SHARE = 0.08, 0.05
"""Of a device's time, for each number of rows."""
_HOST_CHUNK_S = 3.0
"""A host's chunk that takes no longer is timed however little time is left: without it prompts are
predicted from smaller chunks, which are half as fast, and fewer experts are copied to a GPU."""
_ALIKE = 1.02
"""Trunks whose bytes differ by less are one point."""

Report: TypeAlias = Callable[[str, int, int], None]
"""Gets what is measured, the number of parts done, and of all."""


def chunk_sizes(chunking: Chunking) -> tuple[int, ...]:
    """Chunks that are timed, ascending: the backend's own size, and smaller ones."""
    sizes = {min(size, chunking.preferred) for size in _CHUNKS}
    return tuple(size for size in sorted(sizes) if size > max(_TREE_ROWS))


def most_positions(chunk: int, context_length: int) -> int:
    """Positions that passes of up to `chunk` rows need."""
    return max(contexts_of(context_length), default=0) + 2 * chunk


def contexts_of(context_length: int) -> tuple[int, ...]:
    """The contexts that are timed of a model made for so many positions."""
    return tuple(sorted({min(context, context_length // 2) for context in CONTEXTS} - {0}))


def measure_device(
    name: str,
    loaded: LoadedLayers,
    *,
    far: LoadedLayers | None = None,
    kv_type: KvType,
    limit_s: float,
    for_plan: bool = False,
    report: Report,
) -> DeviceSpeed:
    """Time steps of one token, chunks, attention, and what is left of the time, steps of several
    tokens, whose kernels may have to be compiled; not those if it is `for_plan`. On a host a chunk
    that would take too long is left out, and so are larger ones. `far`: see TimedPasses."""
    backend, left = loaded.backend, TimeLeft(limit_s)
    chunks = chunk_sizes(backend.chunking)
    timed, found = TimedPasses(loaded, far), dict[int, Parts]()
    contexts: tuple[int, ...] = ()
    if loaded.sampled.kinds[0].sees_all:
        contexts = contexts_of(loaded.sampled.description.context_length)
        if for_plan:  # in between and beyond it grows as a line
            contexts = contexts[:1]
    trees = () if for_plan else _TREE_ROWS
    attention = _Attention(timed, contexts, kv_type)
    num_parts = 2 + len(chunks) + len(trees)
    for index, rows in enumerate((1, *chunks)):
        report(f"{name}: {'chunks' if index else 'steps'} of {rows}", index, num_parts)
        if backend.is_host and index > 1:
            last = max(found)
            needed_s = 3 * found[last].total * rows / last
            if needed_s > max(_HOST_CHUNK_S, left.share(0.6)):
                break
        found[rows] = timed.parts(rows, min(_PART_SHARE * limit_s, left.share(0.5)))
    report(f"{name}: attention", 1 + len(chunks), num_parts)
    for rows, parts in found.items():
        if not backend.is_host or 3 * parts.total < left.seconds:
            attention.measure(rows, min(_ATTENTION_SHARE * limit_s, left.share(0.5)))
    for index, rows in enumerate(trees, 2 + len(chunks)):
        report(f"{name}: steps of {rows}", index, num_parts)
        if left.seconds:
            found[rows] = timed.parts(rows, _PART_SHARE * limit_s)
            attention.measure(rows, _ATTENTION_SHARE * limit_s)
    report(name, num_parts, num_parts)
    return _speed(name, found, timed, attention.by_rows)


class _Attention:
    """What a layer takes more behind cached positions, by rows. Used by one thread."""

    def __init__(self, timed: TimedPasses, contexts: Sequence[int], kv_type: KvType) -> None:
        """`contexts`: none if no layer sees all positions."""
        self._timed, self._contexts = timed, contexts
        self._bytes = cached_bytes(timed.loaded.spec.kv_layers[0], kv_type) if contexts else 0.0
        self.by_rows: dict[int, Curve] = {}

    def measure(self, rows: int, limit_s: float) -> None:
        if not self._contexts:
            return
        none_s, *times = self._timed.layer_at(rows, (0, *self._contexts), limit_s)
        more = np.maximum.accumulate([0.0, *(each - none_s for each in times)])
        amounts = (0.0, *(self._bytes * context for context in self._contexts))
        self.by_rows[rows] = Curve(tuple(zip(amounts, more.tolist(), strict=True)))


def cached_bytes(kv: KvLayer, kv_type: KvType) -> float:
    """Bytes of a position's keys and values in a layer."""
    return kv.num_heads * (kv.key_dim + kv.value_dim) * kv_type.bytes_per_value


def _speed(
    name: str, found: Mapping[int, Parts], timed: TimedPasses, attention: Mapping[int, Curve]
) -> DeviceSpeed:
    loaded = timed.loaded
    sampled, file = loaded.sampled, loaded.file
    trunk, experts, head = dict[int, Curve](), dict[int, Curve](), dict[int, Curve]()
    of_head = float(head_bytes(file, sampled.description))
    for rows, parts in sorted(found.items()):
        amounts = [rows * pairs * timed.expert_bytes for pairs in timed.pairs()]
        points, last_s = [(0.0, 0.0)], 0.0
        for amount, seconds in zip(amounts, parts.experts, strict=True):
            if amount > points[-1][0]:
                last_s = max(last_s, seconds)
                points.append((amount, last_s))
        experts[rows] = Curve(tuple(points))
        trunk[rows] = _trunk_curve(parts.trunks, sampled, file)
        head[rows] = Curve(((of_head, parts.outside),))
    return DeviceSpeed(name, experts, trunk, head, dict(sorted(attention.items())))


def _trunk_curve(trunks: Sequence[float], sampled: SampledLayers, file: GgufFile) -> Curve:
    """By bytes, ascending; kinds of nearly the same bytes count by their numbers of layers."""
    points, begin = list[tuple[float, float, int]](), 0
    for kind, seconds in zip(sampled.kinds, trunks, strict=True):
        end = begin + len(kind.layer_ids)
        layers = sampled.description.layers[begin:end]
        mean = float(np.mean([trunk_bytes(file, layer) for layer in layers]))
        points.append((mean, seconds, kind.num_all))
        begin = end
    merged = list[tuple[float, float, int]]()
    for mean, seconds, num in sorted(points):
        if merged and mean <= _ALIKE * merged[-1][0]:
            before, before_s, count = merged.pop()
            total = count + num
            mean = (before * count + mean * num) / total
            seconds = (before_s * count + seconds * num) / total
            num = total
        merged.append((mean, seconds, num))
    return Curve(tuple((mean, seconds) for mean, seconds, _ in merged))
