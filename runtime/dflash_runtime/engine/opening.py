"""Opening: from a caller's options to a model with its backend and the owners of its experts.

Options are checked before anything is started.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.weight_check import WeightCheck
from dflash_adapters.keys import YARN_KEYS
from dflash_adapters.registry import describe, read_spec
from dflash_adapters.spec import ModelSpec, MoeLayer
from dflash_protocol.device import CPU, Device, DeviceKind
from dflash_protocol.endpoint import parse_endpoint
from dflash_protocol.errors import DeviceOutOfMemory, SettingsError
from dflash_protocol.ids import AnyArray, I32Array
from dflash_protocol.placement import OwnedExperts, Placement, read_owned_experts
from dflash_protocol.settings import MAX_THREADS, Settings
from dflash_protocol.settings.kinds import DaemonSetting, DeviceOrAuto, checked, shown
from dflash_runtime.compute import (
    MEMORY_ADVICE,
    BackendName,
    ComputeBackend,
    make_backend,
    open_backend,
)
from dflash_runtime.compute.gpu.room import CONTEXT_BYTES
from dflash_runtime.compute.host import PREFILL_CHUNK
from dflash_runtime.compute.kv_cache import KvType, chosen_kv_type
from dflash_runtime.compute.model import Model
from dflash_runtime.engine.arguments import choice, whole_number
from dflash_runtime.engine.daemon_offers import OwnProcessor, classes_of
from dflash_runtime.engine.demo_model import chosen_model_path
from dflash_runtime.engine.heat_keeper import HeatKeeper, open_heat
from dflash_runtime.engine.planning import Planned, Planning
from dflash_runtime.engine.predictions import Predictions
from dflash_runtime.engine.trial_steps import trial_steps
from dflash_runtime.experts.daemons.connecting import connect
from dflash_runtime.experts.daemons.launching import (
    budgets_of,
    choose_daemons,
    daemon_names,
    names_here,
)
from dflash_runtime.experts.daemons.supervisor import ProgressCallback
from dflash_runtime.experts.offload import OffloadChoice, OffloadMode
from dflash_runtime.experts.owners import Owners, give, is_any_local
from dflash_runtime.experts.speed_trial import own_step_s
from dflash_runtime.experts.store import expert_tensor_types
from dflash_runtime.placement.budgets import check_given
from dflash_runtime.placement.footprint import Memory, Request, footprint, what_fits
from dflash_runtime.placement.host_context import context_on_host
from dflash_runtime.placement.moves import MovePrices
from dflash_runtime.placement.planner import UNPLANNED_CONTEXT
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER, even_split
from dflash_runtime.placement.wishes import (
    check_unplanned,
    check_wishes,
    request_of,
    wishes_of,
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """What an engine consists of; closed by the exit stack given to `open_model`."""

    file: GgufFile
    model: Model[AnyArray, Any]
    backend: ComputeBackend
    owners: Owners
    num_positions: int
    kv_type: KvType
    heat: HeatKeeper
    predictions: Predictions
    move_prices: MovePrices | None = None
    """None: experts stay where they are."""


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
    heat = open_heat(file, spec, settings)
    undo.callback(heat.close)
    report = on_progress or (lambda owner, stage, num_done, num_total: None)
    planning: Planning | None = None
    planned = Planned(settings)
    names, budgets = daemon_names(choices, endpoints), budgets_of(choices)
    for name, budget in budgets.items():
        # docs: what its table in the settings file says; a plan, or the even split, keeps to it
        _LOG.info("daemon %s gets %s", name, budget)
    owned: OwnedExperts | None = None
    if settings.placement and placement is None:
        owned = _owned_in(Path(settings.placement), spec, settings)
    if settings.backend == BackendName.AUTO:
        planning = Planning(
            file,
            spec,
            settings,
            heat=heat.for_planning(),
            on_progress=lambda what, *progress: report("parent", f"measure {what}", *progress),
            budgets=budgets,
        )
    is_placed = placement is not None or owned is not None
    if planning is None:
        settings = _unplanned(settings, spec, f"--backend={settings.backend}")
    elif owned is not None:
        settings = _unplanned(settings, spec, "--placement")
    if planning is not None and not is_placed:
        planned = planning.before_daemons(names)
        settings, placement = planned.settings, planned.placement
    is_on_device = (settings.device or CPU).kind is not DeviceKind.CPU
    is_split = placement is None
    if placement is None:  # a first one, so that wishes are checked before anything is started
        placement = even_split(
            spec.moe, names, settings.local_experts, has_host=is_on_device, owned=owned
        )
    ours = {LOCAL_OWNER, HOST_OWNER} if is_on_device else {LOCAL_OWNER}
    strangers = {*placement.owner_names}.difference(names, ours)
    if strangers:
        raise SettingsError(f"the placement has unknown owners: {sorted(strangers)}")
    if not is_split:
        check_given(placement, budgets, spec.moe)
    kv_type = chosen_kv_type(settings.kv_type, spec)
    num_positions = settings.context or min(spec.context_length, UNPLANNED_CONTEXT)
    if not is_on_device:  # devices check their own memory
        num_positions = context_on_host(
            footprint(file, spec, Memory.HOST),
            Request(kv_type, PREFILL_CHUNK),
            num_positions=num_positions,
            most=spec.context_length,
            is_asked=settings.context is not None,
            most_bytes=wishes_of(settings).host_memory_bytes,
            num_daemons=len(choices),
        )
    num_threads = settings.threads or None
    backend = open_backend(
        settings.device,
        backend=BackendName(settings.backend),
        num_threads=num_threads,
        cpu_tier=settings.cpu_tier,
        cache_dir=settings.cache_dir,
        max_chunk=planned.chunk,
    )
    undo.callback(backend.close)
    report("parent", "compile", 0, 1)
    types = {tensor.tensor_type for tensor in file.tensors.values()}
    backend.warm_up(
        (each for each in types if not each.is_integer),
        kv_type=kv_type,
        is_recurrent=bool(spec.recurrent_layers),
        asks_daemons=bool(names),
        on_progress=partial(report, "parent", "compile"),
    )
    require_room = partial(
        _require_room,
        backend,
        file,
        spec,
        num_positions=num_positions,
        kv_type=kv_type,
        num_daemons=len(names),
    )
    require_room(experts=_local_experts(spec, placement))
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
    if planning is not None and names and not is_placed:
        planned = planning.with_daemons(
            planned,
            connected.offers,
            numeric_class=backend.numeric_class,
            own=OwnProcessor(
                partial(own_step_s, backend, file, spec.moe),
                backend.num_threads,
                names_here(names, len(choices), endpoints),
            ),
        )
    if planned.placement is not None:
        placement = planned.placement
        require_room(experts=_local_experts(spec, placement))
    elif is_split:
        placement = even_split(
            spec.moe,
            names,
            settings.local_experts,
            offers=connected.offers,
            budgets=budgets,
            has_host=is_on_device,
            owned=owned,
        )
    if planning is not None and planned.prompts_here is None:
        here = planning.prompts_here(settings, placement, connected.offers)
        planned = replace(planned, prompts_here=here)
    host_backend = backend
    has_fallback = bool(names) and is_any_local(settings)
    if not backend.is_host and (has_fallback or HOST_OWNER in placement.owner_names):
        # It computes from the mapped file: the device has no room.
        host_backend = make_backend(
            BackendName.AUTO,
            num_threads=num_threads,
            cpu_tier=settings.cpu_tier,
            cache_dir=settings.cache_dir,
        )
        undo.callback(host_backend.close)
        host_backend.warm_up(
            expert_tensor_types(spec.moe),
            asks_daemons=True,
            on_progress=partial(report, "parent", "compile"),
        )
        host_backend.choose_threads(file, None)  # as many as were measured
    classes = classes_of(connected.offers, settings)
    classes |= {LOCAL_OWNER: backend.numeric_class, HOST_OWNER: host_backend.numeric_class}
    owners = give(
        undo,
        connected,
        # Those that a plan or a caller has named may have changed since.
        replace(placement, numeric_classes=classes),
        file=file,
        spec=spec,
        backend=backend,
        host_backend=host_backend,
        settings=settings,
        offload=_offload_of(settings, planned, is_on_host=backend.is_host),
    )
    report("parent", "load", 0, 1)
    model = backend.load_model(file, describe(file))
    trial = None if names else trial_steps(backend, model, owners.local_banks, kv_type=kv_type)
    backend.choose_threads(file, trial)
    weights.remember()
    weights.start()
    predictions = Predictions(
        planned.plan, request=request_of(settings), cache_dir=settings.cache_dir
    )
    return Opened(
        file, model, backend, owners, num_positions, kv_type, heat, predictions, planned.move_prices
    )


def _offload_of(settings: Settings, planned: Planned, *, is_on_host: bool) -> OffloadChoice:
    """Which of the others' experts of prompts this process's device computes."""
    mode, layers = OffloadMode(settings.prefill_offload), planned.prompts_here or frozenset()
    if is_on_host or (mode is OffloadMode.AUTO and planned.plan is not None and not layers):
        return OffloadChoice(OffloadMode.OFF)  # a plan has left no memory for copies
    if mode is not OffloadMode.AUTO:
        return OffloadChoice(mode)
    return OffloadChoice(mode, layers)


def _owned_in(path: Path, spec: ModelSpec, settings: Settings) -> OwnedExperts:
    """The experts of a placement file. Raises: SettingsError if another setting says it, too."""
    if settings.local_experts is not None:
        raise SettingsError("--placement and --local-experts both say where experts are computed")
    if settings.plan:
        raise SettingsError("--placement and --plan both say where experts are computed")
    return read_owned_experts(path, {x.layer_id: x.num_experts for x in spec.moe.layers})


def _unplanned(settings: Settings, spec: ModelSpec, instead: str) -> Settings:
    """The settings with the device that they mean, where `instead` is why nothing is planned.

    Raises: SettingsError if one of them needs a plan, or two contradict.
    """
    wishes = wishes_of(settings)
    check_unplanned(wishes, instead)
    check_wishes(wishes, num_layers=spec.num_layers, moe=spec.moe)
    if wishes.num_gpu_layers and settings.device is None:
        raise SettingsError(f"-ngl {wishes.num_gpu_layers} and {instead}: name a GPU (--device)")
    return replace(settings, device=CPU) if wishes.num_gpu_layers == 0 else settings


def _local_experts(spec: ModelSpec, placement: Placement) -> list[tuple[MoeLayer, int]]:
    """How many experts of each layer this process holds."""
    local: Mapping[int, I32Array] = {}
    if LOCAL_OWNER in placement.owner_names:
        local = placement.owners[placement.owner_names.index(LOCAL_OWNER)].by_layer
    return [(each, len(local.get(each.layer_id, ()))) for each in spec.moe.layers]


def _require_room(
    backend: ComputeBackend,
    file: GgufFile,
    spec: ModelSpec,
    *,
    experts: Sequence[tuple[MoeLayer, int]],
    num_positions: int,
    kv_type: KvType,
    num_daemons: int,
) -> None:
    """Raises: as ComputeBackend.require_room, with what would fit."""
    try:
        backend.require_room(
            file, experts, num_positions=num_positions, kv_type=kv_type, num_daemons=num_daemons
        )
    except DeviceOutOfMemory as error:
        request = Request(
            kv_type,
            backend.chunking.preferred,
            num_experts={layer.layer_id: count for layer, count in experts},
            num_remote_layers=sum(count < layer.num_experts for layer, count in experts),
            num_daemons=num_daemons,
        )
        fits = what_fits(
            footprint(file, spec, Memory.GPU),
            request,
            room_bytes=error.free_bytes + CONTEXT_BYTES,  # the device is open already
            num_positions=num_positions,
            most=spec.context_length,
        )
        raise error.with_advice("; or ".join(filter(None, (fits, MEMORY_ADVICE)))) from error
