"""What asking each daemon costs beyond what it computes, from requests of a real engine."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_protocol.ids import Phase
from dflash_runtime.experts.telemetry import OwnerKind, OwnerStats, PhaseStats
from dflash_runtime.placement.box import Curve, LinkSpeed

_LEAST_REQUESTS = 8


class LinkSamples:
    """Differences of an engine's counters, each of requests of one size. Used by one thread."""

    def __init__(self) -> None:
        self._points: dict[tuple[str, Phase], dict[float, float]] = {}

    def add(
        self, phase: Phase, before: Mapping[str, OwnerStats], after: Mapping[str, OwnerStats]
    ) -> None:
        """Counters from before and after work of one phase, whose requests have about as many rows
        each."""
        for name, owner in after.items():
            if owner.kind is not OwnerKind.DAEMON:
                continue
            earlier = before[name].phases.get(phase) if name in before else None
            counts = owner.phases.get(phase)
            if counts is None:
                continue
            earlier = PhaseStats() if earlier is None else earlier
            num = counts.requests - earlier.requests
            trips = counts.round_trips.num_samples - earlier.round_trips.num_samples
            if num < _LEAST_REQUESTS or trips < _LEAST_REQUESTS:
                continue  # through a mailbox the host knows no round trips
            trip_s = (counts.round_trips.total_s - earlier.round_trips.total_s) / trips
            compute_s = (counts.compute_s - earlier.compute_s) / num
            rows = (counts.tokens - earlier.tokens) / num
            self._points.setdefault((name, phase), {})[rows] = max(0.0, trip_s - compute_s)

    def speeds(self) -> dict[str, LinkSpeed]:
        """By owner: of those whose steps were measured."""
        names = {name for name, phase in self._points if phase is Phase.DECODE}
        found = {}
        for name in sorted(names):
            step = self._curve(name, Phase.DECODE)
            chunk = self._curve(name, Phase.PREFILL)
            if step is not None:
                found[name] = LinkSpeed(name, step, chunk or step)
        return found

    def _curve(self, name: str, phase: Phase) -> Curve | None:
        points = self._points.get((name, phase))
        return Curve(tuple(sorted(points.items()))) if points else None
