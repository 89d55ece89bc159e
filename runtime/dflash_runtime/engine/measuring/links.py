"""What asking each daemon costs beyond what it computes, from requests of a real engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dflash_protocol.ids import Phase
from dflash_runtime.experts.telemetry import OwnerKind, OwnerStats, PhaseStats
from dflash_runtime.placement.box import Curve, LinkSpeed

_LEAST_REQUESTS = 2
_RUNS = (Phase.DECODE, 16, 16), (Phase.PREFILL, 64, 1), (Phase.PREFILL, 512, 1)
"""What is sampled in runs of so many tokens of a prompt, and written ones."""

Owners = Mapping[str, OwnerStats]
"""By name."""


def measure_links(
    generate: Callable[[int, int], object], owners: Callable[[], Owners], *, num_positions: int
) -> dict[str, LinkSpeed]:
    """The link to each daemon of an engine, from some of its requests. Daemons that answer through
    a mailbox are left out.

    `generate` computes a prompt of so many tokens, and writes so many; `owners` are the engine's
    counters now. Raises: what `generate` raises.
    """
    samples = LinkSamples()
    for phase, num_prompt, num_tokens in _RUNS:
        if num_prompt + num_tokens <= num_positions:
            generate(num_prompt, num_tokens)
            before = owners()
            generate(num_prompt, num_tokens)
            samples.add(phase, before, owners())
    return samples.speeds()


class LinkSamples:
    """Differences of an engine's counters, each of requests of one size. Used by one thread."""

    def __init__(self) -> None:
        self._points: dict[tuple[str, Phase], dict[float, float]] = {}

    def add(self, phase: Phase, before: Owners, after: Owners) -> None:
        """Counters from before and after work of one phase, whose requests have about as many rows
        each."""
        own_s = _own_s(phase, before, after)
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
            # Replies that come while this process computes its own experts are found after that.
            busy_s = max((counts.compute_s - earlier.compute_s) / num, own_s)
            rows = (counts.tokens - earlier.tokens) / num
            self._points.setdefault((name, phase), {})[rows] = max(0.0, trip_s - busy_s)

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


def _own_s(phase: Phase, before: Owners, after: Owners) -> float:
    """Seconds that this process's experts of a layer took."""
    for name, owner in after.items():
        counts = owner.phases.get(phase)
        if owner.kind is OwnerKind.LOCAL and counts is not None:
            earlier = before[name].phases.get(phase) if name in before else None
            earlier = PhaseStats() if earlier is None else earlier
            num = counts.requests - earlier.requests
            return (counts.compute_s - earlier.compute_s) / num if num > 0 else 0.0
    return 0.0
