"""Progress on stderr for whatever takes longer than a second, if somebody is watching."""

from __future__ import annotations

import threading
from types import TracebackType

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
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            tasks = {}
            while not self._done.wait(0.1):
                with self._lock:
                    states = dict(self._states)
                for owner, (stage, num_done, num_total) in states.items():
                    if owner not in tasks:
                        tasks[owner] = bars.add_task(owner)
                    # A stage of one step has no middle: show that something moves.
                    total = None if num_total <= 1 and num_done == 0 else num_total
                    bars.update(
                        tasks[owner],
                        description=f"{owner}: {stage}",
                        completed=num_done,
                        total=total,
                    )
