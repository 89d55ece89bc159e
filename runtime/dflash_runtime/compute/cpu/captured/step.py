"""A decode step as a program, which is recorded when a model is opened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dflash_protocol.ids import F32Array, F64Array, I32Array, Phase, U8Array
from dflash_runtime.compute.backend import DeviceSampling, LogitChanges, MailedExperts
from dflash_runtime.compute.cpu.captured.ask_table import AskTable
from dflash_runtime.compute.cpu.captured.experts import AskedExperts, KeptChoices, LocalExperts
from dflash_runtime.compute.cpu.captured.program import BetweenCalls, Program
from dflash_runtime.compute.cpu.captured.recorder import PositionTables, Recorder
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import step_tasks as tasks
from dflash_runtime.compute.cpu.kv_cache import CpuKvCache
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.host_model import HostModel
from dflash_runtime.compute.model import Step, forward, run_to_end
from dflash_runtime.compute.slot_stats import MailedCounts
from dflash_runtime.compute.trees import Tree, TreeResult

MOST_ROWS = 8
"""Draft tokens that are verified in one step."""


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """A program, and the memory that it reads and writes.

    Shapes: token_ids, next_ids [T] int32; hidden [T, H]; logits [T, V].
    """

    program: Program
    tables: PositionTables
    token_ids: I32Array
    next_ids: I32Array
    """The argmax after each token, or NOT_FINITE."""
    hidden: F32Array
    """The rows after the last layer that has run."""
    logits: F32Array
    layer_ends: tuple[int, ...]
    """The number of calls up to each layer's end."""
    choices: KeptChoices | None


def _record(
    ops: CpuOps,
    model: HostModel,
    cache: CpuKvCache,
    banks: Mapping[int, CpuExpertBank],
    owners: MailedExperts | None,
    table: AskTable | None,
    *,
    keeps_choices: bool,
) -> _Recorded:
    num_rows, layer_ends = min(MOST_ROWS, cache.capacity), list[int]()
    recorder = Recorder(ops, num_rows, cache.capacity)
    token_ids, next_ids = np.zeros((2, num_rows), np.int32)
    experts: LocalExperts | AskedExperts | KeptChoices
    experts = LocalExperts(recorder, banks)
    if owners is not None and table is not None:
        experts = AskedExperts(recorder, owners, banks, table)
    choices: KeptChoices | None = None
    if keeps_choices:
        experts = choices = KeptChoices(recorder, experts, model.spec.moe)
    recording, step = model.with_ops(recorder), Step.of_chunk(token_ids, 0, cache, Phase.DECODE)

    def end_layer(layer_id: int, hidden: F32Array) -> None:
        layer_ends.append(recorder.num_calls)
        recorder.end_layer()

    hidden = run_to_end(forward(recording, step, experts, on_layer=end_layer))
    logits = recording.head(hidden)
    recorder.run(tasks.argmax_call(logits, next_ids))
    recorder.keep(model)
    program = recorder.program()
    return _Recorded(
        program,
        recorder.tables,
        token_ids,
        next_ids,
        hidden,
        logits,
        tuple(layer_ends),
        choices,
    )


class CpuStep:
    """Implements backend.CapturedStep: decode steps of one sequence, and verification of a chain of
    up to MOST_ROWS draft tokens, as one program from the embedding to the argmax. Used by the
    thread that runs the model.

    With `owners`, some experts are theirs, and they count all work: compiled code asks them in
    steps of one token, if it can (see AskTable), else the host, layer by layer.
    A step that is interrupted, or that no owner can compute, leaves recurrent states which must be
    computed again.
    Owns: the program's memory, until closed.
    """

    most_ahead = 0
    samples_by_rules = False

    def __init__(
        self,
        ops: CpuOps,
        model: HostModel,
        cache: CpuKvCache,
        *,
        banks: Mapping[int, CpuExpertBank],
        owners: MailedExperts | None,
        check: Callable[[], None],
        keeps_choices: bool,
    ) -> None:
        """`banks`: this process's experts; all, without `owners`."""
        self.counts_itself = owners is not None
        self._table: AskTable | None = None
        if owners is not None:
            layers = model.spec.moe.layers
            self._table = AskTable(
                owners,
                hidden_size=model.spec.hidden_size,
                num_experts_used=max(layer.num_experts_used for layer in layers),
                workers=ops.workers,
            )
        self._recorded = _record(
            ops, model, cache, banks, owners, self._table, keeps_choices=keeps_choices
        )
        self._workers, self._cache = ops.workers, cache
        self._check = check
        self._position = 0
        self._is_greedy = True

    def prepare(self) -> None:
        """Do nothing: everything is compiled and recorded."""

    def choose_by(self, options: DeviceSampling | None, *, is_ruled: bool = False) -> None:
        """Tokens that are sampled, or subject to rules, are left to the host."""
        self._is_greedy = options is None and not is_ruled

    def rule(self, mask: U8Array | None, changes: LogitChanges | None) -> None:
        """Do nothing: the host samples."""

    def expect(self, first_position: int, numbers: F64Array) -> None:
        """Do nothing: the host samples."""

    def begin(self, token_id: int, position: int) -> None:
        """Set the token and position of the next step.

        Raises: ValueError for a token id that the model does not have.
        """
        self._check_id(token_id)
        self._recorded.token_ids[0], self._position = token_id, position

    def start(self) -> None:
        """Run a step; its argmax is the input of the next one, at the next position.

        Raises: ContextExceeded; CheckpointMissing; DaemonUnavailable; ValueError if the step before
        it has chosen no token.
        """
        recorded = self._recorded
        self._check_id(int(recorded.token_ids[0]))
        self._run(self._position, 1)
        recorded.token_ids[0] = recorded.next_ids[0]
        self._position += 1

    def verify(
        self, token_ids: I32Array, tree: Tree, features: Collection[int]
    ) -> TreeResult | None:
        """Chains only, of a sequence that can be cut: accepting a part of one leaves the rest of
        its rows behind the sequence's end."""
        recorded, num_tokens = self._recorded, token_ids.size
        is_chain = np.array_equal(tree.parents, np.arange(-1, num_tokens - 1))
        if not is_chain or num_tokens > recorded.token_ids.size or not self._cache.can_be_cut:
            return None
        for token_id in token_ids.tolist():
            self._check_id(token_id)
        recorded.token_ids[:num_tokens] = token_ids
        found: dict[int, F32Array] = {}

        def keep(layer_id: int, num_rows: int) -> None:
            found[layer_id] = recorded.hidden[:num_rows].copy()

        stops = [(recorded.layer_ends[each], partial(keep, each)) for each in sorted(features)]
        self._run(tree.position, num_tokens, stops)
        return TreeResult(recorded.next_ids[:num_tokens].copy(), found)

    def _check_id(self, token_id: int) -> None:
        """Compiled code reads the embedding of any number."""
        num_ids = self._recorded.logits.shape[1]
        if not 0 <= token_id < num_ids:
            raise ValueError(f"token id {token_id} is not within 0..{num_ids - 1}")

    def _run(
        self, position: int, num_rows: int, stops: Sequence[tuple[int, BetweenCalls]] = ()
    ) -> None:
        recorded, end = self._recorded, position + num_rows
        self._cache.begin_step(position, num_rows)
        self._cache.touch(end)
        recorded.tables.extend(position, end)
        recorded.program.place(num_rows, position)
        self._workers.begin(num_rows)
        table = self._table if num_rows == 1 else None
        if table is None:
            recorded.program.run(self._workers.address, self._check, stops)
        else:
            try:
                table.begin()
                recorded.program.run(self._workers.address, self._check, stops)
            finally:
                table.end()
        self._cache.end_step(end)

    def token(self, position: int) -> int | None:
        return int(self._recorded.next_ids[0]) if self._is_greedy else None

    def logits(self) -> F32Array:
        logits: F32Array = self._recorded.logits[0]
        return logits

    @property
    def most_choices(self) -> int:
        return int(self._recorded.choices is not None)

    def choices(self, first_position: int, num_tokens: int) -> I32Array:
        assert num_tokens == 1
        assert first_position == self._position - 1
        return self.tree_choices(1)

    def tree_choices(self, num_tokens: int) -> I32Array:
        assert self._recorded.choices is not None
        return self._recorded.choices.rows(num_tokens)

    @property
    def slots(self) -> None:
        """None: experts are where they live."""

    def take_selections(self) -> dict[tuple[Phase, int], MailedCounts]:
        """None: the host counts, or banks do."""
        return {}

    def wait(self) -> None:
        """Return at once: steps end before `start` returns."""

    def leave_owners(self) -> None:
        """Do nothing: between two steps it has nothing of theirs."""

    def follow_owners(self) -> None:
        if self._table is not None:
            self._table.refresh()

    def close(self) -> None:
        if "_recorded" in vars(self):
            if self._table is not None:
                self._table.close()
            del self._recorded, self._cache, self._table, self._check
