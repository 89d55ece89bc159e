"""Routed experts of a GPU's model: for each layer, the route to them.

* Here: all of a layer's experts are on the device, and nothing leaves it (HereRoute).
* Asked by the host: the choice is copied to the host, and if it has remote experts their owners
  are asked, while the device computes the local ones (HostRoute). Those of a chunk are launched
  before the choice has come, so that all that the host then does is beside them. Rows of a chunk
  and the sums that return stay on the device unless an owner computes on a CPU; the experts of such
  an owner may be computed locally, see offload.py: then the choice is awaited after all chunks of
  a group have been launched, if at all. A captured step is left for that: `run/host_path.py`.
* Asked by the device, through mailboxes, in captured steps: `run/mailbox_path.py`.

Bits are the same whatever the route.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from dflash_protocol.batch import Hidden, HostHidden, Sums
from dflash_protocol.ids import I32Array, Phase
from dflash_runtime.compute.backend import RemoteExperts
from dflash_runtime.compute.gpu.device.buffers import Buffer
from dflash_runtime.compute.gpu.experts.offload import (
    ExpertOffload,
    Experts,
    OffloadedChunk,
)
from dflash_runtime.compute.gpu.launch.decode_experts import Choice
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.gpu.ops.kernels import RoutedRows
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.transfers.host_rows import PendingChoice
from dflash_runtime.compute.model import Pausable


class Route(Protocol):
    """The way to one layer's experts in one phase."""

    def __call__(self, routed: RoutedRows, residual: Rows) -> Pausable[None]:
        """Add the chosen experts to the residual. In a chunk it pauses exactly once.

        Raises: DaemonUnavailable if a remote expert's owner is lost and it has no fallback.
        """


class DeviceMoe:
    """Implements ffns.DeviceExperts for one phase. Used by the thread that runs the model."""

    def __init__(self, route_of: Callable[[int], Route]) -> None:
        """`route_of` makes the route of a layer id, when that is first needed."""
        self._route_of = route_of
        self._routes: dict[int, Route] = {}

    def __call__(self, layer_id: int, routed: RoutedRows, residual: Rows) -> Pausable[None]:
        route = self._routes.get(layer_id)
        if route is None:
            route = self._routes[layer_id] = self._route_of(layer_id)
        return route(routed, residual)


class HereRoute:
    """All of a layer's experts are on this device, or all that are to be computed."""

    def __init__(
        self,
        ops: GpuOps,
        layer: ResidentLayer,
        phase: Phase,
        *,
        remote: RemoteExperts | None = None,
    ) -> None:
        """`remote` counts the pairs, if given."""
        self._ops, self._layer, self._phase, self._remote = ops, layer, phase, remote

    def __call__(self, routed: RoutedRows, residual: Rows) -> Pausable[None]:
        remote, (num_tokens, num_used) = self._remote, routed.choice.ids.shape
        if remote is not None and self._phase is Phase.PREFILL:
            remote.poll()  # of other layers, whose rows may be on their way
        add_local(self._ops, self._layer, routed, residual=residual, phase=self._phase)
        if remote is not None:
            num_pairs = num_tokens * num_used
            remote.count_local(self._phase, num_tokens=num_tokens, num_pairs=num_pairs)
        if self._phase is Phase.PREFILL:
            yield None


class HostRoute:
    """Some of a layer's experts are remote; their owners are asked by the host."""

    def __init__(
        self,
        ops: GpuOps,
        layer_id: int,
        layer: ResidentLayer | None,
        *,
        phase: Phase,
        remote: RemoteExperts,
        offload: ExpertOffload | None = None,
    ) -> None:
        """`layer`: the experts that are here, if any. `offload` computes remote experts of chunks
        if that is faster than asking."""
        self._ops, self._layer_id, self._layer, self._phase = ops, layer_id, layer, phase
        self._remote, self._offload = remote, offload
        self._num_experts = remote.local_experts_mask(layer_id).size

    def __call__(self, routed: RoutedRows, residual: Rows) -> Pausable[None]:
        if self._phase is Phase.PREFILL:
            yield from self._chunk(routed, residual)
        else:
            self._step(routed, residual)

    def _chunk(self, routed: RoutedRows, residual: Rows) -> Pausable[None]:
        ops, remote, offload = self._ops, self._remote, self._offload
        layer_id, num_tokens = self._layer_id, routed.choice.ids.shape[0]
        remote.poll()  # the device is busy until experts are chosen
        ops.steps.choose_now(routed.choice)
        pending = ops.payload.choices.begin(
            routed.choice.ids, routed.choice.weights, num_experts=self._num_experts
        )
        wanted = None if offload is None else offload.wanted(layer_id, num_tokens, remote)
        asks_nothing = wanted is not None and wanted.is_all
        offloaded = None if wanted is None else wanted.experts
        hidden = local = ticket = chunk = None
        try:
            predicted = None if wanted is None else self._predicted(routed)
            if not asks_nothing:
                # A copy, which may be sent while the device goes on with other rows.
                hidden = ops.payload.rows(ops.chunks.copy_of(routed.x).array)
            if self._layer is not None:
                local = local_sums(ops, self._layer, routed, phase=self._phase)
            if offload is not None and offloaded is not None:
                sums = None if local is None else local.array
                count = partial(self._ask, pending, offloaded, None) if asks_nothing else None
                chunk = OffloadedChunk(
                    routed, pending, offloaded, sums, predicted=predicted, note=count
                )
                offload.add(layer_id, chunk)
            if not asks_nothing:
                ticket = self._ask(pending, offloaded, hidden)
            remote.poll()
            if ticket is None and chunk is None:
                # Nothing is awaited: while others take their turns, only rows are kept.
                self._add(residual, local, ticket)
                hidden = local = None
            yield None
            if offload is not None and chunk is not None:
                local = Buffer(offload.sums_of(chunk, remote))
        except BaseException:
            if offload is not None:
                offload.abandon()
            if ticket is not None:
                remote.abandon(ticket)
            raise
        if ticket is not None or chunk is not None:
            self._add(residual, local, ticket)

    def _predicted(self, routed: RoutedRows) -> PendingChoice | None:
        """What the rows are expected to choose in the next layer, if that decides what is copied
        ahead."""
        offload, following = self._offload, self._layer_id + 1
        num_tokens = routed.choice.ids.shape[0]
        if offload is None or routed.predict is None:
            return None
        if not offload.is_uncertain(following, num_tokens, self._remote):
            return None
        choice, num_experts = routed.predict(), self._remote.local_experts_mask(following).size
        choices = self._ops.payload.choices
        return choices.begin(choice.ids, None, num_experts=num_experts)

    def _ask(self, pending: PendingChoice, offloaded: Experts | None, hidden: Hidden | None) -> Any:
        """Ask the owners for what is not `offloaded`, and count what was chosen; a ticket, or None
        if nothing is awaited."""
        (ids, weights), counts = pending.wait(), pending.counts()
        layer, remote = self._layer, self._remote
        if layer is not None and not counts[layer.slot_of_expert < 0].any():
            self._count_local(ids)
            return None
        remote.poll()
        return remote.begin(
            self._layer_id,
            hidden,
            ids,
            weights,
            phase=self._phase,
            offloaded=offloaded,
            counts=counts,
        )

    def _step(self, routed: RoutedRows, residual: Rows) -> None:
        ops, layer, remote = self._ops, self._layer, self._remote
        ops.steps.choose_now(routed.choice)
        ids = ops.device.download(routed.choice.ids)
        if layer is not None and (layer.slot_of_expert[ids] >= 0).all():
            self._count_local(ids)
            add_local(ops, layer, routed, residual=residual, phase=self._phase)
            return
        weights = ops.device.download(routed.choice.weights)
        hidden = HostHidden(ops.device.download(ops.steps.for_host(routed.x)))
        # Launched first, so that the device works while the host groups pairs and sends rows.
        local = None
        if layer is not None:
            local = local_sums(ops, layer, routed, phase=self._phase)
        ticket = remote.begin(self._layer_id, hidden, ids, weights, phase=self._phase)
        self._add(residual, local, ticket)

    def _count_local(self, ids: I32Array) -> None:
        """Count a pass in which nothing remote was chosen. Shapes: ids [T, K]."""
        self._remote.count_selections(self._phase, self._layer_id, ids)
        self._remote.count_local(self._phase, num_tokens=ids.shape[0], num_pairs=ids.size)

    def _add(self, residual: Rows, local: Buffer | None, ticket: Any) -> None:
        """Add the local sums, and those that were asked for, to the residual."""
        parts = [] if local is None else [local]
        if ticket is not None:
            parts.append(self._on_device(self._remote.finish(ticket)))
        self._ops.elementwise.add_sums(residual.array, *(part.array for part in parts))

    def _on_device(self, sums: Sums) -> Buffer:
        """Remote sums as a buffer of the device. Shapes: sums [T, H]."""
        if sums.is_on_device:
            return Buffer(self._ops.payload.array_of_sums(sums))
        buffer = self._ops.steps.sums(*sums.shape)
        self._ops.device.write(buffer.array, sums.to_host())
        return buffer


def add_local(
    ops: GpuOps, layer: ResidentLayer, routed: RoutedRows, *, residual: Rows, phase: Phase
) -> None:
    """Add a layer's experts, all of which are here, to the residual. The phase decides the
    kernels, so that a slice of rows has the bits of the whole."""
    choice = routed.choice
    if phase is Phase.PREFILL:
        ops.steps.choose_now(choice)
        ops.chunk_experts.add(layer, routed, residual)
        return
    rule, logits = ops.steps.left_to_choose(choice)
    counted_in = ops.step_experts.counted_in(layer.counted_in(phase))
    ops.step_experts.run(
        layer,
        Choice(choice.ids, choice.weights, logits, selections=counted_in),
        ops.steps.for_experts(routed.x),
        out=residual.array,
        gives_sums=False,
        rule=rule,
    )


def local_sums(ops: GpuOps, layer: ResidentLayer, routed: RoutedRows, *, phase: Phase) -> Buffer:
    """Sums of the experts that are here, which must be chosen. Shapes: result [T, H] float64."""
    if phase is Phase.PREFILL:
        return Buffer(ops.chunk_experts.local_sums(layer, routed))
    choice = Choice(routed.choice.ids, routed.choice.weights)
    sums = ops.steps.sums(*routed.x.rows.array.shape)
    rows = ops.steps.for_experts(routed.x)
    ops.step_experts.run(layer, choice, rows, out=sums.array, gives_sums=True)
    return sums
