"""The daemon's life: open the model, take the endpoint, serve, stop cleanly.

Process manners: SIGTERM (and SIGINT, unless a parent owns us) ends it; so does the end of the
life-line pipe and, through the kernel, the end of the parent's spawning thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

from dflash_daemon.control import ControlServer
from dflash_daemon.host import ExpertHost
from dflash_daemon.service import ComputeService
from dflash_protocol.endpoint import Endpoint, IpcClaim
from dflash_protocol.errors import DaemonUnavailable, SettingsError
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.settings import Settings
from dflash_protocol.transports.zmq_stream import largest_frame_bytes
from dflash_runtime.compute import BackendName, make_backend

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """What the command line said."""

    model_path: Path
    endpoint: Endpoint
    device: str
    backend: BackendName
    num_threads: int | None
    cores: list[int] | None
    placement_path: Path | None
    lifeline_fd: int | None


def end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the thread that spawned us ends; leave if it has already."""
    parent_pid = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        raise DaemonUnavailable("the parent is gone already")


def run_daemon(options: DaemonOptions, settings: Settings) -> None:
    """Serve until told to stop.

    Raises: DflashError for anything that a user can put right.
    """
    os.umask(0o077)
    if options.lifeline_fd is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_with_parent()
    _check_listen(options.endpoint)
    if options.cores is not None:
        # All our threads are started later, and inherit it.
        os.sched_setaffinity(0, options.cores)
    backend = make_backend(
        options.backend,
        num_threads=options.num_threads or settings.threads or None,
        cpu_tier=settings.cpu_tier,
    )
    try:
        host = ExpertHost(options.model_path, backend)
    except BaseException:
        backend.close()
        raise
    try:
        owned = host.read_placement(options.placement_path) if options.placement_path else None
        with _claimed(options.endpoint), zmq.Context() as context:
            asyncio.run(_serve(options, settings, host, context, owned))
    finally:
        host.close()
    if options.lifeline_fd is not None and options.endpoint.path is not None:
        # A parent that was killed cannot remove the folder it made for its daemons' sockets; the
        # last of them does.
        with contextlib.suppress(OSError):
            options.endpoint.path.parent.rmdir()


async def _serve(
    options: DaemonOptions,
    settings: Settings,
    host: ExpertHost,
    context: zmq.Context[zmq.Socket[bytes]],
    owned: OwnedExperts | None,
) -> None:
    """Load what is to be loaded at once, listen, and serve until told to stop."""
    endpoint = options.endpoint
    stop = _stop_event(options.lifeline_fd, host)
    if owned is not None:
        await asyncio.to_thread(host.load, owned, lambda stage, num_done, num_total: None)
    max_frame_bytes = largest_frame_bytes(
        max_tokens=settings.batch_capacity,
        hidden_size=host.spec.hidden_size,
        max_pairs=settings.batch_capacity * host.max_experts_used,
    )
    loop = asyncio.get_running_loop()
    service = ComputeService(
        context,
        endpoint.data_address(0) if endpoint.path else f"tcp://{endpoint.host}:*",
        max_frame_bytes=max_frame_bytes,
        on_failure=lambda: loop.call_soon_threadsafe(stop.set),
    )
    service.set_banks(host.banks)
    try:
        data_port = service.start()
        control = ControlServer(
            context,
            endpoint.address,
            host,
            service,
            data_port=data_port,
            max_tokens=settings.batch_capacity,
            device=options.device,
        )
        for path in endpoint.socket_paths:
            path.chmod(0o600)
        if options.lifeline_fd is None:
            print(
                f"dflash-daemon: {host.spec.name}, {options.device} ({host.backend.name}), "
                f"listening on {endpoint.address}",
                file=sys.stderr,
                flush=True,
            )
        await _serve_until(stop, control)
    except zmq.ZMQError as error:
        raise DaemonUnavailable(f"cannot listen on {endpoint.address}: {error.strerror}") from error
    finally:
        service.close()
    if service.failure is not None:
        raise DaemonUnavailable(f"the compute thread failed: {service.failure!r}")


async def _serve_until(stop: asyncio.Event, control: ControlServer) -> None:
    """Serve until `stop` is set. Raises: whatever ended the control server before that."""
    serving = asyncio.create_task(control.run())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def _stop_event(lifeline_fd: int | None, host: ExpertHost) -> asyncio.Event:
    """An event that is set by SIGTERM, and by SIGINT or the end of the life-line.

    Handlers of our own rather than the loop's: those go with the loop, and a second SIGTERM would
    then end the process in the middle of its cleaning up.
    Raises: SettingsError if the life-line cannot be watched.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def request_stop() -> None:
        host.cancel_loading()
        stop.set()

    def on_signal(number: int, frame: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are stopping already
            loop.call_soon_threadsafe(request_stop)

    signal.signal(signal.SIGTERM, on_signal)
    if lifeline_fd is None:
        signal.signal(signal.SIGINT, on_signal)
        return stop
    try:
        # Nothing is ever written to the pipe: readable means that its other end is closed.
        loop.add_reader(lifeline_fd, request_stop)
    except OSError as error:
        raise SettingsError(f"life-line descriptor {lifeline_fd}: {error.strerror}") from error
    return stop


@contextlib.contextmanager
def _claimed(endpoint: Endpoint) -> Iterator[None]:
    """Hold an ipc path while serving; tcp ports are held by the kernel."""
    if endpoint.path is None:
        yield
        return
    claim = IpcClaim(endpoint)
    try:
        yield
    finally:
        claim.close()


def _check_listen(endpoint: Endpoint) -> None:
    """tcp carries no keys yet, so it is for this machine alone."""
    if endpoint.host is None or endpoint.host == "localhost":
        return
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(endpoint.host.strip("[]")).is_loopback:
            return
    raise SettingsError(
        f"{endpoint.address} is not a loopback address; a daemon has no keys to tell friend from "
        "stranger, so it listens on ipc:// or tcp://127.0.0.1 only"
    )
