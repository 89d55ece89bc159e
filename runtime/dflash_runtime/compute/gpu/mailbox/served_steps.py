"""A daemon's captured steps for one parent: a step for each size, memory and way to wait."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dflash_adapters.spec import MoeLayer
from dflash_protocol.errors import ProtocolError
from dflash_runtime.compute.gpu.device.device import (
    DeviceArray,
    Graph,
    KernelDevice,
    SideStream,
    address,
)
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows
from dflash_runtime.compute.gpu.launch.decode_experts import Choice, MailReply, MailRequest
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.mailbox.kernels import MailKernels, MailPeer, MailSide
from dflash_runtime.compute.gpu.mailbox.probe import ProbePlan, new_faults, probe_args
from dflash_runtime.compute.gpu.ops.steps import StepExperts
from dflash_runtime.compute.mailbox_layout import MailLines, MailWord, MailWords
from dflash_runtime.compute.step_order import MOST_TOKENS

_LOG = logging.getLogger(__name__)


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


class ServedSteps:
    """Captures a parent's steps, and replays them in a stream of their own.

    States: empty; prepared, from `prepare` on; closed. Within prepared, one memory of lines is in
    use: the host's, or the devices' after `restart` with it. Used by the mailbox's thread, which
    holds the device's lock except in `replay` and `synchronize`.
    Owns: the graphs, the stream, and memory of the device.
    """

    def __init__(
        self,
        device: KernelDevice,
        words: MailWords,
        *,
        layers: Sequence[tuple[int, ResidentLayer]],
        is_alone: Callable[[], bool],
    ) -> None:
        """`layers`, `is_alone`: see MailServer."""
        self._device, self._words, self._layers = device, words, layers
        self._is_alone, self._was_alone = is_alone, True
        self._kernels: MailKernels | None = None
        self._stream: SideStream | None = None
        self._media: list[MailboxMemory] = []
        """Lines in the host's memory; then those in devices' memory, if it can be mapped."""
        self._medium = 0

    def prepare(self, peer: MailPeer, limit_ms: int, lines: MailLines) -> None:
        """Compile and capture the step of one token, with these lines in the host's memory.

        `limit_ms`: time limit of a step. Raises: DeviceUnavailable."""
        side = MailSide(self._device, (peer,), limit_ms)
        self._kernels = MailKernels(side)
        self._kernels.prepare_probe(is_echo=True)
        relay = self._device.zeros(lines.layout.requests_nbytes, np.uint8)
        self._add(lines, (relay, MailLines(lines.layout, requests=address(relay), replies=0)))
        self._stream = self._device.new_stream()

    def add_devices(self, lines: MailLines) -> None:
        """Capture the step of one token for lines in the devices' memory too. The parent must
        restart after that."""
        self._add(lines, None)

    def drop_devices(self) -> None:
        """Close the steps that use the devices' memory; the host's is in use then."""
        self._medium = 0
        for medium in self._media[1:]:
            medium.close()
        del self._media[1:]

    def add_size(self, num_tokens: int) -> None:
        """Capture steps of so many tokens for the lines in use, if there are none. The parent must
        restart after that. Raises: ProtocolError."""
        if not 1 <= num_tokens <= MOST_TOKENS:
            raise ProtocolError(f"a mailbox was asked for steps of {num_tokens} tokens")
        if (num_tokens, False) not in self._media[self._medium].steps:
            self._record(self._media[self._medium], num_tokens)

    def restart(self, epoch: int, *, in_devices: bool) -> None:
        """Use the lines in this memory; the next step's epoch is `epoch` plus one.

        Raises: ProtocolError if the devices' memory is not shared."""
        wanted = int(in_devices)
        if wanted >= len(self._media):
            raise ProtocolError("a mailbox was asked for memory that is not shared")
        assert self._kernels is not None
        self._medium = wanted
        self._words.write(MailWord.DAEMON_ABORT, 0)
        self._kernels.side.set_epoch(epoch)

    def graph_of(self, num_tokens: int) -> Graph:
        """The step for a lone parent has every block poll, which occupies the device until a
        request comes; with several parents one block per token polls.

        Raises: ProtocolError if no such step was captured."""
        medium, is_alone = self._media[self._medium], self._is_alone()
        if is_alone != self._was_alone:
            self._was_alone = is_alone
            # docs (daemon): `alone`, or `one of several`: then kernels that wait for a parent take
            # less of the GPU, and a layer takes a little longer
            _LOG.info("the mailbox's parent is %s", "alone" if is_alone else "one of several")
        captured = medium.steps.get((num_tokens, is_alone))
        if captured is None:
            raise ProtocolError(f"a mailbox step of {num_tokens} tokens was asked for unprepared")
        return captured[1]

    def replay(self, graph: Graph) -> None:
        """Start a step, without waiting for it."""
        assert self._stream is not None
        self._stream.replay(graph)

    def synchronize(self) -> None:
        """Wait for all steps started. Raises: DeviceUnavailable."""
        if self._stream is not None:
            self._stream.synchronize()

    def echo(self, plan: ProbePlan) -> bytes:
        """Answer a probe's round trips: the faults found, as `read_faults` reads them."""
        assert self._kernels is not None
        device, lines = self._device, self._media[self._medium].lines
        faults = new_faults(device)
        self._kernels.probe(probe_args(device, lines, plan, faults=faults), is_echo=True)
        return device.download(faults).tobytes()

    def close(self) -> None:
        """Close the stream and all graphs; no step may be running. Raises: DeviceUnavailable."""
        if self._stream is not None:
            self._stream.close()
        for medium in self._media:
            medium.close()

    def forget(self) -> None:
        """Drop what was closed, and the layers, so that their experts can be dropped."""
        self._media.clear()
        self._layers = ()
        self._stream = self._kernels = None

    def _add(self, lines: MailLines, relay: tuple[DeviceArray, MailLines] | None) -> None:
        medium = MailboxMemory(lines, relay)
        self._record(medium, 1)
        self._media.append(medium)

    def _record(self, medium: MailboxMemory, num_tokens: int) -> None:
        """Run a step of so many tokens as a trial, then capture it."""
        assert self._kernels is not None
        side, layers = self._kernels.side, self._layers
        for by_all in (False, True):
            step = MailStep(
                self._device,
                self._kernels,
                medium.lines,
                num_tokens=num_tokens,
                by_all=by_all,
                relay=None if medium.relay is None else medium.relay[1],
            )
            side.set_epoch(0, is_trial=True)
            step.launch(layers)
            self._device.synchronize()
            self._words.write(MailWord.DAEMON_ABORT, 0)
            side.set_epoch(0)
            graph = self._device.capture(partial(step.launch, layers))
            medium.steps[num_tokens, by_all] = step, graph
