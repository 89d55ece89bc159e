"""What an answer consists of, and the interface of the parsers that find it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text meant for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call of an offered tool."""

    name: str
    arguments: str
    """JSON text of an object, as `json.dumps` writes it with ``ensure_ascii=False``."""
    call_id: str | None = None
    """The model's identifier of the call, in formats that have them."""


AnswerEvent: TypeAlias = Content | Reasoning | ToolCall

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters by the tools' names."""


class AnswerParser(ABC):
    """Parses one answer, whose text comes in pieces.

    No text raises an error, and the pieces have no influence on the result, except on how text is
    distributed over events of the same kind.
    """

    @abstractmethod
    def push(self, text: str) -> list[AnswerEvent]:
        """What became certain with the next piece."""

    @abstractmethod
    def finish(self) -> list[AnswerEvent]:
        """After the last piece: what was held back."""


class EventList:
    """Collects events; text of the same kind is joined."""

    def __init__(self) -> None:
        self._events: list[AnswerEvent] = []
        self._kind: type[Content | Reasoning] = Content
        self._parts: list[str] = []

    def add_text(self, kind: type[Content | Reasoning], text: str) -> None:
        """Add text, unless it is empty."""
        if text:
            if kind is not self._kind:
                self._join()
                self._kind = kind
            self._parts.append(text)

    def add_calls(self, calls: Iterable[ToolCall]) -> None:
        """Add calls."""
        self._join()
        self._events.extend(calls)

    def take(self) -> list[AnswerEvent]:
        """All events since the last time."""
        if not (self._parts or self._events):
            return []
        self._join()
        events, self._events = self._events, []
        return events

    def _join(self) -> None:
        if self._parts:
            self._events.append(self._kind("".join(self._parts)))
            self._parts = []
