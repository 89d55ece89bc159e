"""From tokens to an answer that can be sent: whole characters, divided into reasoning, content and
calls, and no part of a stop string."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from dflash_adapters.text.answers import AnswerEvent, AnswerParser, Content, Reasoning, ToolCall
from dflash_adapters.text.harmony import reply_stream
from dflash_adapters.text.tokenizer import StreamDecoder, Tokenizer
from dflash_runtime.engine.generation import GeneratedToken
from dflash_runtime.engine.stop_strings import StopFinder


@dataclass(frozen=True, slots=True)
class Delta:
    """Events that became certain at once, and the tokens completed with them.

    `offsets` are the starts of these tokens, in characters of the whole text.
    """

    events: tuple[AnswerEvent, ...] = ()
    tokens: tuple[GeneratedToken, ...] = ()
    offsets: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The content."""
        return "".join(event.text for event in self.events if isinstance(event, Content))


@dataclass(frozen=True, slots=True)
class TextRules:
    """How the text of an answer is assembled."""

    stops: tuple[str, ...] = ()
    """The first of them in the content ends the answer, and is not part of it."""
    is_chat: bool = False
    shown: Collection[str] | None = None
    """Spellings of control tokens that are part of the text; None: those that readers are to see,
    and of a chat in harmony's channels the final one alone."""
    parser: Callable[[], AnswerParser] | None = None
    """Makes what divides the text; None: all of it is content."""
    has_reasoning: bool = True
    """Whether reasoning is part of the answer."""


class TextAssembler:
    """Assembles one generation.

    Content that may be the beginning of a stop string is held back, as are the bytes of an
    incomplete character; such bytes at the very end are dropped. A stop string does not go on
    behind reasoning or a call.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, rules: TextRules, *, first_offset: int = 0
    ) -> None:
        """`first_offset`: characters of the answer before the first token."""
        self._decoder: StreamDecoder | None = None
        if tokenizer is not None and rules.is_chat and rules.shown is None:
            self._decoder = reply_stream(tokenizer)
        elif tokenizer is not None:
            self._decoder = tokenizer.stream(keep_special=False, shown=rules.shown or ())
        self._rules = rules
        self._parser = None if rules.parser is None else rules.parser()
        self._finder = StopFinder(rules.stops)
        self._num_decoded = first_offset
        self._num_unread = 0
        """Characters from which the parser has made nothing yet."""
        self._pending: deque[tuple[int, str, GeneratedToken]] = deque()
        """Where the text of a token begins, and that text."""

    @property
    def stop(self) -> str | None:
        """The stop string that was found: `push` needs no more tokens."""
        return self._finder.stop

    @property
    def is_stopped(self) -> bool:
        return self._finder.is_stopped

    def push(self, token: GeneratedToken) -> Delta | None:
        """Take a token; returns what became certain, if anything did."""
        text = self._decoder.push(token.token_id) if self._decoder is not None else ""
        # Bytes of an incomplete character come with the token that completes it.
        self._pending.append((self._num_decoded, text, token))
        self._num_decoded += len(text)
        if self._parser is None:
            return self._delta([Content(text)])
        events = self._parser.push(text)
        self._num_unread = 0 if events else self._num_unread + len(text)
        return self._delta(events)

    def finish(self) -> Delta | None:
        """After the last token: returns what was held back. A stop string may be found only now."""
        if self.is_stopped:
            return None
        self._num_unread = 0
        return self._delta([] if self._parser is None else self._parser.finish(), is_last=True)

    def _delta(self, events: Iterable[AnswerEvent], *, is_last: bool = False) -> Delta | None:
        wanted = self._until_stop(events)
        if is_last and (held := self._finder.finish()):
            wanted.append(Content(held))
        out_until = self._out_until()
        tokens, offsets = [], []
        while self._pending:
            first, text, token = self._pending[0]
            # A token cut by a stop string counts if some of its text is before.
            is_cut = self.is_stopped and first < out_until
            is_all = is_last and not self.is_stopped
            if max(first + len(text), first + 1) > out_until and not is_cut and not is_all:
                break
            tokens.append(token)
            offsets.append(first)
            self._pending.popleft()
        return Delta(tuple(wanted), tuple(tokens), tuple(offsets)) if wanted or tokens else None

    def _until_stop(self, events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
        """The events of the answer before a stop string, and what is not part of one."""
        wanted: list[AnswerEvent] = []
        for event in events:
            if isinstance(event, Content):
                text = self._finder.push(event.text)
            else:
                text = self._finder.finish()
            if text:
                wanted.append(Content(text))
            if self.is_stopped:
                break
            is_left_out = isinstance(event, Reasoning) and not self._rules.has_reasoning
            if not isinstance(event, Content) and not is_left_out:
                wanted.append(event)
        return wanted

    def _out_until(self) -> int:
        """Up to which character of the whole text it is certain what becomes of it."""
        held = self._finder.held
        if self.is_stopped:  # the parser may have dropped text, or have some of what comes behind
            first = self._pending[0][0] if self._pending else self._num_decoded
            return first + max(0, "".join(text for _, text, _ in self._pending).rfind(held))
        return self._num_decoded - (self._num_unread + len(held) if self._rules.stops else 0)


def divided(tokens: Generator[GeneratedToken], assembler: TextAssembler) -> Iterator[AnswerEvent]:
    """The events of a generation up to a stop string, as they become certain. `tokens` are closed
    at the end."""
    with contextlib.closing(tokens):
        for token in tokens:
            if (delta := assembler.push(token)) is not None:
                yield from delta.events
            if assembler.is_stopped:
                break
    if (delta := assembler.finish()) is not None:
        yield from delta.events


def joined_events(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """The same events, with neighbouring texts of the same kind joined."""
    joined: list[AnswerEvent] = []
    for kind, group in groupby(events, type):
        if kind is ToolCall:
            joined.extend(group)
        else:
            text = "".join(event.text for event in group if not isinstance(event, ToolCall))
            joined.append(Reasoning(text) if kind is Reasoning else Content(text))
    return joined
