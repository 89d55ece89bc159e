"""Which experts of a layer owners of one numeric class exchange: the busiest gets less to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dflash_protocol.ids import F64Array, I64Array


@dataclass(slots=True, eq=False)
class Share:
    """What an owner has to do of a layer."""

    name: str
    experts: I64Array
    """Those that may move, by global id. Shapes: [N]."""
    rate_s: float
    """Seconds of a step for each selection."""
    load_s: float
    """Seconds of a step for all of its experts."""
    doubt_s: float
    """How far that may be off, by chance."""


class Exchange(NamedTuple):
    """Two experts by global id, and by how many seconds a step becomes shorter."""

    saved_s: float
    leaving: int
    arriving: int


def best_exchange(
    busy: Share, idle: Share, expected: F64Array, *, doubt: F64Array, least_s: float
) -> Exchange | None:
    """The exchange after which the busier of the two has least to do, but no less than what the
    layer waits for anyway. What chance may account for is taken off. None: there is none.

    Shapes: expected, doubt [E]: a token's selections by expert, and how far each may be off.
    """
    leaving, arriving = busy.experts, idle.experts
    if not leaving.size or not arriving.size or busy.load_s <= idle.load_s:
        return None
    arriving = arriving[np.argsort(expected[arriving], kind="stable")]
    # Both then have the same to do.
    wanted = (busy.load_s - idle.load_s) / (busy.rate_s + idle.rate_s)
    at = np.searchsorted(expected[arriving], expected[leaving] - wanted)
    places = np.clip(np.stack((at - 1, at)), 0, arriving.size - 1)
    less = expected[leaving] - expected[arriving[places]]
    sure = less - np.hypot(doubt[leaving], doubt[arriving[places]])
    left_s = np.maximum(idle.load_s + less * idle.rate_s, least_s)
    saved_s = np.minimum(
        sure * busy.rate_s, busy.load_s - np.hypot(busy.doubt_s, idle.doubt_s) - left_s
    )
    side, place = divmod(int(saved_s.argmax()), leaving.size)
    saved = float(saved_s[side, place])
    if saved <= 0.0:
        return None
    return Exchange(saved, int(leaving[place]), int(arriving[places[side, place]]))


def apply(exchange: Exchange, expected: F64Array, *, busy: Share, idle: Share) -> None:
    """What both have to do afterwards; the experts stay where they are then."""
    less = float(expected[exchange.leaving] - expected[exchange.arriving])
    busy.load_s -= less * busy.rate_s
    idle.load_s += less * idle.rate_s
    busy.experts = busy.experts[busy.experts != exchange.leaving]
    idle.experts = idle.experts[idle.experts != exchange.arriving]
