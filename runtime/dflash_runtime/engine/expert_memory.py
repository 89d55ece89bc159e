"""How much of the parent's device its experts may take: less when another program needs the memory,
and more again when that is free.

What leaves is computed by the parent's processor, with the same bits in decode steps. That may be
between two steps of a text; where prompts of these experts are computed by another class then, the
cached positions are not reused by the next request. Addresses on the device stay, so that steps
that were recorded go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import DflashError, one_line
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.placement import Placement
from dflash_runtime.compute.backend import ResizableBank
from dflash_runtime.compute.memory_watch import LOOK_S, Calm, Shortage, spare_bytes
from dflash_runtime.engine.generation import GeneratedToken
from dflash_runtime.engine.steps import Steps
from dflash_runtime.experts.telemetry import ExpertMemoryStats
from dflash_runtime.placement.experts_within import LayerRoom, experts_within
from dflash_runtime.placement.split import LOCAL_OWNER

_LOG = logging.getLogger(__name__)

LEAST = "experts have the least that they need"
TAKEN, FREE = "another program needs it", "it is free again"


class ExpertDeviceMemory:
    """The device's memory for experts. Used by the thread that uses the engine.

    What is asked with `set_budget` is the most; within it `look` follows what others leave.
    """

    def __init__(
        self, steps: Steps, rooms: list[LayerRoom], *, before_change: Callable[[], None]
    ) -> None:
        """`rooms`: the layers whose experts may go, at least one. `before_change` is called before
        experts are given to other owners."""
        self._steps, self._rooms, self._before_change = steps, rooms, before_change
        self._counts = dict(steps.num_local_experts())
        most = sum(room.held_bytes(room.most) for room in rooms)
        least = sum(room.held_bytes(room.fewest) for room in rooms)
        self._asked_bytes = most
        self._next_look_s = time.monotonic()
        self._calm, self._shortage = Calm(), Shortage()
        self.stats = ExpertMemoryStats(held_bytes=most, most_bytes=most, least_bytes=least)

    def set_budget(self, num_bytes: int | None) -> bool:
        """Have experts take no more than so much, and as much as they can; None: as at first.
        Returns whether a run that is going on has ended.

        Raises: ValueError for a negative number; as Steps.replace.
        """
        if num_bytes is not None and num_bytes < 0:
            raise ValueError(f"a budget of {num_bytes} bytes")
        most = self.stats.most_bytes
        self._asked_bytes = most if num_bytes is None else min(num_bytes, most)
        self._calm.end()
        return self._fit(self._asked_bytes, "as asked", may_end_run=True)

    def look(self, *, is_within_run: bool) -> None:
        """Follow what other programs leave, at most once in LOOK_S. A run ends only if it is over.
        Never raises a DflashError."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_S
        try:
            self._follow(now_s, may_end_run=not is_within_run)
        except (DflashError, MemoryError) as error:
            self._calm.end()
            reason = f"failed: {one_line(str(error))}"
            if reason != self.stats.last_reason:
                # docs: the device has failed, or its memory was taken in this moment; experts stay
                # where they were
                _LOG.warning("device memory of experts: %s", reason)
            self.stats = replace(self.stats, last_reason=reason)

    def _follow(self, now_s: float, *, may_end_run: bool) -> None:
        memory = self._steps.device_memory()
        if memory is None:
            return
        held_bytes = self.stats.held_bytes
        missing_bytes = self._shortage.missing_bytes(*memory)
        if missing_bytes:
            self._calm.end()
            if held_bytes <= self.stats.least_bytes:
                self._shortage = Shortage()
                self.stats = replace(self.stats, last_reason=LEAST)
                return
            self._fit(held_bytes - missing_bytes, TAKEN, may_end_run=may_end_run)
            return
        wanted_bytes = self._asked_bytes - held_bytes
        more_bytes = self._calm.may_take(spare_bytes(*memory), wanted_bytes, now_s=now_s)
        if more_bytes:
            self._fit(held_bytes + more_bytes, FREE, may_end_run=may_end_run)

    def _fit(self, budget_bytes: int, reason: str, *, may_end_run: bool) -> bool:
        """Returns whether a run that is going on has ended."""
        steps, before = self._steps, self.stats
        placement = hottest_within(steps, self._rooms, budget_bytes, here=LOCAL_OWNER)
        if budget_bytes < before.least_bytes:
            reason += f"; {LEAST}"
        if placement is steps.placement:
            self.stats = replace(before, last_reason=reason)
            return False
        ends_run = not steps.decodes_alike(placement)
        if ends_run and not may_end_run:
            self.stats = replace(before, last_reason=f"{reason}: after the text")
            return False
        started_s = time.monotonic()
        self._before_change()
        steps.replace(steps.prepare(placement), ends_run=ends_run)
        counts = steps.num_local_experts()
        held_bytes = sum(room.held_bytes(counts[room.layer_id]) for room in self._rooms)
        num_before, num_after = sum(self._counts.values()), sum(counts.values())
        self._counts = counts
        self.stats = before.changed(held_bytes, reason, pause_s=time.monotonic() - started_s)
        # docs (parent): another program needs memory of the device, or has left it, or
        # `set_expert_budget` was called: the processor computes the experts that have left
        _LOG.info(
            "experts have %.2f GiB of the device instead of %.2f GiB (%s): %d of them there, not "
            "%d",
            held_bytes / 2**30,
            before.held_bytes / 2**30,
            reason,
            num_after,
            num_before,
        )
        return ends_run


class Watcher(Protocol):
    """What follows the memory of devices."""

    def look(self, *, is_within_run: bool) -> None:
        """Follow it, if a look is due."""


def watched(
    tokens: Iterable[GeneratedToken], watchers: Sequence[Watcher]
) -> Iterator[GeneratedToken]:
    """The tokens of a run, with a look of each watcher after every token."""
    for token in tokens:
        yield token
        for each in watchers:
            each.look(is_within_run=True)


def hottest_within(
    steps: Steps, rooms: Sequence[LayerRoom], budget_bytes: int, *, here: str
) -> Placement:
    """The placement with which the owner `here` has the hottest experts that fit into the budget;
    see `experts_within`. Raises: as Steps.heat_now."""
    heat = steps.heat_now()

    def heat_of(layer_id: int) -> F64Array:
        return heat.probabilities(Phase.DECODE, layer_id)

    return experts_within(steps.placement, rooms, budget_bytes, heat_of=heat_of, here=here)


def expert_memory_of(
    steps: Steps, moe: MoeSpec, *, before_change: Callable[[], None]
) -> ExpertDeviceMemory | None:
    """None if the parent has no device, or no expert on it may go to its processor."""
    rooms = []
    answering = steps.placement.answering
    for layer_id, (here, away) in steps.resizable_banks().items():
        layer, held_bytes = moe.by_layer_id[layer_id], _device_bytes(here)
        fewest = min(layer.num_experts_used, here.num_experts)
        is_less = held_bytes(fewest) < held_bytes(here.num_experts)
        if is_less and away.most_experts == layer.num_experts and layer_id not in answering:
            rooms.append(LayerRoom(layer_id, fewest, here.num_experts, held_bytes))
    return ExpertDeviceMemory(steps, rooms, before_change=before_change) if rooms else None


def _device_bytes(bank: ResizableBank) -> Callable[[int], int]:
    sizes = [bank.held_bytes(num) for num in range(bank.num_experts + 1)]
    return sizes.__getitem__
