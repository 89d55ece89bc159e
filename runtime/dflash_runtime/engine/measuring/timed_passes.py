"""Passes through sampled layers, and what their parts take.

A pass of n layers takes ``outside + n * layer``, so half of the layers of the first kind and all of
them tell a layer from what is outside; other kinds of layers follow, one after the other. Passes
with fewer pairs tell the experts from the rest of a layer. Chunks on the host are timed part by
part instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from dflash_protocol.ids import Phase
from dflash_runtime.engine.measuring.host_chunks import chunk_times
from dflash_runtime.engine.measuring.layers import trunk_bytes
from dflash_runtime.engine.measuring.loaded_layers import LoadedLayers
from dflash_runtime.engine.measuring.passes import Passes
from dflash_runtime.engine.measuring.timing import Timer, medians

_LEAST_SHARE = 0.02
"""A part of a layer takes at least this share of it: differences of noisy times may be below 0."""
_FILLED_WITH = 512
"""Rows of chunks that fill a cache."""
_CHUNK_LAYERS = 2
"""Layers of the first kind in a chunk on the host; one of each other kind."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a pass's parts."""

    trunks: tuple[float, ...]
    """Of a layer of each kind, without routed experts."""
    experts: tuple[float, ...]
    """Of a layer's experts, with fewer pairs first, then with all: as `TimedPasses.pairs`."""
    outside: float
    """Everything outside the layers."""
    total: float
    """Of one of each pass that was timed."""


class TimedPasses:
    """Times parts of passes through sampled layers. Used by one thread, as long as these are."""

    def __init__(self, loaded: LoadedLayers, far: LoadedLayers | None = None) -> None:
        """`far`: layers of the first kind alone, where other kinds keep states, which passes behind
        positions that were not computed would miss."""
        self.loaded = loaded
        self._passes = [loaded.passes(num) for num in loaded.sampled.ends]
        self._fewer = loaded.some_experts()
        self._far = self._passes[1] if far is None else far.passes(far.spec.num_layers)
        num_first = len(loaded.sampled.kinds[0].layer_ids)
        layers = [each for each in loaded.spec.moe.layers if each.layer_id < num_first]
        self._num_used = float(np.mean([layer.num_experts_used for layer in layers]))
        self.expert_bytes = float(np.mean([layer.expert_bytes for layer in layers]))
        """Of one expert in the file, on average."""

    def pairs(self) -> tuple[float, ...]:
        """Pairs of a token in a layer, ascending; of the last, all are computed."""
        return (*(each.num_pairs() for each in self._fewer), self._num_used)

    def parts(self, rows: int, limit_s: float) -> Parts:
        """Time all parts of passes of so many rows."""
        if self._is_timed_by_part(rows):
            return self._chunk_parts(rows, limit_s)
        passes = [*self._passes, *(each.passes for each in self._fewer)]
        found = medians([each.timer(rows) for each in passes], limit_s=limit_s)
        times = [seconds for (seconds,) in found]
        self.loaded.note_selections()
        num = len(self._passes)
        return self._told(times[:num], times[num:])

    def layer_at(self, rows: int, positions: Sequence[int], limit_s: float) -> list[float]:
        """Seconds of a layer of the first kind, routed experts perhaps included, behind so many
        cached positions."""
        passes = self._far
        if self._is_timed_by_part(rows):
            for first in range(0, max(positions[:-1]), max(rows, _FILLED_WITH)):
                _chunk(passes, max(rows, _FILLED_WITH), (0,), first)()  # real keys and values
            found = medians(
                [_chunk(passes, rows, (0,), at) for at in positions], limit_s=limit_s, least=2
            )
            return [each[0] for each in found]
        found = medians([passes.timer(rows, at) for at in positions], limit_s=limit_s)
        return [each[0] / passes.model.spec.num_layers for each in found]

    def _is_timed_by_part(self, rows: int) -> bool:
        return self.loaded.backend.is_host and rows > 8

    def _told(self, ends: Sequence[float], fewer: Sequence[float]) -> Parts:
        """What passes up to each end, and with fewer pairs, tell."""
        sampled = self.loaded.sampled
        kinds, num_first = sampled.kinds, len(sampled.kinds[0].layer_ids)
        layer_s = max(1e-9, (ends[1] - ends[0]) / (num_first - sampled.num_first))
        most_s, least_s = (1 - _LEAST_SHARE) * layer_s, _LEAST_SHARE * layer_s
        experts = [min(most_s, each) for each in self._experts(fewer, ends[1], layer_s)]
        trunks = [layer_s - experts[-1]]
        for index, kind in enumerate(kinds[1:], 1):
            of_kind_s = (ends[index + 1] - ends[index]) / len(kind.layer_ids)
            trunks.append(max(least_s, of_kind_s - (experts[-1] if kind.is_routed else 0.0)))
        outside_s = max(0.0, ends[1] - num_first * layer_s)
        return Parts(tuple(trunks), tuple(experts), outside_s, sum((*ends, *fewer)))

    def _experts(self, fewer: Sequence[float], all_s: float, layer_s: float) -> list[float]:
        """Seconds of a layer's experts. A pass without pairs is on the line through those with the
        fewest and the most."""
        pairs, num_layers = self.pairs(), len(self.loaded.sampled.kinds[0].layer_ids)
        if not fewer:  # one expert a token: as if all bytes took the same time
            here = self._num_used * self.expert_bytes
            return [layer_s * here / (here + self._trunk_bytes())]
        slope = (all_s - fewer[0]) / (pairs[-1] - pairs[0])
        none_s = fewer[0] - slope * pairs[0]
        return [max(0.0, each - none_s) / num_layers for each in (*fewer, all_s)]

    def _trunk_bytes(self) -> float:
        sampled = self.loaded.sampled
        layers = sampled.description.layers[: len(sampled.kinds[0].layer_ids)]
        return float(np.mean([trunk_bytes(self.loaded.file, layer) for layer in layers]))

    # -- chunks on the host -----------------------------------------------------------------------

    def _chunk_parts(self, rows: int, limit_s: float) -> Parts:
        sampled = self.loaded.sampled
        first = tuple(range(min(_CHUNK_LAYERS, len(sampled.kinds[0].layer_ids))))
        layer_ids = (*first, *sampled.ends[1:-1])  # one of each other kind
        timers = [_chunk(each.passes, rows, first) for each in self._fewer]
        timers.append(_chunk(self._passes[-1], rows, layer_ids))
        *fewer, whole = medians(timers, limit_s=limit_s, least=2)
        num, num_all = len(first), len(layer_ids)
        trunks = fmean(whole[:num]), *whole[num:num_all]
        experts = [fmean(each[num : 2 * num]) for each in fewer]
        experts.append(fmean(whole[num_all : num_all + num]))
        return Parts(trunks, tuple(experts), whole[-1], sum(map(sum, (*fewer, whole))))


def _chunk(passes: Passes, rows: int, layer_ids: Sequence[int], position: int = 0) -> Timer:
    return lambda: chunk_times(
        passes.model,
        passes.cache,
        passes.experts_of(Phase.PREFILL),
        token_ids=passes.token_ids(rows),
        position=position,
        layer_ids=layer_ids,
    )
