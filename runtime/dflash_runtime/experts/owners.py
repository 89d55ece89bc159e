"""Gives experts to their owners in one engine: local banks, daemons, fallback."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import ModelSpec
from dflash_protocol.placement import Placement
from dflash_protocol.settings import Settings
from dflash_runtime.compute import ComputeBackend, ExpertBank
from dflash_runtime.compute.expert_arena import ArenaOptions, ExpertArena
from dflash_runtime.experts.brought import bring
from dflash_runtime.experts.compute import ExpertCompute, LocalExpertCompute
from dflash_runtime.experts.daemons.connecting import Connected
from dflash_runtime.experts.daemons.data_path import open_data_path
from dflash_runtime.experts.events import EventKind, EventLog
from dflash_runtime.experts.offload import OffloadChoice
from dflash_runtime.experts.remote.pieces import ExecutionMode
from dflash_runtime.experts.remote.remote import RemoteExpertCompute
from dflash_runtime.experts.remote.reply_checks import CheckSchedule, ReplyChecker
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.experts.store import (
    every_expert,
    load_banks,
    measure_pairs_per_second,
    trial_pass,
)
from dflash_runtime.experts.telemetry import OwnerKind
from dflash_runtime.placement.split import HOST_OWNER


@dataclass(frozen=True, slots=True)
class Owners:
    """What computes experts for one engine; the stack given to `give` closes it."""

    runtime: MoeExpertComputeRuntime
    local_banks: dict[int, ExpertBank]
    """Experts of this process, by layer id."""
    events: EventLog
    arena: ExpertArena | None = None
    """Where they are brought to from the disk; None: they are in memory."""


def give(
    undo: contextlib.ExitStack,
    connected: Connected,
    placement: Placement,
    *,
    file: GgufFile,
    spec: ModelSpec,
    backend: ComputeBackend,
    host_backend: ComputeBackend,
    settings: Settings,
    offload: OffloadChoice,
    arena_options: ArenaOptions | None = None,
) -> Owners:
    """Give the daemons their experts, and load those of this process: of its device, and of its
    processor.

    `offload`: which of the others' experts its device computes in prompts. `arena_options`: for
    experts of its processor, if memory does not hold all. `undo` gets the banks and the runtime.
    Raises: DflashError if a daemon is unavailable.
    """
    links, events, is_required = connected.links, connected.events, settings.ipc_required
    owned_by = dict(zip(placement.owner_names, placement.owners, strict=True))
    connected.give(owned_by)
    host_class = host_backend.class_beside(backend.numeric_class)
    every: dict[int, ExpertBank] = {}
    checker: ReplyChecker | None = None
    if links and is_any_local(settings):
        every = load_banks(
            host_backend,
            file,
            spec.moe,
            owned=every_expert(spec.moe),
            read_now=False,
            parent_class=backend.numeric_class,
        )
        if settings.check_replies != 0:
            schedule = CheckSchedule(settings.check_replies)
            checker = ReplyChecker(every, host_class, schedule)
    # Between a parent's device and its processor the number of experts may change.
    is_resizable = not backend.is_host and HOST_OWNER in owned_by and arena_options is None
    computes: list[ExpertCompute] = []
    device_owner: int | None = None
    arena: ExpertArena | None = None
    local_banks: dict[int, ExpertBank] = {}
    for name, owned in owned_by.items():
        if name in links:
            assert connected.context is not None
            open_path = partial(
                open_data_path,
                links[name],
                context=connected.context,
                hidden_size=spec.hidden_size,
                num_experts_used=max(x.num_experts_used for x in spec.moe.layers),
                spin_s=None if settings.spin_us is None else settings.spin_us * 1e-6,
                before_sleep=backend.idle,
                mover=backend.mover,
            )
            remote = RemoteExpertCompute(
                links[name],
                open_path,
                min_deadline_s=settings.deadline_ms / 1e3,
                mode=ExecutionMode(settings.ipc_mode),
                stream_tokens=settings.stream_batch,
                checker=checker,
            )
            computes.append(remote)
        elif name == HOST_OWNER:
            banks = load_banks(
                host_backend,
                file,
                spec.moe,
                owned=owned,
                read_now=True,
                is_brought=arena_options is not None,
                is_resizable=is_resizable,
                parent_class=backend.numeric_class,
            )
            if arena_options is not None:
                arena = _brought(undo, file, host_backend, banks, arena_options)
            batches = host_backend.trial_batches
            measure_pairs_per_second(banks.values(), batches=batches)
            host_backend.choose_threads(file, trial_pass(banks), beside_device=not backend.is_host)
            computes.append(LocalExpertCompute(OwnerKind.LOCAL, banks, numeric_class=host_class))
        else:
            is_brought = arena_options is not None and backend.is_host
            local_banks = load_banks(
                backend,
                file,
                spec.moe,
                owned=owned,
                read_now=True,
                is_brought=is_brought,
                is_resizable=is_resizable,
            )
            if is_brought and arena_options is not None:
                arena = _brought(undo, file, backend, local_banks, arena_options)
            if backend.is_host:  # a device tries them with the whole model
                measure_pairs_per_second(local_banks.values(), batches=backend.trial_batches)
            device_owner = None if backend.is_host else len(computes)
            computes.append(
                LocalExpertCompute(
                    OwnerKind.LOCAL, local_banks, numeric_class=backend.numeric_class
                )
            )
    fallback = None
    if links and not is_required:
        measure_pairs_per_second(every.values(), batches=host_backend.trial_batches)
        fallback = LocalExpertCompute(OwnerKind.FALLBACK, every, numeric_class=host_class)
        if host_class != backend.numeric_class:
            reason = f"fallback {host_class}, parent {backend.numeric_class}"
            events.add(EventKind.NUMERIC_CLASS_DIFFERS, "fallback", reason)
    runtime = MoeExpertComputeRuntime(
        placement,
        computes,
        fallback=fallback,
        device_owner=device_owner,
        offload=replace(offload, numeric_class=backend.numeric_class),
        checks=None if checker is None else checker.schedule,
    )
    undo.callback(runtime.close)
    return Owners(runtime, local_banks, events, arena)


def _brought(
    undo: contextlib.ExitStack,
    file: GgufFile,
    backend: ComputeBackend,
    banks: Mapping[int, ExpertBank],
    options: ArenaOptions,
) -> ExpertArena | None:
    arena = bring(backend, file, banks, options=options)
    if arena is not None:
        undo.callback(arena.close)
    return arena


def is_any_local(settings: Settings) -> bool:
    """Whether the parent may compute experts of daemons: in place of a lost one, or to check
    replies."""
    return not settings.ipc_required or settings.check_replies != 0
