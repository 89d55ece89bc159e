"""Findings of ``dflash-moe doctor --mailbox``, as text and JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from dflash_protocol.process.output import noun
from dflash_runtime.compute.mail_trial import (
    NO_FAULTS,
    FaultKind,
    Faults,
    Medium,
    TrialBatch,
    TripTimes,
)

_QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
_BAR_WIDTH = 40
_NAMES = {
    FaultKind.WRONG: "words wrong",
    FaultKind.TORN: "words torn",
    FaultKind.STALE: "words stale",
    FaultKind.MISSING: "lines missing",
}


@dataclass(slots=True)
class MediumFindings:
    """Round trips through one kind of memory."""

    medium: Medium
    num_rounds: int = 0
    times: TripTimes = field(default_factory=TripTimes)
    """Times of round trips without pauses."""
    in_requests: Faults = NO_FAULTS
    """Faults found by the second device."""
    in_replies: Faults = NO_FAULTS
    """Faults found by the first device."""

    def add(self, batch: TrialBatch, num_rounds: int, *, is_timed: bool) -> None:
        """Add a batch of round trips."""
        self.num_rounds += num_rounds
        self.in_requests += batch.in_requests
        self.in_replies += batch.in_replies
        if is_timed:
            self.times.add(batch.trips_ns)

    def has(self, kind: FaultKind) -> bool:
        return any(faults.counts.get(kind, 0) for faults in (self.in_requests, self.in_replies))

    @property
    def num_faults(self) -> int:
        return self.in_requests.total + self.in_replies.total

    @property
    def quantiles_us(self) -> dict[str, float]:
        """Quantiles by name, and ``longest``, in µs."""
        found = {name: self.times.quantile_us(share) for name, share in _QUANTILES.items()}
        return {**found, "longest": self.times.longest_ns * 1e-3}


@dataclass(slots=True)
class MailboxFindings:
    """Findings for each kind of memory; `devices`: the asking one, the answering one."""

    devices: tuple[str, str]
    seed: int
    limit_ms: int
    """A line that takes longer counts as missing."""
    media: list[MediumFindings] = field(default_factory=list)
    why_no_device_memory: str = ""

    @property
    def problems(self) -> list[str]:
        """A line for each kind of memory and direction with faults."""
        found = []
        for medium in self.media:
            directions = (
                (*self.devices, medium.in_requests),
                (*self.devices[::-1], medium.in_replies),
            )
            for source, target, faults in directions:
                if faults.total:
                    found.append(f"{medium.medium}, {source} to {target}: {_faults_text(faults)}")
        return found

    @property
    def chosen(self) -> Medium | None:
        """The memory with the fastest median round trip, of those without faults."""
        sound = [each for each in self.media if not each.num_faults]
        return min(sound, key=lambda each: each.quantiles_us["p50"]).medium if sound else None

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps(
            {
                "devices": self.devices,
                "seed": self.seed,
                "limit_ms": self.limit_ms,
                "media": [_medium_json(each) for each in self.media],
                "why_no_device_memory": self.why_no_device_memory or None,
                "chosen": self.chosen,
                "problems": self.problems,
            },
            allow_nan=False,
        )

    def as_text(self) -> str:
        """Text for people."""
        asks, answers = self.devices
        lines = [f"mailbox        {asks} asks, {answers} answers; seed {self.seed}", ""]
        for each in self.media:
            lines += [*_medium_lines(each), ""]
        if self.why_no_device_memory:
            lines += [f"{Medium.DEVICES:14s} cannot be used: {self.why_no_device_memory}", ""]
        lines += [f"problem        {problem}" for problem in self.problems]
        if self.chosen is not None:
            lines.append(
                f"faster         {self.chosen}: used if a parent measures the same at its start"
            )
        else:
            lines.append("No memory can be used for a mailbox.")
        return "\n".join(lines)


def _faults_text(faults: Faults) -> str:
    counts = ", ".join(f"{num:,} {_NAMES[kind]}" for kind, num in faults.counts.items() if num)
    first = faults.first
    if first is None:
        return counts
    what = "epoch" if first.kind is FaultKind.MISSING else "word"
    return (
        f"{counts}; the first in round {first.round_number}, line {first.line}, {what} "
        f"{first.word}: {first.found:#010x} instead of {first.expected:#010x}"
    )


def _medium_json(found: MediumFindings) -> dict[str, Any]:
    sides = {"requests": found.in_requests, "replies": found.in_replies}
    return {
        "medium": found.medium,
        "rounds": found.num_rounds,
        "timed": found.times.num_trips,
        "microseconds": found.quantiles_us,
        "histogram": found.times.rows(),
        "faults": {
            side: {kind.name.lower(): faults.counts.get(kind, 0) for kind in FaultKind}
            for side, faults in sides.items()
        },
    }


def _medium_lines(found: MediumFindings) -> list[str]:
    verdict = (
        f"{found.num_faults:,} {noun(found.num_faults, 'fault')}"
        if found.num_faults
        else "nothing wrong"
    )
    lines = [
        f"{found.medium:14s} {found.num_rounds:,} round trips, {verdict}; "
        f"{found.times.num_trips:,} of them without pauses, in µs:"
    ]
    lines.append("  " + ", ".join(f"{name} {us:.1f}" for name, us in found.quantiles_us.items()))
    rows = found.times.rows()
    most = max((count for *_, count in rows), default=0)
    for first_us, last_us, count in rows:
        if count:
            bar = "#" * max(1, round(_BAR_WIDTH * count / most))
            lines.append(f"  {first_us:10.1f} to {last_us:10.1f} {count:12,}  {bar}")
    return lines
