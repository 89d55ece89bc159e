"""Micro-batches take turns layer by layer, and what ends one of them ends both."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import F64Array
from dflash_runtime.compute.model import Pausable
from dflash_runtime.engine.two_batch_overlap import run_in_turns
from support.examples import examples
from support.interrupts import interrupt_main_thread

NUM_LAYERS = 4


class Asked:
    """Remote experts that record what is asked of them, and by which micro-batch."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.open: list[str] = []
        """What was started and is neither finished nor abandoned."""
        self.fails: dict[str, BaseException] = {}
        self.num_polls = 0

    def note(self, what: str) -> None:
        self.log.append(what)
        if what in self.fails:
            raise self.fails[what]

    def poll(self) -> None:
        self.num_polls += 1

    def start(self, name: str) -> str:
        self.note(f"start {name}")
        self.open.append(name)
        return name

    def finish(self, started: str) -> None:
        self.open.remove(started)
        self.note(f"finish {started}")

    def abandon(self, started: str) -> None:
        self.open.remove(started)
        self.log.append(f"abandon {started}")


class Model:
    """Both micro-batches of a chunk, whose layers record when each reaches them."""

    def __init__(
        self, *, asks: Callable[[str, int], bool] = lambda micro_batch, layer: True
    ) -> None:
        self.asked = Asked()
        self._asks = asks

    def run(self) -> tuple[str, str]:
        a, b = run_in_turns(self._forward("A"), self._forward("B"), poll=self.asked.poll)
        return a, b

    def _forward(self, micro_batch: str) -> Pausable[str]:
        for layer_id in range(NUM_LAYERS):
            self.asked.note(f"mixer {micro_batch}{layer_id}")
            yield from self._experts(micro_batch, layer_id)
        self.asked.note(f"end {micro_batch}")
        return micro_batch

    def _experts(self, micro_batch: str, layer_id: int) -> Pausable[None]:
        if not self._asks(micro_batch, layer_id):
            yield None
            return
        started = self.asked.start(f"{micro_batch}{layer_id}")
        try:
            yield None
        except BaseException:
            self.asked.abandon(started)
            raise
        self.asked.finish(started)


def test_each_is_at_work_while_the_others_experts_are_computed() -> None:
    model = Model()
    assert model.run() == ("A", "B")
    expected = ["mixer A0", "start A0", "mixer B0", "start B0"]
    for layer in range(1, NUM_LAYERS):
        for micro_batch in "AB":
            expected += [
                f"finish {micro_batch}{layer - 1}",
                f"mixer {micro_batch}{layer}",
                f"start {micro_batch}{layer}",
            ]
    last = NUM_LAYERS - 1
    assert model.asked.log == [*expected, f"finish A{last}", "end A", f"finish B{last}", "end B"]
    assert model.asked.num_polls >= 2 * NUM_LAYERS
    assert model.run() == ("A", "B")


@examples(40)
@given(st.sets(st.tuples(st.sampled_from("AB"), st.integers(0, NUM_LAYERS - 1))))
def test_the_second_comes_to_a_layer_when_the_first_has_been_there(
    alone: set[tuple[str, int]],
) -> None:
    """Also where one micro-batch, or both, send no request."""
    model = Model(asks=lambda micro_batch, layer: (micro_batch, layer) not in alone)
    model.run()
    mixers = [entry[6:] for entry in model.asked.log if entry.startswith("mixer")]
    assert mixers == [
        f"{micro_batch}{layer}" for layer in range(NUM_LAYERS) for micro_batch in "AB"
    ]
    assert not model.asked.open


@pytest.mark.parametrize("num_pauses", [(1, 2), (2, 1)])
def test_micro_batches_that_pause_in_different_layers_are_refused(
    num_pauses: tuple[int, int],
) -> None:
    """Their order in a layer would be unknown."""
    ended: list[int] = []

    def forward(num: int) -> Pausable[None]:
        try:
            for _ in range(num):
                yield None
        finally:
            ended.append(num)

    first, second = num_pauses
    with pytest.raises(RuntimeError, match="different layers"):
        run_in_turns(forward(first), forward(second), poll=lambda: None)
    assert sorted(ended) == [1, 2]


PLACES = [
    f"{what} {micro_batch}{layer}"
    for what in ("mixer", "start", "finish")
    for micro_batch in "AB"
    for layer in (0, 1, NUM_LAYERS - 1)
]


@pytest.mark.parametrize("place", [*PLACES, "end A", "end B"])
def test_what_ends_one_micro_batch_ends_the_other(place: str) -> None:
    model = Model()
    error = ValueError(place)
    model.asked.fails[place] = error
    with pytest.raises(ValueError, match=place) as caught:
        model.run()
    assert caught.value is error
    log = model.asked.log
    assert not model.asked.open
    # Nothing is begun after it.
    assert all(entry.startswith("abandon") for entry in log[log.index(place) + 1 :])
    model.asked.fails.clear()
    assert model.run() == ("A", "B")


def only_within_turns(_: int, frame: FrameType | None) -> None:
    """What an interrupt does: it may come when a test has gone on already."""
    while frame is not None:
        if frame.f_code is run_in_turns.__code__:
            raise KeyboardInterrupt
        frame = frame.f_back


@pytest.fixture
def interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, only_within_turns)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("place", ["mixer B1", "start A1", "end A", "end B"])
def test_an_interrupt_ends_both(interrupts: None, place: str) -> None:
    model = Model()
    note = model.asked.note

    def interrupting(what: str) -> None:
        note(what)
        if what == place:
            interrupt_main_thread()
            time.sleep(0.05)

    model.asked.note = interrupting  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        model.run()
    assert not model.asked.open
    model.asked.note = note  # type: ignore[method-assign]
    assert model.run() == ("A", "B")


def test_interrupts_at_any_time_leave_nothing_behind(interrupts: None) -> None:
    """Several at once, wherever the two are; both are at an end when `run_in_turns` is."""
    random = np.random.default_rng(0)
    num_interrupted = 0
    for _ in range(60):
        num_interrupted += is_interrupted(random.uniform(0.0, 0.006, random.integers(1, 3)))
    assert num_interrupted > 0


def is_interrupted(delays: F64Array) -> bool:
    """Whether a run was, so long after it began, or after the one before."""
    model, found = Model(), False
    note, num_notes = model.asked.note, 0

    def slow(what: str) -> None:
        nonlocal num_notes
        num_notes += 1
        time.sleep(0.0002)
        note(what)

    def interrupt() -> None:
        for delay in delays:
            time.sleep(delay)
            interrupt_main_thread()

    model.asked.note = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        model.run()
    except KeyboardInterrupt:
        found = True
    num_before = num_notes
    thread.join()
    gc.collect(1)  # of what is young, as what this made is; a whole one takes 0.1 s
    assert not model.asked.open
    assert num_notes == num_before
    return found
