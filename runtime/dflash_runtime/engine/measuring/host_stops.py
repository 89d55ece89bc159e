"""What it costs a device that the host may take part in each layer of a pass, but is not asked."""

from __future__ import annotations

import numpy as np

from dflash_runtime.engine.measuring.loaded_layers import LoadedLayers
from dflash_runtime.engine.measuring.timing import TimeLeft, medians
from dflash_runtime.placement.box import Curve

_TREE_ROWS = 8
_CHUNK_ROWS = 512


def measure_host_stop(loaded: LoadedLayers, *, limit_s: float, for_plan: bool = False) -> Curve:
    """Seconds that a stop of a device takes, by rows: in a recorded step; unless it is `for_plan`,
    in a chunk; and if there is time, in a tree, whose layers the host launches one by one."""
    left, chunk = TimeLeft(limit_s), min(_CHUNK_ROWS, loaded.backend.chunking.preferred)
    num_first, num_all = loaded.sampled.num_first, len(loaded.sampled.kinds[0].layer_ids)
    ends = num_first, num_all
    plain = [loaded.passes(num) for num in ends]
    stopping = [loaded.host_passes(num) for num in ends]

    def stop_s(rows: int, limit_s: float) -> float:
        timers = [each.timer(rows) for both in (plain, stopping) for each in both]
        times = np.array(medians(timers, limit_s=limit_s)).reshape(2, len(ends))
        plain_s, stopping_s = np.diff(times)[:, 0] / (num_all - num_first)
        return max(0.0, float(stopping_s - plain_s))

    points = [(1.0, stop_s(1, left.share(1.0 if for_plan else 0.6)))]
    for rows in () if for_plan else (chunk, _TREE_ROWS):
        if rows == _TREE_ROWS and not left.seconds:
            break
        points.append((float(rows), stop_s(rows, left.share(0.5))))
    return Curve(tuple(sorted(points)))
