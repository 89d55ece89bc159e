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

STEP_ROWS = (1, 2, 4, 8)
_CHUNKS = (64, 512, 4096)
CONTEXTS = (2048, 8192)
"""Cached positions that attention is timed with, where the model has so many."""
_ALIKE = 1.02
"""Trunks whose bytes differ by less are one point."""

Report: TypeAlias = Callable[[str, int, int], None]
"""Gets what is measured, the number of parts done, and of all."""


def chunk_sizes(chunking: Chunking) -> tuple[int, ...]:
    """Chunks that are timed, ascending: the backend's own size, and smaller ones."""
    sizes = {min(size, chunking.preferred) for size in _CHUNKS}
    return tuple(size for size in sorted(sizes) if size > max(STEP_ROWS))


def most_positions(chunking: Chunking, context_length: int) -> int:
    """Positions that passes need."""
    return max(contexts_of(context_length), default=0) + 2 * chunking.preferred


def contexts_of(context_length: int) -> tuple[int, ...]:
    """The contexts that are timed of a model made for so many positions."""
    return tuple(sorted({min(context, context_length // 2) for context in CONTEXTS}))


def measure_device(
    name: str, loaded: LoadedLayers, *, kv_type: KvType, limit_s: float, report: Report
) -> DeviceSpeed:
    """Time steps, chunks and attention, each as long as there is time; a chunk that would take too
    long is left out, and so are larger ones."""
    chunks, left = chunk_sizes(loaded.backend.chunking), TimeLeft(limit_s)
    timed, found = TimedPasses(loaded), dict[int, Parts]()
    num_parts = len(STEP_ROWS) + len(chunks) + 1
    for index, rows in enumerate((*STEP_ROWS, *chunks)):
        is_chunk = rows > max(STEP_ROWS)
        report(f"{name}: {'chunks' if is_chunk else 'steps'} of {rows}", index, num_parts)
        if is_chunk and rows != chunks[0]:
            last = max(found)
            if 3 * found[last].total * rows / last > left.share(0.8):
                break
        found[rows] = timed.parts(rows, left.share(0.25 if is_chunk else 0.08))
    report(f"{name}: attention", num_parts - 1, num_parts)
    attention = dict[int, Curve]()
    if loaded.sampled.kinds[0].sees_all:
        contexts = contexts_of(loaded.sampled.description.context_length)
        attention = _attention(timed, found, contexts, left=left, kv_type=kv_type)
    report(name, num_parts, num_parts)
    return _speed(name, found, timed, attention)


def _attention(
    timed: TimedPasses,
    found: Mapping[int, Parts],
    contexts: Sequence[int],
    *,
    left: TimeLeft,
    kv_type: KvType,
) -> dict[int, Curve]:
    """What a layer takes more behind cached positions. Numbers of rows that are not timed are
    between those that are."""
    bytes_each = cached_bytes(timed.loaded.spec.kv_layers[0], kv_type)
    curves: dict[int, Curve] = {}
    for rows in sorted({1, max(STEP_ROWS), *(rows for rows in found if rows > max(STEP_ROWS))}):
        if rows > max(STEP_ROWS) and 3 * found[rows].total > left.seconds:
            break
        none_s, *times = timed.layer_at(rows, (0, *contexts), left.share(0.25))
        more = np.maximum.accumulate([0.0, *(each - none_s for each in times)])
        amounts = (0.0, *(bytes_each * context for context in contexts))
        curves[rows] = Curve(tuple(zip(amounts, more.tolist(), strict=True)))
    for rows in STEP_ROWS[1:-1]:
        curves[rows] = _between(rows, (1, curves[1]), (8, curves[8]))
    return dict(sorted(curves.items()))


def _between(rows: int, low: tuple[int, Curve], high: tuple[int, Curve]) -> Curve:
    share = (rows - low[0]) / (high[0] - low[0])
    return Curve(
        tuple(
            (amount, low_s + share * (high_s - low_s))
            for (amount, low_s), (_, high_s) in zip(low[1].points, high[1].points, strict=True)
        )
    )


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
    for rows, parts in found.items():
        amounts = [rows * pairs * timed.expert_bytes for pairs in timed.pairs()]
        points, last_s = [(0.0, 0.0)], 0.0
        for amount, seconds in zip(amounts, parts.experts, strict=True):
            if amount > points[-1][0]:
                last_s = max(last_s, seconds)
                points.append((amount, last_s))
        experts[rows] = Curve(tuple(points))
        trunk[rows] = _trunk_curve(parts.trunks, sampled, file)
        head[rows] = Curve(((of_head, parts.outside),))
    return DeviceSpeed(name, experts, trunk, head, attention)


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
