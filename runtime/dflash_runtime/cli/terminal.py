"""What commands write to the terminal: lines, generated text, and progress bars.

Values from files or peers cannot break out of their line, nor send control sequences.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

import click

from dflash_protocol.errors import for_terminal, one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_LONGEST_LINE = 4000
_DELAY_S = 1.0
_STAGE_LIMIT = 60
_NARROW = 60


def write_lines(lines: Iterable[str], *, to_stderr: bool = False) -> None:
    """Write lines, each without control characters and of at most 4000 characters."""
    click.echo("\n".join(one_line(line, _LONGEST_LINE) for line in lines), err=to_stderr)


def write_text(text: str) -> None:
    """Write a piece of generated text to stdout; on a terminal without control sequences."""
    sys.stdout.write(for_terminal(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def shown_bytes(num_bytes: float) -> str:
    """A number of bytes for people, as in ``17.3 GiB`` or ``0.4 MiB``."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"


class ProgressReporter:
    """Collects updates; shows bars on stderr after a second. Does nothing if not `enabled`.

    Owns: a thread that draws, from entering the context until `finish`.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._states: dict[str, tuple[str, int, int]] = {}
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, name="dflash-progress", daemon=True)

    def __enter__(self) -> ProgressReporter:
        if self._enabled:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()

    def update(self, owner: str, stage: str, num_done: int, num_total: int) -> None:
        """Update the progress of an owner, from any thread."""
        with self._lock:
            self._states[owner] = (one_line(stage, _STAGE_LIMIT), num_done, num_total)

    def finish(self) -> None:
        """Remove the bars. Further calls do nothing."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _show(self) -> None:
        if self._done.wait(_DELAY_S):
            return
        from rich.console import Console

        with Bars(console=Console(stderr=True)) as bars:
            while not self._done.wait(0.1):
                with self._lock:
                    states = dict(self._states)
                bars.show(states)


class TransferBar:
    """One line on stderr for bytes on their way: how many of how many, the rate, the time left.

    Owns: the line and a thread that draws it, from the first `show` to `finish`.
    """

    def __init__(
        self, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._clock = clock
        self._progress: Progress | None = None
        self._line: TaskID | None = None

    def show(self, what: str, num_done: int, num_total: int) -> None:
        """Show (bytes done, bytes in all); nothing while `num_total` is 0."""
        if num_total <= 0:
            return
        what = one_line(what, _STAGE_LIMIT)
        if self._progress is None:
            self._progress = self._started()
            self._line = self._progress.add_task(what, total=num_total)
        assert self._line is not None
        self._progress.update(self._line, description=what, completed=num_done, total=num_total)

    def finish(self) -> None:
        """Remove the line."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _started(self) -> Progress:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            ProgressColumn,
            Task,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text

        class Rate(ProgressColumn):
            def render(self, task: Task) -> Text:
                rate = task.finished_speed or task.speed
                return Text("" if rate is None else f"{shown_bytes(rate)}/s")

        console = self._console or Console(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            # On a narrow terminal the numbers take the whole line.
            *([BarColumn(bar_width=None)] if console.width >= _NARROW else []),
            DownloadColumn(binary_units=True),
            Rate(),
            TimeRemainingColumn(compact=True),
        )
        progress = Progress(
            *columns, console=console, get_time=self._clock, transient=True, expand=True
        )
        progress.start()
        return progress


class Bars:
    """A line for each owner: its stage, how much of it is done, and the time taken."""

    def __init__(self, *, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        # The spinner is for stages of a single step.
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=console, get_time=clock, transient=True)
        self._lines: dict[str, TaskID] = {}
        self._shown: dict[str, tuple[str, int, int]] = {}

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def show(self, states: Mapping[str, tuple[str, int, int]]) -> None:
        """Show (stage, steps done, steps in all) of each owner. The clock of a stage stops when
        all its steps are done; that of the next starts at 0."""
        for owner, state in states.items():
            stage, num_done, num_total = state
            what = f"{owner}: {stage}"
            if owner not in self._lines:
                self._lines[owner] = self.progress.add_task(what, total=num_total)
            elif state != self._shown[owner]:
                _, done_before, total_before = self._shown[owner]
                if num_done < done_before or num_total != total_before:
                    self.progress.reset(self._lines[owner], total=num_total)
            self.progress.update(self._lines[owner], description=what, completed=num_done)
            self._shown[owner] = state
