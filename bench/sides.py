"""One side of a comparison in a separate process: an object there, whose methods are called from
here.

One process each, so that sides do not share threads, OpenMP settings, tile state or memory.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import psutil
from bench.cpu_time import family, others_s
from bench.machine import ROOT
from bench.pairs import Sample

_WHERE_ARE_YOU = signal.SIGUSR1
_SAYING_S = 1.0


class SideError(RuntimeError):
    """A side failed; the text is its traceback, or how its process ended."""


class Side:
    """An object made by ``factory(*args, **kwargs)`` in a new process.

    A side that has not answered by `until_s` (of time.monotonic) is killed; None = no limit. Owns
    the process, ended by `close` or at the end of a ``with`` block.
    """

    def __init__(
        self,
        name: str,
        factory: Callable[..., object],
        *args: Any,
        realtime: bool = False,
        until_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Start the process; with `realtime` (root) it has real-time priority during samples.

        Raises: SideError if the object cannot be made.
        """
        self.name = name
        self.until_s = until_s
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(there, realtime, factory, args, kwargs), name=name, daemon=True
        )
        self._process.start()
        there.close()
        try:
            self._receive()
        except SideError:
            self.close()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Call a method there and return its result.

        Raises: SideError.
        """
        try:
            self._pipe.send((method, args))
        except OSError:
            raise SideError(f"{self.name} ended: exit code {self._exit_code()}") from None
        return self._receive()

    def sample(self, method: str, *args: Any) -> Sample:
        """The number that a method there returns, with the number of its interruptions.

        Raises: SideError.
        """
        value, switches, wall_s = self.call("", method, *args)
        return Sample.by_switches(float(value), switches=switches, wall_s=wall_s)

    def sample_on(self, cores: Sequence[int], method: str, *args: Any) -> Sample:
        """The same for a side with child processes, bound to these cores: with the CPU time that
        other processes used there.

        Raises: SideError.
        """
        others_before_s = others_s(cores, self._process.pid)
        value, _, wall_s = self.call("", method, *args)
        used_s = others_s(cores, self._process.pid) - others_before_s
        return Sample.by_cpu_time(float(value), others_s=used_s, wall_s=wall_s, cores=len(cores))

    def close(self) -> None:
        """End the process. May be called again."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _receive(self) -> Any:
        if self.until_s is not None:
            left_s = max(0.0, self.until_s - time.monotonic())
            if not self._pipe.poll(left_s):
                self._end_late()
                raise SideError(f"{self.name} did not answer in time and was ended")
        try:
            is_result, value = self._pipe.recv()
        except EOFError:
            raise SideError(f"{self.name} ended: exit code {self._exit_code()}") from None
        if not is_result:
            raise SideError(f"{self.name} failed:\n{value}")
        return value

    def _end_late(self) -> None:
        """Kill a process that takes too long, after it has printed its stacks to stderr."""
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, _WHERE_ARE_YOU)
            self._process.join(_SAYING_S)
        self._process.kill()

    def _exit_code(self) -> int | None:
        self._process.join(10)
        return self._process.exitcode


def _serve(
    pipe: Connection,
    realtime: bool,
    factory: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    faulthandler.register(_WHERE_ARE_YOU)
    try:
        served = factory(*args, **kwargs)
    except Exception:
        pipe.send((False, _failure()))
        return
    pipe.send((True, None))
    while True:
        try:
            method, arguments = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        reply: tuple[bool, Any]
        try:
            if method:
                reply = True, getattr(served, method)(*arguments)
            else:
                sampled = getattr(served, arguments[0])
                reply = True, _sampled(sampled, arguments[1:], realtime)
        except Exception:
            reply = False, _failure()
        except KeyboardInterrupt:
            return
        try:
            pipe.send(reply)
        except OSError:  # the caller has gone
            return


def _failure() -> str:
    """The current exception's traceback, with paths relative to our folder: results are kept."""
    return traceback.format_exc().replace(f"{ROOT}/", "")


def _sampled(
    method: Callable[..., object], args: tuple[Any, ...], realtime: bool
) -> tuple[object, int, float]:
    """Result, involuntary context switches of all threads, and wall time of a call.

    With `realtime`, child processes have the priority, too.
    """
    if realtime:
        _schedule_all_threads(os.SCHED_FIFO, 1)
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        started_s = time.perf_counter()
        value = method(*args)
        wall_s = time.perf_counter() - started_s
        return value, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before, wall_s
    finally:
        if realtime:
            _schedule_all_threads(os.SCHED_OTHER, 0)


def _schedule_all_threads(policy: int, priority: int) -> None:
    for process in family(os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess):
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setscheduler(thread.id, policy, os.sched_param(priority))
