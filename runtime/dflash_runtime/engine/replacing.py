"""Re-placement while serving: moves experts between the parent's GPU and its processor.

Both compute other bits, so that a request's logits depend on where experts are: they move between
two runs only. A round is decided there or within a run, its weights are copied beside steps, and it
is applied in the next gap: repacking, and tables of the device, take milliseconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import DflashError
from dflash_protocol.ids import Phase
from dflash_protocol.placement import Placement
from dflash_runtime.compute.backend import ExpertStage
from dflash_runtime.engine.generation import GeneratedToken
from dflash_runtime.engine.steps import Steps
from dflash_runtime.experts.telemetry import MoveStats
from dflash_runtime.placement.moves import (
    FEWEST_TOKENS,
    HORIZON,
    RESTING,
    MovePolicy,
    MovePrices,
    MoveRound,
    swapped,
)

_LOG = logging.getLogger(__name__)


class ExpertMover:
    """Decides and applies rounds of moves. Used by the thread that uses the engine.

    States: idle; copying a round's weights, or waiting for a gap in which it is worth what it ends;
    idle again. After a failure the next round waits for RESTING tokens.
    Owns: `stage`, until closed.
    """

    def __init__(
        self, steps: Steps, stage: ExpertStage, moe: MoeSpec, *, prices: MovePrices, min_gain: int
    ) -> None:
        """`min_gain`: how many times what a round costs it has to save."""
        self.stats = MoveStats()
        self._steps, self._stage, self._prices = steps, stage, prices
        self._layers = moe.by_layer_id
        self._policy = MovePolicy(moe, prices, most=stage.num_slots, min_gain=min_gain)
        self._min_gain = min_gain
        self._next: tuple[MoveRound, Placement] | None = None
        self._failed_at: int | None = None

    def between_runs(self, num_lost: int) -> None:
        """Apply what was copied, if that is worth it, and decide what to copy next.

        `num_lost`: tokens that have to be computed again if what is cached is dropped. Never
        raises a DflashError: if a round fails, the old placement stays in use. (If not even that
        can be, the next run fails.)
        """
        self._go_on(num_lost)

    def beside(self, tokens: Iterable[GeneratedToken]) -> Iterator[GeneratedToken]:
        """The tokens of a run, beside which what to copy next is decided."""
        for number, token in enumerate(tokens, 1):
            yield token
            if number % FEWEST_TOKENS == 0:
                self._go_on(None)

    def _go_on(self, num_lost: int | None) -> None:
        """`num_lost`: None within a run, where nothing may be applied."""
        heat = self._steps.heat.copy()
        now = heat.num_tokens(Phase.DECODE)
        try:
            if self._next is not None and num_lost is not None:
                self._try_to_apply(*self._next, now=now, num_lost=num_lost)
            may_decide = self._failed_at is None or now >= self._failed_at + RESTING
            if self._next is None and may_decide:
                placement = self._steps.placement
                found = self._policy.decide(placement, heat)
                if found is not None:
                    self._next = found, swapped(placement, found.swaps)
                    self._stage.begin([
                        (self._layers[swap.layer_id], swap.arriving) for swap in found.swaps
                    ])  # fmt: skip
        except (DflashError, MemoryError) as error:
            self._failed_at = now
            # docs: the device has failed or has no memory, or the model's file was changed; the
            # placement that was in use stays in use
            _LOG.warning("experts are not moved: %s", str(error))
            self._give_up(f"failed: {error}")

    def close(self) -> None:
        """Stop copying, and release the stage. Idempotent."""
        self._next = None
        self._stage.close()

    def _try_to_apply(
        self, found: MoveRound, placement: Placement, *, now: int, num_lost: int
    ) -> None:
        if not self._stage.is_filled:
            return
        if not found.is_worth(self._min_gain, num_lost * self._prices.prompt_s):
            reason = f"{num_lost} cached tokens are worth more"
            if now >= found.num_tokens + HORIZON:
                self._give_up(reason)
            else:
                self.stats = replace(self.stats, last_reason=reason)
            return
        started_s = time.monotonic()
        self._stage.wait()
        self._steps.replace(self._steps.prepare(placement), self._stage)
        self._next = None
        self._stage.clear()
        self._policy.note_applied(found, now)
        self.stats = replace(
            self.stats,
            rounds=self.stats.rounds + 1,
            experts_moved=self.stats.experts_moved + len(found.swaps),
            last_reason=(
                f"saves {found.saved_s:.2g} s in {HORIZON} tokens, costs {found.cost_s:.2g} s"
            ),
            last_pause_s=time.monotonic() - started_s,
        )

    def _give_up(self, reason: str) -> None:
        self._next = None
        self._stage.clear()
        self.stats = replace(
            self.stats,
            rounds_not_applied=self.stats.rounds_not_applied + 1,
            last_reason=reason,
        )


def mover_of(
    steps: Steps, moe: MoeSpec, prices: MovePrices | None, *, most: int, min_gain: int
) -> ExpertMover | None:
    """What moves experts of an engine; None if nothing may move, or the device has no memory.

    `prices`: None if the settings say where experts are. `most`: experts of a round.
    """
    if prices is None or not most:
        return None
    stage = steps.new_stage(moe.layers, most)
    if stage is None:
        return None
    return ExpertMover(steps, stage, moe, prices=prices, min_gain=min_gain)
