"""The supervisor: the one thread, with its asyncio loop, in which all daemon links live.

The loop owns every control socket and every child process. The thread lives as long as the
engine, since a child asks the kernel to end it with the thread that spawned it. What a link does
there is in link_task.py.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent import futures

import zmq
import zmq.asyncio

from dflash_protocol.errors import DaemonUnavailable
from dflash_runtime.experts.daemons.link import DaemonLink
from dflash_runtime.experts.daemons.link_task import FirstAttempt, LinkOptions, LinkTask

_LOG = logging.getLogger(__name__)

ProgressCallback = Callable[[str, str, int, int], None]
"""Called with owner name, stage, number done, number in total."""


class Supervisor:
    """Runs all links until closed.

    Owns: its thread, the control sockets, the child processes.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        links: Sequence[DaemonLink],
        options: LinkOptions,
        *,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        self._context = zmq.asyncio.Context.shadow(context.underlying)
        self._links = tuple(links)
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._first_attempts = tuple(FirstAttempt(link.name, on_progress) for link in self._links)
        self._thread = threading.Thread(target=self._run, name="dflash-supervisor", daemon=True)

    def ask(self) -> None:
        """Start, and wait until every daemon has said what it offers, or will not: see
        `DaemonLink.offer`.

        Raises: as `start`.
        """
        self._await([each.asked for each in self._first_attempts])

    def start(self) -> None:
        """Start, unless `ask` has, and wait until every daemon is ready, once all links were given
        experts.

        Raises: the first daemon's DflashError if one cannot be had; everything is then closed.
        """
        self._await([each.ready for each in self._first_attempts])

    def _await(self, outcomes: Sequence[futures.Future[None]]) -> None:
        if self._thread.ident is None:
            self._thread.start()
        try:
            # A failed link does not wait for slow ones.
            done, _ = futures.wait(outcomes, return_when=futures.FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Say goodbye, end the children, end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run_links())
        finally:
            for each in self._first_attempts:
                each.report(DaemonUnavailable("the engine was closed"))

    async def _run_links(self) -> None:
        tasks = [
            asyncio.create_task(LinkTask(self._context, link, self._options, first=first).run())
            for link, first in zip(self._links, self._first_attempts, strict=True)
        ]
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                # docs: a bug, while ending: report it
                _LOG.error("supervisor: %r", outcome)
