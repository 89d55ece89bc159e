"""The routed experts of a captured step: computed by its own calls, or asked for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dflash_adapters.spec import MoeSpec
from dflash_protocol.batch import HostHidden
from dflash_protocol.ids import F32Array, I32Array, Phase
from dflash_runtime.compute.backend import MailedExperts
from dflash_runtime.compute.cpu.captured.ask_table import AskTable
from dflash_runtime.compute.cpu.captured.recorder import Recorder
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels.step_tasks import columns_call
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


class KeptChoices:
    """Records that other experts' choices are kept. Implements model.RoutedExperts."""

    def __init__(
        self, recorder: Recorder, experts: LocalExperts | AskedExperts, moe: MoeSpec
    ) -> None:
        self._recorder, self._experts = recorder, experts
        self._kept = np.zeros(recorder.num_rows * moe.num_used_total, np.int32)
        """[T, K] of each layer, one after the other."""
        recorder.keep(self._kept)
        self._num_recorded = 0
        self._places = np.empty((recorder.num_rows, moe.num_used_total), np.intp)
        """Indices of each row's choices."""

    def __call__(
        self, layer_id: int, hidden: F32Array, topk_ids: I32Array, topk_weights: F32Array
    ) -> Pausable[F32Array]:
        num_rows, num_used = topk_ids.shape
        first = self._num_recorded
        self._num_recorded = end = first + num_used
        some = slice(num_rows * first, num_rows * end)
        self._places[:, first:end] = np.arange(some.start, some.stop).reshape(topk_ids.shape)
        kept = self._kept[some].reshape(topk_ids.shape)
        # Floats are copied as bits.
        self._recorder.run(columns_call(topk_ids.view(np.float32), 0, kept.view(np.float32)))
        return (yield from self._experts(layer_id, hidden, topk_ids, topk_weights))

    def rows(self, num_rows: int) -> I32Array:
        """Those of the last step's first rows. Shapes: result [T, K of all layers]."""
        return self._kept[self._places[:num_rows]]


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

        sums = np.zeros(hidden[:1].shape)
        call = table.call(
            layer_id,
            (hidden[:1], topk_ids, topk_weights),
            sums=sums,
            out=out,
            bank=self._banks.get(layer_id),
        )
        recorder.keep(sums)
        recorder.run(call, instead=ask)
        yield from ()
        return out
