"""A program: recorded calls with their words and memory, which compiled code runs in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from dflash_runtime.compute.cpu.kernels import step_tasks as tasks
from dflash_runtime.compute.cpu.kernels.words import STOP, WAIT, Call, calls_kernel
from dflash_runtime.compute.cpu.threads.parallel import line_of_words
from dflash_runtime.compute.cpu.threads.scratch import on_lines, zeros_on_lines

BetweenCalls: TypeAlias = Callable[[int], None]
"""What the host does between two calls, or in place of one; it gets the number of rows of the
run."""


class Program:
    """Calls that compute a step of up to `num_rows` successive tokens, and what the host does in
    place of those that stop.

    Owns: words, scratch memory, and everything the words point into. Used by one thread at a time.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        kept: Iterable[object],
        num_rows: int,
        *,
        instead: Mapping[int, BetweenCalls],
    ) -> None:
        """`instead`: what the host does in place of the call of this index, when that has stopped
        the program."""
        self._kernel = calls_kernel()
        self._kept = list(kept)
        self._instead = {1 + index: work for index, work in instead.items()}
        self._counter = line_of_words(STOP + 1)
        self._counter_address = int(self._counter.ctypes.data)
        starts, end = [], on_lines(8 * (tasks.PLACES + 1)) // 8
        for call in calls:
            starts.append(end)
            end += on_lines(8 * len(call.words)) // 8
        self._words = words = line_of_words(end)
        self._calls = np.zeros((len(calls) + 1, 2), np.int64)
        base, scratch = int(words.ctypes.data), self._scratch_of(calls)
        per_token: list[tuple[int, int]] = []
        places: list[tuple[int, int, int]] = []
        for index, (call, start) in enumerate(zip(calls, starts, strict=True), 1):
            words[start : start + len(call.words)] = call.words
            place = scratch
            for word, num_bytes in call.scratch:
                words[start + word] = place
                place += on_lines(num_bytes)
            self._calls[index] = call.function, base + 8 * start
            per_token += [(start + word, call.words[word] // num_rows) for word in call.per_token]
            places += [
                (base + 8 * (start + word), call.words[word], growth)
                for word, growth in call.per_position
            ]
        self._places = np.array(places, np.int64).reshape(-1, 3)
        words[tasks.NUM_PLACES], words[tasks.PLACES] = len(places), self._places.ctypes.data
        self._calls[0] = tasks.run_place().address, base
        self._per_token = np.array(per_token, np.int64).reshape(-1, 2)
        self._num_rows = 0

    def _scratch_of(self, calls: Sequence[Call]) -> int:
        """Address of memory for the calls, which use it one after the other."""
        sizes = [sum(on_lines(size) for _, size in call.scratch) for call in calls]
        self._scratch = zeros_on_lines(max(sizes))
        return int(self._scratch.ctypes.data)

    def place(self, num_rows: int, position: int) -> None:
        """Say how many tokens the next run has, and the position of the first."""
        self._words[tasks.POSITION] = position
        if num_rows != self._num_rows:
            indices, factors = self._per_token.T
            self._words[indices] = factors * num_rows
            self._num_rows = num_rows

    def run(
        self,
        pool: int,
        check: Callable[[], None],
        stops: Sequence[tuple[int, BetweenCalls]] = (),
    ) -> None:
        """Run all calls on a pool of threads. `check` is called in between, at least every 50 ms
        (or once a call that takes longer); `stops`: what the host does before the calls of
        these indices, ascending.

        Raises: what `check` and the host's work raise; KeyboardInterrupt.
        """
        kernel, calls, counter = self._kernel, self._calls, self._counter_address
        words, index = self._counter, 0
        words[STOP] = 0
        for end, work in (*stops, (len(calls) - 1, None)):
            while index <= end:
                index = kernel(calls, index, end + 1, counter, pool)
                if words[STOP]:
                    index = self._stopped(index)
                if index <= end:
                    check()
            if work is not None:
                work(self._num_rows)

    def _stopped(self, index: int) -> int:
        """Do what a call has stopped for; the index of the call to go on with."""
        reason, self._counter[STOP] = int(self._counter[STOP]), 0
        if reason == WAIT:
            return index
        self._instead[index](self._num_rows)
        return index + 1
