"""Captured steps whose remote experts the host asks for, between their graphs.

The host asks the remote owners of a layer's experts, starts the device on the local ones, and
passes on the owners' sums. Rows and sums lie in mapped memory: no copy is asked of the driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dflash_adapters.spec import MoeLayer, MoeSpec
from dflash_protocol.batch import HostHidden
from dflash_protocol.ids import Phase
from dflash_runtime.compute.backend import RemoteExperts
from dflash_runtime.compute.gpu.experts.moe import DeviceMoe, HereRoute, Route, local_sums
from dflash_runtime.compute.gpu.launch.decode_experts import Choice
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.gpu.ops.kernels import RoutedRows
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.run.step_path import GraphPiece, StepPath
from dflash_runtime.compute.gpu.transfers.exchange import Exchanger, StepBox
from dflash_runtime.compute.model import Pausable

_PHASE = Phase.DECODE


class HostPath(StepPath):
    """The path of steps of one token. Owns: mapped memory of the host, for each layer with remote
    experts."""

    needs_host = True

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
        self._ops, self._exchanger = ops, Exchanger(ops.device)
        try:
            routes = {
                layer.layer_id: self._new_route(layer, resident.get(layer.layer_id))
                for layer in moe.layers
            }
        except BaseException:
            self.close()
            raise
        self._moe = DeviceMoe(routes.__getitem__)

    def _new_route(self, layer: MoeLayer, local: ResidentLayer | None) -> Route:
        if local is not None and local.is_whole:
            self._whole_pairs.append(layer.num_experts_used)
            return HereRoute(self._ops, local, _PHASE)
        box = StepBox(
            self._ops.device,
            num_tokens=1,
            hidden_size=layer.hidden_size,
            num_used=layer.num_experts_used,
        )
        exchange = _Exchange(
            self._ops, self._exchanger, box, self._remote, layer.layer_id, layer=local
        )
        self._exchanges.append(exchange)
        return exchange

    def experts(self, phase: Phase) -> DeviceMoe:
        return self._moe

    def begin(self, position: int) -> None:
        """Forget what an incomplete step has left."""
        for exchange in self._exchanges:
            exchange.box.expect()

    @contextmanager
    def trial(self) -> Iterator[None]:
        yield
        for exchange in self._exchanges:
            exchange.box.expect()

    def run(self, pieces: Sequence[GraphPiece], num_tokens: int = 1) -> None:
        """If it fails, what remote owners were asked for is dropped."""
        try:
            for piece in pieces:
                piece.graph.replay()
                if piece.host_work is not None:
                    piece.host_work()
        except BaseException:
            for exchange in self._exchanges:
                exchange.abandon()
            raise

    def count_step(self) -> None:
        """Layers that are wholly local; the others are counted as they are asked for."""
        if self._whole_pairs:
            self._remote.count_local(
                _PHASE,
                num_tokens=1,
                num_pairs=sum(self._whole_pairs),
                num_layers=len(self._whole_pairs),
            )

    def close(self) -> None:
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
