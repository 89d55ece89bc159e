"""Opening: from a caller's options to a model with its backend and the owners of its experts.

Options are checked before anything is started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from dflash_protocol.endpoint import parse_endpoint
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import AnyArray, I32Array
from dflash_protocol.placement import Placement
from dflash_protocol.settings import MAX_THREADS, Settings
from dflash_protocol.settings.kinds import DaemonSetting, DeviceOrAuto, checked, shown
from dflash_runtime.compute import (
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
from dflash_runtime.engine.trial_steps import trial_steps
from dflash_runtime.experts.daemons.connecting import connect
from dflash_runtime.experts.daemons.launching import choose_daemons, daemon_names
from dflash_runtime.experts.daemons.supervisor import ProgressCallback
from dflash_runtime.experts.owners import Owners, give, is_any_local
from dflash_runtime.experts.store import expert_tensor_types
from dflash_runtime.placement.split import LOCAL_OWNER, even_split

_DEFAULT_CONTEXT_LIMIT = 32768
"""Default context of models that have more: a larger cache has to be asked for."""

_BYTES_PER_VALUE = {KvType.F32: 4, KvType.F16: 2, KvType.Q8_0: 34 / 32}


@dataclass(frozen=True, slots=True)
class Opened:
    """What an engine consists of; closed by the exit stack given to `open_model`."""

    file: GgufFile
    model: Model[AnyArray, Any]
    backend: ComputeBackend
    owners: Owners
    num_positions: int
    kv_type: KvType


def settings_with(settings: Settings, given: Mapping[str, Any]) -> Settings:
    """`settings` with the options of `Engine.open` that are not None, checked without the file.

    Raises: SettingsError for the first wrong one.
    """
    options = {name: value for name, value in given.items() if value is not None}
    device = options.get("device", settings.device)
    if isinstance(device, str):
        options["device"] = checked("device", device, DeviceOrAuto().from_text)
    elif not isinstance(device, Device | None):
        raise SettingsError(f"device={shown(device)}: must be {DeviceOrAuto.allowed}")
    if "threads" in options:
        options["threads"] = whole_number(
            "threads", options["threads"], smallest=1, largest=MAX_THREADS
        )
    for name, smallest in (("context", 1), ("local_experts", 0)):
        value = options.get(name, getattr(settings, name))
        if value is not None:
            options[name] = whole_number(name, value, smallest=smallest)
    asked = replace(settings, **options)
    choice(BackendName, "backend", asked.backend)
    if asked.kv_type != "auto":
        choice(KvType, "kv_type", asked.kv_type)
    return asked


def open_model(
    undo: contextlib.ExitStack,
    path: str | Path | None,
    settings: Settings,
    *,
    daemons: Sequence[DaemonSetting | str],
    placement: Placement | None,
    tolerates_absent: bool,
    on_progress: ProgressCallback | None,
) -> Opened:
    """Open a GGUF file as `Engine.open` says; `undo` closes all of it.

    Raises: SettingsError, ModelFileError, DeviceUnavailable, DaemonUnavailable, HandshakeRefused.
    """
    choices = choose_daemons(daemons, settings)
    endpoints = [parse_endpoint(each) for each in settings.connect]
    file = undo.enter_context(GgufFile.open(chosen_model_path(settings) if path is None else path))
    if settings.yarn == "llama.cpp":
        file.ignore(f"{file.architecture}.{key}" for key in YARN_KEYS)
    spec = read_spec(file)
    if settings.context is not None and settings.context > spec.context_length:
        raise SettingsError(
            f"context={settings.context}: the model was made for up to {spec.context_length}"
        )
    names = daemon_names(choices, endpoints)
    is_split = placement is None
    if placement is None:  # a first one, so that wishes are checked before anything is started
        placement = even_split(spec.moe, names, settings.local_experts)
    strangers = {*placement.owner_names} - {*names, LOCAL_OWNER}
    if strangers:
        raise SettingsError(f"the placement has unknown owners: {sorted(strangers)}")
    if settings.kv_type != "auto":
        kv_type = KvType(settings.kv_type)
    else:
        kv_type = KvType.F32 if spec.all_matrices_f32 else KvType.F16
    num_positions = settings.context or min(spec.context_length, _DEFAULT_CONTEXT_LIMIT)
    if (settings.device or CPU).kind is DeviceKind.CPU:  # devices check their own memory
        _check_cache_fits(spec, num_positions, kv_type)
    num_threads = settings.threads or None
    backend = open_backend(
        settings.device,
        backend=BackendName(settings.backend),
        num_threads=num_threads,
        cpu_tier=settings.cpu_tier,
        cache_dir=settings.cache_dir,
    )
    undo.callback(backend.close)
    report = on_progress or (lambda owner, stage, num_done, num_total: None)
    report("parent", "compile", 0, 1)
    types = {tensor.tensor_type for tensor in file.tensors.values()}
    backend.warm_up(
        (each for each in types if not each.is_integer),
        kv_type=kv_type,
        is_recurrent=bool(spec.recurrent_layers),
        asks_daemons=bool(choices or endpoints),
        on_progress=partial(report, "parent", "compile"),
    )
    backend.require_room(
        file,
        _local_experts(spec, placement),
        kv_layers=spec.kv_layers,
        recurrent=spec.recurrent_layers,
        num_positions=num_positions,
        kv_type=kv_type,
    )
    fallback_backend = backend
    if not backend.is_host and (choices or endpoints) and is_any_local(settings):
        # The fallback computes on the host, from the mapped file: the device has no room.
        fallback_backend = make_backend(
            BackendName.AUTO,
            num_threads=num_threads,
            cpu_tier=settings.cpu_tier,
            cache_dir=settings.cache_dir,
        )
        undo.callback(fallback_backend.close)
        fallback_backend.warm_up(
            expert_tensor_types(spec.moe),
            asks_daemons=True,
            on_progress=partial(report, "parent", "compile"),
        )
    weights = WeightCheck(file, spec.moe, settings.cache_dir)
    undo.callback(weights.close)
    connected = connect(
        undo,
        file,
        spec,
        backend=backend,
        weights=weights,
        choices=choices,
        endpoints=endpoints,
        settings=settings,
        tolerates_absent=tolerates_absent,
        on_progress=on_progress,
    )
    if is_split:
        placement = even_split(spec.moe, names, settings.local_experts, offers=connected.offers)
    owners = give(
        undo,
        connected,
        placement,
        file=file,
        spec=spec,
        backend=backend,
        fallback_backend=fallback_backend,
        settings=settings,
    )
    report("parent", "load", 0, 1)
    model = backend.load_model(file, describe(file))
    is_alone = not choices and not endpoints
    backend.choose_threads(
        file, trial_steps(backend, model, owners.local_banks, kv_type=kv_type) if is_alone else None
    )
    weights.remember()
    weights.start()
    return Opened(file, model, backend, owners, num_positions, kv_type)


def _local_experts(spec: ModelSpec, placement: Placement) -> list[tuple[MoeLayer, int]]:
    """How many experts of each layer this process holds."""
    local: Mapping[int, I32Array] = {}
    if LOCAL_OWNER in placement.owner_names:
        local = placement.owners[placement.owner_names.index(LOCAL_OWNER)].by_layer
    return [(each, len(local.get(each.layer_id, ()))) for each in spec.moe.layers]


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
