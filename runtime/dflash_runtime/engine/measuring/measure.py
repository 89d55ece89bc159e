"""Fills a box: all that it lacks, or everything, within a time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.loading import model_spec
from dflash_adapters.registry import describe, read_spec
from dflash_protocol.errors import (
    DeviceOutOfMemory,
    DeviceUnavailable,
    SettingsError,
    UnsupportedModel,
    one_line,
)
from dflash_runtime.compute import BackendName, ComputeBackend
from dflash_runtime.compute.gpu.chunk_room import GPU_CHUNKS
from dflash_runtime.compute.gpu.room import GpuRoom
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine.measuring.asked_model import (
    AskedModel,
    measure_asked,
    measure_unasked,
)
from dflash_runtime.engine.measuring.devices import measure_device, most_positions
from dflash_runtime.engine.measuring.disk import measure_disk
from dflash_runtime.engine.measuring.host_stops import measure_host_stop
from dflash_runtime.engine.measuring.layers import SampledLayers, sampled_layers
from dflash_runtime.engine.measuring.loaded_layers import LoadedLayers
from dflash_runtime.engine.measuring.passes import Passes
from dflash_runtime.engine.measuring.timing import TimeLeft
from dflash_runtime.engine.measuring.together import measure_together
from dflash_runtime.engine.trial_steps import trial_steps
from dflash_runtime.placement.box import Box
from dflash_runtime.placement.split import HOST_OWNER

_LOG = logging.getLogger(__name__)

LIMIT_S = 60.0
START_LIMIT_S = 10.0
"""For a start that lacks a figure, whatever it lacks."""

_MOST_BYTES = 5 << 29
"""Weights of a device's layers that are timed: many times what a processor's caches hold, as
processors of servers cache 300 MB. Reading them costs a start nothing, which needs them anyway."""
_FAR_LAYERS = 2
_FREE_SHARE = 0.3
"""Of a device's free memory, for their weights."""
_READ_KNOWN_S = 1.0
"""For weights of the processor's layers, if its own figures are known."""
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


def chunk_to_measure(file: GgufFile, *, kv_type: KvType, free_bytes: int) -> int:
    """The largest chunk that a GPU is measured with within its free memory: what chunks of the
    sampled layers need leaves a share to what comes after them.

    Raises: UnsupportedModel.
    """
    whole = describe(file)
    cut = sampled_layers(file, whole, limit_bytes=_sample_bytes(free_bytes)).description
    spec = model_spec(file, cut)
    room = GpuRoom(file, spec, cut)
    for chunk in GPU_CHUNKS:
        num_positions = most_positions(chunk, whole.context_length)
        needs = room.needs(num_positions=num_positions, kv_type=kv_type, chunk=chunk)
        if needs.total + room.every_expert <= (1.0 - _FREE_SHARE) * free_bytes:
            return chunk
    return GPU_CHUNKS[-1]


def _sample_bytes(free_bytes: int | None) -> int:
    """Most bytes of the layers that are timed on a device; None: it tells nothing of its memory."""
    return _MOST_BYTES if free_bytes is None else min(_MOST_BYTES, int(_FREE_SHARE * free_bytes))


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
    leaves_out: bool = False,
    on_progress: OnProgress = lambda what, num_done, num_total: None,
) -> Box:
    """Measure these devices, the host among them first, what connects them, and the disk. What a
    `known` box of this key has is taken from there.

    Reads weights of some layers, and frees all that it takes; Ctrl-C ends it. All share one
    deadline, `limit_s` from now: what loading or compiling takes is taken from what follows, and
    each figure gets a share of what is left, or else its shortest time (see `medians`).
    `for_plan`: without figures that plans do not need. `leaves_out`: a GPU that fails is left out.
    Raises: DeviceUnavailable, DeviceOutOfMemory, ModelFileError.
    """
    box, left = Box(key, {}) if known is None else known, TimeLeft(limit_s)
    new = [each for each in devices if each.name not in box.devices]
    spec = read_spec(file)
    if box.disk is None:
        expert_bytes = max(layer.expert_bytes for layer in spec.moe.layers)
        disk_s = _DISK_SHARE * limit_s
        disk = measure_disk(
            file.path, expert_bytes=expert_bytes, limit_s=disk_s, report=on_progress
        )
        box = replace(box, disk=disk)
    processor = next((each for each in devices if each.backend.is_host), None)
    if processor is not None:
        processor.backend.choose_threads(file, None)
    with contextlib.ExitStack() as undo:
        host: _HostPasses | None = None
        if processor is not None:
            host = _HostPasses(processor, file, kv_type, undo, read_s=_READ_KNOWN_S)
        for index, device in enumerate(new):
            measuring = _Measuring(
                file,
                kv_type,
                TimeLeft(left.share(_share_of_first(new[index:]))),
                for_plan=for_plan,
                on_progress=on_progress,
            )
            if device.backend.is_host:
                read_s = measuring.left.share(_READ_SHARE)
                host = _HostPasses(device, file, kv_type, undo, read_s=read_s)
                box = _joined(box, _measured_host(host, measuring))
                continue
            try:
                box = _joined(box, _measured_gpu(device, box, host, measuring))
            except DeviceUnavailable as error:
                if not leaves_out:
                    raise
                log_left_out(device.name, error)
    return box


def log_left_out(device_name: str, error: DeviceUnavailable) -> None:
    """Say that plans are made without a GPU, and why."""
    # docs: this GPU cannot be opened or measured, mostly because other programs have its memory;
    # plans are made without it until a start can measure it
    _LOG.warning("%s is left out: %s", device_name, str(error))


@dataclass(frozen=True, slots=True)
class _Measuring:
    """How one device is measured."""

    file: GgufFile
    kv_type: KvType
    left: TimeLeft
    for_plan: bool
    on_progress: OnProgress


class _HostPasses:
    """The host's sampled layers, loaded and read when they are first needed; `undo` frees them."""

    def __init__(
        self,
        device: MeasuredDevice,
        file: GgufFile,
        kv_type: KvType,
        undo: contextlib.ExitStack,
        *,
        read_s: float,
    ) -> None:
        """`read_s`: the most that reading weights may take."""
        self.device = device
        self._load, self._read_s = partial(_loaded, device, file, kv_type, undo=undo), read_s

    @cached_property
    def loaded(self) -> tuple[LoadedLayers, LoadedLayers | None]:
        """As `_loaded`."""
        found = self._load()
        found[0].read(self._read_s)
        return found

    @cached_property
    def experts(self) -> Passes:
        """Passes through all sampled layers of the first kind."""
        loaded, _ = self.loaded
        return loaded.passes(len(loaded.sampled.kinds[0].layer_ids))


def _measured_host(host: _HostPasses, measuring: _Measuring) -> Box:
    device = host.device
    measuring.on_progress(f"{device.name}: weights are read", 0, 1)
    loaded, far = host.loaded
    trial = trial_steps(device.backend, loaded.model, loaded.banks, kv_type=measuring.kv_type)
    device.backend.choose_threads(measuring.file, trial)
    return _measured_device(device, loaded, far, measuring, share=1.0)


def _measured_gpu(
    device: MeasuredDevice, box: Box, host: _HostPasses | None, measuring: _Measuring
) -> Box:
    """`box`: what is known of other devices."""
    if host is not None:
        host.device.backend.choose_threads(measuring.file, None, beside_device=True)
    with contextlib.ExitStack() as undo:
        loaded, far = _loaded(device, measuring.file, measuring.kv_type, undo=undo)
        found = _measured_device(device, loaded, far, measuring, share=1.0 - _CROSSINGS_SHARE)
        if far is not None:
            far.close()  # what follows needs its memory on a small GPU
        return _measured_crossings(device, loaded, found, box, host, measuring)


def _measured_device(
    device: MeasuredDevice,
    loaded: LoadedLayers,
    far: LoadedLayers | None,
    measuring: _Measuring,
    *,
    share: float,
) -> Box:
    """`share`: of the time that is left."""
    speed = measure_device(
        device.name,
        loaded,
        far=far,
        kv_type=measuring.kv_type,
        limit_s=measuring.left.share(share),
        for_plan=measuring.for_plan,
        report=measuring.on_progress,
    )
    return Box("", {device.name: speed})


def _joined(box: Box, found: Box) -> Box:
    """`box` with the figures of one more device."""
    return replace(
        box,
        devices={**box.devices, **found.devices},
        links={**box.links, **found.links},
        copies={**box.copies, **found.copies},
        together=(*box.together, *found.together),
        host_stop={**box.host_stop, **found.host_stop},
        host_asked={**box.host_asked, **found.host_asked},
        offload={**box.offload, **found.offload},
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


def _measured_crossings(
    device: MeasuredDevice,
    loaded: LoadedLayers,
    found: Box,
    box: Box,
    host: _HostPasses | None,
    measuring: _Measuring,
) -> Box:
    """Add to `found`: stops of the device's steps, experts that the host computes for it, copies,
    steps and copies beside the host's experts, and prompts whose experts are copied. `box`: what is
    known of other devices."""
    from dflash_runtime.engine.measuring.copied_experts import measure_offload
    from dflash_runtime.engine.measuring.copies import (
        TimedCopies,
        measure_copies,
        parts_of_experts,
    )

    gpu: Any = device.backend  # its rows are of another type than a host's
    name, on_progress, left = device.name, measuring.on_progress, measuring.left
    on_progress(f"{name}: stops of its steps", 0, 5)
    limit_s = left.seconds / _CROSSINGS_SHARE
    stop = measure_host_stop(loaded, limit_s=_STOP_SHARE * limit_s, for_plan=measuring.for_plan)
    found = replace(found, host_stop={name: stop})
    # Steps ask no other backend.
    if host is not None and host.device.backend.name == BackendName.CPU:
        on_progress(f"{name}: experts of the processor", 1, 5)
        found = _with_asked(
            device, loaded, found, box, host, measuring, limit_s=_ASKED_SHARE * limit_s
        )
    with contextlib.ExitStack() as undo:
        on_progress(f"{name}: copies", 2, 5)
        copies = TimedCopies(gpu, parts_of_experts(loaded.file, loaded.spec.moe.layers))
        undo.callback(copies.close)
        speed = measure_copies(name, copies, limit_s=_COPIES_SHARE * limit_s)
        copies.from_locked_s()
        found = replace(found, copies={name: replace(speed, pcie=device.pcie())})
        if host is not None:
            on_progress(f"{name}: beside the processor", 3, 5)
            steps = loaded.passes(len(loaded.sampled.kinds[0].layer_ids))
            experts = f"experts of {host.device.name}", host.experts.timer(1)
            for what in (
                (f"copies to {name}", copies.from_pages_s),
                (f"steps of {name}", steps.timer(1)),
            ):
                both = measure_together(experts, what, limit_s=_TOGETHER_SHARE * limit_s)
                found = replace(found, together=(*found.together, both))
    on_progress(f"{name}: prompts with copies", 4, 5)
    try:
        offload = measure_offload(
            name,
            loaded,
            found.devices[name],
            rate=found.copies[name].from_page_cache,
            limit_s=_OFFLOAD_SHARE * limit_s,
        )
    except (DeviceOutOfMemory, SettingsError, UnsupportedModel) as error:
        reason = one_line(str(error))
        # docs: there is no room for it, or no kernel; plans take prompts with copies to be as fast
        # as copies alone
        _LOG.info("prompts with copied experts are not timed on %s: %s", name, reason)
        return found
    return replace(found, offload={name: offload})


def _with_asked(
    device: MeasuredDevice,
    loaded: LoadedLayers,
    found: Box,
    box: Box,
    host: _HostPasses,
    measuring: _Measuring,
    *,
    limit_s: float,
) -> Box:
    """Add to `found`: experts of the device's steps and chunks that the processor computes."""
    from dflash_runtime.engine.measuring.asked_chunks import measure_asked_chunks

    speed, left = found.devices[device.name], TimeLeft(limit_s)
    processor, free_bytes = host.device.backend, device.backend.free_memory_bytes() or 0
    asked = AskedModel(
        device.backend,
        processor,
        loaded.file,
        kv_type=measuring.kv_type,
        limit_bytes=int(_FREE_SHARE * free_bytes),
        limit_s=_READ_SHARE * limit_s / _ASKED_SHARE,
    )
    with contextlib.closing(asked):
        steps = measure_asked(asked, trunk=speed.trunk[1], limit_s=left.share(0.6))
    if steps is not None:
        layer_s, step_s = measure_unasked(loaded, processor, limit_s=left.share(0.2))
        steps = replace(steps, layer_s=layer_s, step_s=step_s)
        found = replace(found, host_asked={device.name: steps})
    on_host = box.devices.get(host.device.name)
    if on_host is not None and HOST_OWNER not in box.links:  # the first device's is that of all
        link = measure_asked_chunks(
            loaded, processor, device=speed, host=on_host, limit_s=left.seconds
        )
        found = replace(found, links={link.owner: link})
    return found
