"""What the layers of a captured step share when compiled code asks the owners of their experts."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import numpy as np

from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ids import F32Array, F64Array, I32Array, I64Array, Phase
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring import compiled_experts as ring
from dflash_protocol.transports.in_flight import LONG_SPIN_S
from dflash_protocol.transports.lent_slot import LentSlot
from dflash_protocol.transports.ports import PHASES
from dflash_runtime.compute.asking import AskedLayers, AskedOwners, AskRoute, OwnerTotals
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import asked_tasks as t
from dflash_runtime.compute.cpu.kernels import experts_kernel as k
from dflash_runtime.compute.cpu.kernels import step_tasks as steps
from dflash_runtime.compute.cpu.kernels.words import Call, address
from dflash_runtime.compute.cpu.threads.parallel import IDLE, REGION
from dflash_runtime.compute.cpu.threads.scratch import zeros_on_lines
from dflash_runtime.compute.cpu.threads.workers import Workers

_SETTLE_S = 0.25
"""Statistics, and deadlines with them, follow what was asked after this time, or when read."""
_NO_FAILURES = ring_native.NOT_FINITE, ring_native.UNSENT
"""Requests that only the host can judge: rows may not be finite either; or send, widened."""


class OwnersPairs(NamedTuple):
    """The pairs of one token by owner, each a group of its own, and the owners' sums.

    Shapes: expert_ids, weights [N, K]; group_starts [K + 1]; token_indices [K]; sums [N, H].
    """

    expert_ids: I32Array
    weights: F32Array
    group_starts: I32Array
    token_indices: I32Array
    sums: F64Array


class _LayerTables(NamedTuple):
    """Memory of a layer that compiled code uses, by global id; shared by all captures of it.

    Shapes: each [E].
    """

    owner_index: I32Array
    local_expert_id: I32Array
    selections: I64Array
    """How often each expert was routed to."""


class AskTable:
    """The words of `kernels.asked_tasks`, and the memory of its requests.

    Between `begin` and `end`, which enclose a step of one token, it has a slot of each daemon's
    ring, if all daemons can be asked by compiled code; outside, and from the first layer on that
    the host has to compute, the host asks. Used by the thread that runs the model.
    """

    def __init__(
        self,
        owners: AskedOwners,
        *,
        hidden_size: int,
        num_experts_used: int,
        workers: Workers | None,
    ) -> None:
        """`num_experts_used`: the most of any layer. `workers` compute the experts of this process
        that are in the host's memory; None if there are none."""
        self.mailed: frozenset[int] = frozenset()
        """Owners that a device asks in the present step, or has asked in the last one."""
        self._owners = owners
        self._kept: list[object] = []
        self._layers: dict[int, _LayerTables] = {}
        self._lent: list[tuple[AskRoute, LentSlot]] = []
        self._routes: dict[int, AskRoute] = {}
        """Those that the words are set for, by owner index."""
        self._settled_s = time.monotonic()
        num_owners = owners.num_owners
        self.pairs = pairs = OwnersPairs(
            np.zeros((num_owners, num_experts_used), np.int32),
            np.zeros((num_owners, num_experts_used), np.float32),
            np.arange(num_experts_used + 1, dtype=np.int32),
            np.zeros(num_experts_used, np.int32),
            np.zeros((num_owners, hidden_size)),
        )
        num_words = t.FIRST_OWNER + t.OWNER_WORDS * num_owners
        words: I64Array = zeros_on_lines(8 * num_words).view(np.int64)[:num_words]
        words[t.NUM_OWNERS] = num_owners
        words[t.OWN], words[t.DEVICE] = owners.own_index, owners.device_index
        self._num_cores = len(os.sched_getaffinity(0))
        idle = region = 0
        if workers is not None:
            # Idle threads that poll would take cores from daemons of this machine.
            num_threads = workers.decode_threads + owners.daemon_threads(workers.num_threads)
            words[t.FREES_CORES] = owners.asks_daemons and self._num_cores < num_threads
            if not words[t.FREES_CORES]:  # waking a thread takes a tenth of a layer
                workers.spin_for(LONG_SPIN_S)
            idle, region = (workers.address + 8 * word for word in (IDLE, REGION))
        self.address = int(words.ctypes.data)
        self._words, self._times = words.data, words.view(np.float64).data
        for index in range(num_owners):
            mine = words[_place(index, 0) :]
            mine[ring.BATCH_TOKENS] = 1
            mine[ring.BATCH_EXPERT_IDS] = pairs.expert_ids[index].ctypes.data
            mine[ring.BATCH_GROUP_STARTS] = pairs.group_starts.ctypes.data
            mine[ring.BATCH_TOKEN_INDICES] = pairs.token_indices.ctypes.data
            mine[ring.BATCH_WEIGHTS] = pairs.weights[index].ctypes.data
            mine[ring.BATCH_SUMS] = pairs.sums[index].ctypes.data
            mine[ring.BATCH_PHASE] = PHASES.index(Phase.DECODE)
            mine[ring.REQUEST_IDLE], mine[ring.REQUEST_REGION] = idle, region
        owners.settle_with(self.settle)

    @property
    def _num_used(self) -> int:
        return len(self.pairs.token_indices)

    def call(
        self,
        layer_id: int,
        routed: tuple[F32Array, I32Array, F32Array],
        *,
        sums: F64Array,
        out: F32Array | None = None,
        bank: CpuExpertBank | None = None,
    ) -> Call:
        """The call of a layer. `bank`: the experts of it that `workers` compute, if any. What it
        points into must be kept, but for tables and the bank.

        Shapes: routed rows [1, H], global ids and weights [1, K], in the memory that each step
        uses; sums, out [1, H], as in `step_tasks.set_routing`.
        """
        pairs, tables = self.pairs, self._tables_of(layer_id)
        hidden, topk_ids, topk_weights = routed
        words, scratch = [0] * t.NUM_WORDS, tuple[tuple[int, int], ...]()
        if bank is not None:
            own = self._owners.own_index
            words[: k.NUM_LAYER_WORDS] = bank.words.tolist()
            words[k.IS_STEP] = 1
            words[k.EXPERT_IDS] = address(pairs.expert_ids[own], np.int32)
            words[k.WEIGHTS] = address(pairs.weights[own])
            scratch = bank.scratch_words(1, self._num_used)
        words[k.GROUP_STARTS] = address(pairs.group_starts, np.int32)
        words[k.TOKEN_INDICES] = address(pairs.token_indices, np.int32)
        steps.set_routing(
            words,
            hidden,
            (topk_ids, topk_weights),
            local_ids=tables.local_expert_id,
            selections=tables.selections,
            sums=sums,
            out=out,
        )
        words[t.LAYER_ID], words[t.TABLE] = layer_id, self.address
        words[t.OWNER_OF] = address(tables.owner_index, np.int32)
        words[t.NUM_IDS] = tables.owner_index.size
        self._kept.append(bank)
        return Call(t.run_asked().address, words, scratch=scratch)

    def _tables_of(self, layer_id: int) -> _LayerTables:
        tables = self._layers.get(layer_id)
        if tables is None:
            routing = self._owners.routing(layer_id)
            tables = self._layers[layer_id] = _LayerTables(
                routing.owner_index.copy(),
                routing.local_expert_id.copy(),
                np.zeros(routing.owner_index.size, np.int64),
            )
        return tables

    def refresh(self) -> None:
        """Experts have moved between the owners; no step is running."""
        for layer_id, tables in self._layers.items():
            routing = self._owners.routing(layer_id)
            tables.owner_index[:] = routing.owner_index
            tables.local_expert_id[:] = routing.local_expert_id

    def begin(self, mailed: frozenset[int] = frozenset()) -> None:
        """Have compiled code ask in the step that follows, if it can. `mailed`: indices of owners
        that a device asks in it, through mailboxes; their pairs are only counted."""
        if mailed != self.mailed:
            self.settle()  # requests through mailboxes have no times
            self.mailed = mailed
            for index in range(self._owners.num_owners):
                self._words[_place(index, t.MAILED)] = index in mailed
        routes = self._owners.ask_routes()
        if routes is None:
            return
        routes = [route for route in routes if route.owner_index not in mailed]
        if self._owners.is_any_to_be_checked(len(routes) * len(self._layers)):
            return
        words = self._words
        try:
            for route in routes:
                slot = route.lend()
                self._lent.append((route, slot))
                place = _place(route.owner_index, 0)
                if self._routes.get(route.owner_index) is not route:
                    self._routes[route.owner_index] = route
                    # Polling would take a core from the last of the daemons.
                    spin_ns = slot.spin_ns if len(routes) < self._num_cores else 0
                    words[place + t.MOST_SPIN_NS] = words[place + ring.REQUEST_SPIN_NS] = spin_ns
                words[place + t.PORT] = slot.port
                deadline_s = route.deadline_s(Phase.DECODE, self._num_used)
                words[place + ring.REQUEST_DEADLINE_NS] = int(deadline_s * 1e9)
        except DaemonUnavailable:
            self.end()
            return
        if not words[t.POST]:
            words[t.POST], words[t.COLLECT] = ring_native.client_functions()
        words[t.PROGRESS] = words[t.STATUS] = 0
        words[t.ENABLED] = 1

    def leave_to_host(self) -> None:
        """Compiled code has stopped: the host computes this layer and the following ones. Reports
        the request that failed, if one has."""
        words, lent = self._words, self._lent.copy()
        if not words[t.ENABLED]:
            return
        self.end()
        status, index = words[t.STATUS], words[t.FAILED]
        if status == 0 or status in _NO_FAILURES:
            return
        waited_ns = time.monotonic_ns() - words[_place(index, ring.REQUEST_POSTED_NS)]
        for route, slot in lent:
            if route.owner_index == index:
                route.fail(slot, status, waited_ns * 1e-9)

    def end(self) -> None:
        """Give back the slots; requests in flight are abandoned."""
        self._words[t.ENABLED] = 0
        while self._lent:
            _, slot = self._lent.pop()
            slot.give_back()
        if time.monotonic() > self._settled_s + _SETTLE_S:
            self.settle()

    def settle(self) -> None:
        """Report what was asked since the last time."""
        self._settled_s = time.monotonic()
        words = self._words
        num_layers = words[t.NUM_LAYERS]
        if not num_layers:
            return
        taken = AskedLayers(
            num_layers,
            words[t.NUM_HOT_ONLY],
            [self._take(index) for index in range(words[t.NUM_OWNERS])],
            {layer_id: tables.selections.copy() for layer_id, tables in self._layers.items()},
        )
        for word in (t.NUM_LAYERS, t.NUM_HOT_ONLY):
            words[word] = 0
        for tables in self._layers.values():
            tables.selections[:] = 0
        self._owners.count_asked(taken)

    def close(self) -> None:
        """Report the last counts. Idempotent."""
        self.settle()
        self._owners.settle_with(None)

    def _take(self, index: int) -> OwnerTotals:
        """Take the totals of an owner."""
        words, times, place = self._words, self._times, _place(index, 0)
        num_pairs, words[place + t.NUM_PAIRS] = words[place + t.NUM_PAIRS], 0
        asked = OwnerTotals(
            words[place + ring.REQUEST_NUM_REPLIES],
            num_pairs,
            compute_s=times[place + ring.REQUEST_COMPUTE_S],
            queue_s=times[place + ring.REQUEST_QUEUE_S],
            wait_s=words[place + ring.REQUEST_WAIT_NS] * 1e-9,
            trip_s=words[place + ring.REQUEST_TRIP_NS] * 1e-9,
            bytes_sent=words[place + ring.REQUEST_BYTES_SENT],
            bytes_received=words[place + ring.REQUEST_BYTES_RECEIVED],
        )
        for word in range(ring.REQUEST_NUM_REPLIES, ring.REQUEST_WORDS):
            words[place + word] = 0
        return asked


def _place(owner_index: int, word: int) -> int:
    """Index of a word of an owner."""
    return t.FIRST_OWNER + t.OWNER_WORDS * owner_index + word
