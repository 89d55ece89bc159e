"""Sets up the owners of experts of one engine: local banks, daemons, fallback."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import zmq

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.weight_check import WeightCheck
from dflash_adapters.spec import ModelSpec
from dflash_protocol.endpoint import Endpoint, parse_endpoint
from dflash_protocol.errors import SettingsError
from dflash_protocol.payloads import PayloadType
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_protocol.process.held_folder import HeldFolder
from dflash_protocol.settings import Settings, keys_directory, run_directory
from dflash_protocol.transports.curve import client_security
from dflash_runtime.compute import ComputeBackend, ExpertBank
from dflash_runtime.experts.compute import ExpertCompute, LocalExpertCompute
from dflash_runtime.experts.daemons.data_path import open_data_path, plan_paths
from dflash_runtime.experts.daemons.handshake import Greeting
from dflash_runtime.experts.daemons.launching import DaemonChoice, daemon_names, launch_of
from dflash_runtime.experts.daemons.link import DaemonLink, Launch
from dflash_runtime.experts.daemons.link_task import LinkOptions, Timeouts
from dflash_runtime.experts.daemons.supervisor import ProgressCallback, Supervisor
from dflash_runtime.experts.events import EventKind, EventLog
from dflash_runtime.experts.offload import OffloadMode
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
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER


@dataclass(frozen=True, slots=True)
class Owners:
    """What computes experts for one engine; the stack given to `open_owners` closes it."""

    placement: Placement
    runtime: MoeExpertComputeRuntime
    local_banks: dict[int, ExpertBank]
    """Experts of this process, by layer id."""
    events: EventLog


def open_owners(
    undo: contextlib.ExitStack,
    file: GgufFile,
    spec: ModelSpec,
    *,
    backend: ComputeBackend,
    host_backend: ComputeBackend,
    weights: WeightCheck,
    placement: Placement,
    choices: Sequence[DaemonChoice],
    endpoints: Sequence[Endpoint],
    settings: Settings,
    tolerates_absent: bool,
    on_progress: ProgressCallback | None,
) -> Owners:
    """Start or find the daemons, and load the experts of this process.

    `undo` gets the banks, the ZeroMQ context, the supervisor with its child processes, and their
    socket folder. Raises: DflashError if a daemon is unavailable.
    """
    events, is_required = EventLog(), settings.ipc_required
    launches = _launches(
        undo, file.path, backend, choices=choices, endpoints=endpoints, settings=settings
    )
    ours = (LOCAL_OWNER,) if backend.is_host else (LOCAL_OWNER, HOST_OWNER)
    strangers = [n for n in placement.owner_names if n not in launches and n not in ours]
    if strangers:
        raise SettingsError(f"the placement has unknown owners: {strangers}")
    owned_by = dict(zip(placement.owner_names, placement.owners, strict=True))
    links: dict[str, DaemonLink] = {}
    for name, (endpoint, launch) in launches.items():
        security = client_security(keys_directory(settings), endpoint)
        links[name] = DaemonLink(
            name,
            endpoint,
            owned_by.get(name, OwnedExperts({})),
            launch=launch,
            numeric_class=backend.numeric_class,
            on_event=events.add,
            secure=None if security is None else security.apply,
        )
        undo.callback(links[name].close)
    context = undo.enter_context(zmq.Context()) if links else None
    if context is not None:
        greeting = Greeting(
            model_identity=file.identity(),
            moe_digest=spec.moe.digest,
            numeric_class=backend.numeric_class,
            max_tokens=settings.batch_capacity,
            payload=PayloadType(settings.ipc_dtype),
            paths=plan_paths(spec, settings, backend),
            weights=weights,
        )
        options = LinkOptions(
            greeting,
            Timeouts(settings.connect_timeout_ms / 1e3, settings.heartbeat_ms / 1e3),
            tolerates_absent=tolerates_absent and not is_required,
            tries_again=tolerates_absent or not is_required,
        )
        supervisor = Supervisor(context, list(links.values()), options, on_progress=on_progress)
        undo.callback(supervisor.close)
        supervisor.start()
    every: dict[int, ExpertBank] = {}
    checker: ReplyChecker | None = None
    if links and is_any_local(settings):
        every = load_banks(
            host_backend, file, spec.moe, owned=every_expert(spec.moe), read_now=False
        )
        if settings.check_replies != 0:
            schedule = CheckSchedule(settings.check_replies)
            checker = ReplyChecker(every, host_backend.numeric_class, schedule)
    computes: list[ExpertCompute] = []
    device_owner: int | None = None
    local_banks: dict[int, ExpertBank] = {}
    for name, owned in owned_by.items():
        if name in links:
            assert context is not None
            open_path = partial(
                open_data_path,
                links[name],
                context=context,
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
            banks = load_banks(host_backend, file, spec.moe, owned=owned, read_now=True)
            batches = host_backend.trial_batches
            pairs_per_s = measure_pairs_per_second(banks.values(), batches=batches)
            host_backend.choose_threads(file, trial_pass(banks))
            host = LocalExpertCompute(OwnerKind.LOCAL, banks, pairs_per_s=pairs_per_s)
            computes.append(host)
        else:
            local_banks = load_banks(backend, file, spec.moe, owned=owned, read_now=True)
            if backend.is_host:  # a device tries them with the whole model
                measure_pairs_per_second(local_banks.values(), batches=backend.trial_batches)
            device_owner = None if backend.is_host else len(computes)
            computes.append(LocalExpertCompute(OwnerKind.LOCAL, local_banks))
    fallback = None
    if links and not is_required:
        pairs_per_s = measure_pairs_per_second(every.values(), batches=host_backend.trial_batches)
        fallback = LocalExpertCompute(OwnerKind.FALLBACK, every, pairs_per_s=pairs_per_s)
        if host_backend.numeric_class != backend.numeric_class:
            reason = f"fallback {host_backend.numeric_class}, parent {backend.numeric_class}"
            events.add(EventKind.NUMERIC_CLASS_DIFFERS, "fallback", reason)
    runtime = MoeExpertComputeRuntime(
        placement,
        computes,
        fallback=fallback,
        device_owner=device_owner,
        offload=OffloadMode(settings.prefill_offload),
        checks=None if checker is None else checker.schedule,
    )
    undo.callback(runtime.close)
    return Owners(placement, runtime, local_banks, events)


def _launches(
    undo: contextlib.ExitStack,
    model_path: Path,
    backend: ComputeBackend,
    *,
    choices: Sequence[DaemonChoice],
    endpoints: Sequence[Endpoint],
    settings: Settings,
) -> dict[str, tuple[Endpoint, Launch | None]]:
    """Where each daemon is, by owner name, and how to start it if it is to be started."""
    names = daemon_names(choices, endpoints)
    launches: dict[str, tuple[Endpoint, Launch | None]] = {}
    if choices:
        folder = HeldFolder(run_directory(settings))
        undo.callback(folder.close)
    for index, choice in enumerate(choices):
        launch = launch_of(
            choices, index, model_path=model_path, backend_name=backend.name, settings=settings
        )
        launches[choice.name] = parse_endpoint(f"ipc://{folder.path}/{choice.name}"), launch
    for name, endpoint in zip(names[len(choices) :], endpoints, strict=True):
        launches[name] = endpoint, None
    return launches


def is_any_local(settings: Settings) -> bool:
    """Whether the parent may compute experts of daemons: in place of a lost one, or to check
    replies."""
    return not settings.ipc_required or settings.check_replies != 0
