"""The routed experts of a captured step: computed by its own calls, or asked for by the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dflash_protocol.batch import HostHidden
from dflash_protocol.ids import F32Array, I32Array, Phase
from dflash_runtime.compute.backend import RemoteExperts
from dflash_runtime.compute.cpu.captured.recorder import Recorder
from dflash_runtime.compute.cpu.experts import CpuExpertBank
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
    """Experts that the host asks their owners for during a step. Implements model.RoutedExperts.

    Sums are added in float64 and rounded once, as HostExperts does.
    """

    def __init__(self, recorder: Recorder, remote: RemoteExperts) -> None:
        self._recorder, self._remote = recorder, remote

    def __call__(
        self, layer_id: int, hidden: F32Array, topk_ids: I32Array, topk_weights: F32Array
    ) -> Pausable[F32Array]:
        recorder, remote, out = self._recorder, self._remote, self._recorder.new(hidden.shape)

        def ask(rows: int) -> None:
            """Raises: DaemonUnavailable if no owner can compute them."""
            ticket = remote.begin(
                layer_id,
                HostHidden(hidden[:rows]),
                topk_ids[:rows],
                topk_weights[:rows],
                phase=Phase.DECODE if rows == 1 else Phase.VERIFY,
            )
            out[:rows] = remote.finish(ticket).to_host()

        recorder.pause(ask)
        yield from ()
        return out
