"""Opening: from a caller's options to a model with its backend and the owners of its experts.

Options are checked before anything is started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.weight_check import WeightCheck
from dflash_adapters.keys import YARN_KEYS
from dflash_adapters.registry import describe, read_spec
from dflash_adapters.spec import ModelSpec, MoeLayer
from dflash_protocol.device import CPU, Device, DeviceKind
from dflash_protocol.endpoint import Endpoint, parse_endpoint
from dflash_protocol.errors import DeviceOutOfMemory, SettingsError
from dflash_protocol.ids import AnyArray, I32Array
from dflash_protocol.placement import Placement
from dflash_protocol.settings import MAX_THREADS, Settings
from dflash_protocol.settings.kinds import DaemonSetting, DeviceOrAuto, checked
from dflash_runtime.compute import (
    MEMORY_ADVICE,
    BackendName,
    ComputeBackend,
    make_backend,
    open_backend,
)
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.model import Model
from dflash_runtime.compute.sliding_window import MOST_KEPT, num_rows
from dflash_runtime.engine.arguments import choice, whole_number
from dflash_runtime.engine.demo_model import chosen_model_path
from dflash_runtime.experts.daemons.launching import DaemonChoice, choose_daemons, daemon_names
from dflash_runtime.experts.daemons.supervisor import ProgressCallback
from dflash_runtime.experts.owners import Owners, is_any_local
from dflash_runtime.experts.store import expert_tensor_types
from dflash_runtime.placement.split import LOCAL_OWNER, even_split

_DEFAULT_CONTEXT_LIMIT = 32768
"""Default context of models that have more: a larger cache has to be asked for."""

_BYTES_PER_VALUE = {KvType.F32: 4, KvType.F16: 2, KvType.Q8_0: 34 / 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """The options of `Engine.open` besides file and settings, unchecked; see there."""

    daemons: Sequence[DaemonSetting | str] | None
    connect: Sequence[str] | None
    local_experts: int | None
    placement: Placement | None
    require_daemons: bool | None
    tolerates_absent: bool
    device: Device | str | None
    backend: str | None
    kv_type: str | None
    context: int | None
    threads: int | None


@dataclass(frozen=True, slots=True)
class Opened:
    """What an engine consists of; closed by the exit stack given to `open_model`."""

    file: GgufFile
    model: Model[AnyArray, Any]
    backend: ComputeBackend
    owners: Owners
    num_positions: int
    kv_type: KvType


@dataclass(frozen=True, slots=True)
class _Checked:
    """Options, with settings in place of those not given; checked without the file."""

    choices: list[DaemonChoice]
    endpoints: list[Endpoint]
    local_experts: int | None
    placement: Placement | None
    require_daemons: bool
    device: Device | None
    backend: BackendName
    kv_type: KvType | None
    context: int | None
    threads: int | None


def open_model(
    undo: contextlib.ExitStack,
    path: str | Path | None,
    options: OpenOptions,
    *,
    settings: Settings,
    on_progress: ProgressCallback | None,
) -> Opened:
    """Open a GGUF file as `Engine.open` says; `undo` closes all of it.

    Raises: SettingsError, ModelFileError, DeviceUnavailable, DaemonUnavailable, HandshakeRefused.
    """
    asked = _checked(options, settings)
    file = undo.enter_context(GgufFile.open(chosen_model_path(settings) if path is None else path))
    if settings.yarn == "llama.cpp":
        file.ignore(f"{file.architecture}.{key}" for key in YARN_KEYS)
    spec = read_spec(file)
    if asked.context is not None and asked.context > spec.context_length:
        raise SettingsError(
            f"context={asked.context}: the model was made for up to {spec.context_length}"
        )
    placement = asked.placement
    if placement is None:
        names = daemon_names(asked.choices, asked.endpoints)
        placement = even_split(spec.moe, names, asked.local_experts)
    kv_type = asked.kv_type
    if kv_type is None:
        kv_type = KvType.F32 if spec.all_matrices_f32 else KvType.F16
    num_positions = asked.context or min(spec.context_length, _DEFAULT_CONTEXT_LIMIT)
    if (asked.device or CPU).kind is DeviceKind.CPU:  # devices check their own memory
        _check_cache_fits(spec, num_positions, kv_type)
    num_threads = asked.threads or settings.threads or None
    with advice_if_out_of_memory():
        backend = open_backend(
            asked.device,
            backend=asked.backend,
            num_threads=num_threads,
            cpu_tier=settings.cpu_tier,
            cache_dir=settings.cache_dir,
        )
    undo.callback(backend.close)
    report = on_progress or _ignore_progress
    report("parent", "compile", 0, 1)
    types = {tensor.tensor_type for tensor in file.tensors.values()}
    backend.warm_up(
        (each for each in types if not each.is_integer),
        kv_type=kv_type,
        is_recurrent=bool(spec.recurrent_layers),
        on_progress=partial(report, "parent", "compile"),
    )
    with advice_if_out_of_memory():
        backend.require_room(
            file,
            _local_experts(spec, placement),
            kv_layers=spec.kv_layers,
            recurrent=spec.recurrent_layers,
            num_positions=num_positions,
            kv_type=kv_type,
        )
    fallback_backend = backend
    computes_locally = is_any_local(settings, require_daemons=asked.require_daemons)
    if not backend.is_host and (asked.choices or asked.endpoints) and computes_locally:
        # The fallback computes on the host, from the mapped file: the device has no room.
        fallback_backend = make_backend(
            BackendName.AUTO,
            num_threads=num_threads,
            cpu_tier=settings.cpu_tier,
            cache_dir=settings.cache_dir,
        )
        undo.callback(fallback_backend.close)
        fallback_backend.warm_up(
            expert_tensor_types(spec.moe), on_progress=partial(report, "parent", "compile")
        )
    weights = WeightCheck(file, spec.moe, settings.cache_dir)
    undo.callback(weights.close)
    owners = Owners(
        file,
        spec,
        backend,
        weights=weights,
        fallback_backend=fallback_backend,
        placement=placement,
        choices=asked.choices,
        endpoints=asked.endpoints,
        settings=settings,
        require_daemons=asked.require_daemons,
        tolerates_absent=options.tolerates_absent,
        on_progress=on_progress,
    )
    undo.callback(owners.close)
    report("parent", "load", 0, 1)
    with advice_if_out_of_memory():
        model = backend.load_model(file, describe(file))
    weights.remember()
    weights.start()
    return Opened(file, model, backend, owners, num_positions, kv_type)


def _checked(options: OpenOptions, settings: Settings) -> _Checked:
    """Raises: SettingsError for the first wrong one."""
    backend = choice(
        BackendName, "backend", settings.backend if options.backend is None else options.backend
    )
    kept = settings.kv_type if options.kv_type is None else options.kv_type
    kv_type = None if kept == "auto" else choice(KvType, "kv_type", kept)
    device: object = settings.device if options.device is None else options.device
    if isinstance(device, str):
        device = checked("device", device, DeviceOrAuto().from_text)
    assert device is None or isinstance(device, Device)
    daemons = settings.daemons if options.daemons is None else options.daemons
    connect = settings.connect if options.connect is None else options.connect
    choices = choose_daemons(daemons, settings)
    endpoints = [parse_endpoint(each) for each in connect]
    if options.placement is not None and options.local_experts is not None:
        raise SettingsError("placement and local_experts exclude each other")
    threads = options.threads
    context = settings.context if options.context is None else options.context
    local_experts = options.local_experts
    if local_experts is None and options.placement is None:
        local_experts = settings.local_experts
    if threads is not None:
        threads = whole_number("threads", threads, smallest=1, largest=MAX_THREADS)
    if context is not None:
        context = whole_number("context", context, smallest=1)
    if local_experts is not None:
        local_experts = whole_number("local_experts", local_experts, smallest=0)
    require_daemons = options.require_daemons
    return _Checked(
        choices=choices,
        endpoints=endpoints,
        local_experts=local_experts,
        placement=options.placement,
        require_daemons=settings.ipc_required if require_daemons is None else require_daemons,
        device=device,
        backend=backend,
        kv_type=kv_type,
        context=context,
        threads=threads,
    )


def _local_experts(spec: ModelSpec, placement: Placement) -> list[tuple[MoeLayer, int]]:
    """How many experts of each layer this process holds."""
    local: Mapping[int, I32Array] = {}
    if LOCAL_OWNER in placement.owner_names:
        local = placement.owners[placement.owner_names.index(LOCAL_OWNER)].by_layer
    return [(each, len(local.get(each.layer_id, ()))) for each in spec.moe.layers]


@contextlib.contextmanager
def advice_if_out_of_memory() -> Iterator[None]:
    """Add advice to DeviceOutOfMemory."""
    try:
        yield
    except DeviceOutOfMemory as error:
        raise error.with_advice(MEMORY_ADVICE) from error


def _check_cache_fits(spec: ModelSpec, num_positions: int, kv_type: KvType) -> None:
    """Raises: SettingsError if caches and recurrent states exceed this machine's memory."""
    values = sum(
        num_rows(kv.mask, num_positions) * kv.num_heads * (kv.key_dim + kv.value_dim)
        for kv in spec.kv_layers
    )
    states = sum(layer.state_bytes for layer in spec.recurrent_layers)
    num_bytes = values * _BYTES_PER_VALUE[kv_type] + (1 + MOST_KEPT) * states
    if num_bytes > psutil.virtual_memory().total:
        raise SettingsError(
            f"a context of {num_positions} needs {num_bytes / 2**30:.1f} GiB for keys and values, "
            "more than this machine has; ask for a smaller one"
        )


def _ignore_progress(owner: str, stage: str, num_done: int, num_total: int) -> None:
    """For callers without `on_progress`."""
