"""What a chunk of a prompt takes on a device that computes experts with copies of their weights, as
an engine does it: in passes through layers that lack all of their experts, or a few."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_adapters.layers import Ffn, RoutedFfn
from dflash_adapters.spec import MoeLayer
from dflash_protocol.ids import Phase
from dflash_runtime.compute.gpu.experts.experts import CupyExpertBank
from dflash_runtime.compute.gpu.experts.moe import DeviceMoe, HostRoute
from dflash_runtime.compute.gpu.experts.offload import ExpertOffload
from dflash_runtime.compute.gpu.experts.offload_room import AHEAD_BYTES, most_of_part
from dflash_runtime.compute.gpu.layers.rows import Input, Rows
from dflash_runtime.compute.gpu.ops.kernels import ExpertChoice, RoutedRows
from dflash_runtime.compute.gpu.transfers.file_copier import FileCopier, FileRuns
from dflash_runtime.engine.absent_owners import AbsentOwners
from dflash_runtime.engine.measuring.layers import trunk_bytes
from dflash_runtime.engine.measuring.loaded_layers import LoadedLayers
from dflash_runtime.engine.measuring.passes import Passes
from dflash_runtime.engine.measuring.timing import Timer, medians
from dflash_runtime.placement.box import Curve, DeviceSpeed, OffloadSpeed
from dflash_runtime.placement.speeds import at_rows

_CHUNK_ROWS = 512
_LAUNCHED_ROWS = 64
"""So few that the host takes longer to launch products than the device to compute them."""
_LAUNCHES = 16
_COPIED_AGAIN = 16
"""How often all experts are copied beside launches: many times as long as these take."""
_TIME_OF_MANY, _TIME_OF_FEW, _TIME_OF_GROUPS = 0.25, 0.5, 0.25
"""Shares of the time, for passes that lack many experts, a few, and a few in groups. Passes that
lack a few take little more than those that lack none, so that noise counts most there."""
_GROUPED_ROWS = 512, 2048
"""Of chunks that are timed in groups: the largest have half of an engine's group."""
_GROUP_TOKENS, _LEAST_CHUNKS = 2048, 2
"""Of a group that is timed, at least: the first chunk's launches are beside nothing."""
_PASS_BYTES = 1 << 30
"""Of the experts that a pass copies; two layers' at least."""
_FEW_SHARE = 0.5
"""Of a layer's time, that copies of a few experts take at most: it does not wait for them."""
_LEAST_SHARE = 0.02
"""What a difference is at least of what it is a part of."""

Missing = npt.NDArray[np.bool_]
"""Shapes: [E]."""
Waited = tuple[float, float]
"""Seconds of a layer that waits for its copies, and their bytes."""
Ends = tuple[int, int]
"""Numbers of layers, whose passes differ in layers alone."""


class _Copied(AbsentOwners):
    """Implements backend.RemoteExperts: in chunks of any size what is missing is copied."""

    may_offload = True

    def __init__(self, missing: Mapping[int, Missing]) -> None:
        """`missing`: by layer id, at least one."""
        super().__init__(lambda layer_id: ~missing[layer_id])
        self._missing = missing

    def to_offload(self, layer_id: int, num_tokens: int) -> Missing | None:
        return self._missing.get(layer_id)

    def begin(self, *_: Any, **__: Any) -> None:
        """Nothing is left to be asked."""


class CopiedPasses:
    """Chunks through both numbers of layers, some of whose experts are missing. Used by one thread.

    Owns: memory on the device and a FileCopier, until `close`.
    """

    def __init__(self, loaded: LoadedLayers, *, num_missing: int, ends: Ends) -> None:
        """Of each layer the last `num_missing` experts, or all if it has less.

        Raises: as FileCopier, ExpertOffload and its `prepare`.
        """
        gpu: Any = loaded.backend  # its rows are of another type than a host's
        layers = {
            layer.layer_id: layer for layer in loaded.spec.moe.layers if layer.layer_id < ends[1]
        }
        missing = {layer_id: _last(layer, num_missing) for layer_id, layer in layers.items()}
        with contextlib.ExitStack() as undo:
            self._copier = copier = FileCopier(gpu.device)
            undo.callback(copier.close)
            self._offload = offload = ExpertOffload(
                gpu.ops,
                loaded.file,
                {layer_id: (layer, missing[layer_id]) for layer_id, layer in layers.items()},
                uploader=gpu.loader.uploader,
                new_copier=lambda _: copier,
            )
            undo.callback(offload.close)
            offload.prepare()
            self._undo = undo.pop_all()

        def route_of(owners: _Copied, layer_id: int) -> HostRoute:
            bank = loaded.banks[layer_id]
            assert isinstance(bank, CupyExpertBank)
            here = bank.by_global.only(gpu.device, ~missing[layer_id])
            return HostRoute(
                gpu.ops,
                layer_id,
                here,
                phase=Phase.PREFILL,
                remote=owners,
                offload=offload,
            )

        def passes(num_layers: int) -> Passes:
            # Of the layer after the last one nothing is copied ahead.
            owners = _Copied({each: missing[each] for each in layers if each < num_layers})
            return loaded.chunk_passes(num_layers, DeviceMoe(partial(route_of, owners)))

        self._passes = tuple(passes(num) for num in ends)

    def timers(self, rows: int) -> list[Timer]:
        """Seconds of a chunk that finds nothing copied, and the bytes that it copies. The host
        waits for its choice, as for those of short prompts."""
        return [
            partial(self._timed, partial(each.seconds, rows), choices=True) for each in self._passes
        ]

    def group_timers(self, rows: int, num_chunks: int) -> list[Timer]:
        """The same of chunks that use the same copies, and choose as those before did."""
        return [
            partial(self._timed, partial(each.group_s, rows, num_chunks)) for each in self._passes
        ]

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Meanwhile, all missing experts are being copied again and again; no pass is timed."""
        runs = [part.runs for part in self._offload.all_parts()]
        table = np.concatenate([each.table for each in runs] * _COPIED_AGAIN)
        transfer = self._copier.begin(FileRuns(table, runs))
        try:
            yield
        finally:
            transfer.cancel()
            self._offload.forget()

    def _timed(
        self, seconds_of: Callable[[], float], *, choices: bool = False
    ) -> tuple[float, ...]:
        self._offload.forget(choices=choices)
        before = self._copier.num_bytes
        seconds = seconds_of()
        return seconds, float(self._copier.num_bytes - before)

    def close(self) -> None:
        """Idempotent."""
        self._passes = ()
        self._undo.close()


def measure_offload(
    name: str, loaded: LoadedLayers, speed: DeviceSpeed, *, rate: float, limit_s: float
) -> OffloadSpeed:
    """Time chunks of 512 rows and of the largest size: with all experts of a layer missing, or half
    of them, with a few, alone and in a group, and with none.

    `speed`: of the same device and layers; `rate`: bytes a second that copies make about.
    Raises: as CopiedPasses.
    """
    kind, chunk = loaded.sampled.kinds[0], loaded.backend.chunking.preferred
    num_all = len(kind.layer_ids)
    ends = min(1, num_all - 1), num_all  # apart, as noise is divided by their difference
    layers = [each for each in loaded.spec.moe.layers if each.layer_id < num_all]
    described = loaded.sampled.description.layers[:num_all]
    trunk = np.array([np.mean([trunk_bytes(loaded.file, each) for each in described])])
    sizes = sorted({min(_CHUNK_ROWS, chunk), chunk})
    # Products of longer chunks take longer than copies of half of the experts.
    short = [rows for rows in sizes if rows <= _CHUNK_ROWS]
    gpu: Any = loaded.backend
    most, every_ends = max(layer.num_experts for layer in layers), _ends_of(layers)
    share_s = limit_s / len(sizes)
    # One after the other: a small GPU has no room for the places of two.
    with contextlib.closing(CopiedPasses(loaded, num_missing=most, ends=every_ends)) as every:
        waited = {
            rows: _waited(
                every,
                rows,
                every_ends,
                limit_s=_TIME_OF_MANY * share_s / (2 if rows in short else 1),
            )
            for rows in sizes
        }
        with every.copying():
            part_s = _launching_s(loaded, min(_LAUNCHED_ROWS, sizes[0]))
    lacking = CopiedPasses(loaded, num_missing=max(1, most // 2), ends=every_ends)
    with contextlib.closing(lacking) as half:
        fewer = {
            rows: _waited(half, rows, every_ends, limit_s=_TIME_OF_MANY * share_s / 2)
            for rows in short
        }
    resident = gpu.moe(loaded.banks, Phase.PREFILL, None)
    here = [loaded.chunk_passes(num, resident) for num in ends]
    copies, after, single, grouped = [], [], [], []
    for rows in sizes:
        trunk_s = float(at_rows(speed.trunk, rows, trunk).sum())
        num_few = _few(layers[0], speed, rows, rate)
        with contextlib.closing(CopiedPasses(loaded, num_missing=num_few, ends=ends)) as few:
            timers = [*few.timers(rows), *(passes.timer(rows) for passes in here)]
            found = medians(timers, limit_s=_TIME_OF_FEW * share_s)
        few_s, _ = _of_layer(found[:2], ends)
        (here_s,) = _of_layer(found[2:], ends)
        single_s = max(0.0, few_s - here_s)
        if rows in short:
            gb_s, after_s = told_apart(waited[rows], fewer[rows], trunk_s=trunk_s)
        else:
            gb_s = seconds_of_gb(*waited[rows], trunk_s=trunk_s, single_s=single_s)
            after_s = single_s
        copies.append((float(rows), gb_s))
        after.append((float(rows), after_s))
        single.append((float(rows), single_s))
    for rows in sorted({min(each, chunk) for each in _GROUPED_ROWS}):
        num_chunks = max(_LEAST_CHUNKS, _GROUP_TOKENS // rows)
        num_few = _few(layers[0], speed, sizes[0], rate, num_chunks)
        with contextlib.closing(CopiedPasses(loaded, num_missing=num_few, ends=ends)) as few:
            timers = few.group_timers(rows, num_chunks)
            found = medians(timers, limit_s=_TIME_OF_GROUPS * limit_s / len(_GROUPED_ROWS))
        group_s, _ = _of_layer(found, ends)
        trunk_s = float(at_rows(speed.trunk, rows, trunk).sum())
        grouped.append((float(rows), max(0.0, group_s / num_chunks - trunk_s)))
    return OffloadSpeed(
        name,
        copies=Curve(tuple(copies)),
        after=Curve(tuple(after)),
        single=Curve(tuple(single)),
        grouped=Curve(tuple(grouped)),
        part_s=part_s,
    )


def _waited(passes: CopiedPasses, rows: int, ends: Ends, *, limit_s: float) -> Waited:
    seconds, num_bytes = _of_layer(medians(passes.timers(rows), limit_s=limit_s), ends)
    return seconds, num_bytes


def _launching_s(loaded: LoadedLayers, rows: int) -> float:
    """What the host needs to launch the products of a layer's experts, which are there."""
    gpu: Any = loaded.backend
    device, layer = gpu.device, loaded.spec.moe.layers[0]
    bank = loaded.banks[layer.layer_id]
    assert isinstance(bank, CupyExpertBank)
    shape = rows, layer.num_experts_used
    ffn = loaded.sampled.description.layers[layer.layer_id].ffn
    assert not isinstance(ffn, Ffn)
    rule = ffn.rule if isinstance(ffn, RoutedFfn) else ffn.choice
    ids, weights = device.zeros(shape, np.int32), device.zeros(shape, np.float32)
    x = Input(Rows(device.zeros((rows, layer.hidden_size), np.float32)))
    routed = RoutedRows(x, ExpertChoice(ids, weights, rule))

    def launch() -> float:
        device.synchronize()
        started_s = time.perf_counter()
        for _ in range(_LAUNCHES):
            gpu.ops.chunk_experts.local_sums(bank.by_global, routed)
        return (time.perf_counter() - started_s) / _LAUNCHES

    return min(launch() for _ in range(3))


def told_apart(every: Waited, fewer: Waited, *, trunk_s: float) -> tuple[float, float]:
    """What a gigabyte of copies takes, and what a layer takes after them (see OffloadSpeed), from
    layers that wait for all experts and for fewer."""
    (every_s, every_bytes), (fewer_s, fewer_bytes) = every, fewer
    most = every_s / max(1.0, every_bytes)
    byte_s = (every_s - fewer_s) / max(1.0, every_bytes - fewer_bytes)
    byte_s = min(max(byte_s, _LEAST_SHARE * most), most)
    waited_s = every_s - max(0.0, trunk_s - AHEAD_BYTES * byte_s)
    return 1e9 * byte_s, max(0.0, waited_s - every_bytes * byte_s)


def seconds_of_gb(layer_s: float, num_bytes: float, *, trunk_s: float, single_s: float) -> float:
    """What a gigabyte of copies takes, if a layer that copies so many bytes takes so long: while
    its trunk is computed copies go on, as far as there is room, and `single_s` (OffloadSpeed) comes
    after them (see CostModel)."""
    waited_s = max(layer_s - single_s, _LEAST_SHARE * layer_s)
    byte_s = waited_s / max(1.0, num_bytes)
    if trunk_s > AHEAD_BYTES * byte_s:
        beyond_s = (waited_s - trunk_s) / max(1.0, num_bytes - AHEAD_BYTES)
        byte_s = max(beyond_s, _LEAST_SHARE * byte_s)
    return 1e9 * byte_s


def _ends_of(layers: Sequence[MoeLayer]) -> Ends:
    """Of passes that copy all experts of layers."""
    of_layer = max(layer.num_experts * layer.expert_bytes for layer in layers)
    num = min(len(layers), max(2, _PASS_BYTES // of_layer))
    return num // 2, num


def _few(layer: MoeLayer, speed: DeviceSpeed, rows: int, rate: float, num_chunks: int = 1) -> int:
    """So many experts of a layer that chunks do not wait for their copies, but one at least."""
    layer_s = speed.trunk[rows].points[-1][1] + speed.experts[rows].points[-1][1]
    num = int(_FEW_SHARE * num_chunks * layer_s * rate / layer.expert_bytes)
    return max(1, min(num, most_of_part(layer, layer.num_experts - 1)))


def _last(layer: MoeLayer, num: int) -> Missing:
    missing = np.zeros(layer.num_experts, np.bool_)
    missing[-num:] = True
    return missing


def _of_layer(found: Sequence[tuple[float, ...]], ends: Ends) -> list[float]:
    """Of each part of what both passes found, a layer's."""
    fewer, more = np.array(found)
    least = _LEAST_SHARE * more / ends[1]  # differences of noisy times may be below 0
    of_layer: list[float] = np.maximum((more - fewer) / (ends[1] - ends[0]), least).tolist()
    return of_layer
