"""Implements backend.CapturedStep on the CPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from dflash_protocol.ids import F32Array, F64Array, I32Array, I64Array, Phase
from dflash_runtime.compute.backend import DeviceSampling, RemoteExperts
from dflash_runtime.compute.cpu.captured.experts import AskedExperts, LocalExperts
from dflash_runtime.compute.cpu.captured.recorder import Recorder
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import step_tasks as tasks
from dflash_runtime.compute.cpu.kv_cache import CpuKvCache
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.host_model import HostModel
from dflash_runtime.compute.model import Step, forward, run_to_end
from dflash_runtime.compute.trees import Tree, TreeResult

MOST_ROWS = 8
"""Draft tokens that are verified in one step."""


class CpuStep:
    """Decode steps of one sequence, and verification of a chain of up to MOST_ROWS draft tokens, as
    one program: from the embedding to the argmax. Used by the thread that runs the model.

    Without `banks`, the host asks the owners of experts in each layer; `remote` counts all work.
    A step that is interrupted, or that no owner can compute, leaves recurrent states which must be
    computed again.
    Owns: the program's memory, until closed.
    """

    def __init__(
        self,
        ops: CpuOps,
        model: HostModel,
        cache: CpuKvCache,
        *,
        banks: Mapping[int, CpuExpertBank] | None,
        remote: RemoteExperts,
    ) -> None:
        self.needs_host = True
        self.counts_itself = banks is None
        self._cache = cache
        self._pool = ops.workers.address
        self._vocabulary_rows = model.spec.vocab_size
        num_rows = min(MOST_ROWS, cache.capacity)
        recorder = Recorder(ops, num_rows, cache.capacity)
        self._token_ids = np.zeros(num_rows, np.int32)
        self._next_ids = np.zeros(num_rows, np.int32)
        self._layer_ends: list[int] = []
        experts = (
            AskedExperts(recorder, remote, self._rows)
            if banks is None
            else LocalExperts(recorder, banks)
        )
        step = Step.of_chunk(self._token_ids, 0, cache, Phase.DECODE)
        recorded = model.with_ops(recorder)
        self._hidden: F32Array = run_to_end(
            forward(
                recorded,
                step,
                experts,
                on_layer=lambda layer_id, hidden: self._layer_ends.append(recorder.num_calls),
            )
        )
        self._logits: F32Array = recorded.head(self._hidden)
        recorder.run(tasks.argmax_call(self._logits, self._next_ids))
        self._tables, self._program = recorder.tables, recorder.program()
        self._position = 0
        self._num_rows = 1
        self._is_greedy = True

    def _rows(self) -> int:
        """Rows of the step that is running."""
        return self._num_rows

    def prepare(self) -> None:
        """Do nothing: everything is compiled and recorded."""

    def choose_by(self, options: DeviceSampling | None) -> None:
        """Sampled tokens are left to the host."""
        self._is_greedy = options is None

    def expect(self, first_position: int, numbers: F64Array) -> None:
        """Do nothing: the host samples."""

    def begin(self, token_id: int, position: int) -> None:
        """Set the token and position of the next step.

        Raises: ContextExceeded; ValueError for a token id that the model does not have.
        """
        if not 0 <= token_id < self._vocabulary_rows:
            raise ValueError(f"token id {token_id} is not within 0..{self._vocabulary_rows - 1}")
        self._token_ids[0], self._position = token_id, position

    def start(self) -> None:
        """Run a step; its argmax is the input of the next one, at the next position.

        Raises: ContextExceeded; CheckpointMissing; DaemonUnavailable.
        """
        self._num_rows = 1
        self._run(self._position, 1)
        self._token_ids[0] = self._next_ids[0]
        self._position += 1

    def _run(self, position: int, num_rows: int) -> None:
        cache, end = self._cache, position + num_rows
        cache.begin_step(position, num_rows)
        self._tables.extend(end)
        self._program.place(num_rows, position)
        self._program.run(self._pool)
        cache.end_step(end)

    def token(self, position: int) -> int | None:
        return int(self._next_ids[0]) if self._is_greedy else None

    def logits(self) -> F32Array:
        logits: F32Array = self._logits[0]
        return logits

    def verify(
        self, token_ids: I32Array, tree: Tree, features: Collection[int]
    ) -> TreeResult | None:
        return None

    def take_selections(self) -> dict[tuple[Phase, int], I64Array]:
        """None: the host counts, or banks do."""
        return {}

    def close(self) -> None:
        del self._program, self._tables, self._hidden, self._logits, self._cache
