"""What an owner's work cost: counters and times by phase, and round trips as a histogram."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from dflash_protocol.ids import Phase
from dflash_protocol.process.output import noun

_LOG = logging.getLogger(__name__)

_STEPS_PER_OCTAVE = 8
_SHIFT = _STEPS_PER_OCTAVE.bit_length() - 1
_NUM_BUCKETS = _STEPS_PER_OCTAVE * 42
"""From 8 ns on, eight to each doubling: more than an hour."""


class LatencyHistogram:
    """Times in buckets whose width is at most an eighth of their lower bound."""

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

    def copy(self) -> LatencyHistogram:
        copied = LatencyHistogram()
        copied._counts = self._counts.copy()
        copied.num_samples, copied.total_s = self.num_samples, self.total_s
        return copied

    def cumulative(self, bounds_s: Sequence[float]) -> list[int]:
        """Number of samples below each of these ascending bounds and, last, of all.

        Exact for bounds of 16 ns times powers of two; for others, samples in the bound's bucket are
        not counted.
        """
        counts = self._counts
        num_counted, num_below, result = 0, 0, []
        for bound_s in bounds_s:
            bucket = _bucket_of(round(bound_s * 1e9))
            num_below += sum(counts[num_counted:bucket])
            num_counted = bucket
            result.append(num_below)
        return [*result, num_below + sum(counts[num_counted:])]

    def quantile_s(self, share: float) -> float:
        """The time that a fraction `share` of the samples did not exceed, as its bucket's middle; 0
        without samples."""
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
    """Time the parent waited for replies."""
    receive_s: float = 0.0
    combine_s: float = 0.0
    queue_s: float = 0.0
    """Time requests waited in the daemon, as reported by it."""
    compute_s: float = 0.0
    """Time the daemon computed, as reported by it."""
    round_trips: LatencyHistogram = field(default_factory=LatencyHistogram)
    """From before a request is packed until its reply has arrived."""

    def copy(self) -> PhaseStats:
        return replace(self, round_trips=self.round_trips.copy())

    def as_record(self) -> dict[str, float]:
        """Numbers by name, the histogram as ``p50_s`` and ``p99_s``."""
        record: dict[str, float] = {name: getattr(self, name) for name in _NUMBERS}
        record["p50_s"] = self.round_trips.quantile_s(0.5)
        record["p99_s"] = self.round_trips.quantile_s(0.99)
        return record


_NUMBERS = tuple(field_.name for field_ in fields(PhaseStats) if field_.name != "round_trips")


class Profile:
    """Logs what each generation cost at the boundary, in one line."""

    def __init__(self) -> None:
        _LOG.setLevel(logging.INFO)  # a Profile is made only to be read
        self._before: dict[tuple[str, Phase], dict[str, float]] = {}

    def log_generation(
        self,
        owners: Mapping[str, Mapping[Phase, PhaseStats]],
        *,
        troubles: Mapping[str, str] | None = None,
    ) -> None:
        """Log the difference since the last call; round trips are those since the engine was
        opened.

        `owners` has each owner's phases; `troubles` other problems to report, in words.
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
