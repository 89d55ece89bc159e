"""Captured steps and trees whose remote experts are asked for through mailboxes.

Kernels ask and daemons' kernels answer, with no host in between; a lost daemon is noticed
afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from dflash_adapters.spec import MoeLayer, MoeSpec
from dflash_protocol.ids import I32Array, I64Array, Phase
from dflash_runtime.compute.backend import NOT_FINITE, MailedExperts
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.experts.moe import DeviceMoe, HereRoute, Route
from dflash_runtime.compute.gpu.launch.decode_experts import Choice
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.gpu.mailbox.parent import ParentMail
from dflash_runtime.compute.gpu.ops.kernels import RoutedRows
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.run.step_path import GraphPiece, StepPath
from dflash_runtime.compute.model import Pausable


class MailboxPath(StepPath):
    """The path of steps and trees of up to MOST_TOKENS tokens, for which every daemon must be
    prepared.

    States: live; failed, from the first step that was not answered on: its results and all later
    ones are wrong; closed. Owns: the mailboxes, and memory of the device.
    """

    def __init__(
        self,
        ops: GpuOps,
        moe: MoeSpec,
        resident: Mapping[int, ResidentLayer],
        *,
        mail: ParentMail,
        remote: MailedExperts,
    ) -> None:
        """`remote` is told what was computed."""
        self.mail = mail
        self._remote = remote
        self._num_steps = self._epoch_of_position_0 = 0
        self._ops, self._resident = ops, resident
        self._layers = {layer.layer_id: (index, layer) for index, layer in enumerate(moe.layers)}
        upload = ops.device.upload
        self._tables: dict[int, dict[int, DeviceArray]] = {
            layer.layer_id: {
                peer: upload(route.local_ids[layer.layer_id])
                for peer, route in enumerate(mail.routes)
                if layer.layer_id in route.local_ids
            }
            for layer in moe.layers
        }
        self._selections: dict[tuple[Phase, int], DeviceArray] = {}
        self._blocks: dict[Phase, DeviceMoe] = {}

    def experts(self, phase: Phase) -> DeviceMoe:
        """Begins the step on the device. Selections are counted by phase."""
        self.mail.kernels.begin()
        if phase not in self._blocks:
            routes = {layer_id: self._new_route(phase, layer_id) for layer_id in self._layers}
            self._blocks[phase] = DeviceMoe(routes.__getitem__)
        return self._blocks[phase]

    def begin(self, position: int) -> None:
        self._epoch_of_position_0 = self.mail.epoch + 1 - position

    def trial(self) -> AbstractContextManager[None]:
        return self.mail.trial()

    def run(self, pieces: Sequence[GraphPiece], num_tokens: int = 1) -> None:
        self.mail.ring(num_tokens)
        for piece in pieces:
            piece.graph.replay()

    def has_failed(self, position: int) -> bool:
        """Whether the step of this position has failed, or one before it."""
        failed = self.mail.failed_epoch()
        return failed != 0 and failed <= self._epoch_of_position_0 + position

    def is_trusted(self, argmax: I32Array) -> bool:
        """Not if something is not finite: asking through the host will tell which reply is at
        fault."""
        return not self.mail.failed_epoch() and not bool((argmax == NOT_FINITE).any())

    def is_to_be_checked(self) -> bool:
        """Whether a step should be recomputed through the host, to compare a daemon's reply with
        the parent's own result."""
        return self._remote.is_step_to_be_checked(self.mail.routes)

    def note_checked(self, elapsed_s: float) -> None:
        """Such a step was recomputed, in this time."""
        self._remote.note_checked_step(elapsed_s)

    def count_step(self) -> None:
        self._num_steps += 1

    def count_tree(self, num_tokens: int) -> None:
        """Count a tree of so many tokens that was replayed."""
        self._remote.count_mailed(self.mail.routes, 1, phase=Phase.VERIFY, num_tokens=num_tokens)

    def settle(self) -> None:
        """Report the counted steps to `remote`."""
        num_steps, self._num_steps = self._num_steps, 0
        if num_steps:
            self._remote.count_mailed(self.mail.routes, num_steps)

    def close(self) -> None:
        self.settle()
        self.mail.close()

    def take_selections(self) -> dict[tuple[Phase, int], I64Array]:
        """How often experts were chosen since the last call in layers with remote experts, by phase
        and layer id. Shapes: each [E]."""
        device, taken = self._ops.device, {}
        for key, selections in self._selections.items():
            counts: I64Array = device.download(selections).astype(np.int64)
            if counts.any():
                device.write(selections, np.zeros(counts.size, np.uint32))
                taken[key] = counts
        return taken

    def _new_route(self, phase: Phase, layer_id: int) -> Route:
        local, (index, layer) = self._resident.get(layer_id), self._layers[layer_id]
        tables = self._tables[layer_id]
        if not tables:  # the layer has no remote experts
            assert local is not None
            return HereRoute(self._ops, local, phase)
        selections = self._ops.device.zeros(layer.num_experts, np.uint32)
        self._selections[phase, layer_id] = selections
        return _MailboxRoute(self._ops, self.mail, layer, index, local, tables, selections)


@dataclass(frozen=True, slots=True, eq=False)
class _MailboxRoute:
    """Implements moe.Route: posts requests, computes local experts, adds these and the replies."""

    ops: GpuOps
    mail: ParentMail
    layer: MoeLayer
    index: int
    """The layer's place among those with experts."""
    local: ResidentLayer | None
    tables: Mapping[int, DeviceArray]
    """By peer, its local ids of the experts. Shapes: each [E] int32."""
    selections: DeviceArray

    def __call__(self, routed: RoutedRows, residual: Rows) -> Pausable[None]:
        yield from ()  # the host has nothing to do
        ops, layer, tables, choice = self.ops, self.layer, self.tables, routed.choice
        rule, logits = ops.steps.left_to_choose(choice)
        requests, replies = self.mail.requests(self.index), self.mail.replies(self.index)
        rows = ops.steps.for_experts(routed.x)
        # A single float64 sum may be rounded by the daemon: two float32 fit a line.
        rounds = self.local is None and len(tables) == 1 and layer.hidden_size % 2 == 0
        counted_in = ops.step_experts.counted_in(self.selections)
        kernels = self.mail.kernels
        kernels.post(
            layer,
            rule,
            rows,
            choice=Choice(choice.ids, choice.weights, logits, selections=counted_in),
            local_ids=list(tables.values()),
            requests=[requests[peer] for peer in tables],
            rounds=rounds,
        )
        answers = kernels.replies({peer: replies[peer] for peer in tables})
        if self.local is None:
            kernels.add(layer, rule, residual.array, replies=answers, rounded=rounds)
            return
        ops.step_experts.add_with_replies(
            self.local,
            Choice(choice.ids, choice.weights),
            rows,
            residual=residual.array,
            replies=answers,
        )
