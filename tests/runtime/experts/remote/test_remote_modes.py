"""Execution modes over a link, and what is counted of its work."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest

from dflash_protocol.batch import RoutedBatch
from dflash_protocol.endpoint import Endpoint
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.payloads import NEGOTIABLE, PayloadType
from dflash_protocol.wire.messages import ExpertRequest
from dflash_protocol.wire.requests import encode_reply
from dflash_protocol.wire.transport import LinkLimits
from dflash_runtime.experts.daemons.link import DaemonCounters
from dflash_runtime.experts.remote import remote
from dflash_runtime.experts.remote.pieces import ExecutionMode
from support.remote_rig import (
    CAPACITY,
    PAIRS,
    TIMEOUT_S,
    TWO_PAIRS,
    GateBank,
    ScriptedRig,
    ServedRig,
    random_pairs,
)
from support.routed_batches import HIDDEN_SIZE, batch_of, begin, finish

MODES = [ExecutionMode.BATCHED, ExecutionMode.STREAM, ExecutionMode.AUTO]


@pytest.mark.wide(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("payload", NEGOTIABLE)
@pytest.mark.parametrize("stream_tokens", [1, 3, 4])
def test_no_mode_changes_a_bit(
    undo: ExitStack,
    endpoint: Endpoint,
    mode: ExecutionMode,
    payload: PayloadType,
    stream_tokens: int,
) -> None:
    rig = ServedRig(
        undo, endpoint, min_deadline_s=TIMEOUT_S, mode=mode, stream_tokens=stream_tokens
    )
    rig.bank = LargeBank()
    reference: dict[int, F64Array] = {}
    for max_tokens in (CAPACITY, 5):
        session = rig.open_session(max_tokens=max_tokens, payload=payload)
        for seed in range(12):  # enough for `auto` to try both
            num_tokens = 1 + 6 * (seed % 6)
            pairs = random_pairs(seed % 6, num_tokens) or {(0, 0): 1.0}
            out = rig.compute(num_tokens, pairs)
            expected = reference.setdefault(seed % 6, out)
            assert out.tobytes() == expected.tobytes()
        rig.link.mark_lost(session.generation, "next")
    assert rig.losses == ["next", "next"]
    assert (rig.remote.stats.widened > 0) == (payload is PayloadType.F16)


class LargeBank(GateBank):
    """Some of its sums are more than float16 holds."""

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        super().accumulate(batch, out)
        out[batch.hidden[:, 0] > 60.0] *= 1e3


def test_streaming_sends_slices_of_a_few_tokens_and_bounds_what_is_in_flight(
    undo: ExitStack, endpoint: Endpoint
) -> None:
    rig = ScriptedRig(undo, endpoint, min_deadline_s=TIMEOUT_S, mode=ExecutionMode.STREAM)
    rig.open_session(max_tokens=1024)
    pairs = {(token_idx, token_idx % 5): 1.0 for token_idx in range(150)}
    ticket = begin(rig.remote, batch_of(150, pairs))
    requests = [rig.receive() for _ in range(16)]
    assert not rig.socket.poll(50), "no more than the window"
    with ThreadPoolExecutor(1) as data_thread:
        out = np.zeros((150, HIDDEN_SIZE))
        waiter = data_thread.submit(finish, rig.remote, ticket, out)
        for request in reversed(requests):  # in any order
            rig.say(encode_reply(request, sums_like(request), compute_s=0.0))
        sizes = [request.num_tokens for request in requests]
        while sum(sizes) < 150:
            request = rig.receive()
            sizes.append(request.num_tokens)
            rig.say(encode_reply(request, sums_like(request), compute_s=0.0))
        waiter.result(TIMEOUT_S)
    assert sizes == [4] * 37 + [2]
    expected = np.repeat(np.arange(1, 39), [4] * 37 + [2])
    np.testing.assert_array_equal(out[:, 0], expected)
    assert rig.remote.stats.requests == 38


def sums_like(request: ExpertRequest) -> F64Array:
    """Sums that say which request they answer."""
    return np.full((request.num_tokens, HIDDEN_SIZE), float(request.sequence))


@pytest.mark.parametrize("mode", MODES)
def test_one_token_is_the_same_in_every_mode(
    undo: ExitStack, endpoint: Endpoint, mode: ExecutionMode
) -> None:
    rig = ServedRig(undo, endpoint, min_deadline_s=TIMEOUT_S, mode=mode)
    rig.open_session()
    for number in range(1, 9):
        rig.assert_right(1, {(0, 1): 0.5, (0, 4): 0.25})
        assert rig.remote.stats.requests == number


class SlowBank(GateBank):
    """Every request takes a while, whatever it holds, of a time in which nothing else does."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        super().accumulate(batch, out)
        self.now_s += 0.002


def test_auto_soon_leaves_the_slower_mode_and_never_sends_all_of_a_batch_in_it(
    undo: ExitStack, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every request costs 2 ms, 16 slices are 32 ms and one batch is 2 ms."""
    rig = ServedRig(undo, endpoint, min_deadline_s=TIMEOUT_S, mode=ExecutionMode.AUTO)
    rig.bank = bank = SlowBank()
    clock = SimpleNamespace(perf_counter=lambda: bank.now_s, monotonic=time.monotonic)
    monkeypatch.setattr(remote, "time", clock)
    session = rig.open_session(max_tokens=64)
    limits = LinkLimits(HIDDEN_SIZE, 64, 8)
    rig.service.add_link(session.welcome.link_id, limits, {0: rig.bank})
    pairs = {(token_idx, token_idx % 5): 0.5 for token_idx in range(64)}
    numbers = []
    for _ in range(10):
        before = rig.remote.stats.requests
        rig.assert_right(64, pairs)
        numbers.append(rig.remote.stats.requests - before)
    assert [numbers[0], numbers[2], *numbers[4:]] == [1] * 8
    assert all(4 < number <= 12 for number in (numbers[1], numbers[3])), numbers


def test_what_work_costs_is_counted_by_phase(served: ServedRig) -> None:
    served.open_session(max_tokens=2)
    served.assert_right(3, PAIRS)
    decoding = batch_of(1, TWO_PAIRS, phase=Phase.DECODE)
    for _ in range(3):
        finish(served.remote, begin(served.remote, decoding), np.zeros((1, HIDDEN_SIZE)))
    stats = served.remote.stats
    prefill, decode = stats.phases[Phase.PREFILL], stats.phases[Phase.DECODE]
    assert (prefill.requests, prefill.tokens, prefill.pairs) == (1, 2, 3)
    assert (decode.requests, decode.tokens, decode.pairs) == (3, 3, 6)
    for name in ("requests", "tokens", "pairs", "bytes_sent", "bytes_received"):
        assert getattr(prefill, name) + getattr(decode, name) == getattr(stats, name)
    for each in (prefill, decode):
        assert min(each.pack_s, each.send_s, each.wait_s, each.receive_s, each.combine_s) > 0
        assert each.compute_s > 0
        record = each.as_record()
        assert 0 < record["p50_s"] <= record["p99_s"] < TIMEOUT_S
    assert decode.round_trips.num_samples == 3
    served.link.daemon_counters = DaemonCounters(late=1, stale=2, checksum_failures=3)
    record_of_owner = served.remote.stats.as_record()
    assert record_of_owner["daemon_late"] == 1
    assert record_of_owner["daemon_stale"] == 2
    assert record_of_owner["daemon_checksum_failures"] == 3
    assert record_of_owner["breaker"] == "closed"
    assert record_of_owner["kind"] == "daemon"
    json.dumps(record_of_owner)
