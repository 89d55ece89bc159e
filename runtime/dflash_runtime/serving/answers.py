"""One answer, in whatever form: what `GenerationResponse` needs of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from dflash_adapters.text.answers import AnswerEvent
from dflash_runtime.engine.answer_text import Delta
from dflash_runtime.serving.errors import ApiError, ErrorForm
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
    def next_chunks(self, delta: Delta) -> list[Chunk]:
        """The chunks of what became certain."""

    @abstractmethod
    def last_chunks(self, finished: Finished) -> list[Chunk]:
        """The chunks after the last token."""

    @abstractmethod
    def whole(self, deltas: Sequence[Delta], finished: Finished) -> dict[str, Any]:
        """The whole answer as one object."""

    def error_chunks(self, error: ApiError, form: ErrorForm) -> list[Chunk]:
        """The chunks that end a stream which has begun. `form` is that of the door's errors."""
        return [form(error)]


def events_of(deltas: Sequence[Delta]) -> list[AnswerEvent]:
    """What an answer consists of."""
    return [event for delta in deltas for event in delta.events]
