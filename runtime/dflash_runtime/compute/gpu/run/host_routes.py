"""Routes to experts that the host asks for between the pieces of a captured step.

The host asks the remote owners of a layer's experts, starts the device on the local ones, and
passes on the owners' sums. Rows and sums lie in mapped memory: no copy is asked of the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_protocol.batch import HostHidden
from dflash_protocol.ids import Phase
from dflash_runtime.compute.backend import RemoteExperts
from dflash_runtime.compute.gpu.experts.moe import DeviceMoe, HereRoute, Route, local_sums
from dflash_runtime.compute.gpu.launch.decode_experts import Choice
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.ops.way import Routed
from dflash_runtime.compute.gpu.transfers.exchange import Exchanger, StepBox
from dflash_runtime.compute.model import Pausable

_PHASE = Phase.DECODE


class HostRoutes:
    """Makes the routes of a captured step of one token, and of its trial, which asks no owner.

    Used by the thread that runs the model. Owns: mapped memory of the host, for each layer with
    remote experts.
    """

    def __init__(
        self, ops: GpuOps, resident: Mapping[int, ResidentLayer], remote: RemoteExperts
    ) -> None:
        self._remote = remote
        exchanges: list[_Exchange] = []
        whole_pairs: list[int] = []
        exchanger = Exchanger(ops.device)

        def route_of(layer_id: int) -> Route:
            layer = resident.get(layer_id)
            if layer is not None and layer.is_whole:
                whole_pairs.append(layer.layer.num_experts_used)
                return HereRoute(ops, layer, _PHASE)
            exchanges.append(_Exchange(ops, exchanger, remote, layer_id, layer))
            return exchanges[-1]

        self.block = DeviceMoe(route_of)
        """The experts that the step's model calls."""
        self._exchanges, self._whole_pairs = exchanges, whole_pairs
        """Layers with remote experts; pairs of a token in each layer without any."""

    def begin_trial(self) -> None:
        """The next step is a trial."""
        for exchange in self._exchanges:
            exchange.is_trial = True

    def begin_capture(self) -> None:
        """The next step, after a trial, is captured in pieces."""
        for exchange in self._exchanges:
            exchange.is_trial = False

    def end_capture(self) -> None:
        """The capture is complete. No step may be running."""
        self.begin_trial()
        self.reset()

    def reset(self) -> None:
        """Forget what an incomplete step or a trial has left. No step may be running."""
        for exchange in self._exchanges:
            exchange.expect()

    def count_step(self) -> None:
        """A step has been run: count its layers that are wholly local."""
        if self._whole_pairs:
            self._remote.count_local(
                _PHASE,
                num_tokens=1,
                num_pairs=sum(self._whole_pairs),
                num_layers=len(self._whole_pairs),
            )

    def abandon(self) -> None:
        """A step has failed: drop what remote owners were asked for."""
        for exchange in self._exchanges:
            exchange.abandon()

    def close(self) -> None:
        """Release mapped memory. No step may be running."""
        for exchange in self._exchanges:
            exchange.close()
        self._exchanges.clear()


@dataclass(slots=True, eq=False)
class _Exchange:
    """Implements moe.Route: remote experts of one layer, step after step."""

    ops: GpuOps
    exchanger: Exchanger
    remote: RemoteExperts
    layer_id: int
    layer: ResidentLayer | None
    box: StepBox | None = None
    """Made by the first trial."""
    is_trial: bool = True
    ticket: Any = None
    has_sums: bool = False
    """The box has sums of an earlier step, not zeros."""

    def __call__(self, routed: Routed, residual: Rows) -> Pausable[None]:
        """Pauses for the host's work, unless this is a trial."""
        ops, choice, is_trial = self.ops, routed.choice, self.is_trial
        ops.steps.choose_now(choice)
        rows = ops.steps.for_host(routed.x)
        if self.box is None:
            (num_tokens, hidden_size), (_, num_used) = rows.shape, choice.ids.shape
            self.box = StepBox(
                ops.device, num_tokens=num_tokens, hidden_size=hidden_size, num_used=num_used
            )
        self.exchanger.give(self.box, rows, Choice(choice.ids, choice.weights))
        if is_trial:
            self.forget()  # no owner is asked
        remote_sums = self.box.mapped_sums
        if self.layer is None:
            if not is_trial:
                yield self.ask_and_add
            ops.add_sums.launch(residual.array, remote_sums)
            return
        if not is_trial:
            yield self.ask
        local = local_sums(ops, self.layer, routed, _PHASE)
        if not is_trial:
            yield self.add
        ops.add_sums.launch(residual.array, local.array, remote_sums)

    def expect(self) -> None:
        """Forget what an incomplete step has left."""
        if self.box is not None:
            self.box.expect()

    def close(self) -> None:
        """Release mapped memory."""
        if self.box is not None:
            self.box.close()

    def ask(self) -> None:
        """Wait for the layer's choice; ask the remote owners if it has any of their experts."""
        box = self.box
        assert box is not None
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
            assert self.box is not None
            self.remote.finish(ticket, self.box.sums)
            self.has_sums = True

    def ask_and_add(self) -> None:
        """Both, for a layer without local experts."""
        self.ask()
        self.add()

    def forget(self) -> None:
        """There are no remote sums in this step."""
        if self.has_sums and self.box is not None:
            self.box.sums.fill(0.0)
            self.has_sums = False

    def abandon(self) -> None:
        """Drop what was asked for."""
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            self.remote.abandon(ticket)
