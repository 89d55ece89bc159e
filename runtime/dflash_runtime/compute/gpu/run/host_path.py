"""Captured steps whose remote experts the host asks for, between their graphs.

The host asks the remote owners of a layer's experts, and computes those in its own memory, while
the device computes its own, and passes on the sums. Rows and sums lie in mapped memory: no copy is
asked of the driver. Compiled code runs a step, from graph to graph, and asks the owners if it can
(see AskTable).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dflash_adapters.spec import MoeLayer, MoeSpec
from dflash_protocol.batch import HostHidden
from dflash_protocol.ids import Phase
from dflash_runtime.compute.backend import MailedExperts
from dflash_runtime.compute.cpu.captured.ask_table import AskTable
from dflash_runtime.compute.cpu.captured.program import BetweenCalls, Program
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels.device_tasks import (
    await_call,
    compile_calls,
    launch_call,
)
from dflash_runtime.compute.cpu.kernels.words import Call
from dflash_runtime.compute.gpu.device.buffers import Buffer
from dflash_runtime.compute.gpu.experts.moe import DeviceMoe, HereRoute, Route, local_sums
from dflash_runtime.compute.gpu.launch.decode_experts import Choice
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.gpu.ops.kernels import RoutedRows
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.run.step_path import GraphPiece, StepPath
from dflash_runtime.compute.gpu.transfers.exchange import BUSY_S, Exchanger, StepBox
from dflash_runtime.compute.model import Pausable

_PHASE = Phase.DECODE


class HostPath(StepPath):
    """The path of steps of one token. Owns: mapped memory of the host, for each layer with remote
    experts."""

    def __init__(
        self,
        ops: GpuOps,
        moe: MoeSpec,
        resident: Mapping[int, ResidentLayer],
        *,
        remote: MailedExperts,
        check: Callable[[], None],
    ) -> None:
        """`check` is called within a step, at least every 50 ms while daemons are awaited; what it
        raises ends the step."""
        compile_calls()
        self._remote, self._check = remote, check
        self.exchanges: dict[int, ExchangeRoute] = {}
        """Routes of layers whose experts are not all here, by layer id."""
        self._whole_pairs: list[int] = []
        """Pairs of a token in each layer whose experts are all here."""
        self._ops, self._exchanger = ops, Exchanger(ops.device)
        banks = {
            layer_id: bank
            for layer_id, bank in remote.own_banks.items()
            if isinstance(bank, CpuExpertBank)
        }
        self._workers = next((bank.workers for bank in banks.values()), None)
        self._table = AskTable(
            remote,
            hidden_size=max(layer.hidden_size for layer in moe.layers),
            num_experts_used=max(layer.num_experts_used for layer in moe.layers),
            workers=self._workers,
        )
        try:
            routes = {
                layer.layer_id: self._new_route(
                    layer, resident.get(layer.layer_id), banks.get(layer.layer_id)
                )
                for layer in moe.layers
            }
        except BaseException:
            self.close()
            raise
        self._moe = DeviceMoe(routes.__getitem__)
        self.owner_indices = self._owners_now()
        """Of all owners of experts in layers that are not wholly here."""

    def _new_route(
        self, layer: MoeLayer, local: ResidentLayer | None, bank: CpuExpertBank | None
    ) -> Route:
        if local is not None and local.is_whole:
            self._whole_pairs.append(layer.num_experts_used)
            return HereRoute(self._ops, local, _PHASE)
        box = StepBox(
            self._ops.device,
            num_tokens=1,
            hidden_size=layer.hidden_size,
            num_used=layer.num_experts_used,
        )
        exchange = _Exchange(self._table, box, self._remote, layer.layer_id, bank)
        route = ExchangeRoute(self._ops, self._exchanger, exchange, local)
        self.exchanges[layer.layer_id] = route
        return route

    @property
    def needs_host(self) -> bool:
        return True

    def experts(self, phase: Phase) -> DeviceMoe:
        return self._moe

    def replayed(self, pieces: Sequence[GraphPiece]) -> Callable[[], None]:
        return partial(self.run_program, self.program(pieces))

    def program(self, pieces: Sequence[GraphPiece]) -> Program:
        """What runs these graphs, and the host's work between them."""
        calls, instead = list[Call](), dict[int, BetweenCalls]()

        def add(call: Call, by_host: Callable[[], None]) -> None:
            instead[len(calls)] = lambda num_rows: by_host()
            calls.append(call)

        for piece in pieces:
            exchange = piece.host_work
            assert exchange is None or isinstance(exchange, _Exchange)
            signal = 0 if exchange is None else exchange.box.signal_address
            add(launch_call(piece.graph.launcher, signal), piece.graph.replay)
            if exchange is not None:
                add(await_call(signal, int(1e9 * BUSY_S)), exchange.box.wait)
                add(exchange.call(), exchange)
        return Program(calls, [self.exchanges, pieces], 1, instead=instead)

    def run_program(self, program: Program, mailed: frozenset[int] = frozenset()) -> None:
        """Run a step. `mailed`: indices of owners that the device asks itself.

        Raises: what `check` raises; DaemonUnavailable, DeviceUnavailable.
        """
        workers, pool = self._workers, 0
        if workers is not None:
            workers.begin(1)
            pool = workers.address
        self._ops.device.use()
        try:
            self._table.begin(mailed)
            program.run(pool, self._check)
        finally:
            self._table.end()

    def count_step(self) -> None:
        """Layers that are wholly local; the others are counted as they are asked for."""
        self.count_whole(_PHASE)

    def count_whole(self, phase: Phase, num_steps: int = 1, *, num_tokens: int = 1) -> None:
        """Count layers that are wholly local, in steps of so many tokens."""
        if self._whole_pairs:
            self._remote.count_local(
                phase,
                num_tokens=num_tokens,
                num_pairs=num_steps * num_tokens * sum(self._whole_pairs),
                num_layers=num_steps * len(self._whole_pairs),
            )

    def settle(self) -> None:
        """Report what was asked since the last time."""
        self._table.settle()

    def follow_owners(self) -> None:
        self._table.refresh()
        self.owner_indices = self._owners_now()

    def _owners_now(self) -> frozenset[int]:
        routings = [self._remote.routing(layer_id) for layer_id in self.exchanges]
        return frozenset(index for each in routings for index in each.owner_index.tolist())

    def close(self) -> None:
        self._table.close()
        for route in self.exchanges.values():
            route.exchange.box.close()
        self.exchanges.clear()


@dataclass(frozen=True, slots=True, eq=False)
class _Exchange:
    """Remote experts of one layer, step after step: by a call of compiled code, or by the host."""

    table: AskTable
    box: StepBox
    remote: MailedExperts
    layer_id: int
    bank: CpuExpertBank | None
    """The experts that this process's processor computes."""

    def call(self) -> Call:
        """Asks for the experts that were chosen and passes their sums to the device."""
        box = self.box
        routed = box.rows, box.ids, box.weights
        return self.table.call(self.layer_id, routed, sums=box.sums, bank=self.bank)

    def __call__(self) -> None:
        """The same by the host. Raises: DaemonUnavailable if no owner can compute them."""
        self.table.leave_to_host()
        box, mailed = self.box, self.table.mailed
        rows = HostHidden(box.rows)
        ticket = self.remote.begin(
            self.layer_id, rows, box.ids, box.weights, phase=_PHASE, mailed=mailed
        )
        self.remote.finish(ticket, box.sums)


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeRoute:
    """Implements moe.Route: gives rows and choice to the host, adds the local experts and its
    sums. Immutable, but for the exchange's memory."""

    ops: GpuOps
    exchanger: Exchanger
    exchange: _Exchange
    layer: ResidentLayer | None

    def __call__(self, routed: RoutedRows, residual: Rows) -> Pausable[None]:
        """Pauses for the host's work, which is left out in a trial."""
        local = yield from self.asked(routed)
        add, host = self.ops.elementwise.add_sums, self.exchange.box.mapped_sums
        if local is None:
            add(residual.array, host)
        else:
            add(residual.array, local.array, host)

    def asked(self, routed: RoutedRows) -> Pausable[Buffer | None]:
        """Have the host ask; then its sums are in the box's memory. Returns those of the local
        experts, if there are any: [1, H] float64."""
        ops, choice = self.ops, routed.choice
        ops.steps.choose_now(choice)
        rows = ops.steps.for_host(routed.x)
        self.exchanger.give(self.exchange.box, rows, Choice(choice.ids, choice.weights))
        local = None
        if self.layer is not None:  # while the host is at work
            local = local_sums(ops, self.layer, routed, phase=_PHASE)
        yield self.exchange
        return local
