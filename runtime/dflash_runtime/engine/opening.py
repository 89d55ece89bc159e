"""Opening: from a caller's options to a model with its backend and the owners of its experts.

Options are checked before anything is started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import describe
from dflash_adapters.spec import ModelSpec, MoeLayer
from dflash_protocol.device import Device
from dflash_protocol.errors import DeviceOutOfMemory, SettingsError
from dflash_protocol.ids import AnyArray, I32Array, Phase
from dflash_protocol.placement import Placement
from dflash_protocol.settings import MAX_THREADS, Settings
from dflash_protocol.settings.kinds import DaemonSetting, DeviceOrAuto, checked, shown
from dflash_runtime.compute import (
    MEMORY_ADVICE,
    BackendName,
    ComputeBackend,
    make_backend,
)
from dflash_runtime.compute.expert_arena import ArenaOptions
from dflash_runtime.compute.gpu.device.devices import CONTEXT_BYTES
from dflash_runtime.compute.half_lives import CachePolicy
from dflash_runtime.compute.host import GROUP_TOKENS, PREFILL_CHUNK
from dflash_runtime.compute.host_room import HostRoom
from dflash_runtime.compute.kv_cache import KvType, chosen_kv_type
from dflash_runtime.compute.memory import host_memory, is_in_memory, process_room
from dflash_runtime.compute.model import Model
from dflash_runtime.engine.arguments import choice, whole_number
from dflash_runtime.engine.daemon_offers import classes_of, with_daemon_prices
from dflash_runtime.engine.deciding import Decision, ask_daemons, decide
from dflash_runtime.engine.heat_keeper import HeatKeeper
from dflash_runtime.engine.kernels_ahead import compile_kernels
from dflash_runtime.engine.planning import Planned
from dflash_runtime.engine.predictions import Predictions
from dflash_runtime.engine.tracing import ExpertTracer, open_tracer
from dflash_runtime.engine.trial_steps import trial_steps
from dflash_runtime.experts.daemons.supervisor import ProgressCallback
from dflash_runtime.experts.offload import OffloadChoice, OffloadMode
from dflash_runtime.experts.owners import Owners, give, is_any_local
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.experts.store import expert_tensor_types
from dflash_runtime.experts.telemetry import OwnerKind, PhaseStats
from dflash_runtime.placement.footprint import Memory, Request, footprint, what_fits
from dflash_runtime.placement.host_context import parent_bytes, room_for_experts, spare_bytes
from dflash_runtime.placement.moves import MovePrices
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from dflash_runtime.placement.wishes import request_of, wishes_of


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
    tracer: ExpertTracer | None = None
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
    report = on_progress or (lambda owner, stage, num_done, num_total: None)
    decision = decide(
        undo, path, settings, daemons=daemons, placement=placement, on_progress=on_progress
    )
    file, spec, settings = decision.file, decision.spec, decision.settings
    names, num_positions = decision.names, decision.num_positions
    kv_type = chosen_kv_type(settings.kv_type, spec)
    num_threads = settings.threads or None
    backend = decision.open_backend()
    undo.callback(backend.close)
    tracer = open_tracer(file, spec, settings)
    if tracer is not None:
        undo.callback(tracer.close)
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
        cache_slots=settings.moe_cache_slots or 0,
    )
    before = decision.placement()
    require_room(experts=_local_experts(spec, before))
    asked = ask_daemons(
        undo, decision, backend, tolerates_absent=tolerates_absent, on_progress=on_progress
    )
    planned, connected, placement = asked.planned, asked.connected, asked.placement
    if placement is not before:
        require_room(experts=_local_experts(spec, placement))
    if planned.prompts_here is None and settings.backend == BackendName.AUTO:
        here = decision.planning.prompts_here(settings, placement, connected.offers)
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
            beside_device=True,
            on_progress=partial(report, "parent", "compile"),
        )
        # As many as were measured.
        host_backend.choose_threads(file, None, beside_device=True)
    compile_kernels(
        backend,
        file,
        kv_type=kv_type,
        asks_host=len(placement.owner_names) > 1,
        on_progress=partial(report, "parent", "compile"),
    )
    classes = classes_of(connected.offers, settings)
    classes |= {
        LOCAL_OWNER: backend.numeric_class,
        HOST_OWNER: host_backend.class_beside(backend.numeric_class),
    }
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
        arena_options=None if names else _arena_options(decision, placement),
    )
    report("parent", "load", 0, 1)
    with backend.loading():
        model = backend.load_model(file, describe(file))
    trial = None if names else trial_steps(backend, model, owners.local_banks, kv_type=kv_type)
    backend.choose_threads(file, trial)
    asked.weights.remember()
    asked.weights.start()
    predictions = Predictions(
        planned.plan,
        request=request_of(settings),
        cache_dir=settings.cache_dir,
        # Times of experts that come from the disk are not those of the processor.
        asked=partial(_asked_in_steps, owners.runtime) if owners.arena is None else lambda: None,
        expert_bytes=fmean([layer.expert_bytes for layer in spec.moe.layers] or [0]),
    )
    move_prices = planned.move_prices if owners.arena is None else None
    if not decision.is_fixed and _may_daemons_change(settings, names):
        move_prices = with_daemon_prices(
            move_prices, connected.offers, placement=placement, moe=spec.moe
        )
    return Opened(
        file,
        model,
        backend,
        owners,
        num_positions,
        kv_type,
        decision.heat,
        predictions,
        tracer,
        move_prices,
    )


def _arena_options(decision: Decision, placement: Placement) -> ArenaOptions | None:
    """For experts of this process's processor; None if there is memory for all of them.

    Raises: SettingsError.
    """
    settings, layers = decision.settings, decision.spec.moe.layers
    most = max((layer.num_experts for layer in layers), default=0)
    if settings.moe_warmpin > most:
        raise SettingsError(f"--moe-warmpin {settings.moe_warmpin}: layers have {most} experts")
    num_bytes = _arena_bytes(decision, placement)
    if num_bytes is None:
        return None
    heat, shares, spare = decision.heat.for_planning(), {}, 0
    if heat.num_tokens():
        shares = {x.layer_id: heat.probabilities(Phase.DECODE, x.layer_id) for x in layers}
    if wishes_of(settings).host_memory_bytes is None:
        spare = spare_bytes(process_room())
    return ArenaOptions(
        num_bytes,
        looks_ahead=settings.moe_predict_prefetch,
        policy=CachePolicy(settings.moe_cache_policy),
        shares=shares,
        spare_bytes=spare,
        pins=settings.moe_warmpin,
        pins_after=settings.moe_warmpin_after,
    )


def _arena_bytes(decision: Decision, placement: Placement) -> int | None:
    """Memory for experts of this process's processor; None if there is room for all of them, or
    the file is in memory anyway."""
    file, spec, settings = decision.file, decision.spec, decision.settings
    name = HOST_OWNER if decision.is_on_device else LOCAL_OWNER
    owned = dict(zip(placement.owner_names, placement.owners, strict=True)).get(name)
    if owned is None or any(is_in_memory(path) for path in file.shard_paths):
        return None
    asked_bytes = wishes_of(settings).host_memory_bytes
    needed_bytes, most_bytes = 0, host_memory().free_bytes  # as plans count beside a GPU
    if not decision.is_on_device:
        request = Request(chosen_kv_type(settings.kv_type, spec), PREFILL_CHUNK)
        room = HostRoom(file, spec, describe(file))
        needed_bytes = parent_bytes(room, request, decision.num_positions)
        waiting = min(GROUP_TOKENS, decision.num_positions) - PREFILL_CHUNK
        needed_bytes += room.waiting_bytes(waiting)
        if asked_bytes is not None:
            asked_bytes -= needed_bytes
    if asked_bytes is not None:
        most_bytes = min(most_bytes, asked_bytes)
    expert_bytes = sum(
        spec.moe.by_layer_id[layer_id].expert_bytes * len(ids)
        for layer_id, ids in owned.by_layer.items()
    )
    return room_for_experts(expert_bytes, needed_bytes, most_bytes=most_bytes)


def _asked_in_steps(runtime: MoeExpertComputeRuntime) -> PhaseStats | None:
    """What the processor beside the parent's device has computed in steps; None where the host
    asks it now, which takes longer: a daemon without a mailbox takes it from all."""
    owners = runtime.stats()
    daemons = [each for each in owners.values() if each.kind is OwnerKind.DAEMON]
    if len(runtime.mail_routes()) < sum(each.num_experts > 0 for each in daemons):
        return None
    owner = owners.get(HOST_OWNER)
    return None if owner is None else owner.phases.get(Phase.DECODE)


def _may_daemons_change(settings: Settings, names: Sequence[str]) -> bool:
    """Whether nothing says which experts these daemons have."""
    is_said = settings.plan or settings.local_experts is not None
    return bool(names) and not is_said and not wishes_of(settings).experts.names_some_of(names)


def _offload_of(settings: Settings, planned: Planned, *, is_on_host: bool) -> OffloadChoice:
    """Which of the others' experts of prompts this process's device computes."""
    mode, layers = OffloadMode(settings.prefill_offload), planned.prompts_here or frozenset()
    if is_on_host or (mode is OffloadMode.AUTO and planned.plan is not None and not layers):
        return OffloadChoice(OffloadMode.OFF)  # a plan has left no memory for copies
    if mode is not OffloadMode.AUTO:
        return OffloadChoice(mode)
    return OffloadChoice(mode, layers)


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
    cache_slots: int,
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
            footprint(file, spec, Memory.GPU, cache_slots=cache_slots),
            request,
            room_bytes=error.free_bytes + CONTEXT_BYTES,  # the device is open already
            num_positions=num_positions,
            most=spec.context_length,
        )
        raise error.with_advice("; or ".join(filter(None, (fits, MEMORY_ADVICE)))) from error
