"""What an owner's work cost: counters and times by phase, round trips by their distribution.

Knows nothing of who measures.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from dflash_protocol.ids import Phase
from dflash_protocol.process.output import noun

_LOG = logging.getLogger(__name__)

_STEPS_PER_OCTAVE = 8
_SHIFT = _STEPS_PER_OCTAVE.bit_length() - 1
_NUM_BUCKETS = _STEPS_PER_OCTAVE * 42
"""From 8 ns on, eight to each doubling: more than an hour."""


class LatencyHistogram:
    """Times by bucket, each at most an eighth wider than where it begins."""

    __slots__ = ("_counts", "num_samples", "total_s")

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self.num_samples = 0
        self.total_s = 0.0
        """Sum of all times."""

    def add(self, seconds: float) -> None:
        self._counts[_bucket_of(int(seconds * 1e9))] += 1
        self.num_samples += 1
        self.total_s += seconds

    def cumulative(self, bounds_s: Sequence[float]) -> list[int]:
        """How many samples are below each of these rising bounds and, last, how many there are.

        Exact for bounds of 16 ns, 32 ns and so on, doubled; of others, what shares a bucket with
        them is not counted. All numbers are of one moment, whoever is adding.
        """
        counts = self._counts.copy()
        num_counted, num_below, result = 0, 0, []
        for bound_s in bounds_s:
            bucket = _bucket_of(round(bound_s * 1e9))
            num_below += sum(counts[num_counted:bucket])
            num_counted = bucket
            result.append(num_below)
        return [*result, num_below + sum(counts[num_counted:])]

    def quantile_s(self, share: float) -> float:
        """The time that this share of the samples did not exceed, as its bucket's middle; 0 if
        there are none."""
        rank = max(1.0, share * self.num_samples)
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if count and seen >= rank:
                octave, step = divmod(bucket, _STEPS_PER_OCTAVE)
                return ((_STEPS_PER_OCTAVE + step + 0.5) * 2.0**octave) * 1e-9
        return 0.0


def _bucket_of(nanoseconds: int) -> int:
    octave = nanoseconds.bit_length() - 1 - _SHIFT
    if octave < 0:
        return 0
    bucket = octave * _STEPS_PER_OCTAVE + (nanoseconds >> octave) - _STEPS_PER_OCTAVE
    return bucket if bucket < _NUM_BUCKETS else _NUM_BUCKETS - 1


@dataclass(slots=True)
class PhaseStats:
    """One owner's work in one phase. Bytes count arrays only."""

    requests: int = 0
    tokens: int = 0
    pairs: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    pack_s: float = 0.0
    send_s: float = 0.0
    wait_s: float = 0.0
    """Time the parent stood still for replies."""
    receive_s: float = 0.0
    combine_s: float = 0.0
    queue_s: float = 0.0
    """Time requests waited at the daemon, as it said."""
    compute_s: float = 0.0
    """Time the daemon computed, as it said."""
    round_trips: LatencyHistogram = field(default_factory=LatencyHistogram)
    """From before a request is packed until its reply is at hand."""

    def as_record(self) -> dict[str, float]:
        """Numbers by name, the distribution as ``p50_s`` and ``p99_s``."""
        record: dict[str, float] = {name: getattr(self, name) for name in _NUMBERS}
        record["p50_s"] = self.round_trips.quantile_s(0.5)
        record["p99_s"] = self.round_trips.quantile_s(0.99)
        return record


_NUMBERS = tuple(field_.name for field_ in fields(PhaseStats) if field_.name != "round_trips")


class Profile:
    """Logs what each generation cost at the boundary, one line apiece."""

    def __init__(self) -> None:
        _LOG.setLevel(logging.INFO)  # whoever made us wants to read it
        self._before: dict[tuple[str, Phase], dict[str, float]] = {}

    def log_generation(
        self,
        owners: Mapping[str, Mapping[Phase, PhaseStats]],
        *,
        troubles: Mapping[str, str] | None = None,
    ) -> None:
        """Log the difference to the last call. Round trips are those since the engine was opened.

        `owners` holds each owner's phases; `troubles` what else is to be said of them, if anything.
        """
        parts = []
        for owner, phases in owners.items():
            for phase, stats in phases.items():
                now = stats.as_record()
                before = self._before.get((owner, phase), {})
                self._before[owner, phase] = now
                new = {name: now[name] - before.get(name, 0.0) for name in _NUMBERS}
                if new["requests"]:
                    parts.append(_profile_part(f"{owner} {phase}", new, now))
        parts += [f"{owner}: {text}" for owner, text in (troubles or {}).items() if text]
        if parts:
            # docs: `IPC_PROFILE`: what a generation cost at the boundary, by owner and phase
            _LOG.info("expert compute: %s", "; ".join(parts))


def _profile_part(label: str, new: Mapping[str, float], now: Mapping[str, float]) -> str:
    times = ", ".join(
        f"{name[:-2]} {new[name] * 1e3:.1f} ms" for name in _NUMBERS if name.endswith("_s")
    )
    counts = ((round(new[f"{name}s"]), name) for name in ("request", "token", "pair"))
    return (
        f"{label}: {', '.join(f'{count} {noun(count, name)}' for count, name in counts)}, "
        f"{new['bytes_sent'] / 2**20:.2f} MiB sent, "
        f"{new['bytes_received'] / 2**20:.2f} MiB received, {times}, "
        f"p50 {now['p50_s'] * 1e6:.0f} us, p99 {now['p99_s'] * 1e6:.0f} us"
    )
