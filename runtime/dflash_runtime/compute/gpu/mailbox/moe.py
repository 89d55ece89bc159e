"""Routed experts of a captured step or tree whose remote owners are asked through mailboxes.

Kernels ask and daemons' kernels answer, with no host in between. Bits are those of `moe.DeviceMoe`
and `shared_moe.SharedMoe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from dflash_adapters.ops import RoutingRule
from dflash_adapters.spec import MoeLayer, MoeSpec
from dflash_protocol.ids import I64Array, Phase
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.launch.decode_experts import Choice
from dflash_runtime.compute.gpu.launch.mailbox_args import MailReplies
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.values import Chosen, ExpertSums, F32Rows, Normed
from dflash_runtime.compute.gpu.mailbox.parent import ParentMail
from dflash_runtime.compute.gpu.ops.ops import CupyOps
from dflash_runtime.compute.model import Pausable, RoutedExperts


class MailMoe:
    """Makes MoE blocks for captures and trials of up to MOST_TOKENS tokens.

    Used by the thread that runs the model; lasts as long as `mail`. Owns: memory of the device.
    """

    def __init__(
        self, ops: CupyOps, moe: MoeSpec, resident: Mapping[int, ResidentLayer], *, mail: ParentMail
    ) -> None:
        self.mail = mail
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

    def block(self, phase: Phase) -> RoutedExperts[Any]:
        """A MoE block that counts its selections under this phase."""
        for layer_id, tables in self._tables.items():
            if tables and (phase, layer_id) not in self._selections:
                num_experts = self._layers[layer_id][1].num_experts
                zeros = self._ops.device.zeros(num_experts, np.uint32)
                self._selections[phase, layer_id] = zeros
        return partial(self._compute, phase)

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

    def _compute(
        self, phase: Phase, layer_id: int, hidden: Any, topk_ids: Any, topk_weights: Any
    ) -> Pausable[ExpertSums]:
        yield from ()  # never pauses: the device asks
        assert isinstance(hidden, Normed | F32Rows)
        assert isinstance(topk_ids, Chosen)
        assert isinstance(topk_weights, Chosen)
        ops, local = self._ops, self._resident.get(layer_id)
        sums = ExpertSums(local, hidden, topk_ids, topk_weights, phase)
        tables = self._tables[layer_id]
        if not tables:
            return sums  # the layer has no remote experts
        index, layer = self._layers[layer_id]
        rule, logits = ops.steps.left_to_choose(topk_ids)
        choice = Choice(
            topk_ids.array,
            topk_weights.array,
            logits=logits,
            selections=ops.steps.counted_in(self._selections[phase, layer_id]),
        )
        requests, replies = self.mail.requests(index), self.mail.replies(index)
        rows = ops.steps.rows_of(hidden)
        # A single float64 sum may be rounded by the daemon: two float32 fit a line.
        rounds = local is None and len(tables) == 1 and layer.hidden_size % 2 == 0
        self.mail.kernels.post(
            layer,
            rule,
            rows,
            choice=choice,
            local_ids=list(tables.values()),
            requests=[requests[peer] for peer in tables],
            rounds=rounds,
        )
        answers = self.mail.kernels.replies({peer: replies[peer] for peer in tables})
        if local is None:
            sums.add_to = partial(self._add, layer, rule, answers, rounds)
        else:
            chosen = Choice(topk_ids.array, topk_weights.array)
            ops.steps.begin_experts(local, chosen, rows)
            sums.add_to = partial(ops.steps.end_experts, local, chosen, replies=answers)
        return sums

    def _add(
        self,
        layer: MoeLayer,
        rule: RoutingRule | None,
        replies: MailReplies,
        rounded: bool,
        residual: F32Rows,
    ) -> None:
        self.mail.kernels.add(layer, rule, residual.array, replies=replies, rounded=rounded)
