"""A processor as a daemon's end of a mailbox. The parent, whom a test plays, may write anything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_adapters.spec import MoeSpec
from dflash_protocol.batch import group_by_expert
from dflash_protocol.errors import ModelFileError
from dflash_protocol.ids import F32Array, F64Array, I32Array, Phase
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import create_segment, open_segment
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import experts_kernel as k
from dflash_runtime.compute.mail_server import MailServer
from dflash_runtime.compute.mailbox_layout import (
    CHECK_FACTOR,
    LAYOUT_NUMBER,
    LINES_AT,
    Ask,
    MailState,
    MailWord,
    MailWords,
    mail_layout,
)
from dflash_runtime.compute.step_order import MOST_TOKENS
from support.expert_files import write_expert_layer
from support.processes import wait_until

E, USED, HIDDEN = 6, 3, 256
EPOCH = 70
LIMIT_MS = 400
FACTOR = np.uint32(CHECK_FACTOR)


class Parent:
    """The parent's side of a mailbox of one layer, whose rows are float32; and the server."""

    def __init__(self, folder: Path, *, limit_ms: int, num_owned: int) -> None:
        self._undo = ExitStack()
        path = folder / "m.gguf"
        layer = write_expert_layer(
            path,
            num_experts=E,
            num_experts_used=USED,
            hidden_size=HIDDEN,
            ffn_size=96,
            types=(TensorType.F32,) * 3,
        )
        backend = CpuBackend(num_threads=2)
        self._undo.callback(backend.close)
        file = GgufFile.open(path)
        self._undo.callback(file.close)
        ids = np.arange(num_owned, dtype=np.int32)
        self.bank = backend.load_experts(file, layer, ids).in_step_order()
        self._banks = {layer.layer_id: self.bank}
        self.spec, self.answering = MoeSpec((layer,)), backend.answering
        assert self.answering is not None
        mail_bytes = self.answering.num_bytes(self.spec)
        shape = RingShape(1, 1, HIDDEN, 1, mail_bytes=mail_bytes)
        self.segment = create_segment(folder, shape, generation=1)
        self._undo.callback(self.segment.close)
        self.theirs = open_segment(folder, self.segment.name, shape, generation=1)
        self._undo.callback(self.theirs.close)
        self.segment.unlink()
        self.words = MailWords(self.segment)
        self.words.write(MailWord.PARENT_LAYOUT, LAYOUT_NUMBER)
        self.words.write(MailWord.LIMIT_MS, limit_ms)
        self.check: Callable[[], object] = lambda: None
        """What the daemon calls before steps."""
        self.epoch = EPOCH

    def serve(self, banks: dict[int, CpuExpertBank] | None = None) -> MailServer | None:
        """Start the server, if it is possible."""
        assert self.answering is not None
        served = self.answering.serve(
            self.theirs,
            self.spec,
            self._banks if banks is None else banks,
            check=lambda: self.check(),
        )
        assert served is None or isinstance(served, MailServer)
        if served is not None:
            self.theirs.before_close = served.close
        return served

    def ask(self, ask: Ask, argument: int = 0) -> None:
        """Ask, and wait for the answer."""
        self.words.ask(ask, argument)
        self.words.await_answer(10.0, lambda: True)

    def send(self, ids: I32Array, weights: F32Array, rows: F32Array) -> None:
        """Write a request of the next epoch. Shapes: ids, weights [T, K]; rows [T, H]."""
        pairs = np.stack([ids.view(np.uint32), weights.view(np.uint32)], axis=2)
        data = np.concatenate([pairs.ravel(), rows.view(np.uint32).ravel()])
        checks = np.uint32(self.epoch + 1) ^ data * FACTOR
        self.segment.write_mail(LINES_AT, np.stack([data, checks], axis=1).tobytes())

    def reply(self, num_tokens: int = 1) -> F64Array | None:
        """The reply of the next epoch, or None. Shapes: result [T, H]."""
        at, size = mail_layout(self.spec).replies_at, 16 * num_tokens * HIDDEN
        halves = np.frombuffer(self.segment.read_mail(at, size), np.uint32).reshape(-1, 2)
        if not (halves[:, 1] == (np.uint32(self.epoch + 1) ^ halves[:, 0] * FACTOR)).all():
            return None
        sums: F64Array = np.ascontiguousarray(halves[:, 0]).view(np.float64)
        return sums.reshape(num_tokens, HIDDEN)

    def expected(self, ids: I32Array, weights: F32Array, rows: F32Array) -> F64Array:
        """The sums of the pairs that the daemon has experts for."""
        is_asked = (ids >= 0) & (ids < self.bank.num_experts)
        tokens = np.broadcast_to(np.arange(len(ids), dtype=np.int32)[:, None], ids.shape)
        step = group_by_expert(
            rows, tokens[is_asked], ids[is_asked], weights=weights[is_asked], phase=Phase.VERIFY
        )
        out = np.zeros(rows.shape)
        self.bank.accumulate(step, out)
        return out

    @property
    def state(self) -> int:
        return self.words.read(MailWord.STATE)

    def close(self) -> None:
        self._undo.close()


@contextmanager
def parent_of(folder: Path, *, limit_ms: int = 20_000, num_owned: int = E) -> Iterator[Parent]:
    parent = Parent(folder, limit_ms=limit_ms, num_owned=num_owned)
    try:
        yield parent
    finally:
        parent.close()
        assert not mail_threads()


def mail_threads() -> list[threading.Thread]:
    names = ("dflash-mail", "dflash-mailbox")
    return [each for each in threading.enumerate() if each.name in names]


@contextmanager
def asking(folder: Path, **options: int) -> Iterator[Parent]:
    """One whose daemon is ready, with the next epoch agreed on."""
    with parent_of(folder, **options) as parent:
        assert parent.serve() is not None
        wait_until(lambda: parent.state == MailState.READY, "the mailbox")
        parent.ask(Ask.EPOCH, parent.epoch)
        yield parent


def request(seed: int, num_tokens: int = 1) -> tuple[I32Array, F32Array, F32Array]:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(E)[:USED] for _ in range(num_tokens)]).astype(np.int32)
    rows = rng.standard_normal((num_tokens, HIDDEN)).astype(np.float32)
    return ids, rng.random(ids.shape, np.float32), rows


def test_steps_are_answered_with_the_sums_of_the_bank(tmp_path: Path) -> None:
    with asking(tmp_path) as parent:
        for seed, num_tokens in enumerate((1, 1, MOST_TOKENS, 1)):
            if num_tokens > 1:
                parent.ask(Ask.SIZE, num_tokens)
            asked = request(seed, num_tokens)
            parent.words.ask(Ask.STEP, num_tokens)
            parent.send(*asked)
            wait_until(lambda size=num_tokens: parent.reply(size) is not None, "the reply")
            np.testing.assert_array_equal(parent.reply(num_tokens), parent.expected(*asked))
            parent.epoch += 1
        assert parent.words.read(MailWord.DAEMON_ABORT) == 0


@pytest.mark.parametrize("wrong", [E - 1, E, 1 << 24, (1 << 30) - 1, -1, -(1 << 29)])
def test_ids_that_are_no_expert_of_the_daemon_are_left_out(tmp_path: Path, wrong: int) -> None:
    with asking(tmp_path, num_owned=E - 1) as parent:
        ids, weights, rows = request(3)
        ids[:] = 0, wrong, 0  # and one of them twice
        parent.words.ask(Ask.STEP, 1)
        parent.send(ids, weights, rows)
        wait_until(lambda: parent.reply() is not None, "the reply")
        np.testing.assert_array_equal(parent.reply(), parent.expected(ids, weights, rows))


def test_any_words_are_survived(tmp_path: Path) -> None:
    """Lines whose checks are right, with ids, weights, and rows of random bits."""
    with asking(tmp_path) as parent:
        rng = np.random.default_rng(5)
        parent.ask(Ask.SIZE, MOST_TOKENS)
        for _ in range(20):
            ids, weights, rows = request(1, MOST_TOKENS)
            for each in (ids, weights, rows):
                each.view(np.uint8).ravel()[:] = rng.integers(0, 256, each.nbytes, np.uint8)
            ids[:, 0] %= E
            parent.words.ask(Ask.STEP, MOST_TOKENS)
            parent.send(ids, weights, rows)
            number = parent.words.read(MailWord.DOORBELL)
            wait_until(lambda n=number: parent.words.read(MailWord.ANSWERS) == n, "the step")
            parent.epoch += 1
            parent.ask(Ask.EPOCH, parent.epoch)
        asked = request(2)
        parent.words.ask(Ask.STEP, 1)
        parent.send(*asked)
        wait_until(lambda: parent.reply() is not None, "the reply")
        np.testing.assert_array_equal(parent.reply(), parent.expected(*asked))


def test_a_step_without_a_request_ends_at_its_limit_and_the_next_one_is_served(
    tmp_path: Path,
) -> None:
    with asking(tmp_path, limit_ms=LIMIT_MS) as parent:
        parent.words.ask(Ask.STEP, 1)
        began_s = time.monotonic()
        wait_until(lambda: parent.words.read(MailWord.DAEMON_ABORT) != 0, "the limit")
        assert parent.words.read(MailWord.DAEMON_ABORT) == EPOCH + 1
        assert time.monotonic() - began_s >= 1.4e-3 * LIMIT_MS
        parent.epoch += 64
        parent.ask(Ask.EPOCH, parent.epoch)
        assert parent.words.read(MailWord.DAEMON_ABORT) == 0
        asked = request(4)
        parent.words.ask(Ask.STEP, 1)
        parent.send(*asked)
        wait_until(lambda: parent.reply() is not None, "the reply")


def test_a_step_that_the_parent_aborts_ends_at_once(tmp_path: Path) -> None:
    with asking(tmp_path) as parent:
        parent.ask(Ask.STEP, 1)  # it has begun
        parent.words.write(MailWord.PARENT_ABORT, EPOCH + 1)
        wait_until(lambda: parent.words.read(MailWord.DAEMON_ABORT) != 0, "the step's end")
        parent.epoch += 64
        parent.ask(Ask.EPOCH, parent.epoch)
        parent.words.write(MailWord.PARENT_ABORT, 0)
        asked = request(4)
        parent.words.ask(Ask.STEP, 1)
        parent.send(*asked)
        wait_until(lambda: parent.reply() is not None, "the reply")


@pytest.mark.parametrize(
    ("ask", "argument"),
    [
        (Ask.STEP, 0),
        (Ask.STEP, 2),
        (Ask.STEP, 1 << 31),
        (Ask.SIZE, 0),
        (Ask.SIZE, MOST_TOKENS + 1),
        (Ask.PEER_EPOCH, 9),
        (Ask.PEERS, 0),
        (Ask.ECHO, 3),
    ],
)
def test_what_a_processor_does_not_do_ends_the_mailbox(
    tmp_path: Path, ask: Ask, argument: int
) -> None:
    with asking(tmp_path) as parent:
        parent.words.ask(ask, argument)
        wait_until(lambda: parent.state == MailState.FAILED, "the mailbox's end")
        assert parent.words.read(MailWord.DAEMON_ABORT)
        wait_until(lambda: not mail_threads(), "the threads' end")


def test_a_doorbell_that_jumps_ends_the_mailbox(tmp_path: Path) -> None:
    with asking(tmp_path) as parent:
        parent.words.write(MailWord.ASKED, Ask.STEP)
        parent.words.write(MailWord.DOORBELL, 1 << 30)
        parent.segment.ring_mail()
        wait_until(lambda: parent.state == MailState.FAILED, "the mailbox's end")


def test_a_parent_of_another_layout_gets_none(tmp_path: Path) -> None:
    with parent_of(tmp_path) as parent:
        parent.words.write(MailWord.PARENT_LAYOUT, LAYOUT_NUMBER + 1)
        parent.serve()
        wait_until(lambda: parent.state == MailState.FAILED, "the mailbox's end")


def test_a_file_that_was_written_to_ends_the_mailbox(tmp_path: Path) -> None:
    def written() -> None:
        raise ModelFileError("the file was written to", path=tmp_path / "m.gguf")

    with asking(tmp_path) as parent:
        parent.check = written
        asked = request(1)
        parent.words.ask(Ask.STEP, 1)
        parent.send(*asked)
        wait_until(lambda: parent.state == MailState.FAILED, "the mailbox's end")
        assert parent.reply() is None


def test_memory_is_not_used_any_more_once_it_is_closed(tmp_path: Path) -> None:
    """Within a step that waits."""
    with asking(tmp_path) as parent:
        parent.words.ask(Ask.STEP, 1)
        began_s = time.monotonic()
        parent.theirs.close()
        assert not mail_threads()
        assert time.monotonic() - began_s < 5.0
        assert parent.state == MailState.FAILED


def test_experts_that_have_no_place_in_memory_are_not_served(tmp_path: Path) -> None:
    with parent_of(tmp_path) as parent:
        assert parent.serve({}) is None
        parent.bank.words[k.ARENA] = 1
        assert parent.serve() is None
        parent.bank.words[k.ARENA] = 0


def test_a_daemon_that_is_not_asked_sleeps(tmp_path: Path) -> None:
    with asking(tmp_path) as parent:
        asked = request(1)
        parent.words.ask(Ask.STEP, 1)
        parent.send(*asked)
        wait_until(lambda: parent.reply() is not None, "the reply")
        time.sleep(0.2)
        before_s, wall_s = time.process_time(), time.monotonic()
        time.sleep(2.0)
        used = (time.process_time() - before_s) / (time.monotonic() - wall_s)
        assert used <= 0.02
