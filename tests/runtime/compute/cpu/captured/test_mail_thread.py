"""The thread that answers a device's requests: a test plays the device, line by line."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_adapters.spec import MoeLayer
from dflash_protocol.batch import group_by_expert
from dflash_protocol.ids import AnyArray, F32Array, F64Array, I32Array, I64Array, Phase
from dflash_protocol.numeric_class import in_step_order
from dflash_runtime.compute.asking import OwnerTotals
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.captured.mail_thread import MailedLayer, MailThread
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import mail_tasks
from dflash_runtime.compute.mailbox_layout import CHECK_FACTOR, num_request_lines, part_words
from dflash_runtime.compute.step_order import GRANULE, padded_columns
from support.expert_files import write_expert_layer
from support.processes import wait_until

E, USED, HIDDEN, FFN = 6, 3, 256, 96
MOST_TOKENS = 5
FACTOR = np.uint32(CHECK_FACTOR)
ROUNDS = np.uint32(1 << 30)

Q8, F32, BF16 = TensorType.Q8_0, TensorType.F32, TensorType.BF16
TYPES = {
    "bytes": (Q8, Q8, Q8),
    "floats": (F32, F32, F32),
    "both": (Q8, BF16, Q8),
}


@pytest.fixture(scope="module")
def backend() -> Iterator[CpuBackend]:
    backend = CpuBackend(num_threads=2)
    yield backend
    backend.close()


def halves_of(words: AnyArray, epoch: int) -> I64Array:
    """Halves of lines. Shapes: words and result [N]."""
    data = words.reshape(-1).view(np.uint32)
    halves = np.stack([data, np.uint32(epoch) ^ data * FACTOR], axis=1)
    found: I64Array = halves.reshape(-1).view(np.int64)
    return found


def parts_of(rows: F32Array, layer: MoeLayer) -> list[AnyArray]:
    """A request's rows as a device quantises them. Shapes: rows [T, H]."""
    as_bytes, _, as_floats = part_words(layer)
    parts: list[AnyArray] = []
    if as_bytes:
        columns = padded_columns(layer.hidden_size)
        granules = np.zeros((len(rows), columns // GRANULE, GRANULE), np.float32)
        granules.reshape(len(rows), -1)[:, : layer.hidden_size] = rows
        largest = np.abs(granules).max(axis=2, keepdims=True)
        with np.errstate(divide="ignore"):
            inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
        quants = np.rint(granules * inverse).astype(np.int8)
        scales = largest[:, :, 0] / np.float32(127)
        sums = scales * quants.sum(axis=2).astype(np.float32)
        parts = [quants, np.stack([scales, sums], axis=2).astype(np.float32)]
    return [*parts, rows] if as_floats else parts


class Rig:
    """Two layers, the first of them in the middle of a model, the lines, and the thread."""

    def __init__(
        self,
        backend: CpuBackend,
        path: Path,
        types: str,
        *,
        limit_s: float,
        leaves_second: bool = False,
    ) -> None:
        self.layer = write_expert_layer(
            path,
            num_experts=E,
            num_experts_used=USED,
            hidden_size=HIDDEN,
            ffn_size=FFN,
            types=TYPES[types],
        )
        self.file = GgufFile.open(path)
        loaded = backend.load_experts(self.file, self.layer, np.arange(E, dtype=np.int32))
        bank = backend.bank_beside(in_step_order(""), loaded)
        assert isinstance(bank, CpuExpertBank)
        self.bank = bank
        num_lines = num_request_lines(self.layer, MOST_TOKENS)
        self.requests = np.zeros((2, 2 * num_lines), np.int64)
        """Halves of lines."""
        self.replies = np.zeros((2, 2 * MOST_TOKENS * HIDDEN), np.int64)
        self.aborts = np.zeros((2, 8), np.int64)
        """Of the thread, and of the device."""
        self.epoch = 7
        places = zip(self.requests, self.replies, strict=True)
        self.thread = MailThread(
            [
                MailedLayer(
                    bank, request.ctypes.data, reply.ctypes.data, leaves_second=leaves_second
                )
                for request, reply in places
            ],
            bank.workers,
            own_abort=int(self.aborts[0].ctypes.data),
            other_abort=int(self.aborts[1].ctypes.data),
            limit_s=limit_s,
            lines=(self.requests, self.replies, self.aborts),
        )
        assert self.thread.restart(self.epoch)

    def ask(self, num_tokens: int = 1) -> None:
        self.thread.prepare(num_tokens)
        self.thread.ask(num_tokens)

    def is_done(self) -> bool:
        """Whether all steps are."""
        words = self.thread._words
        return bool(words[mail_tasks.ASKED] == words[mail_tasks.DONE])

    def lines(self, ids: I32Array, weights: F32Array, rows: F32Array, **how: bool) -> I64Array:
        """A request of the next epoch. Shapes: ids, weights [T, K]; rows [T, H]."""
        asked = ids.astype(np.uint32) ^ (ROUNDS if how.get("rounds") else np.uint32(0))
        pairs = np.stack([asked, weights.view(np.uint32)], axis=2)
        return np.concatenate(
            [halves_of(each, self.epoch + 1) for each in (pairs, *parts_of(rows, self.layer))]
        )

    def expected(self, ids: I32Array, weights: F32Array, rows: F32Array) -> F64Array:
        is_asked = ids >= 0
        tokens = np.broadcast_to(np.arange(len(ids), dtype=np.int32)[:, None], ids.shape)
        step = group_by_expert(
            rows, tokens[is_asked], ids[is_asked], weights=weights[is_asked], phase=Phase.VERIFY
        )
        out = np.zeros(rows.shape)
        self.bank.accumulate(step, out)
        return out

    def reply(self, index: int, num_tokens: int = 1) -> F64Array | None:
        """The sums in a layer's reply of the next epoch, or None."""
        halves = self.replies[index][: 2 * num_tokens * HIDDEN].view(np.uint32).reshape(-1, 2)
        if not (halves[:, 1] == (np.uint32(self.epoch + 1) ^ halves[:, 0] * FACTOR)).all():
            return None
        found: F64Array = np.ascontiguousarray(halves[:, 0]).view(np.float64)
        return found.reshape(num_tokens, HIDDEN)

    def close(self) -> None:
        self.thread.close()
        self.file.close()


@contextmanager
def opened(
    backend: CpuBackend,
    folder: Path,
    types: str = "bytes",
    *,
    limit_s: float = 30.0,
    leaves_second: bool = False,
) -> Iterator[Rig]:
    path = folder / f"{types}.gguf"
    rig = Rig(backend, path, types, limit_s=limit_s, leaves_second=leaves_second)
    try:
        yield rig
    finally:
        rig.close()


def step_of(
    seed: int, num_tokens: int = 1, *, share: float = 0.6
) -> tuple[I32Array, F32Array, F32Array]:
    """Ids, of which a share is asked for, weights and rows."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(E)[:USED] for _ in range(num_tokens)]).astype(np.int32)
    ids[rng.random(ids.shape) > share] = -1
    rows = rng.standard_normal((num_tokens, HIDDEN)) * 10.0 ** rng.integers(-3, 3, HIDDEN)
    rows[:, 32:64] = 0
    return ids, rng.random(ids.shape, np.float32), rows.astype(np.float32)


def send(into: I64Array, lines: I64Array) -> None:
    into[: lines.size] = lines


@pytest.mark.parametrize("types", TYPES)
def test_sums_are_those_of_the_bank(backend: CpuBackend, tmp_path: Path, types: str) -> None:
    with opened(backend, tmp_path, types) as rig:
        for seed, num_tokens in enumerate([1, 1, MOST_TOKENS, 2, 1]):
            steps = [
                step_of(10 * seed + index, num_tokens, share=1 - 0.5 * index) for index in (0, 1)
            ]
            rig.ask(num_tokens)
            for index, step in enumerate(steps):
                send(rig.requests[index], rig.lines(*step))
            wait_until(rig.is_done, "the step")
            for index, step in enumerate(steps):
                found = rig.reply(index, num_tokens)
                assert found is not None
                np.testing.assert_array_equal(found, rig.expected(*step))
            rig.epoch += 1
        assert not rig.aborts.any()


def test_pairs_of_the_second_expert_are_left_to_the_device(
    backend: CpuBackend, tmp_path: Path
) -> None:
    """Of all tokens; their weights are not waited for."""
    steps: list[tuple[list[list[int]], int]] = [
        ([[4, -1, 1]], 1),
        ([[-1, 2, -1]], -1),
        ([[3, -1, -1], [-1, 3, -1], [5, 3, 0], [0, 5, 1], [2, -1, 5]], 5),
        ([[0, -1, -1], [0, -1, -1]], -1),
        ([[-1, -1, -1], [2, 0, 1], [1, 0, 2]], 0),
    ]
    with opened(backend, tmp_path, leaves_second=True) as rig:
        for number, (chosen, second) in enumerate(steps):
            ids, (_, weights, rows) = np.array(chosen, np.int32), step_of(number, len(chosen))
            is_left = ids == second if second >= 0 else np.zeros(ids.shape, np.bool_)
            lines = rig.lines(ids, weights, rows)
            lines[1 : 2 * ids.size : 2][is_left.ravel()] = 0
            rig.ask(len(chosen))
            for request in rig.requests:
                send(request, lines)
            wait_until(rig.is_done, "the step")
            expected = rig.expected(np.where(is_left, -1, ids), weights, rows)
            for index in range(len(rig.requests)):
                found = rig.reply(index, len(chosen))
                assert found is not None
                np.testing.assert_array_equal(found, expected)
            rig.epoch += 1
        num_pairs = sum(int((np.array(ids) >= 0).sum()) for ids, _ in steps)
        _, totals = rig.thread.take_totals()
        assert totals.num_pairs == 2 * (num_pairs - 1 - 3 - 2)


def test_only_the_last_layer_answers_where_nothing_is_asked(
    backend: CpuBackend, tmp_path: Path
) -> None:
    with opened(backend, tmp_path) as rig:
        ids, weights, rows = step_of(1, share=0)
        rig.ask()
        for request in rig.requests:
            send(request, rig.lines(ids, weights, rows)[: 2 * USED])  # and no rows
        wait_until(rig.is_done, "the step")
        assert not rig.replies[0].any()
        found = rig.reply(1)
        assert found is not None
        assert not found.any()
        assert rig.thread.take_totals() == (2, OwnerTotals(0, 0, 0.0))


def test_totals_are_of_what_was_computed(backend: CpuBackend, tmp_path: Path) -> None:
    with opened(backend, tmp_path) as rig:
        asked, unasked = step_of(1, 2, share=1), step_of(2, 2, share=0)
        rig.ask(2)
        send(rig.requests[0], rig.lines(*unasked))
        send(rig.requests[1], rig.lines(*asked))
        wait_until(rig.is_done, "the step")
        num_layers, totals = rig.thread.take_totals()
        assert (num_layers, totals.num_requests, totals.num_pairs) == (2, 1, 2 * USED)
        assert 0 < totals.compute_s < 5
        assert rig.thread.take_totals() == (0, OwnerTotals(0, 0, 0.0))


def test_a_reply_that_may_be_rounded_is(backend: CpuBackend, tmp_path: Path) -> None:
    with opened(backend, tmp_path) as rig:
        step = step_of(3, share=1)
        rig.ask()
        for request in rig.requests:
            send(request, rig.lines(*step, rounds=True))
        wait_until(rig.is_done, "the step")
        halves = rig.replies[0][:HIDDEN].view(np.uint32).reshape(-1, 2)
        epoch = ~np.uint32(rig.epoch + 1)
        np.testing.assert_array_equal(halves[:, 1], epoch ^ halves[:, 0] * FACTOR)
        found = np.ascontiguousarray(halves[:, 0]).view(np.float32)
        np.testing.assert_array_equal(found, rig.expected(*step)[0].astype(np.float32))


@pytest.mark.parametrize("types", TYPES)
def test_halves_of_lines_arrive_in_any_order(
    backend: CpuBackend, tmp_path: Path, types: str
) -> None:
    """Some of them damaged at first: another step's, or a word beside another's check."""
    with opened(backend, tmp_path, types) as rig:
        for seed in range(6):
            rng = np.random.default_rng(seed)
            steps = [step_of(20 + seed, 2, share=0.8), step_of(30 + seed, 2, share=0.8)]
            rig.ask(2)
            for request, step in zip(rig.requests, steps, strict=True):
                lines = rig.lines(*step)
                for place in rng.permutation(lines.size).tolist():
                    if rng.random() < 0.1:
                        request[place] = lines[place] ^ (1 << int(rng.integers(63)))
                    if rng.random() < 0.02:
                        time.sleep(1e-4)
                    request[place] = lines[place]
            wait_until(rig.is_done, "the step")
            for index, step in enumerate(steps):
                found = rig.reply(index, 2)
                assert found is not None
                np.testing.assert_array_equal(found, rig.expected(*step))
            rig.epoch += 1


def test_steps_may_be_asked_for_ahead(backend: CpuBackend, tmp_path: Path) -> None:
    with opened(backend, tmp_path) as rig:
        for _ in range(3):
            rig.ask()
        for seed in range(3):
            step = step_of(seed, share=1)
            for index, request in enumerate(rig.requests):
                send(request, rig.lines(*step))
                wait_until(lambda place=index: rig.reply(place) is not None, "the reply")
                np.testing.assert_array_equal(rig.reply(index), rig.expected(*step))
            rig.epoch += 1
        wait_until(rig.is_done, "the steps")


Fault = Callable[[Rig], None]


def _device_aborts(rig: Rig) -> None:
    rig.aborts[1][0] = rig.epoch + 1


def _nothing_comes(rig: Rig) -> None:
    """The limit passes."""


@pytest.mark.parametrize("fault", [_device_aborts, _nothing_comes])
@pytest.mark.parametrize("sent", ["nothing", "some of the choice", "some of the rows"])
def test_a_step_that_fails_leaves_out_the_rest_until_a_restart(
    backend: CpuBackend, tmp_path: Path, fault: Fault, sent: str
) -> None:
    with opened(backend, tmp_path, limit_s=0.1 if fault is _nothing_comes else 30.0) as rig:
        step = step_of(5, share=1)
        lines = rig.lines(*step)
        num_sent = {"nothing": 0, "some of the choice": 3, "some of the rows": 2 * USED + 9}[sent]
        rig.ask()
        send(rig.requests[0], lines[:num_sent])
        time.sleep(0.02)
        fault(rig)
        wait_until(rig.is_done, "the step", within_s=5.0)
        assert rig.aborts[0][0] == rig.epoch + 1
        assert not rig.replies.any()
        rig.ask()  # it was asked for before the device knew
        wait_until(rig.is_done, "the next step", within_s=5.0)
        assert not rig.replies.any()
        rig.thread._words[mail_tasks.LIMIT_NS] = 30 * 10**9  # of a busy machine
        rig.epoch += 64
        assert rig.thread.restart(rig.epoch)
        rig.aborts[:] = 0
        rig.ask()
        for index, request in enumerate(rig.requests):
            send(request, rig.lines(*step))
            wait_until(lambda place=index: rig.reply(place) is not None, "the reply")
            np.testing.assert_array_equal(rig.reply(index), rig.expected(*step))


def test_closing_ends_a_step_and_the_thread(backend: CpuBackend, tmp_path: Path) -> None:
    for is_asked in (False, True):
        with opened(backend, tmp_path) as rig:
            if is_asked:
                rig.ask()
            threads: Sequence[threading.Thread] = threading.enumerate()
            [thread] = [each for each in threads if each.name == "dflash-mail"]
            rig.thread.close()  # waits for some seconds at most
            assert not thread.is_alive()


def test_a_thread_that_is_dropped_ends(backend: CpuBackend, tmp_path: Path) -> None:
    rig = Rig(backend, tmp_path / "m.gguf", "bytes", limit_s=30.0)
    rig.ask()
    [thread] = [each for each in threading.enumerate() if each.name == "dflash-mail"]
    rig.file.close()
    del rig
    gc.collect()
    assert not thread.is_alive()


def test_a_step_that_is_being_served_delays_a_restart(
    backend: CpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(backend, tmp_path) as rig:
        monkeypatch.setattr("dflash_runtime.compute.cpu.captured.mail_thread._TIMEOUT_S", 0.1)
        rig.ask()
        assert not rig.thread.restart(100)
        _device_aborts(rig)
        wait_until(lambda: rig.thread.restart(100), "the step to end", within_s=5.0)


def test_an_idle_thread_sleeps(backend: CpuBackend, tmp_path: Path) -> None:
    with opened(backend, tmp_path) as rig:
        step = step_of(5, share=1)
        rig.ask()
        for request in rig.requests:
            send(request, rig.lines(*step))
        wait_until(rig.is_done, "the step")
        time.sleep(0.1)
        before_s = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before_s < 0.05
