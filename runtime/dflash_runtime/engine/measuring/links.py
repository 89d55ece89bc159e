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
    generate: Callable[[int, int], object],
    owners: Callable[[], Owners],
    *,
    num_positions: int,
    num_layers: int,
) -> dict[str, LinkSpeed]:
    """The link to each daemon of an engine, from some of its requests. Daemons that answer through
    a mailbox are left out.

    `generate` computes a prompt of so many tokens, and writes so many; `owners` are the engine's
    counters now; `num_layers` of the model have experts. Raises: what `generate` raises.
    """
    samples = LinkSamples()
    for phase, num_prompt, num_tokens in _RUNS:
        if num_prompt + num_tokens <= num_positions:
            generate(num_prompt, num_tokens)
            before = owners()
            generate(num_prompt, num_tokens)
            if phase is Phase.DECODE:
                samples.add_steps(before, owners())
            else:
                samples.add_chunk(num_prompt, before, owners(), num_layers=num_layers)
    return samples.speeds()


class LinkSamples:
    """Differences of an engine's counters. Used by one thread."""

    def __init__(self) -> None:
        self._points: dict[tuple[str, Phase], dict[float, float]] = {}

    def add_steps(self, before: Owners, after: Owners) -> None:
        """Counters from before and after decode steps: what a request's round trip takes beyond
        what both sides compute."""
        phase = Phase.DECODE
        own = _own(phase, before, after)
        own_s = own.compute_s / own.requests if own.requests else 0.0
        for name, counts in _of_daemons(phase, before, after):
            num_trips = counts.round_trips.num_samples
            if min(counts.requests, num_trips) < _LEAST_REQUESTS:
                continue  # through a mailbox the host knows no round trips
            trip_s = counts.round_trips.total_s / num_trips
            # Replies that come while this process computes its own experts are found after that.
            busy_s = max(counts.compute_s / counts.requests, own_s)
            self._points.setdefault((name, phase), {})[1.0] = max(0.0, trip_s - busy_s)

    def add_chunk(self, rows: int, before: Owners, after: Owners, *, num_layers: int) -> None:
        """Counters from before and after a prompt of one chunk: what this process does and waits
        for in a layer, beyond what the daemon computes longer than itself. Requests may be parts
        of a chunk."""
        phase = Phase.PREFILL
        own = _own(phase, before, after)
        for name, counts in _of_daemons(phase, before, after):
            if counts.requests:
                work_s = counts.pack_s + counts.send_s + counts.receive_s + counts.combine_s
                waits_s = counts.wait_s - max(0.0, counts.compute_s - own.compute_s)
                seconds = (work_s + max(0.0, waits_s)) / num_layers
                self._points.setdefault((name, phase), {})[float(rows)] = seconds

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


def _of_daemons(phase: Phase, before: Owners, after: Owners) -> list[tuple[str, PhaseStats]]:
    """What each daemon did in between."""
    return [
        (name, _difference(phase, before.get(name), owner))
        for name, owner in after.items()
        if owner.kind is OwnerKind.DAEMON
    ]


def _own(phase: Phase, before: Owners, after: Owners) -> PhaseStats:
    """What this process did in between."""
    for name, owner in after.items():
        if owner.kind is OwnerKind.LOCAL:
            return _difference(phase, before.get(name), owner)
    return PhaseStats()


def _difference(phase: Phase, before: OwnerStats | None, after: OwnerStats) -> PhaseStats:
    """Of the counters that are read here."""
    now = after.phases.get(phase, PhaseStats())
    old = PhaseStats() if before is None else before.phases.get(phase, PhaseStats())
    found = PhaseStats(requests=now.requests - old.requests)
    for name in ("pack_s", "send_s", "wait_s", "receive_s", "combine_s", "compute_s"):
        setattr(found, name, getattr(now, name) - getattr(old, name))
    found.round_trips.num_samples = now.round_trips.num_samples - old.round_trips.num_samples
    found.round_trips.total_s = now.round_trips.total_s - old.round_trips.total_s
    return found
