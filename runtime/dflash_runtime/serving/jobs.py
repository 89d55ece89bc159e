"""Generation jobs: submitted in the event loop's thread, run in the engine's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass, field

from dflash_runtime.engine.engine import GenerationStats
from dflash_runtime.engine.sampling import SamplingParams
from dflash_runtime.serving.text import Delta


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a generation. `finish_reason` is ``stop``, ``length`` or ``cancelled``."""

    finish_reason: str
    stats: GenerationStats


JobEvent = Delta | Finished | BaseException
"""Events of a job: deltas, then its end or the exception that ended it."""


class Channel:
    """Events from the engine's thread to one reader in the event loop. Never blocks the writer.

    Holds at most the tokens of a generation.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[JobEvent] = deque()
        self._is_awake = asyncio.Event()
        self._is_woken = False
        self._has_ended = asyncio.Event()

    def put(self, event: JobEvent) -> None:
        """Add an event, from any thread."""
        self._events.append(event)
        # Waking the loop is the engine's thread's largest cost here: once is enough for all events
        # that the reader has not yet taken.
        try:
            if not isinstance(event, Delta):
                self._loop.call_soon_threadsafe(self._end)
            elif not self._is_woken:
                self._is_woken = True
                self._loop.call_soon_threadsafe(self._is_awake.set)
        except RuntimeError:
            return  # the loop is closed: there is no reader

    async def take(self) -> list[JobEvent]:
        """Wait for events; returns all there are."""
        while not self._events:
            await self._is_awake.wait()
            self._is_awake.clear()
            self._is_woken = False
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    async def ended(self) -> None:
        """Wait for the last event."""
        await self._has_ended.wait()

    async def pause(self, seconds: float) -> None:
        """Let events gather for a while, or until the last one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ended()

    def _end(self) -> None:
        self._is_awake.set()
        self._has_ended.set()


@dataclass(slots=True, eq=False)
class Job:
    """One generation. `client` takes turns in the queue; jobs of the same API `key` reuse each
    other's prefixes."""

    client: str
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams
    channel: Channel
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None
    ignore_eos: bool = False
    is_chat: bool = False
    key: str = ""
    asked_s: float = field(default_factory=time.perf_counter)
    is_cancelled: bool = False
    """Set from any thread to end the job."""
