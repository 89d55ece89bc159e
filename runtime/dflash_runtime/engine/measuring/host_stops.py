"""What it costs a device that the host takes part in each layer of a pass, asked for nothing."""

from __future__ import annotations

from dflash_runtime.engine.measuring.loaded_layers import LoadedLayers
from dflash_runtime.engine.measuring.passes import Passes
from dflash_runtime.engine.measuring.timing import TimeLeft, Timer, medians
from dflash_runtime.placement.box import Curve

_TREE_ROWS = 8
_CHUNK_ROWS = 512


def measure_host_stop(loaded: LoadedLayers, *, limit_s: float) -> Curve | None:
    """Seconds of a layer's stop by rows: of a recorded step, of a chunk, and if there is time of a
    tree, whose layers the host then launches one by one. None if the backend is the host."""
    sampled, left = loaded.sampled, TimeLeft(limit_s)
    ends = sampled.num_first, len(sampled.kinds[0].layer_ids)
    plain = [loaded.passes(num) for num in ends]
    stopping = [loaded.host_passes(num) for num in ends]
    chunk = min(_CHUNK_ROWS, loaded.backend.chunking.preferred)
    points = list[tuple[float, float]]()
    for rows in (1, chunk, _TREE_ROWS):
        if rows == _TREE_ROWS and not left.seconds:
            break
        timers = [_timer(each, rows) for each in (*plain, *stopping) if each is not None]
        if len(timers) < 2 * len(ends):
            return None
        (few,), (many,), (few_stops,), (many_stops,) = medians(timers, limit_s=limit_s / 3)
        stops_s = (many_stops - few_stops) - (many - few)
        points.append((float(rows), max(0.0, stops_s / (ends[1] - ends[0]))))
    return Curve(tuple(sorted(points)))


def _timer(passes: Passes, rows: int) -> Timer:
    return lambda: (passes.seconds(rows),)
