"""Counters: what each owner's work cost, by phase, with round trips as a histogram; and how often
each expert was routed to, for heat maps and planners, whichever owner computed it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from operator import add

import numpy as np

from dflash_protocol.ids import I32Array, I64Array, Phase
from dflash_protocol.process.output import noun
from dflash_protocol.wire.messages import Offer
from dflash_runtime.placement.heat import HEAT_PHASES, phase_index

_LOG = logging.getLogger(__name__)

_STEPS_PER_OCTAVE = 8
_SHIFT = _STEPS_PER_OCTAVE.bit_length() - 1
_NUM_BUCKETS = _STEPS_PER_OCTAVE * 42
"""From 8 ns on, eight to each doubling: more than an hour."""

_FEW_PAIRS = 64
"""Up to this many are counted one by one: a decode step has a handful, and that is faster than a
call into numpy."""


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

    def add_mean(self, mean_s: float, num_samples: int) -> None:
        """Add times of which only the mean is known."""
        self._counts[_bucket_of(int(mean_s * 1e9))] += num_samples
        self.num_samples += num_samples
        self.total_s += mean_s * num_samples

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


class OwnerKind(StrEnum):
    """Where an owner computes."""

    LOCAL = "local"
    DAEMON = "daemon"
    FALLBACK = "fallback"


@dataclass(slots=True)
class OwnerStats:
    """Counters of one owner since the engine was opened. Bytes count payload frames only."""

    kind: OwnerKind
    num_experts: int
    transport: str = ""
    """How a daemon was last reached: ``stream`` or ``shared``."""
    device: str = ""
    """The device that a daemon reports; empty for this process."""
    numeric_class: str = ""
    """Results of owners of one class have the same bits; empty for a daemon that never came."""
    offer: Offer | None = None
    """What a daemon said before it was given experts; None: it cannot say, or was not there."""
    is_lost: bool = False
    """Whether a daemon cannot be reached now."""
    requests: int = 0
    tokens: int = 0
    pairs: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    wait_s: float = 0.0
    """Time the parent waited for this owner."""
    restarts: int = 0
    retries: int = 0
    """Batches of this owner that failed and were computed by another one."""
    fallbacks: int = 0
    """Retries that needed the fallback, since no replica was left."""
    checksum_failures: int = 0
    """Requests that failed because they, or their reply, were damaged in transit."""
    deadline_failures: int = 0
    """Requests that failed because they took too long."""
    not_finite: int = 0
    """Requests whose reply was NaN or infinite though the rows were not; recomputed by another
    owner."""
    checked: int = 0
    """Batches that the parent computed too, and compared."""
    wrong_replies: int = 0
    """Checked batches that were wrong: the daemon is dropped at the first."""
    stale: int = 0
    """Messages that answered no pending request."""
    widened: int = 0
    """Messages sent in a wider type because the negotiated one could not hold their values."""
    breaker: str = ""
    """State of a daemon's circuit breaker: ``closed``, ``open`` or ``half-open``."""
    breaker_opened: int = 0
    """Times the breaker opened."""
    breaker_refused: int = 0
    """Batches not sent because the breaker was open."""
    daemon_late: int = 0
    """Requests that the daemon dropped because their deadline had passed, of all its parents, since
    it was started. This and the next two are as of its last heartbeat."""
    daemon_stale: int = 0
    daemon_checksum_failures: int = 0
    give_back_bytes: int = 0
    """How much less memory a daemon wants its experts to take, as another program needs it; and how
    much more they may take. As of its last heartbeat; 0 before one of the present session."""
    spare_bytes: int = 0
    phases: dict[Phase, PhaseStats] = field(default_factory=dict)
    """By phase, for phases that have occurred."""

    def of_phase(self, phase: Phase) -> PhaseStats:
        stats = self.phases.get(phase)
        if stats is None:
            stats = self.phases[phase] = PhaseStats()
        return stats

    def copy(self) -> OwnerStats:
        """These counters as they are now, which nothing changes any more."""
        phases = {phase: each.copy() for phase, each in self.phases.items()}
        return replace(self, phases=phases)

    def add_up_phases(self) -> None:
        """Set the totals to the sums over all phases."""
        for name in ("requests", "tokens", "pairs", "bytes_sent", "bytes_received"):
            setattr(self, name, sum(getattr(phase, name) for phase in self.phases.values()))
        self.wait_s = sum(phase.wait_s + phase.receive_s for phase in self.phases.values())

    @property
    def troubles(self) -> str:
        """Problems in words; empty if none is known."""
        parts = []
        if self.breaker_opened:
            times = noun(self.breaker_opened, "time")
            parts.append(f"breaker {self.breaker}, opened {self.breaker_opened} {times}")
        if self.wrong_replies:
            parts.append("answered wrongly and is not used any more")
        for count, what in (
            (self.daemon_late, "late"),
            (self.daemon_stale, "stale"),
            (self.daemon_checksum_failures, "damaged"),
        ):
            if count:
                parts.append(f"the daemon dropped {count} {what}")
        return ", ".join(parts)

    def as_record(self) -> dict[str, object]:
        """All counters by name, as in ``--json``."""
        record: dict[str, object] = {
            field_.name: getattr(self, field_.name) for field_ in fields(self)
        }
        record["kind"] = self.kind.value
        record["offer"] = None if self.offer is None else asdict(self.offer)
        record["phases"] = {phase.value: each.as_record() for phase, each in self.phases.items()}
        return record


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


@dataclass(slots=True)
class HitCounts:
    """How many selections were computed by the parent, since the start.

    A layer is counted once for each step and each chunk.
    """

    layers: int = 0
    layers_hot_only: int = 0
    """Layers that needed only the parent's own device."""
    hot: int = 0
    """Selections computed by the parent's own experts; `remote` by daemons, `cold` by the
    fallback."""
    remote: int = 0
    cold: int = 0
    offloaded: int = 0
    """Selections of remote experts that the parent's device computed with weights copied for a
    chunk."""
    other_class: int = 0
    """Selections of lost owners that another numeric class computed than the class map says, or
    whose owner rounds its sums on their way: their bits may differ."""


@dataclass(frozen=True, slots=True)
class MoveStats:
    """Re-placement while serving, since the engine was opened."""

    rounds: int = 0
    """Rounds in which experts were exchanged."""
    rounds_not_applied: int = 0
    """Rounds that were decided on, but gave up or failed: the placement stayed as it was."""
    experts_moved: int = 0
    """Experts that came to another owner, each in exchange for one of its own."""
    last_reason: str = ""
    """Why the last round was applied, or was not; empty before the first."""
    last_pause_s: float = 0.0
    """How long requests had to wait for the last round."""


@dataclass(frozen=True, slots=True)
class ExpertMemoryStats:
    """Memory of the parent's device that its experts can give back, since the engine was opened:
    that of layers of which the processor has some."""

    held_bytes: int
    """Taken now."""
    most_bytes: int
    """Taken at first, and when nobody else needs it."""
    least_bytes: int
    """Taken in any case: of each layer as many experts stay as a token uses."""
    num_cuts: int = 0
    """How often some was given back."""
    num_returns: int = 0
    """How often some was taken again."""
    last_reason: str = ""
    """Why the last change was made, or was not; empty before the first."""
    last_pause_s: float = 0.0
    """How long requests had to wait for the last change."""

    def changed(self, held_bytes: int, reason: str, *, pause_s: float) -> ExpertMemoryStats:
        """After some was given back, or taken again."""
        is_cut = held_bytes < self.held_bytes
        return replace(
            self,
            held_bytes=held_bytes,
            num_cuts=self.num_cuts + is_cut,
            num_returns=self.num_returns + (not is_cut),
            last_reason=reason,
            last_pause_s=pause_s,
        )


class SelectionCounts:
    """Counts by phase, layer and global expert id since the start. Written by one thread.

    Lists of Python ints: adding to eight of them takes half of the fixed cost of numpy, a compiled
    kernel or a memoryview.
    """

    def __init__(self, experts_per_layer: Mapping[int, int]) -> None:
        self._by_phase = tuple(
            {layer: [0] * num for layer, num in experts_per_layer.items()} for _ in HEAT_PHASES
        )

    def add(self, phase: Phase, layer_id: int, global_expert_ids: I32Array) -> None:
        """Count one layer's selections. Shapes: global_expert_ids [P]."""
        counts = self._by_phase[phase_index(phase)][layer_id]
        if global_expert_ids.size <= _FEW_PAIRS:
            for global_expert_id in global_expert_ids.tolist():
                counts[global_expert_id] += 1
            return
        self.add_counts(phase, layer_id, np.bincount(global_expert_ids, minlength=len(counts)))

    def add_counts(self, phase: Phase, layer_id: int, counts: I64Array) -> None:
        """Add counts made by a device or kernel. Shapes: counts [E]."""
        ours = self._by_phase[phase_index(phase)][layer_id]
        if counts.size != len(ours):
            raise ValueError(f"counts of {counts.size} experts, not of {len(ours)}")
        ours[:] = map(add, ours, counts.tolist())

    def snapshot(self) -> dict[int, list[int]]:
        """A copy of both phases' sums by layer id, each list by global expert id.

        A reader in another thread sees a phase's list as it was at one time.
        """
        prefill, decode = self._by_phase
        return {
            layer_id: [a + b for a, b in zip(counts.copy(), decode[layer_id].copy(), strict=True)]
            for layer_id, counts in prefill.items()
        }

    def as_array(self) -> I64Array:
        """A copy by `HEAT_PHASES`, layer in order of ids, and global expert id; zero beyond a
        layer's experts. Shapes: result [2, L, E]."""
        most = max(map(len, self._by_phase[0].values()))
        result = np.zeros((len(HEAT_PHASES), len(self._by_phase[0]), most), np.int64)
        for phase, layers in zip(result, self._by_phase, strict=True):
            for row, layer_id in enumerate(sorted(layers)):
                phase[row, : len(layers[layer_id])] = layers[layer_id]
        return result
