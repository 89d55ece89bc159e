"""Engines with experts in two daemons, and placements in which these have others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from dflash_protocol.placement import OwnedExperts, Placement
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from support.faults import spawned_daemons

DAEMONS = "cpu0", "cpu1"
"""Those that are spawned."""


@contextlib.contextmanager
def opened(model: Path, **changes: Any) -> Iterator[Engine]:
    """An engine with half of the experts in each of two daemons, of which none may be missed, or
    else silence is noticed soon. `changes`: options of `Engine.open`, and settings."""
    connect = changes.pop("connect", None)
    options = {name: changes.pop(name) for name in ("placement",) if name in changes}
    changes = {"check_replies": 0, "ipc_required": True, **changes}
    with Engine.open(
        model,
        daemons=[] if connect else ["cpu", "cpu"],
        connect=connect,
        settings=replace(
            load_settings(), heartbeat_ms=2000 if changes["ipc_required"] else 200, **changes
        ),
        **options,
    ) as engine:
        yield engine


def daemon_called(name: str) -> psutil.Process:
    """The process of a daemon that was spawned."""
    return next(each for each in spawned_daemons() if f"/{name}" in " ".join(each.cmdline()))


def lists_of(placement: Placement) -> dict[str, dict[int, list[int]]]:
    """Each owner's experts, by layer id; of each layer."""
    none = np.zeros(0, np.int32)
    return {
        name: {layer: owned.by_layer.get(layer, none).tolist()
               for layer in placement.experts_per_layer}
        for name, owned in zip(placement.owner_names, placement.owners, strict=True)
    }  # fmt: skip


def placed(placement: Placement, lists: Mapping[str, Mapping[int, list[int]]]) -> Placement:
    """With these experts of each owner."""
    owners = tuple(OwnedExperts.from_lists(lists[name]) for name in placement.owner_names)
    return replace(placement, owners=owners)


def moved(placement: Placement, num: int) -> Placement:
    """With so many experts of each layer moved from the last owner but one to the last; a negative
    number: the other way."""
    lists = lists_of(placement)
    here, there = list(lists.values())[-2:][:: 1 if num > 0 else -1]
    for layer_id, ids in here.items():
        there[layer_id] += ids[: abs(num)]
        del ids[: abs(num)]
    return placed(placement, lists)


def shuffled(placement: Placement, seed: int) -> Placement:
    """With the experts of the last two owners dealt anew, in any order."""
    random = np.random.default_rng(seed)
    lists = lists_of(placement)
    one, other = list(lists.values())[-2:]
    for layer_id in placement.experts_per_layer:
        theirs = [*one[layer_id], *other[layer_id]]
        random.shuffle(theirs)
        cut = int(random.integers(0, len(theirs) + 1))
        one[layer_id], other[layer_id] = theirs[:cut], theirs[cut:]
    return placed(placement, lists)


def same_owners(one: Placement, other: Placement) -> bool:
    """Whether all owners have the same experts in both."""
    return [each.fingerprint for each in one.owners] == [each.fingerprint for each in other.owners]


def num_moved(before: Placement, after: Placement) -> int:
    """Experts that have another owner."""
    return sum(
        int((routing.owner_index != after.routing[layer_id].owner_index).sum())
        for layer_id, routing in before.routing.items()
    )
