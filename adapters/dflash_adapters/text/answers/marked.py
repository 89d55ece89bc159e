"""Answers whose reasoning and calls stand between markers, in whatever spelling."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_adapters.text.answers.events import AnswerEvent, AnswerParser, ToolCall, Tools
from dflash_adapters.text.answers.scanning import (
    CallScanner,
    CallSyntax,
    Scanned,
    marker_pattern,
)
from dflash_adapters.text.answers.writing import AnswerWriter


@dataclass(frozen=True, slots=True)
class MarkedFormat:
    """The markers of a format.

    Reasoning is recognised where an answer begins. Calls may stand between the markers `before` and
    `after`, or without them. A call that turns out to be none is text, up to where it would end.
    """

    think: tuple[str, str] | None = ("<think>", "</think>")
    """Markers around reasoning."""
    thinks_anywhere: bool = False
    """Reasoning may also follow content."""
    call: CallSyntax | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    """Markers around content, or at its end, which are no part of it."""
    drops_start: bool = True
    """Space at the beginning of an answer is not part of it."""

    def markers(self) -> frozenset[str]:
        """All spellings that belong to the format."""
        found = {*(self.think or ()), *self.before, *self.after, *self.around}
        if self.call is not None:
            found |= {self.call.opens, self.call.ends, *self.call.inner}
            found |= {
                marker for both in self.call.quotes.pairs for marker in both if len(marker) > 1
            }
        return frozenset(marker for marker in found if len(marker) > 1)


class MarkedParser(AnswerParser):
    """Parses an answer in a `MarkedFormat`.

    Text is at one of two places: among reasoning and content, or within what may be a call. The
    first goes to the writer at once, except for what may be the beginning of a marker.
    """

    def __init__(
        self, answer_format: MarkedFormat, tools: Tools, starts_in_reasoning: bool
    ) -> None:
        self._format, self._tools = answer_format, tools
        self._begins, self._closes = answer_format.think or ("", "")
        self._syntax = answer_format.call if tools else None
        markers = {self._begins, self._closes, *answer_format.around} - {""}
        if self._syntax is not None:
            markers |= {*_openings(self._syntax), *answer_format.before, *answer_format.after}
        self._markers = marker_pattern(frozenset(markers))
        self._writer = AnswerWriter(
            drops_start=answer_format.drops_start, has_calls=self._syntax is not None
        )
        if starts_in_reasoning and self._begins:
            self._writer.begin_reasoning()
        self._text = ""
        self._at = 0
        """Where unread text begins."""
        self._call: _HeldCall | None = None
        self._has_quotes = True

    def push(self, text: str) -> list[AnswerEvent]:
        """What became certain with the next piece."""
        self._text, self._at = self._text[self._at :] + text, 0
        self._read(is_last=False)
        return self._writer.take()

    def finish(self) -> list[AnswerEvent]:
        """After the last piece: what was held back."""
        self._read(is_last=True)
        if self._call is not None:
            # Its end may be taken for part of a quotation that should have been closed.
            self._has_quotes = False
            self._text, self._at = self._call.text + self._text[self._at :], 0
            self._call = None
            self._read(is_last=True)
        if self._call is not None:
            self._writer.text(self._call.text + self._text[self._at :])
        return self._writer.finish()

    def _read(self, *, is_last: bool) -> None:
        goes_on = True
        while goes_on:
            if self._call is None:
                goes_on = self._read_text(is_last)
            else:
                goes_on = self._read_call(self._call, is_last)

    def _read_text(self, is_last: bool) -> bool:
        """Read up to a marker, and it; returns whether there was one."""
        found = self._markers.search(self._text, self._at)
        is_marker = found is not None and found.lastgroup is None
        end = len(self._text) if found is None or (is_last and not is_marker) else found.start()
        if end > self._at:
            self._writer.text(self._text[self._at : end])
            self._at = end
        if found is None or not is_marker:
            return False
        self._at = found.end()
        self._take_marker(found[0])
        return True

    def _take_marker(self, marker: str) -> None:
        writer, may_think = self._writer, self._writer.is_start or self._format.thinks_anywhere
        if marker == self._begins:
            if not writer.is_reasoning and may_think:
                writer.begin_reasoning()
            elif not writer.is_reasoning_start:  # else the prompt has it too
                writer.text(marker)
        elif marker == self._closes:
            if writer.is_reasoning:
                writer.end_reasoning()
            elif may_think:  # the prompt has the other one
                writer.drop_space()
            else:
                writer.text(marker)
        elif marker in self._format.around:
            return
        elif marker in self._format.before:
            writer.opening(marker)
        elif marker in self._format.after:
            writer.closing(marker)
        elif self._syntax is not None and (not self._syntax.is_bracket or writer.may_call):
            self._call = self._begun_call(self._syntax, marker)
        else:
            writer.text(marker)

    def _begun_call(self, syntax: CallSyntax, marker: str) -> _HeldCall:
        restarts = (
            {*self._format.before} if syntax.is_bracket else {syntax.opens, *self._format.before}
        )
        aborts = {self._closes} if self._writer.is_reasoning else ()
        scanner = CallScanner(syntax, restarts, aborts, has_quotes=self._has_quotes)
        return _HeldCall(syntax, marker, scanner)

    def _read_call(self, call: _HeldCall, is_last: bool) -> bool:
        """Read more of a call; returns whether that has decided about it."""
        self._at, found = call.read(self._text, self._at, is_last)
        if found is Scanned.NOTHING:
            return False
        self._call = None
        calls = call.calls(self._tools) if found is Scanned.END else []
        if calls:
            self._writer.calls(calls, call.text)
        else:
            self._writer.text(call.text)
        return True


class _HeldCall:
    """What may be a call, from its marker on."""

    def __init__(self, syntax: CallSyntax, marker: str, scanner: CallScanner) -> None:
        self._syntax, self._marker, self._scanner = syntax, marker, scanner
        self._pieces = [marker]
        self._has_lead = False

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._pieces)

    def read(self, text: str, at: int, is_last: bool) -> tuple[int, Scanned]:
        """Read from a place of the text on; returns how far, and what was found."""
        if not self._has_lead:
            lead = self._syntax.lead.whole.match(text, at)
            if lead is None:
                may_come = not is_last and self._syntax.lead.partial.fullmatch(text, at)
                return at, Scanned.NOTHING if may_come else Scanned.NO_CALL
            self._has_lead = True
            self._pieces.append(lead[0])
            at = lead.end()
        end, found = self._scanner.scan(text, at)
        self._pieces.append(text[at:end])
        return end, found

    def calls(self, tools: Tools) -> list[ToolCall]:
        """The calls that the text consists of; none if it is not sound."""
        text = self.text
        if not self._syntax.is_bracket:
            text = text[len(self._marker) : len(text) - len(self._syntax.ends)]
        try:
            return self._syntax.read(text, tools)
        except (ValueError, RecursionError):
            return []


def _openings(syntax: CallSyntax) -> tuple[str, ...]:
    return ("[", "{") if syntax.is_bracket else (syntax.opens,)
