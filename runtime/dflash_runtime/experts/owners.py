"""Sets up and ends the owners of experts of one engine: local banks, daemons, fallback."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import zmq

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.weight_check import WeightCheck
from dflash_adapters.spec import ModelSpec
from dflash_protocol.endpoint import Endpoint, parse_endpoint
from dflash_protocol.errors import DeviceOutOfMemory, SettingsError
from dflash_protocol.payloads import PayloadType
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_protocol.process.held_folder import HeldFolder
from dflash_protocol.settings import Settings, keys_directory, run_directory
from dflash_protocol.transports.curve import client_security
from dflash_runtime.compute import MEMORY_ADVICE, ComputeBackend, ExpertBank
from dflash_runtime.experts.compute import ExpertCompute, LocalExpertCompute, OwnerKind
from dflash_runtime.experts.daemons.data_path import plan_paths
from dflash_runtime.experts.daemons.handshake import Greeting
from dflash_runtime.experts.daemons.launching import DaemonChoice, daemon_names, launch_of
from dflash_runtime.experts.daemons.link import DaemonLink, Launch
from dflash_runtime.experts.daemons.supervisor import ProgressCallback, Supervisor, Timeouts
from dflash_runtime.experts.event_kinds import EventKind
from dflash_runtime.experts.events import EventLog
from dflash_runtime.experts.offload import OffloadMode
from dflash_runtime.experts.remote.pieces import ExecutionMode
from dflash_runtime.experts.remote.remote import RemoteExpertCompute
from dflash_runtime.experts.remote.reply_checks import CheckSchedule, ReplyChecker
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.experts.store import (
    every_expert,
    load_banks,
    measure_pairs_per_second,
)
from dflash_runtime.placement.split import LOCAL_OWNER


class Owners:
    """Everything that computes experts for one engine.

    Owns backend banks, the ZeroMQ context, the supervisor with its child processes, and their
    socket folder.
    Raises: DflashError if a daemon is unavailable; everything opened so far is closed then.
    """

    def __init__(
        self,
        file: GgufFile,
        spec: ModelSpec,
        backend: ComputeBackend,
        *,
        weights: WeightCheck,
        fallback_backend: ComputeBackend,
        placement: Placement,
        choices: Sequence[DaemonChoice],
        endpoints: Sequence[Endpoint],
        settings: Settings,
        require_daemons: bool,
        tolerates_absent: bool,
        on_progress: ProgressCallback | None,
    ) -> None:
        self.events = EventLog()
        self.placement = placement
        self.local_banks: dict[int, ExpertBank] = {}
        """Experts of this process, by layer id."""
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            links = self._make_links(
                undo,
                file.path,
                backend,
                choices=choices,
                endpoints=endpoints,
                settings=settings,
            )
            computes: list[ExpertCompute] = []
            device_owner: int | None = None
            context = undo.enter_context(zmq.Context()) if links else None
            if context is not None:
                supervisor = Supervisor(
                    context,
                    list(links.values()),
                    Greeting(
                        model_identity=file.identity(),
                        moe_digest=spec.moe.digest,
                        numeric_class=backend.numeric_class,
                        max_tokens=settings.batch_capacity,
                        payload=PayloadType(settings.ipc_dtype),
                        paths=plan_paths(spec, settings, backend),
                        weights=weights,
                    ),
                    timeouts=Timeouts(
                        settings.connect_timeout_ms / 1e3, settings.heartbeat_ms / 1e3
                    ),
                    on_progress=on_progress,
                    tolerates_absent=tolerates_absent and not require_daemons,
                    tries_again=tolerates_absent or not require_daemons,
                )
                undo.callback(supervisor.close)
                supervisor.start()
            every: dict[int, ExpertBank] = {}
            checker: ReplyChecker | None = None
            if links and is_any_local(settings, require_daemons=require_daemons):
                owned_locally = every_expert(spec.moe)
                every = load_banks(
                    fallback_backend, file, spec.moe, owned=owned_locally, read_now=False
                )
                if settings.check_replies != 0:
                    schedule = CheckSchedule(settings.check_replies)
                    checker = ReplyChecker(every, fallback_backend.numeric_class, schedule)
            for name, owned in zip(placement.owner_names, placement.owners, strict=True):
                if name in links:
                    assert context is not None
                    computes.append(
                        RemoteExpertCompute(
                            links[name],
                            context,
                            hidden_size=spec.hidden_size,
                            num_experts_used=max(x.num_experts_used for x in spec.moe.layers),
                            min_deadline_s=settings.deadline_ms / 1e3,
                            mode=ExecutionMode(settings.ipc_mode),
                            stream_tokens=settings.stream_batch,
                            spin_s=None if settings.spin_us is None else settings.spin_us * 1e-6,
                            before_sleep=backend.idle,
                            mover=backend.mover,
                            checker=checker,
                        )
                    )
                else:
                    banks = self._load_local(backend, file, spec, owned)
                    computes.append(LocalExpertCompute(OwnerKind.LOCAL, banks))
                    device_owner = None if backend.is_host else len(computes) - 1
            fallback = None
            if links and not require_daemons:
                pairs_per_s = measure_pairs_per_second(
                    every.values(), batches=fallback_backend.trial_batches
                )
                fallback = LocalExpertCompute(OwnerKind.FALLBACK, every, pairs_per_s=pairs_per_s)
                if fallback_backend.numeric_class != backend.numeric_class:
                    reason = f"fallback {fallback_backend.numeric_class}"
                    self.events.add(
                        EventKind.NUMERIC_CLASS_DIFFERS,
                        "fallback",
                        f"{reason}, parent {backend.numeric_class}",
                    )
            self.runtime = MoeExpertComputeRuntime(
                placement,
                computes,
                fallback=fallback,
                device_owner=device_owner,
                offload=OffloadMode(settings.prefill_offload),
                checks=None if checker is None else checker.schedule,
            )
            undo.callback(self.runtime.close)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """End daemons started here, disconnect from others, remove sockets."""
        self._undo.close()

    def _load_local(
        self, backend: ComputeBackend, file: GgufFile, spec: ModelSpec, owned: OwnedExperts
    ) -> dict[int, ExpertBank]:
        """Load the experts of this process; on a device they are tried with the whole model.

        Raises: DeviceOutOfMemory.
        """
        try:
            self.local_banks = load_banks(backend, file, spec.moe, owned=owned, read_now=True)
        except DeviceOutOfMemory as error:
            raise error.with_advice(MEMORY_ADVICE) from error
        if backend.is_host:
            measure_pairs_per_second(self.local_banks.values(), batches=backend.trial_batches)
        return self.local_banks

    def _make_links(
        self,
        undo: contextlib.ExitStack,
        model_path: Path,
        backend: ComputeBackend,
        *,
        choices: Sequence[DaemonChoice],
        endpoints: Sequence[Endpoint],
        settings: Settings,
    ) -> dict[str, DaemonLink]:
        """A link for each daemon of the placement, by owner name."""
        placement = self.placement
        owned = dict(zip(placement.owner_names, placement.owners, strict=True))
        links: dict[str, DaemonLink] = {}

        def add(name: str, endpoint: Endpoint, launch: Launch | None) -> None:
            security = client_security(keys_directory(settings), endpoint)
            links[name] = DaemonLink(
                name,
                endpoint,
                owned.get(name, OwnedExperts({})),
                launch=launch,
                numeric_class=backend.numeric_class,
                on_event=self.events.add,
                secure=None if security is None else security.apply,
            )
            undo.callback(links[name].close)

        names = daemon_names(choices, endpoints)
        if choices:
            folder = HeldFolder(run_directory(settings))
            undo.callback(folder.close)
        for index, choice in enumerate(choices):
            launch = launch_of(
                choices,
                index,
                model_path=model_path,
                backend_name=backend.name,
                settings=settings,
            )
            add(choice.name, parse_endpoint(f"ipc://{folder.path}/{choice.name}"), launch)
        for name, endpoint in zip(names[len(choices) :], endpoints, strict=True):
            add(name, endpoint, None)
        strangers = [n for n in placement.owner_names if n not in links and n != LOCAL_OWNER]
        if strangers:
            raise SettingsError(f"the placement has unknown owners: {strangers}")
        return links


def is_any_local(settings: Settings, *, require_daemons: bool) -> bool:
    """Whether the parent may compute experts of daemons: in place of a lost one, or to check
    replies."""
    return not require_daemons or settings.check_replies != 0
