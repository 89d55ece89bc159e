"""Micro-batches take turns layer by layer, and what ends one of them ends both."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.batch import Hidden, HostHidden, HostSums, Sums
from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import AnyArray, F32Array, F64Array, I32Array, Phase
from dflash_runtime.compute.backend import MailRoute
from dflash_runtime.engine import two_batch_overlap
from dflash_runtime.engine.two_batch_overlap import TwoBatchOverlap
from support.examples import examples
from support.interrupts import interrupt_main_thread

NUM_LAYERS = 4
EMPTY = np.empty(0, np.float32)


class Asked:
    """Remote experts that record what is asked of them, and by which micro-batch."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.open: list[str] = []
        """What was ticket and is neither finished nor abandoned."""
        self.fails: dict[str, BaseException] = {}
        self.num_looks = 0

    def note(self, what: str) -> None:
        self.log.append(what)
        if what in self.fails:
            raise self.fails[what]

    def poll(self) -> None:
        self.num_looks += 1

    def local_experts_mask(self, layer_id: int) -> Any:
        raise NotImplementedError

    def count_local(self, phase: Phase, **_: int) -> None:
        """Not looked at."""

    def count_selections(self, layer_id: int, topk_ids: I32Array) -> None:
        """Not looked at."""

    def mail_routes(self) -> tuple[MailRoute, ...]:
        return ()

    def count_mailed(
        self,
        routes: Sequence[MailRoute],
        num_steps: int,
        *,
        phase: Phase = Phase.DECODE,
        num_tokens: int = 1,
    ) -> None:
        """Not looked at."""

    def is_step_to_be_checked(self, routes: Sequence[MailRoute]) -> bool:
        raise NotImplementedError

    def note_checked_step(self, elapsed_s: float) -> None:
        raise NotImplementedError

    def begin(
        self,
        layer_id: int,
        hidden: Hidden,
        topk_ids: AnyArray,
        topk_weights: AnyArray,
        *,
        phase: Phase,
        offloaded: npt.NDArray[np.bool_] | None = None,
    ) -> str:
        assert offloaded is None
        name = f"{micro_batch_of(hidden.to_host())}{layer_id}"
        self.note(f"begin {name}")
        self.open.append(name)
        return name

    def finish(self, ticket: str, out: F64Array | None = None) -> Sums:
        self.open.remove(ticket)
        self.note(f"finish {ticket}")
        return HostSums(EMPTY.astype(np.float64))

    may_offload = False

    def to_offload(
        self, layer_id: int, topk_ids: I32Array | None, *, expert_s: float
    ) -> npt.NDArray[np.bool_] | None:
        return None

    def abandon(self, ticket: str) -> None:
        self.open.remove(ticket)
        self.log.append(f"abandon {ticket}")


def micro_batch_of(hidden: Any) -> str:
    return "AB"[int(hidden[0])]


class Model:
    """Both micro-batches of a chunk, whose layers record when each reaches them."""

    def __init__(
        self, *, asks: Callable[[str, int], bool] = lambda micro_batch, layer: True
    ) -> None:
        self.asked = Asked()
        self.turns = TwoBatchOverlap(self.asked)
        self._asks = asks
        self._num_running = 0
        self._block = self.turns.overlapped(self._experts)

    def run(self) -> tuple[str, str]:
        return self.turns.run(lambda: self._forward(0), lambda: self._forward(1))

    def _experts(
        self, layer_id: int, hidden: AnyArray, topk_ids: AnyArray, topk_weights: AnyArray
    ) -> AnyArray:
        if not self._asks(micro_batch_of(hidden), layer_id):
            return EMPTY
        rows = HostHidden(hidden)
        ticket = self.turns.begin(layer_id, rows, topk_ids, topk_weights, phase=Phase.PREFILL)
        self._num_running -= 1
        try:
            sums = self.turns.finish(ticket)
        finally:
            self._num_running += 1
        assert self._num_running == 1, "both micro-batches run"
        return sums.to_host()

    def _forward(self, index: int) -> str:
        hidden: F32Array = np.array([index], np.float32)
        micro_batch = micro_batch_of(hidden)
        self._num_running += 1
        try:
            for layer_id in range(NUM_LAYERS):
                self.asked.note(f"mixer {micro_batch}{layer_id}")
                is_asking = self._asks(micro_batch, layer_id)
                self._num_running -= not is_asking
                try:
                    self._block(layer_id, hidden, EMPTY, EMPTY)
                finally:
                    self._num_running += not is_asking
            self.asked.note(f"end {micro_batch}")
        finally:
            self._num_running -= 1
        return micro_batch


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [each.name for each in threading.enumerate() if each.name == "dflash-micro-batch"] == []


def test_each_is_at_work_while_the_others_experts_are_computed() -> None:
    model = Model()
    assert model.run() == ("A", "B")
    expected = ["mixer A0", "begin A0", "mixer B0", "begin B0"]
    for layer in range(1, NUM_LAYERS):
        for micro_batch in "AB":
            expected += [
                f"finish {micro_batch}{layer - 1}",
                f"mixer {micro_batch}{layer}",
                f"begin {micro_batch}{layer}",
            ]
    last = NUM_LAYERS - 1
    assert model.asked.log == [*expected, f"finish A{last}", "end A", f"finish B{last}", "end B"]
    assert model.asked.num_looks >= 4 * NUM_LAYERS
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


PLACES = [
    f"{what} {micro_batch}{layer}"
    for what in ("mixer", "begin", "finish")
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


def test_a_micro_batch_is_not_split_again() -> None:
    turns = TwoBatchOverlap(Asked())
    with pytest.raises(RuntimeError):
        turns.run(lambda: turns.run(int, int), lambda: (0, 0))
    assert turns.run(int, int) == (0, 0)


def test_a_micro_batch_that_never_ends_is_waited_for_with_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(two_batch_overlap, "_LONGEST_TURN_S", 0.05)
    released = threading.Event()
    turns = TwoBatchOverlap(Asked())
    block = turns.overlapped(lambda *_: EMPTY)
    with pytest.raises(DeviceUnavailable):
        turns.run(lambda: block(0, EMPTY, EMPTY, EMPTY), lambda: released.wait(30))
    released.set()
    for thread in threading.enumerate():
        if thread.name == "dflash-micro-batch":
            thread.join(30)


def only_within_halves(_: int, frame: FrameType | None) -> None:
    """What an interrupt does: it may come when a test has gone on already."""
    while frame is not None:
        if frame.f_code is TwoBatchOverlap.run.__code__:
            raise KeyboardInterrupt
        frame = frame.f_back


def test_an_interrupt_waits_for_the_micro_batch_that_runs() -> None:
    """It comes to the main thread, which waits for its turn, while the other one is at work."""
    model = Model()
    check_waits(model, "mixer B1", delays_s=[0.0])
    assert "mixer A2" not in model.asked.log
    assert model.run() == ("A", "B")


def test_an_interrupt_waits_for_the_micro_batch_that_ends_last() -> None:
    """The caller's has ended and waits for the other one, which it must not leave at work."""
    check_waits(Model(), "end B", delays_s=[0.02, 0.02])


def check_waits(model: Model, at: str, *, delays_s: Sequence[float]) -> None:
    """The main thread is interrupted while the second micro-batch runs, after each delay; that one
    has gone on for a while before `run` raises."""
    note, ended = model.asked.note, []

    def interrupting(what: str) -> None:
        note(what)
        if what == at:
            for delay_s in delays_s:
                time.sleep(delay_s)
                interrupt_main_thread()
            time.sleep(0.05)
            ended.append(what)

    model.asked.note = interrupting  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        model.run()
    assert ended
    assert not model.asked.open
    model.asked.note = note  # type: ignore[method-assign]


def test_interrupts_at_any_time_leave_nothing_behind() -> None:
    """Several at once, wherever the two are; both are at an end when `run` is."""
    random = np.random.default_rng(0)
    num_interrupted = 0
    before = signal.signal(signal.SIGINT, only_within_halves)
    try:
        for _ in range(60):
            num_interrupted += is_interrupted(random.uniform(0.0, 0.006, random.integers(1, 3)))
    finally:
        signal.signal(signal.SIGINT, before)
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
    assert not model.asked.open
    assert num_notes == num_before
    return found
