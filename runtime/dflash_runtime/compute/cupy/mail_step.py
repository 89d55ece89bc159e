"""A daemon's step that is asked for through a mailbox, and the memory that its lines go through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dflash_runtime.compute.cupy.decode_experts import Choice, MailReply, Rows
from dflash_runtime.compute.cupy.device import DeviceArray, Graph, KernelDevice, address
from dflash_runtime.compute.cupy.mailbox_args import MailRequest
from dflash_runtime.compute.cupy.mailbox_kernels import MailKernels
from dflash_runtime.compute.cupy.mailbox_layout import MailLines
from dflash_runtime.compute.cupy.resident import ResidentLayer
from dflash_runtime.compute.cupy.steps import Steps


class MailStep:
    """What is recorded: every layer of which there are experts here, one after the other.

    `by_all`: every block that needs a request looks for it in our device's memory, where one block
    a token brings it to `relay` if it does not lie there; or else such a block takes it, before the
    others begin.
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
        # Others may compute at the same time, in another stream: nothing is shared with them.
        self._steps = Steps(device)
        self._choices: dict[int, Choice] = {}
        self._rows: dict[int, Rows] = {}

    def launch(self, layers: Sequence[tuple[int, ResidentLayer]]) -> None:
        """Shapes: layers by their place in the model."""
        self._kernels.begin()
        reply = address(self._kernels.side.state)
        for index, resident in layers:
            layer = resident.layer
            rows = self._rows.get(layer.hidden_size)
            choice = self._choices.get(layer.num_experts_used)
            if rows is None:
                rows = self._rows[layer.hidden_size] = self._steps.new_rows(
                    self._num_tokens, layer.hidden_size
                )
            if choice is None:
                shape = self._num_tokens, layer.num_experts_used
                empty = self._device.empty
                choice = self._choices[layer.num_experts_used] = Choice(
                    empty(shape, np.int32), empty(shape, np.float32), slots=empty(shape, np.int32)
                )
            request, to = self._lines.request(index), MailReply(self._lines.reply(index), reply)
            if self._by_all:
                asked = MailRequest(self._kernels.side.args, request, is_relayed=0)
                if self._relay is not None:
                    asked.lines, asked.is_relayed = self._relay.request(index), 1
                    self._kernels.relay(layer, self._num_tokens, request=request, to=asked.lines)
                self._steps.answer(resident, asked, replace(choice, slots=None), to=to)
                continue
            table = resident.decode.slot_of_expert
            self._kernels.take(layer, rows, choice, slot_of_expert=table, request=request)
            self._steps.answer(resident, rows, choice, to=to)


@dataclass(frozen=True, slots=True)
class Medium:
    """Memory that lines go through, and steps that were recorded for it, by their tokens and by who
    looks for requests: what each uses, and its graph."""

    lines: MailLines
    relay: tuple[DeviceArray, MailLines] | None
    """Memory of our device that requests are brought to, where they do not lie there."""
    steps: dict[tuple[int, bool], tuple[MailStep, Graph]] = field(default_factory=dict)

    def close(self) -> None:
        """No step may still run."""
        for _, graph in self.steps.values():
            graph.close()
        self.steps.clear()
