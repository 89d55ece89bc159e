"""Fills a box: all that it lacks, or everything, within a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.loading import model_spec
from dflash_adapters.registry import describe, read_spec
from dflash_protocol.device import CPU
from dflash_protocol.errors import DeviceOutOfMemory, SettingsError, UnsupportedModel
from dflash_runtime.compute import BackendName, ComputeBackend
from dflash_runtime.compute.gpu.chunk_room import GPU_CHUNKS
from dflash_runtime.compute.gpu.room import GpuRoom
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine.measuring.asked_model import AskedModel, measure_asked
from dflash_runtime.engine.measuring.devices import measure_device, most_positions
from dflash_runtime.engine.measuring.disk import measure_disk
from dflash_runtime.engine.measuring.host_stops import measure_host_stop
from dflash_runtime.engine.measuring.layers import SampledLayers, sampled_layers
from dflash_runtime.engine.measuring.loaded_layers import LoadedLayers
from dflash_runtime.engine.measuring.passes import Passes
from dflash_runtime.engine.measuring.timing import TimeLeft
from dflash_runtime.engine.measuring.together import measure_together
from dflash_runtime.engine.trial_steps import trial_steps
from dflash_runtime.placement.box import (
    AskedSpeed,
    Box,
    CopySpeed,
    Curve,
    DeviceSpeed,
    LinkSpeed,
    OffloadSpeed,
    Together,
)
from dflash_runtime.placement.footprint import Footprint, Memory

LIMIT_S = 60.0
START_LIMIT_S = 10.0
"""For a start that lacks a figure, whatever it lacks."""

_MOST_BYTES = 5 << 29
"""Weights of a device's layers that are timed: many times what a processor's caches hold, as
processors of servers cache 300 MB. Reading them costs a start nothing, which needs them anyway."""
_FAR_LAYERS = 2
_FREE_SHARE = 0.3
"""Of a device's free memory, for their weights."""
_HOST_SHARE, _GPU_SHARE = 3, 4
"""Of the time, in proportion: a device's weights are loaded in its share."""
_DISK_SHARE, _READ_SHARE, _COPIES_SHARE = 0.06, 0.15, 0.1
_STOP_SHARE, _ASKED_SHARE, _TOGETHER_SHARE = 0.06, 0.14, 0.06
_OFFLOAD_SHARE = 0.1
_CROSSINGS_SHARE = _STOP_SHARE + _ASKED_SHARE + _COPIES_SHARE + _OFFLOAD_SHARE + 2 * _TOGETHER_SHARE

OnProgress = Callable[[str, int, int], None]
"""Gets what is measured, the number of parts done, and of all."""


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """An opened backend, warmed up for the file, to be measured."""

    name: str
    """``cpu``, ``cuda:0``, …"""
    backend: ComputeBackend
    pcie: Callable[[], str] = lambda: ""
    """Its link as it is now; asked when it is busy."""


@dataclass(slots=True)
class _Parts:
    """What is measured so far."""

    devices: dict[str, DeviceSpeed] = field(default_factory=dict)
    copies: dict[str, CopySpeed] = field(default_factory=dict)
    together: list[Together] = field(default_factory=list)
    host_stop: dict[str, Curve] = field(default_factory=dict)
    host_asked: dict[str, AskedSpeed] = field(default_factory=dict)
    links: dict[str, LinkSpeed] = field(default_factory=dict)
    offload: dict[str, OffloadSpeed] = field(default_factory=dict)
    disk: Curve | None = None


def chunk_to_measure(file: GgufFile, *, kv_type: KvType, free_bytes: int) -> int:
    """The largest chunk that a GPU is measured with within its free memory: what chunks of the
    sampled layers need leaves a share to what comes after them.

    Raises: UnsupportedModel.
    """
    whole = describe(file)
    cut = sampled_layers(file, whole, limit_bytes=_sample_bytes(free_bytes)).description
    spec = model_spec(file, cut)
    room = Footprint(Memory.GPU, GpuRoom(file, spec, cut))
    for chunk in GPU_CHUNKS:
        num_positions = most_positions(chunk, whole.context_length)
        needs = room.needs(num_positions=num_positions, kv_type=kv_type, chunk=chunk)
        if needs.total + room.every_expert <= (1.0 - _FREE_SHARE) * free_bytes:
            return chunk
    return GPU_CHUNKS[-1]


def _sample_bytes(free_bytes: int | None) -> int:
    """Most bytes of the layers that are timed on a device; None: it tells nothing of its memory."""
    return min(_MOST_BYTES, int(_FREE_SHARE * free_bytes)) if free_bytes else _MOST_BYTES


def lacking(box: Box | None, devices: Sequence[str]) -> list[str]:
    """Devices that a box does not have figures of; all without one."""
    return [name for name in devices if box is None or name not in box.devices]


def measure_box(
    file: GgufFile,
    devices: Sequence[MeasuredDevice],
    *,
    key: str,
    kv_type: KvType,
    known: Box | None = None,
    limit_s: float = LIMIT_S,
    for_plan: bool = False,
    on_progress: OnProgress = lambda what, num_done, num_total: None,
) -> Box:
    """Measure these devices, the host among them first, what connects them, and the disk. What a
    `known` box of this key has is taken from there.

    Reads weights of some layers, and frees all that it takes; Ctrl-C ends it. All share one
    deadline, `limit_s` from now: what loading or compiling takes is taken from what follows, and
    each figure gets a share of what is left, or else its shortest time (see `medians`).
    `for_plan`: without figures that plans do not need.
    Raises: DeviceUnavailable, DeviceOutOfMemory, ModelFileError.
    """
    parts, left = _Parts(), TimeLeft(limit_s)
    if known is not None:
        parts = _Parts(
            dict(known.devices),
            dict(known.copies),
            list(known.together),
            dict(known.host_stop),
            dict(known.host_asked),
            dict(known.links),
            dict(known.offload),
            known.disk,
        )
    new = [each for each in devices if each.name not in parts.devices]
    spec = read_spec(file)
    disk_s = 0.0 if parts.disk is not None else _DISK_SHARE * limit_s
    if disk_s:
        expert_bytes = max(layer.expert_bytes for layer in spec.moe.layers)
        parts.disk = measure_disk(
            file.path, expert_bytes=expert_bytes, limit_s=disk_s, report=on_progress
        )
    host: tuple[str, Passes] | None = None
    processor = next((each.backend for each in devices if each.backend.is_host), None)
    if processor is not None:
        processor.choose_threads(file, None)
    with contextlib.ExitStack() as undo:
        for index, device in enumerate(new):
            device_left = TimeLeft(left.share(_share_of_first(new[index:])))
            loaded, far = _loaded(device, file, kv_type, undo=undo)
            share = 1.0
            if device.backend.is_host:
                on_progress(f"{device.name}: weights are read", 0, 1)
                loaded.read(device_left.share(_READ_SHARE))
                trial = trial_steps(device.backend, loaded.model, loaded.banks, kv_type=kv_type)
                device.backend.choose_threads(file, trial)
            else:
                share -= _CROSSINGS_SHARE
            parts.devices[device.name] = measure_device(
                device.name,
                loaded,
                far=far,
                kv_type=kv_type,
                limit_s=device_left.share(share),
                for_plan=for_plan,
                report=on_progress,
            )
            if device.backend.is_host:
                num_layers = len(loaded.sampled.kinds[0].layer_ids)
                host = device.name, loaded.passes(num_layers)
            else:
                _measure_crossings(
                    device,
                    loaded,
                    parts,
                    host,
                    processor=processor,
                    kv_type=kv_type,
                    left=device_left,
                    for_plan=for_plan,
                    on_progress=on_progress,
                )
    return Box(
        key,
        parts.devices,
        parts.links,
        parts.copies,
        tuple(parts.together),
        parts.host_stop,
        parts.host_asked,
        parts.offload,
        parts.disk,
    )


def _share_of_first(devices: Sequence[MeasuredDevice]) -> float:
    """Of the time that is left for these devices."""
    shares = [_HOST_SHARE if each.backend.is_host else _GPU_SHARE for each in devices]
    return shares[0] / sum(shares)


def _loaded(
    device: MeasuredDevice,
    file: GgufFile,
    kv_type: KvType,
    *,
    undo: contextlib.ExitStack,
) -> tuple[LoadedLayers, LoadedLayers | None]:
    """The layers to be measured, and those for `TimedPasses.far`."""
    description, backend = describe(file), device.backend
    limit = _sample_bytes(backend.free_memory_bytes())
    sampled = sampled_layers(file, description, limit_bytes=limit)
    num_positions = most_positions(backend.chunking.preferred, description.context_length)

    def load(layers: SampledLayers) -> LoadedLayers:
        loaded = LoadedLayers(backend, file, layers, num_positions=num_positions, kv_type=kv_type)
        undo.callback(loaded.close)
        return loaded

    loaded = load(sampled)
    if not loaded.spec.recurrent_layers or not sampled.kinds[0].sees_all:
        return loaded, None
    return loaded, load(sampled.first_kind(_FAR_LAYERS))


def _measure_crossings(
    device: MeasuredDevice,
    loaded: LoadedLayers,
    parts: _Parts,
    host: tuple[str, Passes] | None,
    *,
    processor: ComputeBackend | None,
    kv_type: KvType,
    left: TimeLeft,
    for_plan: bool,
    on_progress: OnProgress,
) -> None:
    """Stops of a device's steps, copies, both beside the host's experts, which `processor`
    computes, and prompts whose experts are copied."""
    from dflash_runtime.engine.measuring.copied_experts import measure_offload
    from dflash_runtime.engine.measuring.copies import (
        TimedCopies,
        measure_copies,
        parts_of_experts,
    )

    gpu: Any = device.backend  # its rows are of another type than a host's
    name = device.name
    on_progress(f"{name}: stops of its steps", 0, 5)
    limit_s = left.seconds / _CROSSINGS_SHARE
    stop = measure_host_stop(loaded, limit_s=_STOP_SHARE * limit_s, for_plan=for_plan)
    if stop is not None:
        parts.host_stop[name] = stop
    if stop is not None and processor is not None and processor.name == BackendName.CPU:
        on_progress(f"{name}: experts of the processor", 1, 5)  # steps ask no other backend
        _measure_asked(
            device, loaded, parts, processor, kv_type=kv_type, limit_s=_ASKED_SHARE * limit_s
        )
    with contextlib.ExitStack() as undo:
        on_progress(f"{name}: copies", 2, 5)
        sources = parts_of_experts(loaded.file, loaded.spec.moe.layers)
        copies = TimedCopies(gpu, sources)
        undo.callback(copies.close)
        parts.copies[name] = measure_copies(name, copies, limit_s=_COPIES_SHARE * limit_s)
        copies.from_locked_s()
        parts.copies[name] = replace(parts.copies[name], pcie=device.pcie())
        if host is not None:
            on_progress(f"{name}: beside the processor", 3, 5)
            of_host, passes = host
            steps = loaded.passes(len(loaded.sampled.kinds[0].layer_ids))
            experts = f"experts of {of_host}", lambda: (passes.seconds(1),)
            for what in (
                (f"copies to {name}", copies.from_pages_s),
                (f"steps of {name}", lambda: (steps.seconds(1),)),
            ):
                together = measure_together(experts, what, limit_s=_TOGETHER_SHARE * limit_s)
                parts.together.append(together)
    on_progress(f"{name}: prompts with copies", 4, 5)
    with contextlib.suppress(DeviceOutOfMemory, SettingsError, UnsupportedModel):
        # Where there is no room, or no kernel, no plan copies experts either.
        found = measure_offload(
            name,
            loaded,
            parts.devices[name],
            rate=parts.copies[name].from_page_cache,
            limit_s=_OFFLOAD_SHARE * limit_s,
        )
        if found is not None:
            parts.offload[name] = found


def _measure_asked(
    device: MeasuredDevice,
    loaded: LoadedLayers,
    parts: _Parts,
    processor: ComputeBackend,
    *,
    kv_type: KvType,
    limit_s: float,
) -> None:
    """Experts of a device's steps and chunks that `processor` computes."""
    from dflash_runtime.engine.measuring.asked_chunks import measure_asked_chunks

    speed, left = parts.devices[device.name], TimeLeft(limit_s)
    free_bytes = device.backend.free_memory_bytes() or 0
    asked = AskedModel(
        device.backend,
        processor,
        loaded.file,
        kv_type=kv_type,
        limit_bytes=int(_FREE_SHARE * free_bytes),
        limit_s=_READ_SHARE * limit_s / _ASKED_SHARE,
    )
    with contextlib.closing(asked):
        stop_s = parts.host_stop[device.name].at(1)
        found = measure_asked(asked, trunk=speed.trunk[1], stop_s=stop_s, limit_s=left.share(0.6))
        if found is not None:
            parts.host_asked[device.name] = found
    host = parts.devices.get(str(CPU))
    if host is not None:
        link = measure_asked_chunks(
            loaded, processor, device=speed, host=host, limit_s=left.seconds
        )
        if link is not None:
            parts.links.setdefault(link.owner, link)
