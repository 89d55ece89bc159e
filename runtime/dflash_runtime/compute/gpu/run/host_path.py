"""Captured steps whose remote experts the host asks for, between their graphs.

The host asks the remote owners of a layer's experts, and computes those in its own memory, while
the device computes its own, and passes on the sums. Rows and sums lie in mapped memory: no copy is
asked of the driver. Compiled code runs a step, from graph to graph, and asks the owners if it can
(see AskTable).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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

    needs_host = True

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
        self._exchanges: list[_Exchange] = []
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
        self._exchanges.append(exchange)
        return _ExchangeRoute(self._ops, self._exchanger, exchange, local)

    def experts(self, phase: Phase) -> DeviceMoe:
        return self._moe

    def replayed(self, pieces: Sequence[GraphPiece]) -> Callable[[], None]:
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
        program = Program(calls, [self._exchanges, pieces], 1, instead=instead)
        return lambda: self._run(program)

    def _run(self, program: Program) -> None:
        """Raises: what `check` raises; DaemonUnavailable, DeviceUnavailable."""
        workers, pool = self._workers, 0
        if workers is not None:
            workers.begin(1)
            pool = workers.address
        self._ops.device.use()
        try:
            self._table.begin()
            program.run(pool, self._check)
        finally:
            self._table.end()

    def count_step(self) -> None:
        """Layers that are wholly local; the others are counted as they are asked for."""
        if self._whole_pairs:
            self._remote.count_local(
                _PHASE,
                num_tokens=1,
                num_pairs=sum(self._whole_pairs),
                num_layers=len(self._whole_pairs),
            )

    def follow_owners(self) -> None:
        self._table.refresh()

    def close(self) -> None:
        self._table.close()
        for exchange in self._exchanges:
            exchange.box.close()
        self._exchanges.clear()


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
        box = self.box
        rows = HostHidden(box.rows)
        ticket = self.remote.begin(self.layer_id, rows, box.ids, box.weights, phase=_PHASE)
        self.remote.finish(ticket, box.sums)


@dataclass(frozen=True, slots=True, eq=False)
class _ExchangeRoute:
    """Implements moe.Route: gives rows and choice to the host, adds the local experts and its
    sums."""

    ops: GpuOps
    exchanger: Exchanger
    exchange: _Exchange
    layer: ResidentLayer | None

    def __call__(self, routed: RoutedRows, residual: Rows) -> Pausable[None]:
        """Pauses for the host's work, which is left out in a trial."""
        ops, choice, box = self.ops, routed.choice, self.exchange.box
        ops.steps.choose_now(choice)
        rows = ops.steps.for_host(routed.x)
        self.exchanger.give(box, rows, Choice(choice.ids, choice.weights))
        if self.layer is None:
            yield self.exchange
            ops.elementwise.add_sums(residual.array, box.mapped_sums)
            return
        local = local_sums(ops, self.layer, routed, phase=_PHASE)  # while the host is at work
        yield self.exchange
        ops.elementwise.add_sums(residual.array, local.array, box.mapped_sums)
