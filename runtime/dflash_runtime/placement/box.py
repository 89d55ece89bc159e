"""A box: what a machine's devices and links were measured to do with one model's formats and sizes.

Pure: `engine.measuring` fills it, `placement.cost` predicts from it. All times are seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

_MOST_SLOWER = 2.0
"""Times from service change those of the box by at most this factor: other programs may have used
the machine."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by an amount: straight lines between measured points, and through the last two beyond
    them. One point: the same for every amount.

    Raises: ValueError without points, or if amounts do not ascend.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        amounts = [amount for amount, _ in self.points]
        if not amounts or any(b <= a for a, b in pairwise(amounts)):
            raise ValueError("a curve needs points with ascending amounts")

    def at(self, amount: float) -> float:
        """Never below 0."""
        points = self.points
        if len(points) == 1:
            return points[0][1]
        index = bisect_left(points, amount, key=lambda point: point[0])
        index = min(max(index, 1), len(points) - 1)
        (begin, begin_s), (end, end_s) = points[index - 1], points[index]
        return max(0.0, begin_s + (end_s - begin_s) * (amount - begin) / (end - begin))


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """How fast one device, or the processor's cores, computes layers of the model.

    ``trunk``, ``experts`` and ``head`` are by the number of rows of a pass: 1, 2, 4 and 8 tokens of
    a step, larger ones of a chunk, ascending. There is always 1; others are absent if there was no
    time for them. A device that holds experts only has just ``experts``. Bytes are the file's.
    """

    device: str
    """``cpu``, ``cuda:0``, …; of a daemon its name."""
    experts: Mapping[int, Curve]
    """A layer's routed experts, by pairs times the bytes of an expert in the file."""
    trunk: Mapping[int, Curve] = field(default_factory=dict)
    """A layer without its routed experts and cached positions, by the bytes of its weights."""
    head: Mapping[int, Curve] = field(default_factory=dict)
    """Everything outside the layers, sampling included, by the bytes of the head."""
    attention: Mapping[int, Curve] = field(default_factory=dict)
    """What a layer takes more for cached positions, by the bytes of keys and values."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The way from the parent to one owner of experts that is not its own device."""

    owner: str
    step: Curve
    """A layer of a step that asks the owner, beyond what both sides compute: by rows."""
    chunk: Curve
    """The same of a chunk, by rows."""
    by_device: bool = False
    """Whether steps ask through a mailbox, without the parent's host."""


@dataclass(frozen=True, slots=True)
class CopySpeed:
    """Copies between the host and one device, bytes a second; 0 where not measured."""

    device: str
    from_locked: float = 0.0
    from_page_cache: float = 0.0
    to_host: float = 0.0
    """Writes to the host's memory by kernels beside others."""
    kernel_reads: float = 0.0
    """Reads of the host's memory by kernels."""
    pcie: str = ""
    """The link as it is now, as in ``gen 4 x8 of gen 5 x16``."""


@dataclass(frozen=True, slots=True)
class OffloadSpeed:
    """Chunks of prompts whose experts are copied to one device, timed as an engine runs them. By
    rows, two points or one."""

    device: str
    copies: Curve
    """Seconds for a gigabyte of experts, if a layer waits for nothing else: 1e9 bytes."""
    after: Curve
    """Seconds that a layer takes after copies that it has to wait for: the products of the experts
    that came last, and launches that the host has not done by then."""
    single: Curve
    """Seconds that a layer takes more than one whose experts are there, beside its copies, in a
    chunk that is computed alone and does not wait for them: the host learns what was chosen, and
    launches products."""
    grouped: Curve
    """Seconds of a layer of each chunk of a group beyond its trunk, if copies take less: often what
    the host needs to launch it beside copies. These come as one part."""
    part_s: float = 0.0
    """For each further part of a chunk, what the host needs to launch its products beside copies.
    """


@dataclass(frozen=True, slots=True)
class AskedSpeed:
    """The time of experts that the processor computes for a device's steps of one token. Both
    curves are of a layer, by the bytes in the file of these experts, from one expert on."""

    beyond: Curve
    """What the layer takes more than its trunk: asking, through a mailbox where that is possible,
    the start of the processor's threads, products and sums, and what the device then waits for."""
    computing: Curve
    """Of that, what the processor counts as computing. While serving, the same is counted."""
    layer_s: float = 0.0
    """What a layer takes more if the device and the processor both have experts of it, whether the
    processor is asked for any or not."""
    step_s: float = 0.0
    """What each step takes more in which the processor may be asked, besides."""

    def as_served(self, num_bytes: float, seconds: float) -> AskedSpeed:
        """The same, scaled so that computing so many bytes takes `seconds`."""
        found_s = self.computing.at(num_bytes)
        ratio = seconds / found_s if found_s > 0.0 else 1.0
        ratio = min(_MOST_SLOWER, max(1.0 / _MOST_SLOWER, ratio))
        computing = tuple((amount, ratio * each_s) for amount, each_s in self.computing.points)
        beyond = tuple(
            (amount, max(0.0, each_s + (ratio - 1.0) * self.computing.at(amount)))
            for amount, each_s in self.beyond.points
        )
        return replace(self, beyond=Curve(beyond), computing=Curve(computing))


@dataclass(frozen=True, slots=True)
class Together:
    """How many times longer two things take when both run, each as a factor of 1 or more."""

    first: str
    """``experts of cpu``, ``copies to cuda:0``, ``steps of cuda:0``."""
    second: str
    first_factor: float
    second_factor: float


@dataclass(frozen=True, slots=True)
class Box:
    """Everything that was measured for one model on one machine."""

    key: str
    """Digest of device ids, drivers, kernel versions, the CPU set, and the model's formats and
    sizes."""
    devices: Mapping[str, DeviceSpeed]
    links: Mapping[str, LinkSpeed] = field(default_factory=dict)
    """By owner."""
    copies: Mapping[str, CopySpeed] = field(default_factory=dict)
    """By device."""
    together: tuple[Together, ...] = ()
    host_stop: Mapping[str, Curve] = field(default_factory=dict)
    """By device: a layer's stop within a step, where the host takes over rows and choice and gives
    back sums; by rows."""
    host_asked: Mapping[str, AskedSpeed] = field(default_factory=dict)
    """By device."""
    offload: Mapping[str, OffloadSpeed] = field(default_factory=dict)
    """By device: prompts whose experts are copied there."""
    disk: Curve | None = None
    """Bytes a second of reads of an expert's size past the page cache, by how many are pending."""
    is_second: bool = False
    """Whether service was faster than by an earlier one, which was dropped."""
    daemons: Mapping[str, DeviceSpeed] = field(default_factory=dict)
    """By daemon, which may have the name of a device: what it has told of its speed. Not kept."""
