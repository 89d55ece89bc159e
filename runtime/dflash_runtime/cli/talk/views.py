"""What a reader sees of an answer while it is written: Markdown in a terminal, or plain text."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from dflash_adapters.text.answers import Content, Reasoning
from dflash_protocol.errors import one_line
from dflash_runtime.cli.talk.markdown import BlockSplitter, Line, markdown_lines, plain_lines
from dflash_runtime.cli.terminal import write_lines, write_text

_REFRESHES_PER_S = 8
_SHARE = 4
"""Of the time that drawing takes, at least so many times pass until the next: a long block must not
take the processor from the model."""
_QUIET_S = 1.0
"""Prompts that are read faster have no progress line."""
_KEPT_ROWS = 2
"""Of the terminal, not used by what changes: the cursor's, and one above."""


class AnswerView(ABC):
    """Shows one answer; used in ``with``."""

    def __init__(self, *, shows_reasoning: bool, clock: Callable[[], float]) -> None:
        self._shows_reasoning = shows_reasoning
        self._clock = clock
        self._thinks_since_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_thought()
        self._finish()

    def show(self, event: Content | Reasoning) -> None:
        """Show a piece of the answer."""
        if isinstance(event, Reasoning):
            if self._thinks_since_s is None:
                self._thinks_since_s = self._clock()
            self._think(event.text)
        elif event.text:
            self._end_thought()
            self._write(event.text)

    @abstractmethod
    def read(self, num_done: int, num_total: int) -> None:
        """So many tokens of the prompt are computed, of all."""

    def _end_thought(self) -> None:
        if self._thinks_since_s is not None:
            since_s, self._thinks_since_s = self._thinks_since_s, None
            self._fold(f"thought for {self._clock() - since_s:.1f} s")

    @abstractmethod
    def _think(self, text: str) -> None: ...

    @abstractmethod
    def _fold(self, summary: str) -> None:
        """The reasoning has ended; the line `summary` stays of it."""

    @abstractmethod
    def _write(self, text: str) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...


class PlainView(AnswerView):
    """Writes an answer to stdout as it comes. Where that is no terminal, without the reasoning."""

    def __init__(
        self, *, shows_reasoning: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(shows_reasoning=shows_reasoning, clock=clock)
        self._is_terminal = sys.stdout.isatty()
        self._ends_line = True

    def read(self, num_done: int, num_total: int) -> None:
        """Nothing is shown."""

    def _think(self, text: str) -> None:
        if self._shows_reasoning and self._is_terminal:
            self._put(text)

    def _fold(self, summary: str) -> None:
        if self._is_terminal:
            self._put(f"{'' if self._ends_line else chr(10)}({summary})\n")

    def _write(self, text: str) -> None:
        self._put(text)

    def _finish(self) -> None:
        if not self._ends_line:
            self._put("\n")

    def _put(self, text: str) -> None:
        if text:
            write_text(text)
            self._ends_line = text.endswith("\n")


class StyledView(AnswerView):
    """Renders Markdown to a terminal: complete blocks for good, the last one anew while it grows.

    Of a block that is higher than the terminal the end is shown, until it is complete.
    Owns: within the context, a thread that draws what has changed.
    """

    def __init__(
        self,
        console: Console,
        *,
        shows_reasoning: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(shows_reasoning=shows_reasoning, clock=clock)
        self._console = console
        self._tail = _Tail(console, clock)
        self._live = Live(
            get_renderable=self._tail.rendered,
            console=console,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
        )
        self._blocks = BlockSplitter()
        self._thought = ""
        """The last line of reasoning that is shown."""
        self._has_written = False
        self._begun_s = clock()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._live.stop()

    def read(self, num_done: int, num_total: int) -> None:
        """Shown if it takes long."""
        if self._clock() - self._begun_s > _QUIET_S:
            line = _dim(f"reading {num_done} of {num_total} tokens")
            self._tail.show(lambda options: line)

    def _think(self, text: str) -> None:
        if self._shows_reasoning:
            *lines, thought = (self._thought + text).split("\n")
            if lines:
                self._print(plain_lines("\n".join(lines), self._console, self._console.options))
            self._thought = thought
            self._tail.show(lambda options: plain_lines(thought, self._console, options))
        else:
            since_s = self._thinks_since_s or 0.0
            self._tail.show(lambda _: _dim(f"thinking… {self._clock() - since_s:.1f} s"))

    def _fold(self, summary: str) -> None:
        last, self._thought = self._thought, ""
        self._print(plain_lines(last, self._console, self._console.options) if last else [])
        self._print(_dim(summary))
        self._has_written = True

    def _write(self, text: str) -> None:
        for block in self._blocks.push(text):
            self._print_block(block)
        rest = self._blocks.rest
        before: list[Line] = [[]] if self._has_written else []
        self._tail.show(lambda options: [*before, *markdown_lines(rest, self._console, options)])

    def _finish(self) -> None:
        self._print_block(self._blocks.finish())

    def _print_block(self, block: str) -> None:
        """Print it for good, an empty line before it unless it is the first."""
        if lines := markdown_lines(block, self._console, self._console.options):
            self._print([*([[]] if self._has_written else []), *lines])
            self._has_written = True

    def _print(self, lines: list[Line]) -> None:
        """Print lines for good, in place of what changes."""
        self._tail.show(_nothing)
        self._live.refresh()
        self._console.print(_Lines(lines), end="")


_Render = Callable[[ConsoleOptions], list[Line]]


def _nothing(_: ConsoleOptions) -> list[Line]:
    return []


class _Tail:
    """What changes at the end of an answer, rendered by the thread that draws.

    Which is at most a fifth of the time: a long block must not take the processor from the model.
    """

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._render: _Render = _nothing
        self._next_s = 0.0
        self._drawn = _Lines([])

    def show(self, render: _Render) -> None:
        """Show other lines from now on."""
        self._render = render

    def rendered(self) -> _Lines:
        """The last rows of the lines, as many as the terminal has; they may be a moment old."""
        begun_s, render = self._clock(), self._render
        if render is _nothing:  # at once, as something else is printed in its place
            self._drawn = _Lines([])
        elif begun_s >= self._next_s or not self._drawn.lines:
            height = max(1, self._console.height - _KEPT_ROWS)
            self._drawn = _Lines(render(self._console.options)[-height:])
            now_s = self._clock()
            self._next_s = now_s + _SHARE * (now_s - begun_s)
        return self._drawn


class TalkScreen:
    """Where a talk is shown: makes a view for each answer, and shows what is said beside them.

    `console` renders Markdown; without it everything is plain text.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self.shows_reasoning = False
        self._is_terminal = sys.stdout.isatty()

    def view(self) -> AnswerView:
        """For the next answer."""
        if self._console is None:
            return PlainView(shows_reasoning=self.shows_reasoning)
        return StyledView(self._console, shows_reasoning=self.shows_reasoning)

    def note(self, lines: Iterable[str]) -> None:
        """Show lines that are not of the model: on stderr if stdout is no terminal."""
        for line in lines:
            if self._console is None:
                write_lines([line], to_stderr=not self._is_terminal)
            else:
                self._console.print(Text(one_line(line), style="dim"))

    def space(self) -> None:
        """An empty line after an answer, on terminals."""
        if self._is_terminal:
            write_text("\n")


class _Lines:
    """Rendered lines, for rich."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            yield from line
            yield Segment.line()


def _dim(text: str) -> list[Line]:
    return [[Segment(text, Style(dim=True))]]
