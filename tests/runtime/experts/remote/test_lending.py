"""Slots lent to compiled code: what is counted, and what a failure means for the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.batch import HostSums
from dflash_protocol.endpoint import parse_endpoint
from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded, ProtocolError
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.ring import compiled as ring
from dflash_protocol.ring import compiled_experts as w
from dflash_runtime.experts.daemons.data_path import DataPath
from dflash_runtime.experts.remote.session import LentRing
from support.compiled_asker import Asker
from support.remote_rig import Rig
from support.shared_pair import NUM_SLOTS, Pair
from support.transport_checks import HIDDEN_SIZE, MAX_TOKENS, example_batch, received, sums_of

BATCH = example_batch(2, seed=3, phase=Phase.DECODE)


class LendingRig(Rig):
    """A remote expert compute whose data path is a ring; the test answers at its other end."""

    def __init__(self, undo: ExitStack, folder: Path) -> None:
        super().__init__(undo, parse_endpoint(f"ipc://{folder}/cpu0"), min_deadline_s=0.1)
        self.pair = Pair(folder)
        undo.callback(self.pair.close)
        self.remote._open_path = lambda opened, counters: DataPath(
            self.pair.client, "shared", MAX_TOKENS
        )
        self.open_session(max_tokens=MAX_TOKENS)
        self.out: F64Array = np.zeros((2, HIDDEN_SIZE))

    def lend(self) -> tuple[LentRing, Asker]:
        lent = self.remote.lend(Phase.DECODE, num_requests=1, num_pairs=8)
        assert lent is not None
        assert lent.deadline_s == 0.1
        return lent, Asker(lent.slot)

    def ended(self, lent: LentRing, asker: Asker, status: int) -> DaemonUnavailable | None:
        requests, failure = asker.words[None], min(status, 0)
        return self.remote.take_back(lent, requests, Phase.DECODE, failure=failure)

    @property
    def counted(self) -> Any:
        return self.remote.stats.phases[Phase.DECODE]


@pytest.fixture
def rig(run_dir: Path) -> Iterator[LendingRig]:
    with ExitStack() as undo:
        yield LendingRig(undo, run_dir)


def test_answered_requests_are_counted(rig: LendingRig) -> None:
    for number in range(1, 4):
        lent, asker = rig.lend()
        assert asker.post(BATCH, rig.out) > 0
        request = received(rig.pair)
        rig.pair.server.reply(request, HostSums(sums_of(request.batch)), 0.01)
        assert rig.ended(lent, asker, asker.ended()) is None
        counted = rig.counted
        assert (counted.requests, counted.tokens) == (number, 2 * number)
        assert counted.pairs == number * BATCH.num_pairs
        assert counted.bytes_received == number * 16 * HIDDEN_SIZE
        assert counted.bytes_sent == number * asker.words[w.REQUEST_BYTES_SENT]
        assert counted.round_trips.num_samples == number
        assert counted.compute_s == pytest.approx(0.01 * number)
    np.testing.assert_allclose(rig.out, 3 * sums_of(BATCH))
    assert len(rig.pair.client._requests.free) == NUM_SLOTS


def test_a_late_daemon_is_lost(rig: LendingRig) -> None:
    lent, asker = rig.lend()
    assert asker.post(BATCH, rig.out, deadline_s=0.05) > 0
    status = asker.ended()
    assert status == ring.LATE
    assert isinstance(rig.ended(lent, asker, status), DeadlineExceeded)
    assert rig.remote.stats.deadline_failures == 1
    assert rig.remote.stats.is_lost
    assert rig.remote.lend(Phase.DECODE, num_requests=1, num_pairs=8) is None


def test_a_refused_request_leaves_the_link_and_troubles_its_guard(rig: LendingRig) -> None:
    lent, asker = rig.lend()
    assert asker.post(BATCH, rig.out) > 0
    request = received(rig.pair)
    error = ProtocolError("no time", code="late")
    rig.pair.server.fail(request.link_id, request.header.sequence, error)
    reason = rig.ended(lent, asker, asker.ended())
    assert reason is not None
    assert "no time" in str(reason)
    assert rig.remote.stats.deadline_failures == 1
    assert not rig.remote.stats.is_lost
    # Until a request has gone well, the host asks.
    assert rig.remote.lend(Phase.DECODE, num_requests=1, num_pairs=8) is None


def test_what_only_the_host_can_send_or_judge_is_no_failure(rig: LendingRig) -> None:
    lent, asker = rig.lend()
    status = asker.post(example_batch(MAX_TOKENS + 1), np.zeros((MAX_TOKENS + 1, HIDDEN_SIZE)))
    assert status == ring.UNSENT
    assert rig.ended(lent, asker, status) is not None
    lent, asker = rig.lend()
    assert asker.post(BATCH, rig.out) > 0
    rig.pair.server.reply(received(rig.pair), HostSums(np.full((2, HIDDEN_SIZE), np.inf)), 0.0)
    status = asker.ended()
    assert status == ring.NOT_FINITE
    assert rig.ended(lent, asker, status) is not None
    lent, asker = rig.lend()
    assert rig.ended(lent, asker, ring.ABORTED) is None
    assert not rig.losses
