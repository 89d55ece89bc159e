"""Requests that compiled code serves: the same answers and refusals as by Python, and no delay of
what only Python does."""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_daemon.service import ComputeService
from dflash_protocol.batch import RoutedBatch
from dflash_protocol.endpoint import IpcClaim, parse_endpoint
from dflash_protocol.errors import DeadlineExceeded, ModelFileError, ProtocolError
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.payloads import PayloadType
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import create_segment, open_segment
from dflash_protocol.transports.shared_client import SharedClient
from dflash_protocol.transports.zmq_stream import StreamClient
from dflash_protocol.wire.requests import largest_frame_bytes
from dflash_protocol.wire.transport import LinkLimits
from dflash_runtime.compute import ExpertBank
from dflash_runtime.compute.cpu import CpuBackend
from support.called_back import called_back
from support.expert_files import write_expert_layer
from support.routed_batches import (
    HIDDEN_SIZE,
    ScalingBank,
    batch_of,
    moe_layer,
    naive_sums,
    numbered_rows,
)

TIMEOUT_S = 20.0
CAPACITY, NUM_SLOTS, MAX_EXPERTS_USED = 64, 2, 5
PAIRS = {(0, 1): 0.5, (2, 1): 0.25, (2, 4): -1.0}
EXPECTED = naive_sums(numbered_rows(3), PAIRS)
LAYER_ID = 3


class GatedBank(ScalingBank):
    """Computes while its gate is open."""

    def __init__(self) -> None:
        super().__init__(moe_layer())
        self.gate = threading.Event()
        self.gate.set()
        self.has_entered = threading.Event()
        self.failure: Exception | None = None

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        self.has_entered.set()
        assert self.gate.wait(TIMEOUT_S)
        if self.failure is not None:
            raise self.failure
        super().accumulate(batch, out)


class Rig:
    """A service of one bank, and clients with rings."""

    def __init__(
        self,
        undo: ExitStack,
        folder: Path,
        bank: ExpertBank,
        compile_banks: Any = called_back,
        check_file: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.undo, self._folder, self.bank = undo, folder, bank
        self.hidden_size = bank.layer.hidden_size
        endpoint = parse_endpoint(f"ipc://{folder}/cpu0")
        undo.callback(IpcClaim(endpoint).close)
        self.context = undo.enter_context(zmq.Context())
        self.address = endpoint.data_address(0)
        self.max_frame_bytes = largest_frame_bytes(
            max_tokens=CAPACITY,
            hidden_size=self.hidden_size,
            max_pairs=CAPACITY * MAX_EXPERTS_USED,
        )
        self.service = ComputeService(
            self.context,
            self.address,
            max_frame_bytes=self.max_frame_bytes,
            shares_memory=True,
            spin_s=1e-3,
            check_file=check_file,
            compile_banks=compile_banks,
        )
        self.service.start()
        undo.callback(self.service.close)
        self.never_lost = os.eventfd(0, os.EFD_CLOEXEC)
        undo.callback(os.close, self.never_lost)

    @property
    def num_answered(self) -> int:
        """Requests that were answered without Python."""
        rings = self.service._servers._rings
        assert rings is not None
        return rings.num_answered

    def client(
        self, link_id: str | None = None, payload: PayloadType = PayloadType.F32
    ) -> SharedClient:
        link_id = link_id or secrets.token_hex(8)
        limits = LinkLimits(self.hidden_size, CAPACITY, MAX_EXPERTS_USED, payload=payload)
        self.service.add_link(link_id, limits, {LAYER_ID: self.bank})
        shape = RingShape(NUM_SLOTS, CAPACITY, self.hidden_size, CAPACITY * MAX_EXPERTS_USED)
        segment = create_segment(self._folder, shape, generation=7)
        opened = open_segment(self._folder, segment.name, shape, generation=7)
        segment.unlink()
        client = SharedClient(
            segment, lost_fd=self.never_lost, lost_reason=lambda: "", payload=payload
        )
        self.undo.callback(client.close)
        self.service.attach(link_id, opened)
        return client

    def socket_client(self) -> StreamClient:
        link_id = secrets.token_hex(8)
        limits = LinkLimits(self.hidden_size, CAPACITY, MAX_EXPERTS_USED)
        self.service.add_link(link_id, limits, {LAYER_ID: self.bank})
        client = StreamClient(
            self.context,
            self.address,
            link_id,
            hidden_size=self.hidden_size,
            max_frame_bytes=self.max_frame_bytes,
            lost_fd=self.never_lost,
            lost_reason=lambda: "",
        )
        self.undo.callback(client.close)
        return client


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def bank(undo: ExitStack) -> GatedBank:
    bank = GatedBank()
    undo.callback(bank.gate.set)
    return bank


@pytest.fixture
def rig(undo: ExitStack, run_dir: Path, bank: GatedBank) -> Rig:
    return Rig(undo, run_dir, bank)


def send(
    client: SharedClient | StreamClient,
    batch: RoutedBatch | None = None,
    *,
    layer_id: int = LAYER_ID,
    deadline_s: float = TIMEOUT_S,
) -> int:
    return client.submit(layer_id, batch or batch_of(3, PAIRS), deadline_s=deadline_s)


def assert_serves(client: SharedClient | StreamClient) -> None:
    reply = client.wait(send(client), deadline_s=TIMEOUT_S)
    np.testing.assert_array_equal(reply.sums, EXPECTED)
    assert reply.compute_s >= 0.0
    assert reply.queue_s >= 0.0


def refusal(client: SharedClient, sequence: int) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        client.wait(sequence, deadline_s=TIMEOUT_S)
    return caught.value


class Traffic:
    """A client in a thread of its own that asks again and again, until closed."""

    def __init__(self, rig: Rig) -> None:
        client = rig.client()
        self.num_served = 0
        self.failures: list[Exception] = []
        self._client, self._stop = client, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        rig.undo.callback(self.close)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                reply = self._client.wait(send(self._client), deadline_s=1.0)
                np.testing.assert_array_equal(reply.sums, EXPECTED)
                self.num_served += 1
        except Exception as error:
            self.failures.append(error)

    def wait_for(self, num_more: int) -> None:
        end_s, wanted = time.monotonic() + TIMEOUT_S, self.num_served + num_more
        while self.num_served < wanted:
            assert not self.failures
            assert time.monotonic() < end_s
            time.sleep(1e-3)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_S)


def test_requests_are_answered_without_python(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    client = rig.client()
    assert_serves(client)  # the first one has the file checked
    served = []
    monkeypatch.setattr(ComputeService, "_serve", lambda *request: served.append(request))
    before = rig.num_answered
    for _ in range(50):
        assert_serves(client)
    assert not served
    assert rig.num_answered == before + 50


@pytest.mark.parametrize("types", [(TensorType.Q4_K, TensorType.Q4_K, TensorType.Q6_K)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_banks_of_the_cpu_give_the_same_bits(
    undo: ExitStack, run_dir: Path, tmp_path: Path, types: Any, num_threads: int
) -> None:
    path = tmp_path / "layer.gguf"
    layer = write_expert_layer(
        path, num_experts=6, num_experts_used=3, hidden_size=256, ffn_size=512, types=types
    )
    backend = CpuBackend(num_threads=num_threads)
    undo.callback(backend.close)
    file = GgufFile.open(path)
    undo.callback(file.close)
    bank = backend.load_experts(file, layer, np.array([4, 0, 3, 5], np.int32))
    rig = Rig(undo, run_dir, bank, backend.compile_banks)
    client = rig.client()
    random = np.random.default_rng(1)
    for num_tokens in (1, 1, 8, 2, 32, 33, 1):
        hidden = random.standard_normal((num_tokens, 256)).astype(np.float32)
        pairs = {
            (token, int(expert)): 0.25 * (1 + int(expert))
            for token in range(num_tokens)
            for expert in random.permutation(4)[: int(random.integers(0, 4))]
        }
        batch = batch_of(num_tokens, pairs, hidden=hidden, phase=Phase.DECODE)
        expected = np.zeros((num_tokens, 256))
        bank.accumulate(batch, expected)
        reply = client.wait(send(client, batch), deadline_s=TIMEOUT_S)
        np.testing.assert_array_equal(reply.sums, expected, strict=True)
    assert rig.num_answered == 5  # not the first, which has the file checked, nor the large one


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("expert_ids", [1, 5], "expert ids"),
        ("expert_ids", [-1, 4], "expert ids"),
        ("token_indices", [0, 3, 2], "token indices"),
        ("token_indices", [2, 0, 2], "token indices"),
        ("group_starts", [0, 2, 4], "group_starts"),
        ("group_starts", [0, -2, 3], "group_starts"),
    ],
)
def test_an_invalid_request_is_refused_before_it_is_computed_and_the_next_is_served(
    rig: Rig, bank: GatedBank, name: str, values: list[int], reason: str
) -> None:
    client = rig.client()
    assert_serves(client)
    bank.has_entered.clear()
    changes: dict[str, Any] = {name: np.array(values, dtype=np.int32)}
    error = refusal(client, send(client, replace(batch_of(3, PAIRS), **changes)))
    assert error.code == "malformed"
    assert reason in str(error)
    assert not bank.has_entered.is_set()
    assert_serves(client)


def test_layers_that_are_not_here_are_refused(rig: Rig) -> None:
    client = rig.client()
    for layer_id in (0, LAYER_ID + 1, 1 << 40):
        assert refusal(client, send(client, layer_id=layer_id)).code == "not_owned"
        assert_serves(client)


def test_late_requests_are_dropped_and_counted(rig: Rig, bank: GatedBank) -> None:
    client = rig.client()
    assert_serves(client)
    bank.gate.clear()
    bank.has_entered.clear()
    running = send(client)
    assert bank.has_entered.wait(TIMEOUT_S)
    first_s, second_s = rig.service.busy_s, rig.service.busy_s
    assert 0.0 < first_s < second_s
    late = send(client, deadline_s=0.05)
    time.sleep(0.15)
    bank.gate.set()
    client.wait(running, deadline_s=TIMEOUT_S)
    assert refusal(client, late).code == "late"
    assert rig.service.num_late == 1
    assert_serves(client)
    assert rig.service.busy_s == 0.0


def test_a_failing_bank_is_an_internal_error(rig: Rig, bank: GatedBank) -> None:
    client = rig.client()
    assert_serves(client)
    bank.failure = RuntimeError("secret detail")
    error = refusal(client, send(client))
    assert error.code == "internal"
    assert "secret" not in str(error)
    bank.failure = None
    assert_serves(client)


def test_a_link_that_is_dropped_while_its_request_waits_gets_no_answer(
    rig: Rig, bank: GatedBank
) -> None:
    first, second = rig.client("aa" * 8), rig.client("bb" * 8)
    assert_serves(first)
    assert_serves(second)
    bank.gate.clear()
    bank.has_entered.clear()
    running = send(first)
    assert bank.has_entered.wait(TIMEOUT_S)
    waiting = send(second)
    rig.service.drop_link("bb" * 8)
    bank.gate.set()
    first.wait(running, deadline_s=TIMEOUT_S)
    with pytest.raises(DeadlineExceeded):
        second.wait(waiting, deadline_s=0.2)
    assert_serves(first)
    assert rig.service.num_links == 1


def test_links_come_and_go_and_change_their_experts_under_traffic(rig: Rig) -> None:
    traffic = Traffic(rig)
    traffic.wait_for(100)
    client = rig.client("aa" * 8)
    assert_serves(client)
    limits = rig.service.limits_of("aa" * 8)
    assert limits is not None
    fewer = ScalingBank(moe_layer(), [4, 1])
    rig.service.add_link("aa" * 8, limits, {LAYER_ID: fewer})
    for _ in range(2):
        reply = client.wait(send(client, batch_of(3, {(1, 0): 1.0})), deadline_s=TIMEOUT_S)
        np.testing.assert_array_equal(reply.sums, naive_sums(numbered_rows(3), {(1, 4): 1.0}))
    assert refusal(client, send(client)).code == "malformed"
    rig.service.drop_link("aa" * 8)
    traffic.wait_for(100)
    traffic.close()
    assert not traffic.failures


def test_the_socket_is_served_under_traffic(rig: Rig) -> None:
    traffic = Traffic(rig)
    traffic.wait_for(100)
    client = rig.socket_client()
    assert_serves(client)
    for _ in range(3):
        time.sleep(0.15)  # until the socket counts as quiet
        started_s = time.monotonic()
        assert_serves(client)
        assert time.monotonic() - started_s < 1.0
    traffic.close()
    assert not traffic.failures


def test_closing_ends_the_thread_under_traffic(rig: Rig) -> None:
    traffic = Traffic(rig)
    traffic.wait_for(100)
    started_s = time.monotonic()
    rig.service.close()
    assert time.monotonic() - started_s < 2.0
    assert "dflash-compute" not in [thread.name for thread in threading.enumerate()]


class WatchedFile:
    """`check_file` of a file that is checked every 50 ms."""

    def __init__(self) -> None:
        self.num_checks, self.is_changed = 0, False

    def check(self) -> float:
        self.num_checks += 1
        if self.is_changed:
            raise ModelFileError("was written to", path=Path("model.gguf"))
        return time.monotonic() + 0.05


def test_no_reply_is_sent_without_a_recent_check_of_the_file(
    undo: ExitStack, run_dir: Path, bank: GatedBank
) -> None:
    file = WatchedFile()
    rig = Rig(undo, run_dir, bank, check_file=file.check)
    client = rig.client()
    end_s = time.monotonic() + 0.5
    while time.monotonic() < end_s:
        assert_serves(client)
    assert 5 <= file.num_checks <= 11
    assert rig.num_answered > 50
    # What was computed while the check became old is not sent without another one.
    for is_changed in (False, True):
        bank.gate.clear()
        bank.has_entered.clear()
        sequence = send(client)
        assert bank.has_entered.wait(TIMEOUT_S)
        time.sleep(0.1)
        file.is_changed = is_changed
        bank.gate.set()
        if is_changed:
            assert refusal(client, sequence).code == "file"
        else:
            reply = client.wait(sequence, deadline_s=TIMEOUT_S)
            np.testing.assert_array_equal(reply.sums, EXPECTED)
            assert reply.compute_s > 0.09
    for _ in range(5):
        assert refusal(client, send(client)).code == "file"
    file.is_changed = False
    assert_serves(client)


@pytest.mark.parametrize("payload", [PayloadType.F16, PayloadType.BF16])
def test_narrow_sums_that_overflow_are_sent_in_float64(
    undo: ExitStack, run_dir: Path, bank: GatedBank, payload: PayloadType
) -> None:
    rig = Rig(undo, run_dir, bank)
    client = rig.client(payload=payload)
    assert_serves(client)
    before = rig.num_answered
    assert_serves(client)
    large = np.full((1, HIDDEN_SIZE), 3e4 if payload is PayloadType.F16 else 1e38, np.float32)
    pairs = {(0, 4): 1.0, (0, 3): 1.0}
    batch = batch_of(1, pairs, hidden=large)
    reply = client.wait(send(client, batch), deadline_s=TIMEOUT_S)
    np.testing.assert_allclose(reply.sums, naive_sums(large, pairs), rtol=0.01)
    assert_serves(client)
    assert rig.service.counters.widened == 1
    assert rig.num_answered == before + 2
