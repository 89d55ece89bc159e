"""Times of one parent's trunk and of each owner's experts, read from a box's curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_adapters.spec import ModelSpec, MoeSpec
from dflash_protocol.ids import F64Array
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.placement.box import AskedSpeed, Box, Curve, DeviceSpeed
from dflash_runtime.placement.situation import ExpertDaemon, ParentDevice, Situation
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER

_CPU = "cpu"
_STEP_ROWS = 8
"""Passes of more rows are chunks."""


def along(curve: Curve, amounts: F64Array) -> F64Array:
    """`Curve.at` for many amounts, never falling: what falls from one amount to a larger one is
    noise."""
    x = np.array([amount for amount, _ in curve.points])
    y = np.maximum.accumulate(np.array([seconds for _, seconds in curve.points]))
    if x.size == 1:
        return np.full(np.shape(amounts), y[0])
    inside = np.interp(amounts, x, y)
    below = (y[1] - y[0]) / (x[1] - x[0]) * np.minimum(amounts - x[0], 0.0)
    above = (y[-1] - y[-2]) / (x[-1] - x[-2]) * np.maximum(amounts - x[-1], 0.0)
    return np.asarray(np.maximum(inside + below + above, 0.0))


def at_rows(
    curves: Mapping[int, Curve], rows: int, amounts: F64Array, *, is_by_row: bool = False
) -> F64Array:
    """Seconds of a pass of `rows` rows, between the measured numbers of rows on a straight line.

    `is_by_row`: `amounts` grow with the rows, as pairs do. More rows than were measured take as
    long as several passes, fewer as long as the smallest. No curves: nothing.
    """
    if not curves:
        return np.zeros(np.shape(amounts))

    def measured(at: int) -> F64Array:
        return along(curves[at], amounts * (at / rows) if is_by_row else amounts)

    sizes = sorted(curves)
    if rows <= sizes[0]:
        # Fewer rows than measured read the same weights.
        return along(curves[sizes[0]], amounts)
    if rows >= sizes[-1]:
        return measured(sizes[-1]) * (rows / sizes[-1])
    end = next(size for size in sizes if size >= rows)
    begin = sizes[sizes.index(end) - 1]
    part = (rows - begin) / (end - begin)
    return measured(begin) * (1.0 - part) + measured(end) * part


@dataclass(frozen=True, slots=True)
class ChunkParts:
    """What a processor's experts take in chunks, told apart: reading their weights, of each chosen
    expert once, and computing pairs. Seconds by bytes of experts.

    Chunks are measured with uniform routing, which chooses all experts. Those that a device leaves
    to its processor are the ones that few tokens choose: their weights take most of the time.
    """

    read: Curve
    """By rows: of a byte of weights."""
    pair: Curve
    """By rows: of a byte of an expert, for each of its pairs."""

    @classmethod
    def of(cls, experts: Mapping[int, Curve], moe: MoeSpec) -> ChunkParts | None:
        """From `DeviceSpeed.experts`; None if no chunk was measured with two numbers of pairs."""
        num_experts = float(np.mean([each.num_experts for each in moe.layers]))
        size = float(np.mean([each.expert_bytes for each in moe.layers]))
        reads, pairs = [], []
        for rows, curve in sorted(experts.items()):
            points = [each for each in curve.points if each[0] > 0]
            if rows <= _STEP_ROWS or len(points) < 2:
                continue
            (few, few_s), (many, many_s) = points[0], points[-1]
            read = size * num_experts * -np.expm1(-np.array([few, many]) / (size * num_experts))
            pair_s = (many_s * read[0] - few_s * read[1]) / (many * read[0] - few * read[1])
            pair_s = float(np.clip(pair_s, 0.0, few_s / few))
            pairs.append((float(rows), pair_s))
            reads.append((float(rows), float((few_s - pair_s * few) / read[0])))
        return cls(Curve(tuple(reads)), Curve(tuple(pairs))) if pairs else None

    def seconds(self, rows: int, pairs: F64Array, distinct: F64Array) -> F64Array:
        """Of so many bytes of pairs, and of the weights that these need."""
        return np.asarray(_within(self.read, rows) * distinct + _within(self.pair, rows) * pairs)


SLOTS_S = 3.6e-6
"""What slots of a layer take of a step, whatever is in them; see docs/worklog.md."""
_FOUND_IN_SLOTS, _FOUND_SLOTS = 0.35, 8
"""Of a token's experts that do not live on the device, the share that so many slots have. Fitted to
`qwen3`, as ALIKE in heat.py is."""


READ_S = 17e-6
"""What else a layer takes in which an expert is read over the bus: products of that expert come
after it, and both sides read the host's memory. On an H200 with 16 cores, 12 layers of the 30B
shape within 3 GiB (`gpu-regret-20261128-234139`), layers with reads took so much longer than
predicted, beyond what those without did."""


def _longer_s(first: F64Array, second: F64Array) -> F64Array:
    """About how long the longer one of two takes that run at once, from the average of each. Both
    vary: if their averages are equal, the longer one takes a quarter more. With the longer average
    instead, steps of 48 layers within 8 GiB were predicted 14 to 19 % too fast in five measurements
    on H200s with 14 threads, which take as long as reads, and at most 6 % with 7 threads, which
    take longer (the last: `gpu-predictions-20261130-015428`)."""
    return np.asarray(np.cbrt(first**3 + second**3))


def with_one_read(asked: F64Array, expert_bytes: F64Array, bus: float) -> F64Array:
    """What a layer takes by how many of a token's experts are missing, of which the device reads
    one, `bus` bytes a second, if they are two or more, while the processor, which takes `asked` for
    so many, computes the others. Shapes: asked [L, K + 1] and the result, expert_bytes [L]."""
    left = asked.copy()
    left[:, 2:] = _longer_s(asked[:, 1:-1], expert_bytes[:, None] / bus) + READ_S
    return left


@dataclass(frozen=True, slots=True)
class StepSlots:
    """Experts that steps keep on the parent's device besides those that live there, in place of
    asking the processor for them; see gpu/run/step_slots.py."""

    num: int
    """Of a layer."""
    bus: float
    """Bytes a second that the device's kernels read of the host's memory."""

    def seconds(self, asked: F64Array, expert_bytes: F64Array) -> F64Array:
        """What a layer takes by how many of a token's experts do not live there: some of these are
        in slots, and of two or more that are left the device reads one, while the processor, which
        takes `asked` for so many, computes the others. Shapes: asked [L, K + 1] and the result,
        expert_bytes [L]."""
        found = _FOUND_IN_SLOTS * min(1.0, self.num / _FOUND_SLOTS)
        most, left = asked.shape[1] - 1, with_one_read(asked, expert_bytes, self.bus)
        mixed = np.zeros((most + 1, most + 1))
        for missing in range(most + 1):
            for num in range(missing + 1):
                share = (1.0 - found) ** num * found ** (missing - num)
                mixed[num, missing] = math.comb(missing, num) * share
        return np.asarray(left @ mixed)


@dataclass(frozen=True, slots=True)
class Side:
    """One owner of experts, as its parent sees it."""

    name: str
    experts: Mapping[int, Curve]
    step_link_s: float = 0.0
    chunk_link: Curve | None = None
    by_device: bool = True
    """Whether steps ask it without the parent's host; the parent's own device is not asked."""
    is_cpu: bool = False
    factor: float = 1.0
    """How many times longer it takes beside the others."""
    chunks: ChunkParts | None = None
    """Of a processor."""
    asked: AskedSpeed | None = None
    """Of the processor that the parent's device asks: see Box.host_asked. Steps take this instead
    of what the curves, link and factor say."""
    slots: StepSlots | None = None
    """Of the parent's device, for experts of this side; `step_s` leaves them out."""

    def step_s(self, expert_bytes: F64Array, most: int) -> F64Array:
        """Seconds of a layer of a step by how many of its experts are chosen, link included.

        Shapes: expert_bytes [L], result [L, most + 1].
        """
        sizes, layers = np.unique(expert_bytes, return_inverse=True)
        amounts = sizes[:, None] * np.arange(most + 1)
        if self.asked is not None:
            times = along(self.asked.beyond, amounts)
        else:
            times = at_rows(self.experts, 1, amounts) * self.factor + self.step_link_s
        times[:, 0] = 0.0
        return np.asarray(times[layers])

    def chunk_s(
        self,
        rows: int,
        pairs: F64Array,
        expert_bytes: F64Array,
        *,
        distinct: F64Array | None = None,
    ) -> F64Array:
        """Seconds of a layer of a chunk, link included. `distinct`: how many experts are expected
        to be chosen; None: as many as by uniform routing. Shapes: pairs, distinct [..., L], as the
        result."""
        if distinct is None or self.chunks is None:
            times = at_rows(self.experts, rows, pairs * expert_bytes, is_by_row=True)
        else:
            times = self.chunks.seconds(rows, pairs * expert_bytes, distinct * expert_bytes)
        times = times * self.factor
        if self.chunk_link is not None:
            crossing = rows * -np.expm1(-pairs / rows)  # rows that have any
            times = times + along(self.chunk_link, crossing)
        return np.asarray(times * -np.expm1(-pairs))  # unless no expert is chosen


def local_side(situation: Situation, parent: ParentDevice) -> Side:
    """The parent's own device. Raises: KeyError if it was not measured."""
    speed = situation.box.devices[str(parent.device)]
    return Side(LOCAL_OWNER, speed.experts, is_cpu=parent.is_host)


def host_side(situation: Situation, parent: ParentDevice) -> Side | None:
    """The processor beside the parent's device; None if it is the parent's device, or was not
    measured."""
    box, speed = situation.box, situation.box.devices.get(_CPU)
    if parent.is_host or speed is None:
        return None
    beside = factor(box, f"experts of {_CPU}", f"steps of {parent.device}")
    side = _linked(box, HOST_OWNER, speed, is_cpu=True, factor=beside)
    return replace(
        side,
        chunks=ChunkParts.of(speed.experts, situation.spec.moe),
        asked=box.host_asked.get(str(parent.device)),
        by_device=True,
        slots=_slots(situation, parent),
    )


def _slots(situation: Situation, parent: ParentDevice) -> StepSlots | None:
    """None where steps have none, or can't fetch."""
    name, layers = str(parent.device), situation.spec.moe.layers
    copies = situation.box.copies.get(name)
    if any(each.bias or each.scale for layer in layers for each in layer.projections):
        return None
    if situation.daemons or name not in situation.box.host_asked:
        return None
    if not parent.cache_slots or copies is None or not copies.kernel_reads:
        return None
    return StepSlots(parent.cache_slots, copies.kernel_reads)


def factor_beside_processor(box: Box, device: str) -> float:
    """How many times longer the parent's device takes beside its processor's experts."""
    return factor(box, f"steps of {device}", f"experts of {_CPU}")


def daemon_side(box: Box, daemon: ExpertDaemon) -> Side | None:
    """A daemon; None if it was not measured."""
    speed = box.daemons.get(daemon.name)
    if speed is None:
        return None
    is_cpu = str(daemon.device) == _CPU
    return _linked(box, daemon.name, speed, is_cpu=is_cpu, factor=1.0)


def copy_rate(box: Box, parent: ParentDevice) -> float:
    """Bytes a second of the file's weights to the parent's device, beside its steps; 0 if it was
    not measured, or nothing need be copied."""
    device = str(parent.device)
    copies = box.copies.get(device)
    if copies is None or parent.shares_host_memory or parent.is_host:
        return 0.0
    rate = copies.from_page_cache or copies.from_locked
    return rate / factor(box, f"copies to {device}", f"steps of {device}")


@dataclass(frozen=True, slots=True)
class ExpertCopies:
    """Copies of experts to the parent's device in chunks of prompts."""

    copies: Curve
    after: Curve
    single: Curve
    grouped: Curve
    """See OffloadSpeed."""
    group: int = 0
    """Tokens of a prompt whose chunks use the same copies; 0: each chunk has its own."""
    part_s: float = 0.0
    """See OffloadSpeed."""

    @classmethod
    def of(cls, box: Box, parent: ParentDevice, *, group: int = 0) -> ExpertCopies | None:
        """As prompts were timed; else at the rate of copies. None if neither was measured, or
        nothing need be copied."""
        rate, found = copy_rate(box, parent), box.offload.get(str(parent.device))
        if not rate:
            return None
        if found is None:
            nothing = Curve(((0.0, 0.0),))
            return cls(Curve(((0.0, 1e9 / rate),)), nothing, nothing, nothing, group)
        curves = found.copies, found.after, found.single, found.grouped
        return cls(*curves, group, found.part_s)

    def seconds(self, rows: int, num_bytes: F64Array) -> F64Array:
        """Of so many bytes in a chunk of so many rows. Shapes: both [...]."""
        return np.asarray(num_bytes * (_within(self.copies, rows) / 1e9))

    def after_s(self, rows: int) -> float:
        """What a layer takes after copies that it waits for."""
        return _within(self.after, rows)

    def single_s(self, rows: int) -> float:
        """What a layer of a chunk that is computed alone takes more, beside its copies."""
        return _within(self.single, rows)

    def grouped_s(self, rows: int) -> float:
        """A layer of each chunk of a group, beyond its trunk, beside copies."""
        return _within(self.grouped, rows)


def _within(curve: Curve, amount: float) -> float:
    """Beyond the measured points as at the nearest one."""
    (first, _), (last, _) = curve.points[0], curve.points[-1]
    return curve.at(min(max(amount, first), last))


def factor(box: Box, what: str, beside: str) -> float:
    """How many times longer something takes beside something else."""
    for each in box.together:
        if (each.first, each.second) == (what, beside):
            return max(1.0, each.first_factor)
        if (each.second, each.first) == (what, beside):
            return max(1.0, each.second_factor)
    return 1.0


def _linked(box: Box, owner: str, speed: DeviceSpeed, *, is_cpu: bool, factor: float) -> Side:
    link = box.links.get(owner)
    if link is None:
        return Side(owner, speed.experts, by_device=False, is_cpu=is_cpu, factor=factor)
    return Side(
        owner,
        speed.experts,
        step_link_s=link.step.at(1),
        chunk_link=link.chunk,
        by_device=link.by_device,
        is_cpu=is_cpu,
        factor=factor,
    )


class TrunkTimes:
    """Seconds of everything but routed experts, on one parent's device."""

    def __init__(
        self,
        speed: DeviceSpeed,
        layer_bytes: Sequence[int],
        spec: ModelSpec,
        *,
        head_bytes: int,
        kv_type: KvType,
    ) -> None:
        """`layer_bytes`: of each layer's trunk."""
        self._speed = speed
        self._layer_bytes = np.array(layer_bytes, np.float64)
        self._head_bytes = np.array([head_bytes], np.float64)
        value = kv_type.bytes_per_value
        self._row_bytes = np.array(
            [kv.num_heads * (kv.key_dim + kv.value_dim) * value for kv in spec.kv_layers]
        )
        spans = [kv.mask.span for kv in spec.kv_layers]
        self._spans = np.array([np.inf if span is None else span for span in spans])

    @classmethod
    def of(cls, situation: Situation, parent: ParentDevice, kv_type: KvType) -> TrunkTimes:
        """Raises: KeyError if the device was not measured."""
        return cls(
            situation.box.devices[str(parent.device)],
            [each.trunk for each in parent.footprint.layers],
            situation.spec,
            head_bytes=situation.head_bytes,
            kv_type=kv_type,
        )

    def step_s(self, position: float) -> float:
        """A step of one token after so many positions."""
        head = at_rows(self._speed.head, 1, self._head_bytes)
        return self._pass_s(1, position) + float(head.sum())

    def chunk_layer_s(self, rows: int) -> float:
        """A layer of a prompt's first chunk, on average."""
        return self._pass_s(rows, 0.0) / self._layer_bytes.size

    def prompt_s(self, num_tokens: int, chunk: int) -> float:
        """A prompt, cut into chunks."""
        total = float(at_rows(self._speed.head, 1, self._head_bytes).sum())
        begin = 0
        for rows, times in chunk_sizes(num_tokens, chunk):
            # What is cached before a chunk, on average: times grow with it nearly as a line.
            middle = begin + rows * (times - 1) / 2
            total += times * self._pass_s(rows, middle)
            begin += rows * times
        return total

    def _pass_s(self, rows: int, position: float) -> float:
        cached = self._row_bytes * np.minimum(self._spans, position)
        trunk = at_rows(self._speed.trunk, rows, self._layer_bytes)
        return float(trunk.sum() + at_rows(self._speed.attention, rows, cached).sum())


def chunk_sizes(num_tokens: int, chunk: int) -> Iterator[tuple[int, int]]:
    """The sizes of a prompt's chunks, and how many there are of each."""
    if num_tokens >= chunk:
        yield chunk, num_tokens // chunk
    if num_tokens % chunk:
        yield num_tokens % chunk, 1
