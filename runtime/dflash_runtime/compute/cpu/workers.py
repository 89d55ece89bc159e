"""A fixed pool of threads that share one piece of work; the caller is one of them.

Knows nothing of what is computed. Results must not depend on the number of parts.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

Part = Callable[[int, int], object]
"""``part(part_idx, num_parts)`` does one share of the work."""

_Job = tuple[Part, "SimpleQueue[BaseException | None]"]


class Workers:
    """Owns ``num_threads - 1`` threads until closed; with one thread it owns none."""

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, expected at least 1")
        self.num_threads = num_threads
        # One job at a time: callers that come meanwhile do all parts themselves.
        self._lock = Lock()
        self._jobs: list[SimpleQueue[_Job | None]] = []
        self._threads: list[Thread] = []
        for index in range(1, num_threads):
            jobs: SimpleQueue[_Job | None] = SimpleQueue()
            thread = Thread(
                target=self._serve, args=(index, jobs), name=f"cpu-worker-{index}", daemon=True
            )
            self._jobs.append(jobs)
            self._threads.append(thread)
            thread.start()

    def run(self, part: Part) -> None:
        """Do all parts and return when the last is done.

        Raises: the error of a part that failed, once the others have ended.
        """
        if not self._jobs or not self._lock.acquire(blocking=False):
            part(0, 1)
            return
        try:
            # A queue a run: what an interrupted run left behind must not end the next one.
            done: SimpleQueue[BaseException | None] = SimpleQueue()
            for jobs in self._jobs:
                jobs.put((part, done))
            try:
                part(0, self.num_threads)
            finally:
                errors = [done.get() for _ in self._jobs]
            for error in errors:
                if error is not None:
                    raise error
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the threads. Work that comes later is done by its caller alone."""
        with self._lock:
            jobs, self._jobs = self._jobs, []
            for queue in jobs:
                queue.put(None)
            for thread in self._threads:
                thread.join()
            self._threads = []

    def _serve(self, index: int, jobs: SimpleQueue[_Job | None]) -> None:
        while (job := jobs.get()) is not None:
            part, done = job
            error: BaseException | None = None
            try:
                part(index, self.num_threads)
            except BaseException as raised:
                error = raised
            # An idle worker must not keep the last job's arrays alive.
            del job, part
            done.put(error)
            del done, error


def share(total: int, part_idx: int, num_parts: int, multiple: int = 16) -> tuple[int, int]:
    """First and end of one part of ``range(total)``; inner borders are whole multiples."""
    steps = -(-total // multiple)
    first = steps * part_idx // num_parts * multiple
    end = steps * (part_idx + 1) // num_parts * multiple
    return min(first, total), min(end, total)
