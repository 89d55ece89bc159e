"""Memory that experts give back on daemons' GPUs, and take again: a daemon says how much less its
experts should take, or how much more they may.

What leaves is computed by the parent's processor, with the same bits in decode steps. The daemon is
given its other experts as in any move, beside those that it has, whose memory they share; once this
parent has left the session before, the daemon returns what nobody needs. A daemon that says
anything is obeyed no faster than by the rules here: each layer keeps as many experts as a token
uses, no more come back than it had at first, and only after CALM_S.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import DaemonUnavailable, DflashError, one_line
from dflash_protocol.placement import Placement
from dflash_runtime.compute.backend import ResizableBank
from dflash_runtime.compute.memory_watch import CALM_S, LOOK_S, Calm
from dflash_runtime.engine.expert_memory import FREE, LEAST, TAKEN, hottest_within
from dflash_runtime.engine.steps import Steps
from dflash_runtime.experts.replacing import Prepared
from dflash_runtime.experts.telemetry import ExpertMemoryStats
from dflash_runtime.placement.experts_within import LayerRoom

_LOG = logging.getLogger(__name__)

_SOON_S = 0.1
"""Between two looks while a daemon prepares."""
_PAUSE_S = 2.0
"""From a change to the next of the same daemon: it has to see what the last one has brought."""
_LONGEST_S = 60.0
"""A daemon that prepares for longer keeps what it has."""


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """Other experts that a daemon prepares."""

    name: str
    placement: Placement
    prepared: Prepared
    reason: str
    begun_s: float


class _Daemon:
    """What is known of one daemon's memory for experts."""

    def __init__(self, rooms: list[LayerRoom]) -> None:
        self.rooms = rooms
        self.calm = Calm()
        self.next_s = 0.0
        """When it may be changed again, by the monotonic clock."""
        most = sum(room.held_bytes(room.most) for room in rooms)
        least = sum(room.held_bytes(room.fewest) for room in rooms)
        self.stats = ExpertMemoryStats(held_bytes=most, most_bytes=most, least_bytes=least)


class DaemonExpertMemory:
    """Follows what daemons say of their memory. Used by the thread that uses the engine.

    States: idle; a change is being prepared, which nothing else may change the placement within:
    whoever wants to calls `forget`.
    """

    def __init__(
        self,
        steps: Steps,
        rooms: Mapping[str, list[LayerRoom]],
        *,
        before_change: Callable[[], None],
    ) -> None:
        """`rooms`: by daemon, the layers whose experts may go. `before_change` is called before a
        change is prepared."""
        self._steps, self._before_change = steps, before_change
        self._daemons = {name: _Daemon(each) for name, each in rooms.items()}
        self._next_look_s = 0.0
        self._change: _Change | None = None

    @property
    def is_changing(self) -> bool:
        """Whether a change is being prepared."""
        return self._change is not None

    @property
    def stats(self) -> dict[str, ExpertMemoryStats]:
        """By daemon, in bytes of the model's file."""
        return {name: each.stats for name, each in self._daemons.items()}

    def look(self, *, is_within_run: bool) -> None:
        """Follow what daemons have said, at most once in LOOK_S. A run ends only if it is over.
        Never raises a DflashError."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        change = self._change
        if change is None:
            self._decide(now_s)
        else:
            with self._noting_failures(change.name):
                self._go_on(change, now_s, may_end_run=not is_within_run)
        self._next_look_s = now_s + (_SOON_S if self.is_changing else LOOK_S)

    def forget(self) -> None:
        """Withdraw what is being prepared."""
        change, self._change = self._change, None
        if change is not None:
            change.prepared.withdraw()

    def _decide(self, now_s: float) -> None:
        """Begin the first change that is due."""
        for name, said in self._steps.memory_said().items():
            daemon = self._daemons.get(name)
            if daemon is not None and now_s >= daemon.next_s:
                with self._noting_failures(name):
                    self._follow(name, daemon, *said, now_s=now_s)
            if self.is_changing:
                return

    def _follow(
        self,
        name: str,
        daemon: _Daemon,
        give_back_bytes: int,
        spare_bytes: int,
        *,
        now_s: float,
    ) -> None:
        held_bytes, most_bytes = daemon.stats.held_bytes, daemon.stats.most_bytes
        if give_back_bytes:
            daemon.calm.end()
            self._begin(name, held_bytes - give_back_bytes, TAKEN, now_s)
            return
        more_bytes = daemon.calm.may_take(spare_bytes, most_bytes - held_bytes, now_s=now_s)
        if more_bytes:
            self._begin(name, held_bytes + more_bytes, FREE, now_s)

    @contextmanager
    def _noting_failures(self, name: str) -> Iterator[None]:
        """If a change fails, experts stay where they are, and the daemon is let alone for a
        while."""
        daemon = self._daemons[name]
        try:
            yield
        except (DflashError, MemoryError) as error:
            self.forget()
            daemon.calm.end()
            daemon.next_s = time.monotonic() + CALM_S
            reason = f"failed: {one_line(str(error))}"
            if reason != daemon.stats.last_reason:
                # docs: the daemon was lost, or has no memory even for what it needs to change;
                # experts stay where they were, and it is tried again
                _LOG.warning("memory of daemon %s: %s", name, reason)
            daemon.stats = replace(daemon.stats, last_reason=reason)

    def _begin(self, name: str, budget_bytes: int, reason: str, now_s: float) -> None:
        """Have the daemon prepare what fits into the budget, unless that is what it has."""
        steps, daemon = self._steps, self._daemons[name]
        placement = hottest_within(steps, daemon.rooms, budget_bytes, here=name)
        if budget_bytes < daemon.stats.least_bytes:
            reason += f"; {LEAST}"
        if placement is steps.placement:
            daemon.stats = replace(daemon.stats, last_reason=reason)
            return
        self._before_change()
        self._change = _Change(name, placement, steps.prepare(placement), reason, now_s)

    def _go_on(self, change: _Change, now_s: float, *, may_end_run: bool) -> None:
        steps, name = self._steps, change.name
        daemon = self._daemons[name]
        if not change.prepared.is_ready:
            if now_s > change.begun_s + _LONGEST_S:
                raise DaemonUnavailable(f"daemon {name}: it has not become ready")
            return
        ends_run = not steps.decodes_alike(change.placement)
        if ends_run and not may_end_run:
            return
        started_s, before = time.monotonic(), daemon.stats
        self._change = None
        steps.replace(change.prepared, ends_run=ends_run)
        daemon.next_s = now_s + _PAUSE_S
        owned = steps.placement.owners[steps.placement.owner_names.index(name)]
        held_bytes = sum(
            room.held_bytes(owned.by_layer[room.layer_id].size) for room in daemon.rooms
        )
        pause_s = time.monotonic() - started_s
        daemon.stats = before.changed(held_bytes, change.reason, pause_s=pause_s)
        # docs (parent): another program needs memory of the daemon's device, or has left it: the
        # parent's processor computes the experts that have left
        _LOG.info(
            "experts have %.2f GiB of the device of daemon %s instead of %.2f GiB (%s): %d of "
            "them there",
            held_bytes / 2**30,
            name,
            before.held_bytes / 2**30,
            change.reason,
            owned.num_experts,
        )


def daemon_memory_of(
    steps: Steps, moe: MoeSpec, *, before_change: Callable[[], None]
) -> DaemonExpertMemory | None:
    """None if no expert of a daemon may go to the parent's processor."""
    placement, away = steps.placement, steps.processor_banks
    rooms: dict[str, list[LayerRoom]] = {}
    for name in steps.memory_said():
        owned = placement.owners[placement.owner_names.index(name)].by_layer
        for layer_id, ids in owned.items():
            layer, other = moe.by_layer_id[layer_id], away.get(layer_id)
            fewest = min(layer.num_experts_used, ids.size)
            may_all_go = isinstance(other, ResizableBank) and (
                other.most_experts == layer.num_experts
            )
            if fewest < ids.size and may_all_go and layer_id not in placement.answering:
                held_bytes = partial(int.__mul__, layer.expert_bytes)
                rooms.setdefault(name, []).append(
                    LayerRoom(layer_id, fewest, int(ids.size), held_bytes)
                )
    return DaemonExpertMemory(steps, rooms, before_change=before_change) if rooms else None
