"""Routes to experts that the host asks for between the pieces of a captured step.

The host asks the remote owners of a layer's experts, starts the device on the local ones, and
passes on the owners' sums. Rows and sums lie in mapped memory: no copy is asked of the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_adapters.spec import MoeSpec
from dflash_protocol.batch import HostHidden
from dflash_protocol.ids import Phase
from dflash_runtime.compute.backend import RemoteExperts
from dflash_runtime.compute.gpu.experts.moe import DeviceMoe, HereRoute, Route, local_sums
from dflash_runtime.compute.gpu.launch.decode_experts import Choice
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.gpu.ops.kernels import RoutedRows
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.transfers.exchange import Exchanger, StepBox
from dflash_runtime.compute.model import Pausable

_PHASE = Phase.DECODE


class HostRoutes:
    """Makes the routes of a captured step of one token.

    Used by the thread that runs the model. Owns: mapped memory of the host, for each layer with
    remote experts.
    """

    def __init__(
        self,
        ops: GpuOps,
        moe: MoeSpec,
        resident: Mapping[int, ResidentLayer],
        *,
        remote: RemoteExperts,
    ) -> None:
        self._remote = remote
        self._exchanges: list[_Exchange] = []
        self._whole_pairs: list[int] = []
        """Pairs of a token in each layer whose experts are all here."""
        exchanger = Exchanger(ops.device)
        routes: dict[int, Route] = {}
        for spec in moe.layers:
            layer = resident.get(spec.layer_id)
            if layer is not None and layer.is_whole:
                routes[spec.layer_id] = HereRoute(ops, layer, _PHASE)
                self._whole_pairs.append(spec.num_experts_used)
                continue
            box = StepBox(
                ops.device,
                num_tokens=1,
                hidden_size=spec.hidden_size,
                num_used=spec.num_experts_used,
            )
            exchange = _Exchange(ops, exchanger, box, remote, spec.layer_id, layer)
            routes[spec.layer_id] = exchange
            self._exchanges.append(exchange)
        self.block = DeviceMoe(routes.__getitem__)
        """The experts that the step's model calls."""

    def reset(self) -> None:
        """Forget what an incomplete step or a trial has left. No step may be running."""
        for exchange in self._exchanges:
            exchange.box.expect()

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
            exchange.box.close()
        self._exchanges.clear()


@dataclass(slots=True, eq=False)
class _Exchange:
    """Implements moe.Route: remote experts of one layer, step after step."""

    ops: GpuOps
    exchanger: Exchanger
    box: StepBox
    remote: RemoteExperts
    layer_id: int
    layer: ResidentLayer | None
    ticket: Any = None
    has_sums: bool = False
    """The box has sums of an earlier step, not zeros."""

    def __call__(self, routed: RoutedRows, residual: Rows) -> Pausable[None]:
        """Pauses for the host's work, which is left out in a trial."""
        ops, choice = self.ops, routed.choice
        ops.steps.choose_now(choice)
        rows = ops.steps.for_host(routed.x)
        self.exchanger.give(self.box, rows, Choice(choice.ids, choice.weights))
        if self.layer is None:
            yield self.ask_and_add
            ops.elementwise.add_sums(residual.array, self.box.mapped_sums)
            return
        yield self.ask
        local = local_sums(ops, self.layer, routed, phase=_PHASE)
        yield self.add
        ops.elementwise.add_sums(residual.array, local.array, self.box.mapped_sums)

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
        if ticket is not None:
            self.has_sums = True  # some of them, even if it fails
            self.remote.finish(ticket, self.box.sums)
        elif self.has_sums:
            self.box.sums.fill(0.0)
            self.has_sums = False

    def ask_and_add(self) -> None:
        """Both, for a layer without local experts."""
        self.ask()
        self.add()

    def abandon(self) -> None:
        """Drop what was asked for."""
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            self.remote.abandon(ticket)
