"""A parent of ours and a daemon of version 1: the handshake finds out, and it serves."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zmq

from dflash_protocol.batch import group_by_expert
from dflash_protocol.endpoint import parse_endpoint
from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ids import F64Array, I32Array, Phase
from dflash_protocol.payloads import PayloadType
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.wire.messages import PROTOCOL_VERSIONS
from dflash_runtime.experts.daemons.data_path import open_data_path
from dflash_runtime.experts.daemons.handshake import Greeting
from dflash_runtime.experts.daemons.link import DaemonLink
from dflash_runtime.experts.daemons.link_task import LinkOptions, Timeouts
from dflash_runtime.experts.daemons.supervisor import Supervisor
from dflash_runtime.experts.remote.pieces import ExecutionMode
from dflash_runtime.experts.remote.remote import RemoteExpertCompute
from support.routed_batches import HIDDEN_SIZE, begin, expert_scale, finish, numbered_rows
from support.version1_peer import Version1Daemon

TIMEOUT_S = 20.0
GLOBAL_IDS = [6, 1, 4, 0, 7]
OWNED = OwnedExperts.from_lists({0: GLOBAL_IDS})


class Rig:
    """Supervisor, link and remote expert compute, and the old daemon."""

    def __init__(self, undo: ExitStack, run_dir: Path, mode: ExecutionMode) -> None:
        endpoint = parse_endpoint(f"ipc://{run_dir}/old")
        self.daemon = undo.enter_context(
            Version1Daemon(endpoint, hidden_size=HIDDEN_SIZE, max_tokens=16)
        )
        self.events: list[str] = []
        self.link = DaemonLink(
            "old",
            endpoint,
            OWNED,
            launch=None,
            numeric_class="c",
            on_event=lambda kind, name, reason: self.events.append(reason),
        )
        undo.callback(self.link.close)
        context = undo.enter_context(zmq.Context())
        greeting = Greeting(
            model_identity="m",
            moe_digest="d",
            numeric_class="c",
            max_tokens=64,
            payload=PayloadType.BF16,
        )
        supervisor = Supervisor(
            context, [self.link], LinkOptions(greeting, Timeouts(TIMEOUT_S, 1.0))
        )
        undo.callback(supervisor.close)
        supervisor.start()
        open_path = partial(
            open_data_path,
            self.link,
            context=context,
            hidden_size=HIDDEN_SIZE,
            num_experts_used=4,
        )
        self.remote = RemoteExpertCompute(self.link, open_path, min_deadline_s=TIMEOUT_S, mode=mode)
        undo.callback(self.remote.close)

    def compute(self, local_ids: list[list[int]]) -> F64Array:
        """Sums of tokens that have these experts, all with weight 0.5. Shapes: result [T, H]."""
        tokens: I32Array = np.repeat(
            np.arange(len(local_ids), dtype=np.int32), [len(ids) for ids in local_ids]
        )
        experts = np.array([e for ids in local_ids for e in ids], dtype=np.int32)
        batch = group_by_expert(
            numbered_rows(len(local_ids)),
            tokens,
            experts,
            weights=np.full(experts.size, 0.5, dtype=np.float32),
            phase=Phase.DECODE if len(local_ids) == 1 else Phase.PREFILL,
        )
        out = np.zeros((len(local_ids), HIDDEN_SIZE))
        finish(self.remote, begin(self.remote, batch), out)
        return out

    def assert_right(self, local_ids: list[list[int]]) -> None:
        scales = [sum(0.5 * expert_scale(GLOBAL_IDS[e]) for e in ids) for ids in local_ids]
        expected = numbered_rows(len(local_ids)) * np.array(scales)[:, None]
        np.testing.assert_array_equal(self.compute(local_ids), expected)


@pytest.mark.parametrize("mode", list(ExecutionMode))
def test_a_daemon_of_version_1_is_spoken_to_in_rectangles_of_global_ids(
    undo: ExitStack, run_dir: Path, mode: ExecutionMode
) -> None:
    rig = Rig(undo, run_dir, mode)
    assert rig.daemon.versions_offered == list(PROTOCOL_VERSIONS)
    rig.assert_right([[2, 4]])
    assert rig.daemon.shapes == [(1, 2)]
    assert rig.daemon.ids_seen == {4, 7}
    ragged = [[0, 1, 2], [], [3], [4, 0, 1], [2], []]
    for _ in range(6):  # enough for `auto` to try whatever it would
        rig.assert_right(ragged)
    assert rig.daemon.shapes[1:3] == [(2, 1), (2, 3)], "one request for each number of experts"
    rig.assert_right([[0]] * 40)
    assert max(num_tokens for num_tokens, _ in rig.daemon.shapes) <= 16
    stats = rig.remote.stats
    assert stats.checksum_failures == stats.stale == stats.widened == 0
    assert stats.phases[Phase.DECODE].compute_s > 0, "measured from here, for it says nothing"
    assert rig.events == []


def test_a_failure_of_a_version_1_daemon_concerns_one_request(
    undo: ExitStack, run_dir: Path
) -> None:
    rig = Rig(undo, run_dir, ExecutionMode.BATCHED)
    rig.daemon.failure = "no luck"
    with pytest.raises(DaemonUnavailable, match="daemon old: no luck"):
        rig.compute([[0, 1]])
    rig.daemon.failure = ""
    rig.assert_right([[0, 1]])
    assert rig.events == ["no luck"]
