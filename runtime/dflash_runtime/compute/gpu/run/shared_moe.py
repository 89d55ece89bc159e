"""Routed experts of a captured step, some of which are remote and asked for by the host.

Between the pieces of such a step the host asks the remote owners of a layer's experts, starts the
device on the local ones, and passes on the owners' sums. Rows and sums lie in mapped memory: no
copy is asked of the driver. Bits are those of `moe.DeviceMoe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_protocol.batch import HostHidden
from dflash_protocol.ids import Phase
from dflash_runtime.compute.backend import RemoteExperts
from dflash_runtime.compute.gpu.device.buffers import Buffer
from dflash_runtime.compute.gpu.launch.decode_experts import Choice
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.values import Chosen, ExpertSums, F32Rows, Normed
from dflash_runtime.compute.gpu.ops.ops import CupyOps
from dflash_runtime.compute.gpu.run.captured_pieces import HostWork, Pause
from dflash_runtime.compute.gpu.transfers.exchange import Exchanger, StepBox

_PHASE = Phase.DECODE


class SharedMoe:
    """Implements ops.MoeBlock for a step of one token that is captured, or run once as a trial.

    A trial (`begin_trial`) asks no remote owner. Used by the thread that runs the model.
    Owns: mapped memory of the host, for each layer with remote experts.
    """

    def __init__(
        self, ops: CupyOps, resident: Mapping[int, ResidentLayer], remote: RemoteExperts
    ) -> None:
        self._pause: Pause | None = None
        self._ops = ops
        self._resident = resident
        self._remote = remote
        self._exchanger = Exchanger(ops.device)
        self._exchanges: dict[int, _Exchange] = {}
        self._num_whole = self._num_whole_pairs = 0

    def begin_trial(self) -> None:
        """The next step is a trial."""
        self.begin_capture(None)

    def begin_capture(self, pause: Pause | None) -> None:
        """The next step is captured; `pause` ends a piece."""
        self._pause = pause
        self._num_whole = self._num_whole_pairs = 0

    def end_capture(self) -> None:
        """The capture is complete. No step may be running."""
        self._pause = None
        self.reset()

    def reset(self) -> None:
        """Forget what an incomplete step or a trial has left. No step may be running."""
        for exchange in self._exchanges.values():
            exchange.box.expect()

    def count_step(self) -> None:
        """A step has been run: count its layers that are wholly local."""
        if self._num_whole:
            self._remote.count_local(
                _PHASE,
                num_tokens=1,
                num_pairs=self._num_whole_pairs,
                num_layers=self._num_whole,
            )

    def abandon(self) -> None:
        """A step has failed: drop what remote owners were asked for."""
        for exchange in self._exchanges.values():
            exchange.abandon()

    def close(self) -> None:
        """Release mapped memory. No step may be running."""
        for exchange in self._exchanges.values():
            exchange.box.close()
        self._exchanges.clear()

    def __call__(self, layer_id: int, hidden: Any, topk_ids: Any, topk_weights: Any) -> ExpertSums:
        assert isinstance(hidden, Normed | F32Rows)
        assert isinstance(topk_ids, Chosen)
        assert isinstance(topk_weights, Chosen)
        ops, layer = self._ops, self._resident.get(layer_id)
        sums = ExpertSums(layer, hidden, topk_ids, topk_weights, _PHASE)
        if layer is not None and layer.is_whole:
            self._num_whole += 1
            self._num_whole_pairs += topk_ids.array.size
            return sums
        ops.steps.choose(topk_ids)
        rows = ops.steps.normed_rows(hidden)
        exchange = self._exchanges.get(layer_id)
        if exchange is None:
            num_tokens, hidden_size = rows.array.shape
            box = StepBox(
                ops.device,
                num_tokens=num_tokens,
                hidden_size=hidden_size,
                num_used=topk_ids.array.shape[1],
            )
            exchange = self._exchanges[layer_id] = _Exchange(layer_id, layer, self._remote, box)
        box = exchange.box
        self._exchanger.give(box, rows.array, Choice(topk_ids.array, topk_weights.array))
        pause = self._pause
        if pause is None:
            exchange.forget()  # no owner was asked
            pause = _no_pause
        remote_sums = Buffer(box.mapped_sums)
        if layer is None:
            pause(exchange.ask_and_add)
            sums.parts = (remote_sums,)
        else:
            pause(exchange.ask)
            local_sums = ops.local_sums(sums)
            pause(exchange.add)
            sums.parts = (local_sums, remote_sums)
        return sums


def _no_pause(work: HostWork) -> None:
    """The pause of a trial: no host work."""


@dataclass(slots=True, eq=False)
class _Exchange:
    """Remote experts of one layer, step after step."""

    layer_id: int
    layer: ResidentLayer | None
    remote: RemoteExperts
    box: StepBox
    ticket: Any = None
    has_sums: bool = False
    """The box has sums of an earlier step, not zeros."""

    def ask(self) -> None:
        """Wait for the layer's choice; ask the remote owners if it has any of their experts."""
        box = self.box
        box.wait()
        box.expect()  # the next step's
        ids = box.ids
        if self.layer is not None and (self.layer.slot_of_expert[ids] >= 0).all():
            self.remote.count_selections(self.layer_id, ids)
            self.remote.count_local(_PHASE, num_tokens=1, num_pairs=ids.size)
            return
        rows = HostHidden(box.rows)
        self.ticket = self.remote.begin(self.layer_id, rows, ids, box.weights, phase=_PHASE)

    def add(self) -> None:
        """Wait for the owners' sums and pass them to the device."""
        ticket, self.ticket = self.ticket, None
        if ticket is None:
            self.forget()
        else:
            self.remote.finish(ticket, self.box.sums)
            self.has_sums = True

    def ask_and_add(self) -> None:
        """Both, for a layer without local experts."""
        self.ask()
        self.add()

    def forget(self) -> None:
        """There are no remote sums in this step."""
        if self.has_sums:
            self.box.sums.fill(0.0)
            self.has_sums = False

    def abandon(self) -> None:
        """Drop what was asked for."""
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            self.remote.abandon(ticket)
