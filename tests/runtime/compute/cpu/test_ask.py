"""A layer's experts asked for by compiled code: the host's bits, and failures that end a step."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_protocol.batch import HostHidden, Pairs, RoutedBatch
from dflash_protocol.errors import DeadlineExceeded, ProtocolError
from dflash_protocol.ids import AnyArray, F32Array, I32Array, I64Array, Phase
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring import compiled_experts as w
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.transports.lent_slot import LentSlot
from dflash_protocol.transports.ports import PHASES
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import ask_kernel as k
from dflash_runtime.experts.pairs import all_pairs
from support.expert_files import write_expert_layer
from support.shared_pair import Pair
from support.transport_checks import MAX_EXPERTS_USED, MAX_TOKENS

E, H, K = 12, 64, 3
OWNERS_OF: I32Array = np.arange(E, dtype=np.int32) % 3
"""Owner 0 is here, 1 and 2 are daemons; their sums are added in this order."""
LOCAL_IDS: I32Array = np.arange(E, dtype=np.int32) // 3
SHAPE = RingShape(2, MAX_TOKENS, H, MAX_TOKENS * MAX_EXPERTS_USED)


class Served:
    """A daemon's ring in this process, served by a thread of its own."""

    def __init__(self, undo: ExitStack, folder: Path, backend: CpuBackend, bank: object) -> None:
        self.pair = Pair(folder, shape=SHAPE)
        undo.callback(self.pair.close)
        assert isinstance(bank, CpuExpertBank)
        limits = {"max_tokens": MAX_TOKENS, "max_experts_used": MAX_EXPERTS_USED}
        server = self.pair.server
        server.set_experts("ab", backend.compile_banks({0: bank}, **limits))
        server.allow_replies(math.inf)
        self._stop, self.is_late = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        undo.callback(self.stop)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self.is_late.is_set():
                time.sleep(1e-3)
            else:
                request = self.pair.server.receive(0.01)
                if request is not None:
                    error = ProtocolError("no such layer", code="not_owned")
                    self.pair.server.fail(request.link_id, request.header.sequence, error)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class Asked:
    """The words of one layer, whose owners are a bank here and two daemons."""

    def __init__(self, undo: ExitStack, folder: Path) -> None:
        path = folder / "layer.gguf"
        layer = write_expert_layer(
            path,
            num_experts=E,
            num_experts_used=K,
            hidden_size=H,
            ffn_size=96,
            types=(TensorType.Q8_0, TensorType.Q8_0, TensorType.F32),
        )
        undo.callback(path.unlink)
        file = GgufFile.open(path)
        undo.callback(file.close)
        self.banks, self.served, self.lent = [], list[Served](), list[LentSlot]()
        self._kept: list[object] = []
        self.owners: I64Array = np.zeros((3, k.OWNER_WORDS), np.int64)
        self.requests: I64Array = np.zeros((3, w.REQUEST_WORDS), np.int64)
        self.step: I64Array = np.zeros(k.STEP_WORDS, np.int64)
        self.words: I64Array = np.zeros(k.NUM_WORDS, np.int64)
        for index in range(3):
            backend = CpuBackend(num_threads=1)
            undo.callback(backend.close)
            ids = np.flatnonzero(index == OWNERS_OF).astype(np.int32)
            bank = backend.load_experts(file, layer, ids)
            self.banks.append(bank)
            request = self.requests[index]
            arrays: list[AnyArray] = [np.zeros(MAX_TOKENS * K + 1, np.int32) for _ in range(3)]
            arrays += [np.zeros(MAX_TOKENS * K, np.float32), np.zeros((MAX_TOKENS, H))]
            self._kept += arrays
            for word, array in enumerate(arrays, w.BATCH_EXPERT_IDS):
                request[word] = array.ctypes.data
            request[w.REQUEST_PHASE] = PHASES.index(Phase.DECODE)
            request[w.REQUEST_DEADLINE_NS] = 20 * 10**9
            owner = self.owners[index]
            owner[k.REQUEST] = request.ctypes.data
            if index:
                self.served.append(Served(undo, folder, backend, bank))
            else:
                compiled = backend.compile_banks(
                    {0: bank}, max_tokens=MAX_TOKENS, max_experts_used=MAX_EXPERTS_USED
                )
                assert compiled is not None
                self._kept.append(compiled)
                owner[k.COMPUTE] = compiled.layers[0, w.LAYER_COMPUTE]
                owner[k.EXPERTS] = compiled.layers[0, w.LAYER_EXPERTS]
        self.selections: I64Array = np.zeros(E, np.int64)
        arrays = [self.selections, OWNERS_OF, LOCAL_IDS]
        for word, array in enumerate(arrays, k.SELECTIONS):
            self.words[word] = array.ctypes.data
        self.words[k.STEP], self.words[k.NUM_USED] = self.step.ctypes.data, K
        self.words[k.HIDDEN_SIZE], self.words[k.NUM_OWNERS] = H, 3
        self.words[k.OWNERS] = self.owners.ctypes.data
        self.words[k.POST], self.words[k.COLLECT] = ring_native.client_functions()
        self._ask = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(k.ask_function().address)

    def lend(self) -> None:
        self.lent = [each.pair.client.lend() for each in self.served]
        self.owners[1:, k.PORT] = [each.port for each in self.lent]
        self.step[:] = 0

    def give_back(self) -> None:
        for each in self.lent:
            each.give_back()

    def run(self, hidden: F32Array, topk_ids: I32Array, topk_weights: F32Array) -> F32Array:
        sums, rounded = np.full(hidden.shape, np.nan), np.full(hidden.shape, np.nan, np.float32)
        self.words[k.NUM_TOKENS] = hidden.shape[0]
        self.words[k.HIDDEN] = hidden.ctypes.data
        self.words[k.TOPK_IDS], self.words[k.TOPK_WEIGHTS] = (
            topk_ids.ctypes.data,
            topk_weights.ctypes.data,
        )
        self.words[k.SUMS], self.words[k.ROUNDED] = sums.ctypes.data, rounded.ctypes.data
        while True:
            started_s = time.monotonic()
            self._ask(self.words.ctypes.data, 0, 0)
            assert time.monotonic() - started_s < 2.0
            if not self.step[k.IS_WAITING]:
                return rounded

    def expected(self, hidden: F32Array, topk_ids: I32Array, topk_weights: F32Array) -> F32Array:
        """As experts.runtime computes it."""
        pairs, sums = all_pairs(topk_ids, topk_weights), np.zeros(hidden.shape)
        for index, bank in enumerate(self.banks):
            own = pairs.where(OWNERS_OF[pairs.expert_ids] == index)
            if own.num_pairs:
                own = Pairs(own.token_indices, LOCAL_IDS[own.expert_ids], own.weights)
                batch = RoutedBatch.group(Phase.DECODE, HostHidden(hidden), own)
                reply = np.zeros(hidden.shape)
                bank.accumulate(batch, reply)
                sums += reply
        return sums.astype(np.float32)


@pytest.fixture
def asked(run_dir: Path) -> Iterator[Asked]:
    with ExitStack() as undo:
        yield Asked(undo, run_dir)


def routed(num_tokens: int, seed: int) -> tuple[F32Array, I32Array, F32Array]:
    random = np.random.default_rng(seed)
    ids = [random.permutation(E)[:K] for _ in range(num_tokens)]
    return (
        random.standard_normal((num_tokens, H)).astype(np.float32),
        np.array(ids, np.int32),
        random.random((num_tokens, K)).astype(np.float32),
    )


def test_the_bits_are_the_hosts(asked: Asked) -> None:
    counts = np.zeros(E, np.int64)
    for seed in range(40):
        asked.lend()
        for layer in range(3):
            layer_input = routed(1 + seed % 8, 3 * seed + layer)
            found, expected = asked.run(*layer_input), asked.expected(*layer_input)
            assert not asked.step[k.FAILURE]
            assert found.tobytes() == expected.tobytes()
            counts += np.bincount(layer_input[1].ravel(), minlength=E)
        asked.give_back()
    np.testing.assert_array_equal(asked.selections, counts)
    assert asked.requests[1, w.REQUEST_NUM_REPLIES] > 40


def test_a_failure_ends_the_step_and_the_next_one_is_right(asked: Asked) -> None:
    hidden, ids, weights = routed(2, 0)
    ids[:, 0] = 1, 4  # owner 1 is asked
    asked.lend()
    asked.requests[1, w.REQUEST_DEADLINE_NS] = 120 * 10**6
    asked.served[0].is_late.set()
    time.sleep(0.05)
    started_s = time.monotonic()
    asked.run(hidden, ids, weights)
    assert time.monotonic() - started_s < 2.0
    assert asked.step[k.FAILED_OWNER] == 1
    error = asked.lent[0].error(int(asked.step[k.FAILURE]))
    assert isinstance(error, DeadlineExceeded)
    before = asked.selections.copy()
    asked.run(hidden, ids, weights)  # the step's other layers
    np.testing.assert_array_equal(asked.selections, before)
    asked.give_back()
    asked.requests[1, w.REQUEST_DEADLINE_NS] = 20 * 10**9
    asked.served[0].is_late.clear()
    for _ in range(3):
        asked.lend()
        assert (
            asked.run(hidden, ids, weights).tobytes()
            == asked.expected(hidden, ids, weights).tobytes()
        )
        asked.give_back()


def test_a_request_that_a_daemon_refuses_ends_the_step(asked: Asked) -> None:
    hidden, ids, weights = routed(1, 0)
    ids[0] = 0, 2, 1  # all owners are asked
    for _ in range(3):
        asked.lend()
        asked.requests[2, w.REQUEST_LAYER] = 5
        asked.run(hidden, ids, weights)
        assert asked.step[k.FAILED_OWNER] == 2
        error = asked.lent[1].error(int(asked.step[k.FAILURE]))
        assert isinstance(error, ProtocolError)
        assert error.code == "not_owned"
        asked.give_back()
        asked.requests[2, w.REQUEST_LAYER] = 0
        asked.lend()
        found = asked.run(hidden, ids, weights)
        assert found.tobytes() == asked.expected(hidden, ids, weights).tobytes()
        asked.give_back()
