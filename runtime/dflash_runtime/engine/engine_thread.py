"""The thread that owns an engine: opens it, runs one job after the other, closes it.

What a job is, its user decides: `AsyncEngine`, and the server's worker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from dflash_protocol.errors import one_line
from dflash_runtime.engine.engine import Engine
from dflash_runtime.engine.fair_queue import FairQueue
from dflash_runtime.experts.daemons.supervisor import ProgressCallback

_LOG = logging.getLogger(__name__)

REST_S = 0.5
"""Time between two rests of an engine that nobody asks."""

OpenEngine = Callable[[ProgressCallback], Engine]

J = TypeVar("J")
J_contra = TypeVar("J_contra", contravariant=True)


class OpeningAborted(Exception):
    """The thread is told to end before the engine was open."""


class JobRunner(Protocol[J_contra]):
    """What the thread does with its engine; all of it is called in that thread."""

    def begin(self, engine: Engine) -> None:
        """Before the first job."""

    def run(self, engine: Engine, job: J_contra) -> None:
        """Run a job. Never raises; once `EngineThread.is_stopping`, ends soon."""

    def rest(self, engine: Engine) -> None:
        """Every `REST_S` without a job. What it raises is logged."""


class EngineThread(Generic[J]):
    """Owns the engine and its thread, from `start` until `join` returns.

    `opened` gives the engine once it is ready. Other threads may use its tokenizer, its grammars,
    what renders chats, and what never changes.
    """

    def __init__(
        self,
        open_engine: OpenEngine,
        runner: JobRunner[J],
        *,
        capacity: int,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """`capacity`: most jobs that wait; of one client, half as many."""
        self.opened: Future[Engine] = Future()
        self.opened.set_running_or_notify_cancel()  # nobody who waits for it can cancel it
        self.stage = ""
        """The stage of opening, for people."""
        self._open_engine, self._runner = open_engine, runner
        self._queue: FairQueue[J] = FairQueue(capacity)
        self._on_stage = on_stage
        self._thread = threading.Thread(target=self._main, name="dflash-engine")

    def start(self) -> None:
        """Begin to open the engine."""
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._queue)

    def waiting(self, most: int) -> list[J]:
        """The jobs that are next in the queue, `most` at most."""
        return self._queue.waiting(most)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to end: jobs are not to go on."""
        return self._queue.is_closed

    def submit(self, client: str, job: J) -> None:
        """Queue a job; clients take turns. Raises: QueueFull."""
        self._queue.put(client, job)

    def remove(self, client: str, job: J) -> bool:
        """Take a job out of the queue; False if it is not waiting (any more)."""
        return self._queue.remove(client, job)

    def stop(self) -> None:
        """Have the thread end, without waiting for it; jobs that wait are still given to the runner
        to end them. An engine that is being opened ends at its next stage."""
        self._queue.close()

    def join(self) -> None:
        """Wait until the engine is closed, if it was opened."""
        self._thread.join()

    def _main(self) -> None:
        try:
            engine = self._open_engine(self._report)
        except BaseException as error:
            self.opened.set_exception(error)
            return
        with engine:
            # Loaded here, as other threads use it from now on.
            if (tokenizer := engine.tokenizer) is not None:
                tokenizer.fewest_tokens("")  # scans the whole vocabulary, once
            self._runner.begin(engine)
            self.opened.set_result(engine)
            while (job := self._next_job(engine)) is not None:
                self._runner.run(engine, job)

    def _next_job(self, engine: Engine) -> J | None:
        told = ""
        while True:
            try:
                return self._queue.take(REST_S)
            except TimeoutError:  # a daemon may have been lost, or come back
                if not threading.main_thread().is_alive():
                    return None  # the program ends, and waits for this thread
                try:
                    engine.move_experts()
                    self._runner.rest(engine)
                except Exception as error:
                    if str(error) != told:
                        told = str(error)
                        # docs: a device has failed, or a bug, with its traceback. Experts stay
                        # where they are, and what is asked for next is tried
                        _LOG.exception("the work between two requests has failed")

    def _report(self, owner: str, stage: str, num_done: int, num_total: int) -> None:
        self.stage = one_line(f"{owner}: {stage} {num_done}/{num_total}")
        self._on_stage(self.stage)
        # Only in this thread: an exception in another reporting thread would not end the opening.
        if self._queue.is_closed and threading.current_thread() is self._thread:
            raise OpeningAborted
