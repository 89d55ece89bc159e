"""The daemon's life cycle: open the model, claim the endpoint, serve, stop cleanly.

SIGTERM ends it, and SIGINT unless a parent has spawned it; so does the end of the lifeline pipe
and, through the kernel, the end of the parent's spawning thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from dflash_adapters.gguf.file import FileChange
from dflash_adapters.library.finding import model_file
from dflash_daemon.authentication import Authenticator, let_handshakes_yield
from dflash_daemon.control import ControlServer
from dflash_daemon.data_paths import prepare_shared_folder
from dflash_daemon.host import ExpertHost
from dflash_daemon.service import ComputeService
from dflash_protocol.device import CPU, Device
from dflash_protocol.endpoint import Endpoint, IpcClaim, parse_endpoint
from dflash_protocol.errors import DaemonUnavailable, SettingsError
from dflash_protocol.notify import Notifier
from dflash_protocol.placement import OwnedExperts, read_owned_experts
from dflash_protocol.process.held_folder import remove_if_abandoned
from dflash_protocol.process.output import say
from dflash_protocol.process.startup import end_with_parent
from dflash_protocol.settings import Settings, keys_directory, run_directory
from dflash_protocol.transports.curve import ServerSecurity, secure_server, server_security
from dflash_protocol.transports.in_flight import spin_window_s
from dflash_protocol.wire.requests import largest_frame_bytes
from dflash_runtime.bus_errors import explain_bus_errors
from dflash_runtime.compute import BackendName, open_backend
from dflash_runtime.compute.cores import parse_cores
from dflash_runtime.experts.daemons.data_path import may_mail
from dflash_runtime.placement.wishes import wishes_of

_LOG = logging.getLogger(__name__)

_CONTROL_IO_THREAD = 0
_DATA_IO_THREADS = (1, 2)
"""Used with keys, so that handshakes at the control socket, whose address is public, delay no
request. ZeroMQ gives a new data connection to the thread with the fewest, on a tie to the first,
so short-lived unauthorized connections stay on that one."""
_FILE_CHECK_S = 1.0
"""Interval of checks whether the model's file has changed."""
_HUNG_S = 60.0
"""A daemon that spends longer than this on one request stops feeding the watchdog."""
_PROGRESS_LINE_S = 2.0
"""Interval of log lines about progress at start."""
_OPEN_FILES = 65_536
"""Many times the connections that can be opened within a handshake's time limit."""


def run_daemon(settings: Settings, lifeline_fd: int | None) -> None:
    """Serve until stopped by a signal or the end of the lifeline, the pipe of a parent that has
    spawned this daemon.

    Raises: DflashError for errors that a user can fix.
    """
    device = settings.device or CPU
    listen = settings.listen or f"ipc://{run_directory(settings)}/daemon-{device}.sock"
    endpoint = parse_endpoint(listen)
    cores = parse_cores(settings.cores) if settings.cores else None
    os.umask(0o077)
    manager = Notifier.of_environment()
    if lifeline_fd is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        manager = Notifier()  # the service manager supervises the parent
        if not end_with_parent(signal.SIGTERM):
            raise DaemonUnavailable("the parent is gone already")
    security = server_security(
        keys_directory(settings), endpoint, is_configured=bool(settings.keys_dir)
    )
    model_path = model_file(settings.model)
    if cores is not None:
        # All threads are started later and inherit it.
        os.sched_setaffinity(0, cores)
    backend = open_backend(
        device,
        backend=BackendName(settings.backend),
        num_threads=settings.threads or None,
        cpu_tier=settings.cpu_tier,
        cache_dir=settings.cache_dir,
    )
    if settings.spin_us is not None:
        backend.spin_for(settings.spin_us * 1e-6)
    explain_bus_errors("dflash-daemon", model_path)
    try:
        host = ExpertHost(
            model_path,
            backend,
            settings.cache_dir,
            most_bytes=wishes_of(settings).host_memory_bytes,
        )
    except BaseException:
        backend.close()
        raise
    with contextlib.ExitStack() as undo:
        undo.callback(host.close)
        owned = None
        if settings.placement:
            owned = read_owned_experts(Path(settings.placement), host.experts_per_layer)
        if endpoint.path is not None:  # for tcp the kernel guards the port
            undo.callback(IpcClaim(endpoint).close)
        num_io_threads = 1 if security is None else 1 + len(_DATA_IO_THREADS)
        context = undo.enter_context(zmq.Context(num_io_threads))
        _raise_open_files()
        if security is not None:
            undo.callback(Authenticator(context, security.clients).close)
        asyncio.run(
            _serve(
                settings,
                host,
                context,
                endpoint=endpoint,
                device=device,
                lifeline_fd=lifeline_fd,
                owned=owned,
                security=security,
                manager=manager,
            )
        )
    if endpoint.path is not None and _has_ended(lifeline_fd):
        # A killed parent cannot remove its daemons' socket folder, so the last daemon does. A
        # living parent has the folder locked.
        remove_if_abandoned(endpoint.path.parent, only_if_empty=True)


def _has_ended(lifeline_fd: int | None) -> bool:
    """Whether this daemon was spawned by a parent that has ended."""
    if lifeline_fd is None:
        return False
    poller = select.poll()
    poller.register(lifeline_fd, select.POLLHUP)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


async def _serve(
    settings: Settings,
    host: ExpertHost,
    context: zmq.Context[zmq.Socket[bytes]],
    *,
    endpoint: Endpoint,
    device: Device,
    lifeline_fd: int | None,
    owned: OwnedExperts | None,
    security: ServerSecurity | None,
    manager: Notifier,
) -> None:
    """Load `owned` if given, listen, and serve until stopped.

    Without it, kernels are compiled while parents can already connect: they receive Progress, and
    Welcome when it is done. Then the service manager is notified that the daemon is ready.
    """
    stop = _stop_event(lifeline_fd, host)
    if owned is not None:
        await asyncio.to_thread(host.keep, owned, _Progress(manager))
    max_frame_bytes = largest_frame_bytes(
        max_tokens=settings.batch_capacity,
        hidden_size=host.spec.hidden_size,
        max_pairs=settings.batch_capacity * host.max_experts_used,
    )
    loop = asyncio.get_running_loop()

    def secured(io_threads: tuple[int, ...]) -> Callable[[zmq.Socket[Any]], object] | None:
        if security is None:
            return None
        return partial(secure_server, keys=security.keys, io_threads=io_threads)

    shared_folder = await asyncio.to_thread(prepare_shared_folder, endpoint, settings)
    service = ComputeService(
        context,
        endpoint.data_address(settings.data_port),
        max_frame_bytes=max_frame_bytes,
        on_failure=lambda: loop.call_soon_threadsafe(stop.set),
        shares_memory=shared_folder is not None,
        spin_s=spin_window_s() if settings.spin_us is None else settings.spin_us * 1e-6,
        before_sleep=host.backend.idle,
        check_file=host.poll,
        compile_banks=host.backend.compile_banks,
        secure=secured(_DATA_IO_THREADS),
    )
    control = None
    try:
        data_port = service.start()
        control = ControlServer(
            context,
            endpoint.address,
            host,
            service=service,
            data_port=data_port,
            max_tokens=settings.batch_capacity,
            device=str(device),
            shared_folder=shared_folder,
            mails=may_mail(settings),
            secure=secured((_CONTROL_IO_THREAD,)),
        )
        if security is not None:
            let_handshakes_yield(_CONTROL_IO_THREAD)
        for path in endpoint.socket_paths:
            path.chmod(0o600)
        summary = (
            f"{host.spec.name}, {device} ({host.backend.name}), listening on {endpoint.address}"
        )
        if lifeline_fd is None:
            # docs: parents can connect
            say(summary, program="dflash-daemon")
            # Log what is loaded for which parent, unless a parent has spawned this daemon.
            if (log := logging.getLogger("dflash_daemon")).level == logging.NOTSET:
                log.setLevel(logging.INFO)  # no --log-level was given
        # A parent that spawned us sends Hello at once, and gets Progress from the load.
        is_told = owned is not None or lifeline_fd is not None
        warm_up = None if is_told else partial(host.warm_up, _Progress(manager))
        life = _get_ready_and_report(
            warm_up, stop, manager, service, summary=summary, on_disk=host.on_disk
        )
        await _serve_until(stop, control, host, life)
        manager.stopping()
    except zmq.ZMQError as error:
        raise DaemonUnavailable(f"cannot listen on {endpoint.address}: {error.strerror}") from error
    finally:
        if control is not None:
            control.close()
        service.close()
    if service.failure is not None:
        raise DaemonUnavailable(f"the compute thread failed: {service.failure!r}")


async def _serve_until(
    stop: asyncio.Event, control: ControlServer, host: ExpertHost, report: Coroutine[Any, Any, None]
) -> None:
    """Run the control server and `report` until `stop` is set.

    Raises: ModelFileError if the file was written to; any exception of the control server.
    """
    tasks = [
        asyncio.create_task(coroutine)
        for coroutine in (control.run(), stop.wait(), _watch_file(host), report)
    ]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    host.cancel_loading()
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task


class _Progress:
    """Reports progress at start: each step to the service manager, at intervals to the log."""

    def __init__(self, manager: Notifier) -> None:
        self._manager = manager
        self._said_s = time.monotonic()

    def __call__(self, stage: str, num_done: int, num_total: int) -> None:
        line = f"{stage} {num_done}/{num_total}"
        self._manager.starting(line)
        now_s = time.monotonic()
        if now_s - self._said_s >= _PROGRESS_LINE_S:
            self._said_s = now_s
            # docs: progress at start, at intervals
            _LOG.info("%s", line)


async def _get_ready_and_report(
    warm_up: Callable[[], None] | None,
    stop: asyncio.Event,
    manager: Notifier,
    service: ComputeService,
    *,
    summary: str,
    on_disk: Callable[[], str],
) -> None:
    """Run `warm_up` if given and notify the service manager; then, until cancelled, feed the
    watchdog while the compute thread is healthy, and report status.

    Raises: any exception of `warm_up`.
    """

    def is_healthy() -> bool:
        return service.failure is None and service.busy_s < _HUNG_S

    def status() -> str:
        if not is_healthy():
            return f"computing one request for more than {_HUNG_S:.0f} s"
        return "; ".join(filter(None, (f"{summary}; parents: {service.num_links}", on_disk())))

    if warm_up is not None:
        try:
            await asyncio.to_thread(warm_up)
        except DaemonUnavailable:
            if stop.is_set():
                return
            raise
        # docs: every kernel that the model needs is compiled and has run once
        _LOG.info("ready")
    manager.ready(summary)
    await manager.report(is_healthy=is_healthy, status=status)


async def _watch_file(host: ExpertHost) -> None:
    """Watch the model's file; warn once if it was replaced, and go on serving the open file.

    Raises: ModelFileError when it was written to.
    """
    was_replaced = False
    while True:
        await asyncio.sleep(_FILE_CHECK_S)
        await asyncio.to_thread(host.require_unwritten)
        await asyncio.to_thread(host.look_after_disk)
        if not was_replaced and host.file_change() is FileChange.REPLACED:
            was_replaced = True
            # docs: the model's path is another file now: restart the daemon
            _LOG.warning(
                "%s was replaced; serving the previous file until the daemon is restarted",
                host.model_path,
            )


def _wake_at_signals(loop: asyncio.AbstractEventLoop) -> None:
    """Make signals wake the loop, so that one that arrives just before it sleeps is handled.

    The pipe lives as long as the process.
    """
    awake_fd, wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    loop.add_reader(awake_fd, os.read, awake_fd, 1 << 10)


def _stop_event(lifeline_fd: int | None, host: ExpertHost) -> asyncio.Event:
    """An event that is set by SIGTERM, and by the end of the lifeline or, without one, SIGINT.

    Not with the loop's signal handlers: they end with the loop, and a second SIGTERM would then
    kill the process during its cleanup.
    Raises: SettingsError if the lifeline cannot be watched.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def request_stop() -> None:
        host.cancel_loading()
        stop.set()

    def on_signal(number: int, frame: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: stopping already
            loop.call_soon_threadsafe(request_stop)

    signal.signal(signal.SIGTERM, on_signal)
    _wake_at_signals(loop)
    if lifeline_fd is None:
        signal.signal(signal.SIGINT, on_signal)
        return stop
    try:
        # Nothing is written to the pipe: readable means that the other end was closed.
        loop.add_reader(lifeline_fd, request_stop)
    except OSError as error:
        raise SettingsError(f"lifeline descriptor {lifeline_fd}: {error.strerror}") from error
    return stop


def _raise_open_files() -> None:
    """Raise the limit of open files: ZeroMQ aborts the process if it has no descriptor for a
    connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
