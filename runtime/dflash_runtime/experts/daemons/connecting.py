"""Connects an engine with its daemons, which tell what they have before they are given experts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.weight_check import WeightCheck
from dflash_adapters.spec import ModelSpec
from dflash_protocol.endpoint import Endpoint, parse_endpoint
from dflash_protocol.payloads import PayloadType
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.process.held_folder import HeldFolder
from dflash_protocol.settings import Settings, keys_directory, run_directory
from dflash_protocol.transports.curve import client_security
from dflash_protocol.wire.messages import Offer
from dflash_runtime.compute import ComputeBackend
from dflash_runtime.experts.daemons.data_path import is_through_socket, plan_paths
from dflash_runtime.experts.daemons.handshake import Greeting
from dflash_runtime.experts.daemons.launching import DaemonChoice, daemon_names, launch_of
from dflash_runtime.experts.daemons.link import DaemonLink, Launch
from dflash_runtime.experts.daemons.link_task import LinkOptions, Timeouts
from dflash_runtime.experts.daemons.link_trial import timed_link
from dflash_runtime.experts.daemons.supervisor import ProgressCallback, Supervisor
from dflash_runtime.experts.events import EventLog
from dflash_runtime.placement.box import LinkSpeed


@dataclass(frozen=True, slots=True)
class Connected:
    """The daemons of one engine, without experts yet; the stack given to `connect` closes them."""

    links: Mapping[str, DaemonLink]
    """By owner name."""
    events: EventLog
    context: zmq.Context[zmq.Socket[bytes]] | None
    """None without daemons, as is `supervisor`."""
    supervisor: Supervisor | None

    @property
    def offers(self) -> dict[str, Offer]:
        """What the daemons have for experts, by owner name, of those that have said so."""
        return {name: x.offer for name, x in self.links.items() if x.offer is not None}

    def timed_links(self, spec: ModelSpec, settings: Settings) -> dict[str, LinkSpeed]:
        """What asking daemons costs, one after the other, by owner name: of those that are asked
        through sockets and answer in time (`timed_link`)."""
        found = {}
        for name, link in self.links.items():
            speed = None if self.context is None else _timed(self.context, link, spec, settings)
            if speed is not None:
                found[name] = speed
        return found

    def give(self, owned_by: Mapping[str, OwnedExperts]) -> None:
        """Give each daemon its experts, by owner name, and wait until all are ready; one that is
        not named gets none. To be called once.

        Raises: the first daemon's DflashError if one cannot be had.
        """
        for name, link in self.links.items():
            link.give(owned_by.get(name, OwnedExperts({})))
        if self.supervisor is not None:
            self.supervisor.start()


def connect(
    undo: contextlib.ExitStack,
    file: GgufFile,
    spec: ModelSpec,
    *,
    backend: ComputeBackend,
    weights: WeightCheck,
    choices: Sequence[DaemonChoice],
    endpoints: Sequence[Endpoint],
    settings: Settings,
    tolerates_absent: bool,
    on_progress: ProgressCallback | None,
) -> Connected:
    """Start or find the daemons, and wait for what they offer.

    `undo` gets the ZeroMQ context, the links, the supervisor with its child processes, and their
    socket folder. Raises: DflashError if a daemon is unavailable.
    """
    events, is_required = EventLog(), settings.ipc_required
    launches = _launches(
        undo, file.path, backend, choices=choices, endpoints=endpoints, settings=settings
    )
    if not launches:
        return Connected({}, events, None, None)
    links: dict[str, DaemonLink] = {}
    for name, (endpoint, launch) in launches.items():
        security = client_security(keys_directory(settings), endpoint)
        links[name] = DaemonLink(
            name,
            endpoint,
            launch=launch,
            numeric_class=backend.numeric_class,
            on_event=events.add,
            secure=None if security is None else security.apply,
        )
        undo.callback(links[name].close)
    context = undo.enter_context(zmq.Context())
    greeting = Greeting(
        model_identity=file.identity(),
        moe_digest=spec.moe.digest,
        numeric_class=backend.numeric_class,
        max_tokens=settings.batch_capacity,
        payload=PayloadType(settings.ipc_dtype),
        paths=plan_paths(spec, settings, backend),
        weights=weights,
        moe=spec.moe,
    )
    options = LinkOptions(
        greeting,
        Timeouts(settings.connect_timeout_ms / 1e3, settings.heartbeat_ms / 1e3),
        tolerates_absent=tolerates_absent and not is_required,
        tries_again=tolerates_absent or not is_required,
    )
    supervisor = Supervisor(context, list(links.values()), options, on_progress=on_progress)
    undo.callback(supervisor.close)
    supervisor.ask()
    return Connected(links, events, context, supervisor)


def offer_at(
    endpoint: Endpoint, file: GgufFile, spec: ModelSpec, *, settings: Settings
) -> tuple[Offer | None, LinkSpeed | None]:
    """What a running daemon offers for a model, and what asking it costs; it is left alone
    afterwards. None: an older one, which cannot say; the link as in `timed_links`.

    Raises: DflashError if it is unavailable, or has another model.
    """
    with contextlib.ExitStack() as undo:
        security = client_security(keys_directory(settings), endpoint)
        link = DaemonLink(
            "asked",
            endpoint,
            launch=None,
            numeric_class="",
            on_event=EventLog().add,
            secure=None if security is None else security.apply,
        )
        undo.callback(link.close)
        context = undo.enter_context(zmq.Context())
        greeting = Greeting(file.identity(), spec.moe.digest, "", max_tokens=1, moe=spec.moe)
        silence_s = settings.connect_timeout_ms / 1e3
        options = LinkOptions(greeting, Timeouts(silence_s, silence_s))
        supervisor = Supervisor(context, [link], options)
        undo.callback(supervisor.close)
        supervisor.ask()
        return link.offer, _timed(context, link, spec, settings)


def _timed(
    context: zmq.Context[zmq.Socket[bytes]], link: DaemonLink, spec: ModelSpec, settings: Settings
) -> LinkSpeed | None:
    if not is_through_socket(link.endpoint, settings):
        return None
    return timed_link(
        context,
        link,
        hidden_size=spec.hidden_size,
        payload=PayloadType(settings.ipc_dtype),
        max_rows=settings.batch_capacity,
    )


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
