"""Progress on stderr for whatever takes longer than a second, if somebody is watching."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

from dflash_protocol.errors import one_line

_DELAY_S = 1.0
_STAGE_LIMIT = 60


class ProgressReporter:
    """Collects updates; shows bars once the whole has taken a second. Quiet if not `enabled`."""

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
        """Say where a piece of work stands. May be called from any thread."""
        with self._lock:
            self._states[owner] = (one_line(stage, _STAGE_LIMIT), num_done, num_total)

    def finish(self) -> None:
        """Take the bars away. Further calls do nothing."""
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


class Bars:
    """A line for each owner: what it is at, how much of that is done, and for how long."""

    def __init__(self, *, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        # The spinner is for stages of one step, whose bar has no middle.
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
        """Show stage, steps that are done, and steps in all, of each owner. The clock of a stage
        stops when all its steps are done; that of the next one begins at 0."""
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
