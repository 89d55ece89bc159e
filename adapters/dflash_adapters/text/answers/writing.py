"""Puts text and calls together, and drops the space that chat templates add around them."""

from __future__ import annotations

from collections.abc import Iterable

from dflash_adapters.text.answers.events import AnswerEvent, Content, EventList, Reasoning, ToolCall

_SPACE = " \t\r\n"


class AnswerWriter:
    """Collects an answer's events. What is dropped:

    * space at both ends of reasoning; space between reasoning and what follows it;
    * space directly before and after calls, and between them;
    * with `drops_start`, space at the beginning of the answer; without, only before reasoning or a
      call.

    Other space is kept, even at the end. Markers that stand around calls are treated like space,
    unless something else than a call is next to them. Space is " ", tabs and line breaks.

    Calls within reasoning count if nothing but space follows them, not even the end of the
    reasoning; else they are part of it.
    """

    def __init__(self, *, drops_start: bool, has_calls: bool) -> None:
        self._events = EventList()
        self._kind: type[Content | Reasoning] = Content
        self._held: list[str] = []
        """Text that is dropped if a call follows (in reasoning: if it ends): space, and markers
        around calls; in reasoning the last calls."""
        self._calls: list[ToolCall] = []
        """Of the reasoning, if nothing followed them."""
        self._drops_space = drops_start
        self._has_calls = has_calls
        self._is_after_call = False
        self._is_marked = False
        """The last thing held is a marker, perhaps with space."""
        self.is_start = True
        """Nothing has come but reasoning and space."""

    @property
    def is_reasoning(self) -> bool:
        """Whether text is reasoning now."""
        return self._kind is Reasoning

    @property
    def is_reasoning_start(self) -> bool:
        """Whether reasoning has begun, and has no text yet."""
        return self.is_reasoning and self._drops_space

    @property
    def may_call(self) -> bool:
        """Whether there is no text directly before this place: a start, a call, or a marker."""
        return self.is_start or self._is_after_call or self._is_marked

    def text(self, text: str) -> None:
        """Add text, or what proved to be text."""
        if self._drops_space:
            text = text.lstrip(_SPACE)
        if not text:
            return
        holds = self._has_calls or self.is_start or self.is_reasoning
        core = text.rstrip(_SPACE) if holds else text
        if core:
            self._release()
            self._events.add_text(self._kind, core)
            self._drops_space = self._is_after_call = False
            self.is_start = self.is_start and self.is_reasoning
        if len(core) < len(text):
            self._held.append(text[len(core) :])

    def opening(self, marker: str) -> None:
        """Add a marker that stands before calls."""
        self._held.append(marker)
        self._is_marked = True
        self._drops_space = self._is_after_call = False
        self.is_start = self.is_start and self.is_reasoning

    def closing(self, marker: str) -> None:
        """Add a marker that stands after calls."""
        if self._is_marked or (self._is_after_call and self.is_reasoning):
            self._held.append(marker)
        elif not self._is_after_call:
            self.text(marker)

    def calls(self, calls: Iterable[ToolCall], text: str) -> None:
        """Add calls, which were written as the text."""
        if self.is_reasoning:
            self._held.append(text)
            self._calls.extend(calls)
        else:
            self._held.clear()
            self._events.add_calls(calls)
            self.is_start = False
        self._drops_space = not self.is_reasoning
        self._is_after_call = True
        self._is_marked = False

    def begin_reasoning(self) -> None:
        """What follows is reasoning."""
        self._held.clear()
        self._kind = Reasoning
        self._drops_space = True
        self._is_after_call = False

    def end_reasoning(self) -> None:
        """What follows is content."""
        if self._calls or self._is_marked:
            self._held = ["".join(self._held).rstrip(_SPACE)]
            self._release()
        self.drop_space()
        self._kind = Content
        self._is_after_call = False

    def drop_space(self) -> None:
        """Drop space before and after this place."""
        self._held.clear()
        self._drops_space = True

    def finish(self) -> list[AnswerEvent]:
        """Everything that was held back, after the last text."""
        if self._is_marked or not self.is_reasoning:
            self._release()
        self._events.add_calls(self._calls)
        self._held.clear()
        return self.take()

    def take(self) -> list[AnswerEvent]:
        """The events since the last time."""
        return self._events.take()

    def _release(self) -> None:
        self._events.add_text(self._kind, "".join(self._held))
        self._held.clear()
        self._calls.clear()
        self._is_marked = False
