"""Moves that are decided without heat: random swaps between owners, round after round."""

from __future__ import annotations

import numpy as np

from dflash_protocol.placement import Placement
from dflash_runtime.placement.moves import MoveRound, Swap
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER


class ScriptedPolicy:
    """In place of MovePolicy: random swaps, whatever was counted."""

    saved_s = 1.0
    is_silent = False

    def __init__(self, *args: object, most: int, **options: object) -> None:
        self.most = most
        self.random = np.random.default_rng(3)

    def decide(self, placement: Placement, heat: object) -> MoveRound | None:
        if self.is_silent:
            return None
        owned = dict(zip(placement.owner_names, placement.owners, strict=True))
        swaps = []
        for layer_id, here in owned[LOCAL_OWNER].by_layer.items():
            there = owned[HOST_OWNER].by_layer.get(layer_id, np.zeros(0, np.int32))
            num = min(here.size, there.size, int(self.random.integers(1, 3)))
            for pair in zip(
                self.random.permutation(there)[:num],
                self.random.permutation(here)[:num],
                strict=True,
            ):
                swaps.append(Swap(layer_id, *map(int, pair)))
        return MoveRound(tuple(swaps[: self.most]), self.saved_s, 0.01, 0)

    def note_applied(self, done: MoveRound, num_tokens: int) -> None:
        pass
