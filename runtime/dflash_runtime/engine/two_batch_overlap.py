"""Two-batch overlap: two micro-batches of a chunk go through the layers, one behind the other.

::

    first    attention 0, send | . . . . . . . . . | sums 0, attention 1, send | . . .
    second   . . . . . . . . . | attention 0, send | . . . . . . . . . . . . . | sums 0, …
    remote   . . . . . . . . . | first's experts 0 . . | second's experts 0 . . | first's …

Each micro-batch is a pass that pauses once in each routed layer, after requests to remote owners
were sent and before their replies are waited for. They are advanced in turns, so the second reaches
a layer after the first, and finds the first's keys, values and recurrent states there as those of
an earlier chunk.

So do the chunks of a *group*, of which there may be more, where a device copies weights of experts
for them: all have paused in a layer before the first one has its copied experts computed for all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from dflash_runtime.compute.model import Pausable
from dflash_runtime.interrupts import uninterrupted

T = TypeVar("T")


def run_in_turns(*micro_batches: Pausable[T], poll: Callable[[], None]) -> list[T]:
    """Run micro-batches to their ends and return their results. `poll` advances their requests in
    flight.

    Raises: what one of them has raised, or KeyboardInterrupt; all are closed by then, which
    abandons their requests in flight.
    """
    results: list[T] = []
    try:
        while not results:
            for micro_batch in micro_batches:
                poll()
                try:
                    host_work = next(micro_batch)
                except StopIteration as end:
                    results.append(end.value)
                else:
                    assert host_work is None, "a chunk is not captured"
            if 0 < len(results) < len(micro_batches):
                raise RuntimeError("micro-batches have paused in different layers")
        return results
    finally:
        with uninterrupted(), ExitStack() as undo:
            for micro_batch in micro_batches:
                undo.callback(micro_batch.close)
