"""Markdown of an answer while it is written: blocks that are complete, and rendered lines.

What a model writes cannot control the terminal: control characters are escaped before the Markdown
is read and after it is rendered, and links are shown as text.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from dflash_protocol.errors import for_terminal

Line: TypeAlias = list[Segment]

_FENCE = re.compile(r"[ \t]*(?:[-*+>]|\d+[.)])?[ \t]*(?P<mark>`{3,}|~{3,})(?P<info>[^\r]*)$")
# Tags are text, as most of what looks like one in an answer is code.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


_MOST_CODE, _MOST_TEXT = 1 << 18, 1 << 13
"""Characters of a block that is read as Markdown: brackets and stars without end take time that
grows with the square of their number, code does not."""


class BlockSplitter:
    """Divides Markdown that comes in pieces into blocks that later text does not change.

    A block ends at an empty line, unless that is in fenced code, or the next line is indented.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._partial = ""
        self._fence = ""
        self._is_after_blank = False

    @property
    def rest(self) -> str:
        """The block that is not complete."""
        return "".join((*self._lines, self._partial))

    def push(self, text: str) -> list[str]:
        """The blocks that became complete with the next piece."""
        *lines, self._partial = (self._partial + text).split("\n")
        return [block for line in lines if (block := self._add(line)) is not None]

    def finish(self) -> str:
        """After the last piece: the last block."""
        rest, self._lines, self._partial = self.rest, [], ""
        return rest

    def _add(self, line: str) -> str | None:
        block = None
        if self._fence:
            if line.strip(" \t\r")[: len(self._fence)] == self._fence and not line.strip(
                f" \t\r{self._fence[0]}"
            ):
                self._fence = ""
        elif not line.strip():
            self._is_after_blank = bool(self._lines)
        else:
            if self._is_after_blank and line[0] not in " \t":
                block, self._lines = "".join(self._lines), []
            self._is_after_blank = False
            found = _FENCE.match(line)
            if found is not None and not (found["mark"][0] == "`" and "`" in found["info"]):
                self._fence = found["mark"]
        if self._lines or line.strip():
            self._lines.append(line + "\n")
        return block


def markdown_lines(text: str, console: Console, options: ConsoleOptions) -> list[Line]:
    """Markdown rendered for a console, line by line, without empty ones at both ends."""
    is_code = text.lstrip().startswith(("```", "~~~"))
    if len(text) > (_MOST_CODE if is_code else _MOST_TEXT):
        return plain_lines(text, console, options, style="")
    rendered = Markdown("", hyperlinks=False)
    rendered.parsed = _PARSER.parse(for_terminal(text))
    for token in rendered.parsed:
        for part in token.children or ():
            if part.type == "softbreak":  # poems, addresses, lists of short lines
                part.type = "hardbreak"
    lines = console.render_lines(rendered, options, pad=False)
    return _without_empty_ends([_without_blanks(list(map(_harmless, line))) for line in lines])


def plain_lines(
    text: str, console: Console, options: ConsoleOptions, *, style: str = "dim"
) -> list[Line]:
    """Text that is not Markdown, wrapped for a console."""
    shown = Text(for_terminal(text).expandtabs(4), style=style)
    lines = console.render_lines(shown, options, pad=False)
    return [list(map(_harmless, line)) for line in lines]


def _harmless(segment: Segment) -> Segment:
    if segment.text.isprintable() or segment.control:
        return segment
    return Segment(for_terminal(segment.text), segment.style)


def _without_blanks(line: Line) -> Line:
    """The line without blanks at its end, but those of a background."""
    while line and not _has_background(line[-1]):
        last = line[-1]
        if text := last.text.rstrip(" "):
            return [*line[:-1], Segment(text, last.style)]
        line = line[:-1]
    return line


def _has_background(segment: Segment) -> bool:
    return segment.style is not None and segment.style.bgcolor is not None


def _without_empty_ends(lines: list[Line]) -> list[Line]:
    first, last = 0, len(lines)
    while first < last and not lines[first]:
        first += 1
    while last > first and not lines[last - 1]:
        last -= 1
    return lines[first:last]
