"""Moves that are decided without heat: random swaps between owners, round after round.

As a program: the real command line, which moves experts between daemons so.

Example:
  python -m support.scripted_moves serve model.gguf --daemon cpu --daemon cpu
"""

from __future__ import annotations

import numpy as np
import pytest

from dflash_protocol.placement import Placement
from dflash_runtime.engine import replacing
from dflash_runtime.placement.moves import MoveRound, Swap
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER


class ScriptedPolicy:
    """In place of MovePolicy: random swaps, whatever was counted."""

    owners = LOCAL_OWNER, HOST_OWNER
    saved_s = 1.0
    is_silent = False
    most_of_a_layer = 2

    def __init__(self, *args: object, most: int, **options: object) -> None:
        self.most = most
        self.random = np.random.default_rng(3)

    def decide(self, placement: Placement, heat: object) -> MoveRound | None:
        if self.is_silent:
            return None
        owned = dict(zip(placement.owner_names, placement.owners, strict=True))
        to, of = self.owners
        swaps = []
        for layer_id, here in owned[to].by_layer.items():
            there = owned[of].by_layer.get(layer_id, np.zeros(0, np.int32))
            most = int(self.random.integers(1, self.most_of_a_layer + 1))
            num = min(here.size, there.size, most)
            for arriving, leaving in zip(
                self.random.permutation(there)[:num],
                self.random.permutation(here)[:num],
                strict=True,
            ):
                swaps.append(Swap(layer_id, int(arriving), int(leaving), to, of))
        return MoveRound(tuple(swaps[: self.most]), self.saved_s, 0.01, 0)

    def note_applied(self, done: MoveRound, num_tokens: int) -> None:
        pass


def move_between_daemons(patch: pytest.MonkeyPatch) -> None:
    """All the time, also within requests."""
    patch.setattr(replacing, "MovePolicy", ScriptedPolicy)
    patch.setattr(ScriptedPolicy, "owners", ("cpu0", "cpu1"))
    patch.setattr(ScriptedPolicy, "most_of_a_layer", 8)
    patch.setattr(replacing, "FEWEST_TOKENS", 2)
    patch.setattr(replacing, "_LOOK_TOKENS", 1)


if __name__ == "__main__":
    from dflash_runtime.cli.main import main

    with pytest.MonkeyPatch.context() as patched:
        move_between_daemons(patched)
        main()
