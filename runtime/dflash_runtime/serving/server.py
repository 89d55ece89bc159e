"""The server's life: listen, open the engine, serve, and end without cutting off an answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvicorn

from dflash_protocol.errors import RenderingUnavailable, SettingsError
from dflash_protocol.notify import Notifier
from dflash_protocol.settings import Settings
from dflash_runtime.engine.engine import Engine
from dflash_runtime.engine.engine_thread import OpenEngine
from dflash_runtime.placement.plan_text import plan_text
from dflash_runtime.serving.access import ApiKeys, listening_socket
from dflash_runtime.serving.app import create_app
from dflash_runtime.serving.connections import Acceptor, BoundedProtocol
from dflash_runtime.serving.cors import check_origins
from dflash_runtime.serving.metrics import Metrics
from dflash_runtime.serving.request_log import RequestLog
from dflash_runtime.serving.spans import Spans
from dflash_runtime.serving.state import ServerState
from dflash_runtime.serving.status import chat_template, model_id
from dflash_runtime.serving.worker import EngineWorker

_LOG = logging.getLogger(__name__)

_IDLE_CONNECTION_S = 15
_LINGER_S = 2
"""For connections that do not react when the server ends."""
_LARGEST_HEAD_BYTES = 32 << 10

Say = Callable[[str], None]


class BoundedServer(uvicorn.Server):
    """uvicorn with our handling of signals, and our Acceptor for connections."""

    _acceptor: Acceptor | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        await super().startup(sockets=[])
        connections = cast("set[BoundedProtocol]", self.server_state.connections)
        self._acceptor = Acceptor(sockets[0], self._protocol, connections)
        self._acceptor.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        assert self._acceptor is not None
        self._acceptor.stop()
        await super().shutdown(sockets)

    def _protocol(self) -> BoundedProtocol:
        return BoundedProtocol(self.config, self.server_state, self.lifespan.state)


def serve(
    settings: Settings,
    open_engine: OpenEngine,
    *,
    chat_template: str | None,
    say: Say,
    manager: Notifier,
) -> None:
    """Serve until a signal.

    `open_engine` is called in the engine's own thread. `say` is called with the address, and once
    the server is ready; the service `manager` is notified too. The first SIGTERM or SIGINT lets
    running requests finish and refuses new ones; the second ends at once.
    Raises: SettingsError for an address or key file that cannot be used; what `open_engine` raises.
    """
    keys = ApiKeys.load(Path(settings.api_key_file)) if settings.api_key_file else None
    check_origins(settings.cors, has_keys=keys is not None)
    listener = listening_socket(settings.host, settings.port, has_keys=keys is not None)
    with listener, contextlib.ExitStack() as spans_end:
        metrics = Metrics()
        spans: Spans | None = None
        if settings.otlp_endpoint:
            spans = Spans.to(settings.otlp_endpoint, lambda: _model_of(worker))
            spans_end.callback(spans.close)
        with EngineWorker(
            open_engine,
            queue_capacity=settings.queue_capacity,
            metrics=metrics,
            requests=RequestLog(() if keys is None else keys.names, spans),
            on_stage=manager.starting,
        ) as worker:
            state = ServerState(settings, keys, worker, metrics, chat_template)
            # Its errors are those of clients; the gate logs our own.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            host, port = listener.getsockname()[:2]
            shown_host = f"[{host}]" if ":" in host else host
            http = BoundedServer(
                uvicorn.Config(
                    create_app(state),
                    ws="none",
                    lifespan="off",
                    loop="asyncio",
                    log_config=None,
                    access_log=False,
                    proxy_headers=False,
                    server_header=False,
                    timeout_keep_alive=_IDLE_CONNECTION_S,
                    timeout_graceful_shutdown=_LINGER_S,
                    h11_max_incomplete_event_size=_LARGEST_HEAD_BYTES,
                )
            )
            # docs: the address is ours; the model is being opened
            say(f"listening on http://{shown_host}:{port}")
            asyncio.run(_Life(state, http, say, manager).run(listener))


def _model_of(worker: EngineWorker) -> str | None:
    return model_id(worker.opened.result()) if worker.opened.done() else None


def _prepare_grammars(engine: Engine) -> None:
    """Make what all grammars share, so that the first request with one does not wait for it."""
    try:
        engine.prepare_grammars()
    except SettingsError:
        pass  # no tokenizer, or no token that ends a text
    except Exception:
        # docs: a bug, with its traceback: report it. Requests with a grammar may fail
        _LOG.exception("grammars cannot be prepared")


@dataclass(slots=True)
class _Life:
    """The server's states: opening, ready, draining, ended. Runs in the event loop."""

    state: ServerState
    http: BoundedServer
    say: Say
    manager: Notifier
    signalled: asyncio.Event = field(default_factory=asyncio.Event)
    hurried: asyncio.Event = field(default_factory=asyncio.Event)
    """A second signal came."""

    async def run(self, listener: socket.socket) -> None:
        """Raises: what opening the engine raised."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self.http.serve(sockets=[listener]))
        opened = asyncio.wrap_future(self.state.worker.opened)
        try:
            if await self._first_of(opened) and not self.signalled.is_set():
                self.state.engine = engine = opened.result()
                if chat_template(self.state, engine) is not None:
                    with contextlib.suppress(RenderingUnavailable):  # the first chat raises it
                        engine.prepare_chat()
                if engine.tokenizer is not None:
                    with contextlib.suppress(RenderingUnavailable):  # the first grammar raises it
                        engine.start_trials()
                for line in [] if engine.plan is None else plan_text(engine.plan).splitlines():
                    # docs: what each device's memory is used for, what was chosen and how fast that
                    # should be, and why; `dflash-moe plan` says the same without loading the model
                    self.say(f"plan: {line}")
                summary = (
                    f"{engine.spec.name}; experts: {', '.join(self.state.worker.stats.owners)}"
                )
                # docs: requests are taken; the summary names the model and the owners of its
                # experts
                self.say(f"ready: {summary}")
                self.manager.ready(summary)
                loop.run_in_executor(None, _prepare_grammars, engine)
                await self._until_signalled()
            self.state.is_draining = True
            self.manager.stopping()
            if num_left := self.state.num_active:
                if num_left == 1:
                    # docs: a signal came; a second one ends it at once
                    self.say("ending once 1 request has ended")
                else:
                    # docs: a signal came; a second one ends them at once
                    self.say(f"ending once {num_left} requests have ended")
                await self._drained()
        finally:
            self.state.is_draining = True
            self.state.worker.stop()
            opened.cancel()
            self.http.should_exit = True
            await serving

    async def _first_of(self, opened: asyncio.Future[Engine]) -> bool:
        """Wait for the engine or a signal; True if the engine is open. Raises: as opening it."""
        signalled = asyncio.create_task(self.signalled.wait())
        waits: set[asyncio.Future[Any]] = {opened, signalled}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if opened.done():
            opened.result()
        return opened.done()

    async def _until_signalled(self) -> None:
        """Until a signal, report to the service manager whether the engine's thread is healthy."""
        worker = self.state.worker

        def status() -> str:
            running = "nothing" if worker.running is None else "1 request"
            return f"running {running}, {worker.num_waiting} waiting"

        report = asyncio.create_task(
            self.manager.report(is_healthy=lambda: worker.is_well, status=status)
        )
        await self.signalled.wait()
        report.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await report

    async def _drained(self) -> None:
        """Wait until all answers are sent, or for a second signal."""
        waits = [
            asyncio.create_task(event.wait()) for event in (self.state.became_idle, self.hurried)
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _on_signal(self) -> None:
        if not self.signalled.is_set():
            self.signalled.set()
        elif not self.hurried.is_set():
            self.hurried.set()
        else:
            os._exit(1)  # the third signal: wait for nothing
