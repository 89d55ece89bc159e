"""What planted routing chooses along a walk, without a file."""

from __future__ import annotations

from functools import cache

import numpy as np
from bench.planted_routing import UNITS, PlantedRouting

from dflash_protocol.ids import I64Array


@cache
def planted_choices(
    kind: str, seed: int, *, length: int, num_layers: int, num_experts: int, num_used: int
) -> I64Array:
    """The experts of each token. Shapes: result [L, length, K]."""
    routing = PlantedRouting(kind, seed, vocabulary=length, num_layers=num_layers)
    rows = (routing.levels * UNITS)[routing.walk.token_ids].astype(np.float64)
    chosen = []
    for layer in range(num_layers):
        scores = rows @ routing.router(layer, num_experts, UNITS.size)[:, : UNITS.size].T
        chosen.append(np.argpartition(-scores, num_used, axis=1)[:, :num_used])
    return np.stack(chosen)
