"""AsyncEngine: an engine for asyncio, in a thread of its own.

Several generations at once wait for each other: an engine has one sequence.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, Unpack

from dflash_adapters.text.answers import AnswerEvent, Content
from dflash_adapters.text.grammar import Grammar
from dflash_adapters.text.tokenizer import Tokenizer
from dflash_protocol.errors import SettingsError
from dflash_runtime.engine.engine import Engine, EngineStats
from dflash_runtime.engine.engine_thread import EngineThread
from dflash_runtime.engine.event_channel import EventChannel
from dflash_runtime.engine.generate_options import Schema, TokenChoice, TokenSampling
from dflash_runtime.engine.generation import GeneratedToken, GenerationStats
from dflash_runtime.experts.daemons.supervisor import ProgressCallback

_CLOSED = "this engine is closed"
_MOST_WAITING = 1000

T = TypeVar("T")
_Started: TypeAlias = Callable[[Callable[[], bool]], Iterator[T]]
"""Begins a generation in the engine's thread; what it is given says whether it is to end."""


@dataclass(slots=True, eq=False)
class _Job:
    """A call in the engine's thread. `work` gets the engine, and what says whether it is to end; it
    never raises. `refuse` gets the error if the engine is closed before."""

    work: Callable[[Engine, Callable[[], bool]], None]
    refuse: Callable[[BaseException], None]
    is_cancelled: bool = False
    """Set from any thread."""


@dataclass(slots=True)
class _Runner:
    """Runs jobs in the engine's thread."""

    is_closed: bool = False
    """Set from any thread."""

    def begin(self, engine: Engine) -> None:
        pass

    def run(self, engine: Engine, job: _Job) -> None:
        if job.is_cancelled:
            return
        if self.is_closed:
            job.refuse(SettingsError(_CLOSED))
        else:
            job.work(engine, lambda: job.is_cancelled or self.is_closed)

    def rest(self, engine: Engine) -> None:
        pass


class AsyncGeneration(AsyncIterator[T]):
    """The tokens of one generation, or the parts of an answer, as they come. It is queued when the
    first one is awaited.

    To end it, cancel the task that reads it, or call `aclose`: the engine stops within a step. One
    that is left in the middle and forgotten is closed too, when it is collected.
    """

    def __init__(
        self, generate: Callable[[Callable[[GenerationStats], None]], AsyncGenerator[T, None]]
    ) -> None:
        """For `AsyncEngine`; not to be called directly."""
        self._ends: list[GenerationStats] = []
        self._parts = generate(self._ends.append)  # not of `self`: forgotten, both are collected

    @property
    def stats(self) -> GenerationStats | None:
        """Times, counts and the reason of the end; None before that."""
        return self._ends[0] if self._ends else None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Raises: as `Engine.generate`; QueueFull; SettingsError if the engine is closed."""
        return await anext(self._parts)

    async def text(self) -> str:
        """The text of all tokens that are not yet taken; of an answer the content. Raises: as
        `__anext__`."""
        shown = (GeneratedToken, Content)
        return "".join([each.text async for each in self if isinstance(each, shown)])

    async def aclose(self) -> None:
        """End it; does nothing if it has ended."""
        await self._parts.aclose()


class AsyncEngine:
    """A model opened for asyncio. Made by `AsyncEngine.open`; close it, or use ``async with``.

    Used by one event loop. One generation is computed at a time; the others wait, and clients take
    turns.
    Owns: the thread that uses the engine.
    """

    def __init__(self, thread: EngineThread[_Job], runner: _Runner) -> None:
        """For `open`; not to be called directly."""
        self._thread, self._runner = thread, runner
        self._is_started = False
        weakref.finalize(self, thread.stop)  # one that is dropped without being closed ends too

    @classmethod
    def open(
        cls, path: str | Path | None = None, *, max_waiting: int = _MOST_WAITING, **options: Any
    ) -> Self:
        """An engine to be awaited, or entered with ``async with``, which opens it.

        `options` are those of `Engine.open`, whose errors are raised then; `on_progress` is called
        in other threads. At most `max_waiting` calls wait, of one client half as many.
        """
        asked: ProgressCallback | None = options.pop("on_progress", None)

        def open_engine(report: ProgressCallback) -> Engine:
            def on_progress(owner: str, stage: str, num_done: int, num_total: int) -> None:
                if asked is not None:
                    asked(owner, stage, num_done, num_total)
                report(owner, stage, num_done, num_total)

            return Engine.open(path, on_progress=on_progress, **options)

        runner = _Runner()
        return cls(EngineThread(open_engine, runner, capacity=max_waiting), runner)

    def __await__(self) -> Generator[Any, None, Self]:
        return self._opened().__await__()

    async def __aenter__(self) -> Self:
        return await self._opened()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        if self._runner.is_closed:
            return "<AsyncEngine, closed>"
        if not self._is_started or not self._thread.opened.done():
            return "<AsyncEngine, not open>"
        return f"<AsyncEngine of {self._engine!r}, {self._thread.num_waiting} waiting>"

    async def close(self) -> None:
        """End what is running, and the daemons that were spawned. Those who wait for tokens get a
        SettingsError. May be called twice."""
        self._end()
        if self._is_started:
            await asyncio.to_thread(self._thread.join)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if the file has none. Raises: SettingsError if not open."""
        return self._engine.tokenizer

    @property
    def num_positions(self) -> int:
        """The context: the longest sequence, in tokens. Raises: SettingsError if not open."""
        return self._engine.num_positions

    @property
    def model_path(self) -> Path:
        """The file that is open. Raises: SettingsError if not open."""
        return self._engine.model_path

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        client: str = "",
        **options: Unpack[TokenChoice],
    ) -> AsyncGeneration[GeneratedToken]:
        """Up to `max_tokens` tokens after the prompt: for ``async for``, or ``await ….text()``.

        `options` are those of `Engine.generate`. Clients take turns in the queue. Prompts are
        tokenised, and schemas compiled, in other threads than the engine's.
        """

        def prompt_ids(engine: Engine) -> Sequence[int]:
            return engine.encode_prompt(prompt) if isinstance(prompt, str) else prompt

        return self._tokens(prompt_ids, max_tokens, options, client=client)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: str | None = None,
        extra: Mapping[str, Any] | None = None,
        client: str = "",
        **options: Unpack[TokenChoice],
    ) -> AsyncGeneration[GeneratedToken]:
        """Up to `max_tokens` tokens of the answer to a conversation, as `generate` gives them; its
        arguments are those of `Engine.chat`, whose errors the first token raises."""

        def prompt_ids(engine: Engine) -> Sequence[int]:
            return engine.encode_chat(messages, tools=tools, template=template, extra=extra)

        return self._tokens(prompt_ids, max_tokens, options, client=client)

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: str | None = None,
        extra: Mapping[str, Any] | None = None,
        answer_format: str = "auto",
        stop: str | Sequence[str] = (),
        grammar: Grammar | None = None,
        schema: Schema | None = None,
        client: str = "",
        **options: Unpack[TokenSampling],
    ) -> AsyncGeneration[AnswerEvent]:
        """The answer to a conversation, divided into reasoning, content and calls of tools; its
        arguments are those of `Engine.answer`, whose errors the first part raises."""

        def prepared(engine: Engine) -> _Started[AnswerEvent]:
            asked = engine.prepare_answer(
                messages,
                tools=tools,
                template=template,
                extra=extra,
                answer_format=answer_format,
                stop=stop,
                grammar=grammar,
                schema=schema,
            )
            return lambda is_ended: engine.answer_asked(
                asked, max_tokens, is_cancelled=is_ended, **options
            )

        return AsyncGeneration(lambda end: self._generate(prepared, client=client, end=end))

    async def stats(self) -> EngineStats:
        """The counters since opening, between two generations. Raises: as `call`."""
        return await self.call(lambda engine: engine.stats())

    async def call(self, function: Callable[[Engine], T], *, client: str = "") -> T:
        """What a function of the engine returns, called in the engine's thread in its turn, as for
        `Engine.logits`. Cancelling it ends the waiting; a function that runs is not interrupted.

        Raises: what the function raises; QueueFull; SettingsError if the engine is not open.
        """
        result: Future[T] = Future()

        def work(engine: Engine, is_ended: Callable[[], bool]) -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function(engine))
                except BaseException as error:
                    result.set_exception(error)

        def refuse(error: BaseException) -> None:
            if result.set_running_or_notify_cancel():
                result.set_exception(error)

        job = _Job(work, refuse)
        self._submit(client, job)
        try:
            return await asyncio.wrap_future(result)
        finally:
            self._cancel(client, job)

    async def _opened(self) -> Self:
        if self._runner.is_closed:
            raise SettingsError(_CLOSED)
        if not self._is_started:
            self._is_started = True
            self._thread.start()
        try:
            await asyncio.wrap_future(self._thread.opened)
        except BaseException:
            self._end()
            raise
        return self

    @property
    def _engine(self) -> Engine:
        """Raises: SettingsError if it is not open."""
        if self._runner.is_closed:
            raise SettingsError(_CLOSED)
        if not self._thread.opened.done():
            raise SettingsError("this engine is not open yet: await it first")
        return self._thread.opened.result()

    def _tokens(
        self,
        prompt_ids: Callable[[Engine], Sequence[int]],
        max_tokens: int,
        options: TokenChoice,
        *,
        client: str,
    ) -> AsyncGeneration[GeneratedToken]:
        def prepared(engine: Engine) -> _Started[GeneratedToken]:
            token_ids, choice = prompt_ids(engine), options
            if options.get("grammar") is None and (schema := options.get("schema")) is not None:
                choice = {**options, "grammar": engine.schema_grammar(schema), "schema": None}
            return lambda is_ended: engine.generate(
                token_ids, max_tokens, is_cancelled=is_ended, **choice
            )

        return AsyncGeneration(lambda end: self._generate(prepared, client=client, end=end))

    async def _generate(
        self,
        prepared: Callable[[Engine], _Started[T]],
        *,
        client: str,
        end: Callable[[GenerationStats], None],
    ) -> AsyncGenerator[T, None]:
        """`prepared` is called in a thread that is not the engine's."""
        engine = self._engine
        started = await asyncio.to_thread(prepared, engine)

        def work(engine: Engine, is_ended: Callable[[], bool]) -> None:
            try:
                for part in started(is_ended):
                    channel.put(part)
                if engine.last_generation.finish_reason == "cancelled":
                    channel.put(SettingsError(_CLOSED))  # else there is no reader
                else:
                    channel.put(engine.last_generation)
            except BaseException as error:
                channel.put(error)

        channel: EventChannel[T | GenerationStats | BaseException] = EventChannel(
            asyncio.get_running_loop(),
            is_last=lambda event: isinstance(event, GenerationStats | BaseException),
        )
        job = _Job(work, channel.put)
        self._submit(client, job)
        try:
            while True:
                for event in await channel.take():
                    match event:
                        case GenerationStats():
                            end(event)
                            return
                        case BaseException():
                            raise event
                        case _:
                            yield event
        finally:
            self._cancel(client, job)

    def _submit(self, client: str, job: _Job) -> None:
        """Raises: QueueFull; SettingsError if the engine is not open."""
        _ = self._engine
        self._thread.submit(client, job)

    def _cancel(self, client: str, job: _Job) -> None:
        """Does nothing if it has ended."""
        job.is_cancelled = True
        self._thread.remove(client, job)

    def _end(self) -> None:
        self._runner.is_closed = True
        self._thread.stop()
