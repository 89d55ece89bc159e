"""One answer, in whatever form: what `GenerationResponse` needs of it, and the division of its text
into content, reasoning and calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dflash_adapters.text.answers import AnswerEvent, AnswerParser, Content, Reasoning, ToolCall
from dflash_runtime.serving.errors import ApiError, ErrorForm
from dflash_runtime.serving.text import Delta
from dflash_runtime.serving.wire import Chunk, Wire
from dflash_runtime.serving.worker import Finished


class Answer(ABC):
    """One answer in a door's form. Of a stream its chunks are asked for, otherwise `whole`."""

    wire: Wire
    """The form of a stream."""
    has_logprobs: bool = False
    """Deltas come one by one, also those without text."""

    @property
    def request_id(self) -> str | None:
        """What the client is told that this answer is called; None: nothing."""
        return None

    def first_chunks(self, num_prompt_tokens: int) -> list[Chunk]:
        """The chunks before the first token."""
        return []

    @abstractmethod
    def next_chunks(self, events: Sequence[AnswerEvent], delta: Delta) -> list[Chunk]:
        """The chunks of text that became final: `events` are what it is divided into."""

    @abstractmethod
    def last_chunks(self, events: Sequence[AnswerEvent], finished: Finished) -> list[Chunk]:
        """The chunks after the last token: `events` became certain with the end."""

    @abstractmethod
    def whole(
        self, events: Sequence[AnswerEvent], deltas: Sequence[Delta], finished: Finished
    ) -> dict[str, Any]:
        """The whole answer as one object: `events` are what its text is divided into."""

    def error_chunks(self, error: ApiError, form: ErrorForm) -> list[Chunk]:
        """The chunks that end a stream which has begun. `form` is that of the door's errors."""
        return [form(error)]


class Division:
    """Divides the text of one answer into events. Without a `parser` all of it is content."""

    def __init__(self, parser: AnswerParser | None = None, *, has_reasoning: bool = True) -> None:
        self._parser = parser
        self._has_reasoning = has_reasoning
        """Whether reasoning is part of the answer."""

    def push(self, text: str) -> list[AnswerEvent]:
        """What became certain with the next piece."""
        if self._parser is None:
            return [Content(text)] if text else []
        return self._wanted(self._parser.push(text))

    def finish(self) -> list[AnswerEvent]:
        """What becomes certain with the end."""
        return [] if self._parser is None else self._wanted(self._parser.finish())

    def _wanted(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        if self._has_reasoning:
            return events
        return [event for event in events if not isinstance(event, Reasoning)]


def joined_events(events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
    """The same events, with neighbouring texts of the same kind joined."""
    joined: list[AnswerEvent] = []
    for kind, group in groupby(events, type):
        if kind is ToolCall:
            joined.extend(group)
        else:
            text = "".join(event.text for event in group if not isinstance(event, ToolCall))
            joined.append(Reasoning(text) if kind is Reasoning else Content(text))
    return joined
