"""Re-placement while serving: moves experts between owners, as many of each layer as before.

Owners of different classes compute other bits, so that a request's logits depend on where experts
are: between these they move between two runs only; between owners of one class, after any token. A
round is decided there or within a run. What the parent's device misses is copied beside steps, and
daemons load what they miss; then it is applied, which takes milliseconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import DflashError
from dflash_protocol.ids import Phase
from dflash_runtime.compute.backend import ExpertStage
from dflash_runtime.engine.generation import GeneratedToken
from dflash_runtime.engine.steps import Steps
from dflash_runtime.experts.replacing import Prepared
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
from dflash_runtime.placement.split import LOCAL_OWNER

_LOG = logging.getLogger(__name__)

_LOOK_TOKENS = 8
"""Written tokens between two looks whether a round can be applied within a run."""


@dataclass(frozen=True, slots=True, eq=False)
class _Next:
    """A round that is decided on."""

    round: MoveRound
    prepared: Prepared
    is_staged: bool
    """Whether weights are copied to the parent's device."""
    is_within_class: bool
    """Whether it may be applied between any two steps."""


class ExpertMover:
    """Decides and applies rounds of moves. Used by the thread that uses the engine.

    States: idle; preparing a round, or waiting for a gap in which it is worth what it ends; idle
    again. After a failure the next round waits for RESTING tokens.
    Owns: `stage`, until closed; what is prepared.
    """

    def __init__(
        self,
        steps: Steps,
        stage: ExpertStage | None,
        moe: MoeSpec,
        *,
        prices: MovePrices,
        most: int,
        min_gain: int,
        has_to_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        """`most`: swaps of a round; `min_gain`: how many times its cost a round has to save.
        `has_to_wait`: whether another change of the placement is under way."""
        self.stats = MoveStats()
        self._steps, self._stage, self._prices = steps, stage, prices
        self._layers = moe.by_layer_id
        self._policy = MovePolicy(moe, prices, most=most, min_gain=min_gain)
        self._min_gain = min_gain
        self._has_to_wait = has_to_wait
        self._next: _Next | None = None
        self._failed_at: int | None = None

    def between_runs(self, num_lost: int) -> None:
        """Apply what was prepared, if that is worth it, and decide what to prepare next.

        `num_lost`: tokens that have to be computed again if what is cached is dropped. Never
        raises a DflashError: if a round fails, the old placement stays in use. (If not even that
        can be, the next run fails.)
        """
        self._go_on(num_lost)

    def beside(self, tokens: Iterable[GeneratedToken]) -> Iterator[GeneratedToken]:
        """The tokens of a run. Beside it what to prepare next is decided; rounds within a class are
        applied after a token."""
        for number, token in enumerate(tokens, 1):
            yield token
            is_next = self._next is not None and self._next.is_within_class
            if number % (_LOOK_TOKENS if is_next else FEWEST_TOKENS) == 0:
                self._go_on(None)

    def _go_on(self, num_lost: int | None) -> None:
        """`num_lost`: None within a run, where only rounds within a class may be applied."""
        if self._has_to_wait():
            return
        heat = self._steps.heat.copy()
        now = heat.num_tokens(Phase.DECODE)
        try:
            planned = self._next
            if planned is not None and (num_lost is not None or self._may_apply_now(planned)):
                self._try_to_apply(planned, now=now, num_lost=num_lost)
            may_decide = self._failed_at is None or now >= self._failed_at + RESTING
            if self._next is None and may_decide:
                found = self._policy.decide(self._steps.placement, heat)
                if found is not None:
                    self._prepare(found)
        except (DflashError, MemoryError) as error:
            self._failed_at = now
            # docs: a device or daemon has failed or has no memory, or the model's file was changed;
            # the placement that was in use stays in use
            _LOG.warning("experts are not moved: %s", str(error))
            self._give_up(f"failed: {error}")

    def forget(self) -> None:
        """Drop what is being prepared."""
        if self._next is not None:
            self._next.prepared.withdraw()
            self._next = None
        if self._stage is not None:
            self._stage.clear()

    def close(self) -> None:
        """Stop preparing, and release the stage. Idempotent."""
        self.forget()
        if self._stage is not None:
            self._stage.close()

    def _may_apply_now(self, planned: _Next) -> bool:
        """Whether it may be applied within a run."""
        return planned.is_within_class and not self._steps.asks_by_mailbox

    def _prepare(self, found: MoveRound) -> None:
        placement = swapped(self._steps.placement, found.swaps)
        arriving = [
            (self._layers[swap.layer_id], expert)
            for swap in found.swaps
            for name, expert in ((swap.to, swap.arriving), (swap.of, swap.leaving))
            if name == LOCAL_OWNER
        ]
        is_staged = self._stage is not None and bool(arriving)
        is_within = self._steps.keeps_classes(placement)
        self._next = _Next(found, self._steps.prepare(placement), is_staged, is_within)
        if self._stage is not None and is_staged:
            self._stage.begin(arriving)

    def _try_to_apply(self, planned: _Next, *, now: int, num_lost: int | None) -> None:
        found, stage = planned.round, self._stage if planned.is_staged else None
        if not planned.prepared.is_ready or (stage is not None and not stage.is_filled):
            return
        num_lost = 0 if num_lost is None or planned.is_within_class else num_lost
        if not found.is_worth(self._min_gain, num_lost * self._prices.prompt_s):
            reason = f"{num_lost} cached tokens are worth more"
            if now >= found.num_tokens + HORIZON:
                self._give_up(reason)
            else:
                self.stats = replace(self.stats, last_reason=reason)
            return
        started_s = time.monotonic()
        if stage is not None:
            stage.wait()
        self._steps.replace(planned.prepared, stage, ends_run=not planned.is_within_class)
        self.forget()
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
        self.forget()
        self.stats = replace(
            self.stats,
            rounds_not_applied=self.stats.rounds_not_applied + 1,
            last_reason=reason,
        )


def mover_of(
    steps: Steps,
    moe: MoeSpec,
    prices: MovePrices | None,
    *,
    most: int,
    min_gain: int,
    has_to_wait: Callable[[], bool],
) -> ExpertMover | None:
    """What moves experts of an engine; None if nothing may move, or the device has no memory.

    `prices`: None if the settings say where experts are. `most`: experts of a round. The others:
    see ExpertMover.
    """
    if prices is None or not most:
        return None
    owners, stage = dict(prices.owners), None
    if LOCAL_OWNER in owners:
        stage = steps.new_stage(moe.layers, most)
        if stage is None:
            del owners[LOCAL_OWNER]
        else:
            most = min(most, stage.num_slots)
    if len(owners) < 2:
        return None
    prices = replace(prices, owners=owners)
    return ExpertMover(
        steps,
        stage,
        moe,
        prices=prices,
        most=most,
        min_gain=min_gain,
        has_to_wait=has_to_wait,
    )
