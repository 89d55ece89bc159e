"""A daemon's captured step that answers a mailbox, and the memory of its lines."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_adapters.spec import MoeLayer
from dflash_runtime.compute.gpu.device.device import DeviceArray, Graph, KernelDevice, address
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows
from dflash_runtime.compute.gpu.launch.decode_experts import Choice, MailReply, MailRequest
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.mailbox.kernels import MailKernels
from dflash_runtime.compute.gpu.mailbox.layout import MailLines
from dflash_runtime.compute.gpu.ops.step_experts import StepExperts


class MailStep:
    """Launches a step: for every layer with local experts, wait for the request and answer it.

    `by_all`: every block that needs a request polls for it in our device's memory; if the lines
    do not lie there, one block per token copies them to `relay`. Otherwise one block per token
    takes the request before the others begin.
    """

    def __init__(
        self,
        device: KernelDevice,
        kernels: MailKernels,
        lines: MailLines,
        *,
        num_tokens: int,
        by_all: bool,
        relay: MailLines | None,
    ) -> None:
        self._device, self._kernels, self._lines = device, kernels, lines
        self._relay = relay
        self._num_tokens, self._by_all = num_tokens, by_all
        # Own buffers: another stream may compute at the same time.
        self._experts = StepExperts(device)
        self._choices: dict[int, Choice] = {}
        self._rows: dict[int, StepRows] = {}

    def launch(self, layers: Sequence[tuple[int, ResidentLayer]]) -> None:
        """Launch all layers, each with its place in the model."""
        self._kernels.begin()
        reply = address(self._kernels.side.state)
        for index, resident in layers:
            choice = self._choice_of(resident.layer)
            to = MailReply(self._lines.reply(index), reply)
            asked = (
                self._awaited(index, resident.layer)
                if self._by_all
                else self._taken(index, resident, choice)
            )
            self._experts.answer(resident, asked, choice, to=to, takes_request=self._by_all)

    def _awaited(self, index: int, layer: MoeLayer) -> ctypes.Structure:
        """The request that every block polls for; relayed to our memory if need be."""
        request = self._lines.request(index)
        asked = MailRequest(self._kernels.side.args, request, is_relayed=0)
        if self._relay is not None:
            asked.lines, asked.is_relayed = self._relay.request(index), 1
            self._kernels.relay(layer, self._num_tokens, request=request, to=asked.lines)
        return asked

    def _taken(self, index: int, resident: ResidentLayer, choice: Choice) -> StepRows:
        """Wait for a request: its rows; its pairs are written to `choice`."""
        layer = resident.layer
        if layer.hidden_size not in self._rows:
            rows = self._experts.new_rows(self._num_tokens, layer.hidden_size)
            self._rows[layer.hidden_size] = rows
        rows, table = self._rows[layer.hidden_size], resident.experts.slot_of_expert
        request = self._lines.request(index)
        self._kernels.take(layer, rows, choice, slot_of_expert=table, request=request)
        return rows

    def _choice_of(self, layer: MoeLayer) -> Choice:
        """Memory for a choice; with slots if they are computed before the experts' kernels run."""
        num_used, empty = layer.num_experts_used, self._device.empty
        if num_used not in self._choices:
            shape = self._num_tokens, num_used
            self._choices[num_used] = Choice(
                empty(shape, np.int32),
                empty(shape, np.float32),
                slots=None if self._by_all else empty(shape, np.int32),
            )
        return self._choices[num_used]


@dataclass(frozen=True, slots=True)
class MailboxMemory:
    """A mailbox's lines in one memory, and the steps captured for them, by (tokens, by_all)."""

    lines: MailLines
    relay: tuple[DeviceArray, MailLines] | None
    """Memory of our device that requests are copied to, if their lines do not lie there."""
    steps: dict[tuple[int, bool], tuple[MailStep, Graph]] = field(default_factory=dict)

    def close(self) -> None:
        """Close all graphs; no step may be running."""
        for _, graph in self.steps.values():
            graph.close()
        self.steps.clear()
