"""What it costs a device that the host takes part in each layer of a pass: asked for nothing, and
asked for experts, which its processor computes as in a real step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_runtime.compute import ExpertBank
from dflash_runtime.engine.measuring.loaded_layers import AskedPasses, LoadedLayers
from dflash_runtime.engine.measuring.passes import Passes
from dflash_runtime.engine.measuring.timing import TimeLeft, Timer, medians
from dflash_runtime.placement.box import Curve

_TREE_ROWS = 8
_CHUNK_ROWS = 512
_FEW_PAIRS = 2
"""Experts that a layer asks in a step in which few are asked: nearly all layers then ask some."""
_LEAST_WEIGHT = 0.05
"""Of what few experts tell of the cost of asking for any."""


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds of a layer."""

    stop: Curve
    """By rows: see Box.host_stop."""
    asked: Curve | None
    """By bytes: see Box.host_asked."""


def measure_host_stop(
    loaded: LoadedLayers,
    *,
    experts_s: float,
    banks: Mapping[int, ExpertBank] | None,
    alone: Curve | None,
    limit_s: float,
    for_plan: bool = False,
) -> HostTimes | None:
    """Time a recorded step whose host is asked for nothing, and for all or few of a token's experts
    of each layer; unless it is `for_plan` a chunk, and if there is time a tree, whose layers the
    host then launches one by one. None if the backend is the host.

    `experts_s`: what a layer's experts take on the device in a step, all of them; `banks`: the
    layers' experts in the host's memory, if its processor may be asked; `alone`: by their bytes,
    what they take in the processor's own steps. Asking for them takes as long at least: times that
    are differences may be far below on a busy machine.
    """
    left, chunk = TimeLeft(limit_s), min(_CHUNK_ROWS, loaded.backend.chunking.preferred)
    num_first, num_all = loaded.sampled.num_first, len(loaded.sampled.kinds[0].layer_ids)
    ends = num_first, num_all
    plain = [loaded.passes(num) for num in ends]
    stopping = [each for each in map(loaded.host_passes, ends) if each is not None]
    if not stopping:
        return None
    asked = [] if banks is None else [_Asked(loaded, banks, every) for every in _parts(loaded)]

    def layers_s(rows: int, limit_s: float) -> list[float]:
        """Seconds of a layer in each kind of passes."""
        passes = [plain, stopping]
        if rows == 1:
            passes += [[part.passes for part in each.passes] for each in asked]
        found = medians([_timer(each, rows) for both in passes for each in both], limit_s=limit_s)
        times = np.array(found).reshape(len(passes), len(ends))
        differences: list[float] = (np.diff(times)[:, 0] / (num_all - num_first)).tolist()
        return differences

    plain_s, stopping_s, *asked_s = layers_s(1, left.share(1.0 if for_plan else 0.6))
    stop_s = max(0.0, stopping_s - plain_s)
    points = [(1.0, stop_s)]
    for rows in () if for_plan else (chunk, _TREE_ROWS):
        if rows == _TREE_ROWS and not left.seconds:
            break
        of_rows_s, stopping_s = layers_s(rows, left.share(0.5))
        points.append((float(rows), max(0.0, stopping_s - of_rows_s)))
    trunk_s = plain_s - experts_s
    beyond_s = [max(0.0, each - trunk_s - stop_s) for each in asked_s]
    curve = _asked_curve(loaded, asked, beyond_s)
    if curve is not None and alone is not None:
        least = [(amount, alone.at(amount)) for amount, _ in curve.points]
        curve = Curve(tuple(map(max, curve.points, least)))
    return HostTimes(Curve(tuple(sorted(points))), curve)


class _Asked:
    """Passes of both numbers of layers that ask the processor for every so many-th expert."""

    def __init__(
        self, loaded: LoadedLayers, banks: Mapping[int, ExpertBank], asked_every: int
    ) -> None:
        ends = loaded.sampled.num_first, len(loaded.sampled.kinds[0].layer_ids)
        self.passes: list[AskedPasses] = [
            loaded.asked_passes(num, banks, asked_every) for num in ends
        ]

    def counts(self) -> tuple[float, float]:
        """See `AskedProcessor.counts`."""
        return self.passes[-1].counts()


def _parts(loaded: LoadedLayers) -> tuple[int, ...]:
    """Every how many-th expert is asked: first all, then, if a token has several, few."""
    num_used = min(layer.num_experts_used for layer in loaded.spec.moe.layers)
    return (1, max(2, num_used // _FEW_PAIRS)) if num_used > 1 else (1,)


def _asked_curve(
    loaded: LoadedLayers, asked: Sequence[_Asked], beyond_s: Sequence[float]
) -> Curve | None:
    """What a layer takes beyond its stop by the bytes of its asked experts, from one to all."""
    if not asked:
        return None
    num_layers = len(loaded.sampled.kinds[0].layer_ids)
    layers = [each for each in loaded.spec.moe.layers if each.layer_id < num_layers]
    num_bytes = float(np.mean([layer.expert_bytes for layer in layers]))
    all_s, (_, num_all) = beyond_s[0], asked[0].counts()
    if len(asked) == 1 or num_all <= 1.0:
        return Curve(((num_bytes, all_s),))
    share, num_few = asked[1].counts()
    one_s = time_of_one(all_s, beyond_s[1], share_asking=share, num_few=num_few, num_all=num_all)
    return Curve(((num_bytes, one_s), (num_all * num_bytes, all_s)))


def time_of_one(
    all_s: float, few_s: float, *, share_asking: float, num_few: float, num_all: float
) -> float:
    """What one asked expert takes, if each further one takes as much again as another, and the
    first something more: ``all_s = any_s + slope * num_all`` for layers that ask all of a token's
    experts, and ``few_s = share_asking * any_s + slope * num_few`` for layers that ask some of them
    with this share, `num_few` on average."""
    weight, any_s = share_asking - num_few / num_all, 0.0
    if weight > _LEAST_WEIGHT:
        any_s = min(all_s, max(0.0, (few_s - num_few / num_all * all_s) / weight))
    return any_s + (all_s - any_s) / num_all


def _timer(passes: Passes, rows: int) -> Timer:
    return lambda: (passes.seconds(rows),)
