"""What a compiled step has of one link, called from Python."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np

from dflash_protocol.batch import RoutedBatch
from dflash_protocol.ids import F64Array, I64Array
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring import compiled_experts as w
from dflash_protocol.transports.lent_slot import LentSlot
from dflash_protocol.transports.ports import PHASES
from support.transport_checks import HIDDEN_SIZE, MAX_TOKENS, TIMEOUT_S

SLICE_S = 1e-9 * w.SLICE_NS
SLACK_S = 1.0
"""For machines that are slow and busy."""


class Asker:
    """A lent slot, and the words of its requests."""

    def __init__(self, lent: LentSlot, hidden_size: int = HIDDEN_SIZE) -> None:
        self.lent = lent
        self.words: I64Array = np.zeros(w.REQUEST_WORDS, np.int64)
        self.abort: I64Array = np.zeros(1, np.int64)
        self.sums: F64Array = np.empty((MAX_TOKENS, hidden_size))
        self.words[w.BATCH_SUMS] = self.sums.ctypes.data
        self.words[w.REQUEST_ABORT] = self.abort.ctypes.data
        kind = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 3)
        post, collect = map(kind, ring_native.client_functions())
        self._post: Callable[[int, int], int] = post
        self._collect: Callable[[int, int], int] = collect
        self._kept: list[object] = []

    def post(
        self, batch: RoutedBatch, out: F64Array, *, deadline_s: float = TIMEOUT_S, layer_id: int = 3
    ) -> int:
        words, routing = self.words, (batch.token_indices, batch.weights)
        arrays = (batch.hidden, batch.expert_ids, batch.group_starts, *routing)
        self._kept = [*arrays, out]
        words[w.BATCH_TOKENS], words[w.BATCH_PAIRS] = batch.num_tokens, batch.num_pairs
        words[w.BATCH_GROUPS] = batch.num_groups
        for word, array in enumerate(arrays, w.BATCH_HIDDEN):
            words[word] = array.ctypes.data
        words[w.REQUEST_LAYER], words[w.REQUEST_PHASE] = layer_id, PHASES.index(batch.phase)
        words[w.REQUEST_DEADLINE_NS] = int(deadline_s * 1e9)
        words[w.REQUEST_OUT] = out.ctypes.data
        return self._post(self.lent.port, words.ctypes.data)

    def collect(self) -> int:
        return self._collect(self.lent.port, self.words.ctypes.data)

    def ended(self) -> int:
        """Collect until there is something; each time within a slice."""
        while True:
            started_s = time.monotonic()
            status = self.collect()
            assert time.monotonic() - started_s < SLICE_S + SLACK_S
            if status != ring_native.NOTHING:
                return status
