"""The routed experts of a captured step: computed by its own calls, or asked for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dflash_protocol.batch import HostHidden
from dflash_protocol.ids import F32Array, I32Array, Phase
from dflash_runtime.compute.backend import MailedExperts
from dflash_runtime.compute.cpu.captured.ask_table import AskTable
from dflash_runtime.compute.cpu.captured.recorder import Recorder
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import asked_tasks as asked
from dflash_runtime.compute.cpu.kernels import experts_kernel as k
from dflash_runtime.compute.cpu.kernels import step_tasks as steps
from dflash_runtime.compute.cpu.kernels.words import Call, address
from dflash_runtime.compute.model import Pausable


class LocalExperts:
    """Records experts that are all in this process, by layer id. Implements model.RoutedExperts."""

    def __init__(self, recorder: Recorder, banks: Mapping[int, CpuExpertBank]) -> None:
        self._recorder, self._banks = recorder, banks

    def __call__(
        self, layer_id: int, hidden: F32Array, topk_ids: I32Array, topk_weights: F32Array
    ) -> Pausable[F32Array]:
        recorder, bank = self._recorder, self._banks[layer_id]
        out, routing = recorder.new(hidden.shape), (topk_ids, topk_weights)
        local_ids = np.arange(bank.num_experts, dtype=np.int32)
        call, memory = bank.routed_call(hidden, routing, local_ids, out)
        recorder.keep(local_ids, *memory)
        recorder.run(call)
        yield from ()
        return out


class AskedExperts:
    """Experts of several owners, which compiled code asks in steps of one token, and else the host.
    Implements model.RoutedExperts.

    Sums are added in float64 and rounded once, as HostExperts does. `banks`: this process's
    experts, by layer id.
    """

    def __init__(
        self,
        recorder: Recorder,
        owners: MailedExperts,
        banks: Mapping[int, CpuExpertBank],
        table: AskTable,
    ) -> None:
        self._recorder, self._owners, self._banks, self._table = recorder, owners, banks, table

    def __call__(
        self, layer_id: int, hidden: F32Array, topk_ids: I32Array, topk_weights: F32Array
    ) -> Pausable[F32Array]:
        recorder, owners, table = self._recorder, self._owners, self._table
        out = recorder.new(hidden.shape)

        def ask(rows: int) -> None:
            """Raises: DaemonUnavailable if no owner can compute them."""
            table.leave_to_host()
            ticket = owners.begin(
                layer_id,
                HostHidden(hidden[:rows]),
                topk_ids[:rows],
                topk_weights[:rows],
                phase=Phase.DECODE if rows == 1 else Phase.VERIFY,
            )
            out[:rows] = owners.finish(ticket).to_host()

        recorder.run(self._call(layer_id, hidden, (topk_ids, topk_weights), out), instead=ask)
        yield from ()
        return out

    def _call(
        self,
        layer_id: int,
        hidden: F32Array,
        routing: tuple[I32Array, F32Array],
        out: F32Array,
    ) -> Call:
        """Shapes: as `CpuExpertBank.routed_call`, of which it computes the first row."""
        table, lookup, num_used = self._table, self._owners.routing(layer_id), routing[0].shape[1]
        words, scratch = [0] * asked.NUM_WORDS, tuple[tuple[int, int], ...]()
        if layer_id in self._banks:
            bank, own = self._banks[layer_id], self._owners.own_index
            words[: k.NUM_LAYER_WORDS] = bank.words.tolist()
            words[k.EXPERT_IDS] = address(table.pairs.expert_ids[own], np.int32)
            words[k.WEIGHTS] = address(table.pairs.weights[own])
            scratch = bank.scratch_words(1, num_used)
        words[k.GROUP_STARTS] = address(table.pairs.group_starts, np.int32)
        words[k.TOKEN_INDICES] = address(table.pairs.token_indices, np.int32)
        selections, sums = np.zeros(lookup.owner_index.size, np.int64), np.zeros(hidden[:1].shape)
        table.selections[layer_id] = selections
        steps.set_routing(
            words,
            hidden[:1],
            routing,
            local_ids=lookup.local_expert_id,
            selections=selections,
            sums=sums,
            out=out,
        )
        words[asked.LAYER_ID], words[asked.TABLE] = layer_id, table.address
        words[asked.OWNER_OF] = address(lookup.owner_index, np.int32)
        self._recorder.keep(lookup, selections, sums, self._banks.get(layer_id))
        return Call(asked.run_asked().address, words, scratch=scratch)
