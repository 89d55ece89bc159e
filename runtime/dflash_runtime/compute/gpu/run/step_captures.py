"""Captured passes of one path to the experts: capture, replay, buckets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from dflash_protocol.ids import F64Array, Phase, U8Array
from dflash_runtime.compute.backend import DeviceSampling, LogitChanges
from dflash_runtime.compute.gpu.device.buffers import Buffer
from dflash_runtime.compute.gpu.device.device import Graph, KernelDevice
from dflash_runtime.compute.gpu.device.mapped_array import MappedBlock
from dflash_runtime.compute.gpu.launch.sample_tokens import (
    NUM_OPTIONS,
    SampleInputs,
    StepRules,
    option_values,
    rule_layout,
    write_rules,
)
from dflash_runtime.compute.gpu.layers.attention_plan import context_bucket
from dflash_runtime.compute.gpu.layers.kv_cache import DeviceKvCache
from dflash_runtime.compute.gpu.layers.placed_step import PlacedStep
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.gpu.model.model import GpuModel
from dflash_runtime.compute.gpu.ops.choice_notes import ChoiceRows, ChoiceTable
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.run.captured_trees import CapturedTrees
from dflash_runtime.compute.gpu.run.decode_tokens import DecodeTokens
from dflash_runtime.compute.gpu.run.step_path import GraphPiece, StepPath, capture_pieces
from dflash_runtime.compute.model import Pausable, forward, run_to_end


class StepSampling:
    """Whether decode steps sample their tokens, with what parameters and random numbers, and of
    which tokens.

    Owns: device memory, and mapped memory of the host until `close`, which the captured steps read.
    """

    def __init__(self, device: KernelDevice, *, vocab_size: int, num_positions: int) -> None:
        self._device, self._vocab_size = device, vocab_size
        self._rules = MappedBlock(
            device, rule_layout(vocab_size=vocab_size, num_positions=num_positions)
        )
        self.inputs = SampleInputs(
            device.zeros(NUM_OPTIONS, np.float64),
            device.zeros(num_positions, np.float64),
            StepRules(*self._rules.device),
        )
        self.is_on = False
        """Off: greedy, of all tokens. Captured separately, so that such steps do not pay for
        sampling."""
        self.is_ruled = False
        """Whether a step is sampled only when `rule` has said from what: by a graph of its own.
        Such steps are captured when they are first needed."""

    def choose(self, options: DeviceSampling | None, *, is_ruled: bool) -> None:
        """See CapturedStep.choose_by."""
        values = option_values(options, vocab_size=self._vocab_size, is_ruled=is_ruled)
        self._device.write(self.inputs.options, values)
        self.is_on, self.is_ruled = options is not None or is_ruled, is_ruled

    def rule(self, mask: U8Array | None, changes: LogitChanges | None) -> None:
        """Set what the step started last is sampled from. See CapturedStep.rule."""
        write_rules(StepRules(*self._rules.host), mask, changes)

    def expect(self, first_position: int, numbers: F64Array) -> None:
        """See CapturedStep.expect."""
        places = self.inputs.numbers[first_position : first_position + numbers.size]
        self._device.write(places, numbers)

    def close(self) -> None:
        """Unmap the host's memory; no step may be running."""
        self._rules.close()


@dataclass(frozen=True, slots=True, eq=False)
class DecodePass:
    """The launches of a decode step: a token through all layers, and the next one from its logits.

    Immutable, but for what its parts keep.
    """

    ops: GpuOps
    model: GpuModel
    cache: DeviceKvCache
    tokens: DecodeTokens
    sampling: StepSampling
    choices: ChoiceRows | None = None
    """Gets the experts that are chosen, if they are wanted."""

    def layers(self, path: StepPath, bucket: int, table: ChoiceTable | None) -> Pausable[Rows]:
        """Returns the logits; the next token is chosen, too, unless it is by rules. `table`: of
        this pass, for `choices`. Shapes: [1, V]."""
        notes = self.ops.notes
        if self.choices is not None:
            notes.begin()
        ids, positions = self.tokens.ids, self.tokens.positions
        experts = path.experts(Phase.DECODE)
        step = PlacedStep(ids, positions, (self.cache,), Phase.DECODE, context=bucket)
        hidden = yield from forward(self.model, step, experts)
        if self.choices is not None and table is not None:
            self.choices.append(notes.end(), table, position=positions)
        logits = self.model.step_logits(hidden)
        if not self.sampling.is_ruled:
            self.choose(logits)
        return logits

    def choose(self, logits: Rows) -> None:
        """The rest of a step by rules, which begins later than its layers do."""
        tokens = self.tokens
        self.model.choose_tokens(
            logits,
            token_ids=tokens.ids,
            positions=tokens.positions,
            history=tokens.history,
            sampling=self.sampling.inputs if self.sampling.is_on else None,
        )


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured step of one context bucket, and the buffers that its graphs use (`kept`)."""

    pieces: list[GraphPiece]
    logits: Rows
    kept: list[Buffer]
    replay: Callable[[], None]
    """Runs the layers, and what else `pieces` have."""
    sampling: Graph | None
    """The rest; None: `pieces` have all."""
    table: ChoiceTable | None

    def close(self) -> None:
        for piece in self.pieces:
            piece.graph.close()
        if self.sampling is not None:
            self.sampling.close()


class PathCaptures:
    """What is captured for one path: decode steps by context bucket and sampling, and trees.

    Used by one thread. Owns: graphs, and what they keep, until `forget`; then it captures anew.
    """

    def __init__(self, decode: DecodePass, path: StepPath) -> None:
        self.path = path
        self.trees = CapturedTrees(
            decode.ops, decode.model, decode.cache, path=path, choices=decode.choices
        )
        self._decode = decode
        self._steps: dict[tuple[int, bool, bool], Capture] = {}

    def next_step(self) -> Capture:
        """The capture for the position of the next step, made when its bucket is first needed."""
        bucket = context_bucket(self._decode.tokens.position + 1)
        key = bucket, self._decode.sampling.is_on, self._decode.sampling.is_ruled
        capture = self._steps.get(key)
        if capture is None:
            capture = self._steps[key] = self._captured(bucket)
        return capture

    def _captured(self, bucket: int) -> Capture:
        """Run the step once, which compiles and allocates what it needs, then capture it."""
        decode, path = self._decode, self.path
        buffers = decode.ops.steps.buffers
        table = None if decode.choices is None else decode.choices.new_table()
        with (
            path.trial(),
            decode.tokens.restored(),  # waits for the pass
            buffers.noted() as noted,
            decode.ops.step_experts.uncounted(),
        ):
            logits = run_to_end(decode.layers(path, bucket, table), is_trial=True)
            if decode.sampling.is_ruled:
                decode.choose(logits)
        device = decode.ops.device
        with ExitStack() as undo:
            with buffers.repeated(noted) as kept:
                pieces, logits = capture_pieces(device, decode.layers(path, bucket, table))
                for piece in pieces:
                    undo.callback(piece.graph.close)
                sampling = None
                if decode.sampling.is_ruled:
                    sampling = device.capture(lambda: decode.choose(logits))
                    undo.callback(sampling.close)
            replay = path.replayed(pieces)
            undo.pop_all()
        # Other work may run between pieces, so a step in pieces keeps its buffers to itself.
        return Capture(pieces, logits, kept if path.needs_host else [], replay, sampling, table)

    def forget(self) -> None:
        """Close all graphs; none may be running."""
        self.trees.forget()
        for capture in self._steps.values():
            capture.close()
        self._steps.clear()
