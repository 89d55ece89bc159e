"""Work in a thread that must go on: watched from outside, so that no wait of its own can hold it.

A library's wait has the library's deadlines, which a peer that sends a byte now and then never
meets, and the system's resolver has none. The thread that watches also takes Ctrl-C at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from dflash_protocol.errors import PullFailed

T = TypeVar("T")

_POLL_S = 0.1


@dataclass(slots=True)
class PullProgress:
    """What the working thread tells the one that watches.

    `stage` says what is done, `num_done` counts bytes of `num_total`, and of `num_moved`, those
    that count against the deadline, which `num_done` may lack: it goes back when a file is begun
    anew.
    """

    stage: str = ""
    num_done: int = 0
    num_total: int = 0
    num_moved: int = 0
    is_cancelled: threading.Event = field(default_factory=threading.Event)

    def move(self, num_bytes: int) -> None:
        """Count bytes. Raises: PullFailed if nobody waits for them any more."""
        if self.is_cancelled.is_set():
            raise PullFailed("cancelled")
        self.num_done += num_bytes
        self.num_moved += num_bytes


def watched(
    work: Callable[[PullProgress], T],
    *,
    stall_s: float,
    least_bytes_per_s: int,
    on_progress: Callable[[PullProgress], None] = lambda progress: None,
) -> T:
    """`work` in a thread of its own, which is left behind if it stalls: if within `stall_s` it has
    moved fewer bytes than this rate makes, and is not done.

    Raises: PullFailed if it stalls; what `work` raises.
    """
    progress = PullProgress()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work(progress))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="dflash-pull", daemon=True)
    thread.start()
    since_s, moved_before = time.monotonic(), 0
    try:
        while True:
            thread.join(_POLL_S)
            on_progress(progress)
            if not thread.is_alive():
                break
            if progress.num_moved - moved_before >= stall_s * least_bytes_per_s:
                since_s, moved_before = time.monotonic(), progress.num_moved
            elif time.monotonic() - since_s > stall_s:
                # docs: the network or the hub is too slow; what has come is kept, and the next pull
                # goes on from there
                raise PullFailed(
                    f"the hub sent {progress.num_moved - moved_before:,} bytes in {stall_s:.0f} s"
                )
    finally:
        progress.is_cancelled.set()
    if errors:
        raise errors[0]
    return results[0]
