"""Passes through a few layers that belong to no request, and how long each takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_protocol.ids import AnyArray, I32Array, Phase
from dflash_runtime.compute import ComputeBackend
from dflash_runtime.compute.backend import CapturedStep, DeviceSampling
from dflash_runtime.compute.kv_cache import KvCache
from dflash_runtime.compute.model import Model, Step, forward, run_to_end
from dflash_runtime.compute.trees import Tree
from dflash_runtime.engine.measuring.timing import Timer
from dflash_runtime.engine.two_batch_overlap import run_in_turns

STEPS_IN_A_ROW = 16
"""Steps of a device, of which some are started before a token is read, as the engine does. A single
one whose host takes part would find the processor's threads asleep."""
_BEFORE_TREES = 8
"""Positions before a tree."""
_ANY_TOKEN = DeviceSampling(temperature=30.0, top_k=1000)
"""One of many tokens. A device leaves choices among more of equal weight to the host."""


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """Passes through a model's layers, with all or some of its experts. Used by one thread.

    Tokens are random, so that each pass chooses other experts.
    """

    backend: ComputeBackend
    model: Model[AnyArray, Any]
    cache: KvCache
    experts_of: Callable[[Phase], Any]
    """The routed experts that the model calls in a phase."""
    captured: CapturedStep | None
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    draws_tokens: bool = False
    """Whether a device draws each token of steps in a row (_ANY_TOKEN). Else they are greedy: the
    first layers of a model write the same few tokens again and again, whose experts a processor has
    in its caches. Drawing takes the device longer."""

    def seconds(self, num_rows: int, position: int = 0) -> float:
        """One pass of a step of up to 8 tokens, or of a chunk, with the head's result for its last
        row; all that the engine does but for choosing tokens by the host.

        Positions before `position` need not have been computed.
        """
        if num_rows == 1:
            return self._step_s(position)
        if num_rows <= 8:
            return self._tree_s(num_rows, position)
        return self._forward_s(self._chunk(num_rows, position))

    def timer(self, num_rows: int, position: int = 0) -> Timer:
        """A timer of such a pass, for `medians`."""
        return lambda: (self.seconds(num_rows, position),)

    def group_s(self, num_rows: int, num_chunks: int) -> float:
        """Chunks that pass each layer one after the other, as an engine's groups do. All have the
        same positions."""
        started_s = time.perf_counter()
        experts = self.experts_of(Phase.PREFILL)
        steps = [self._chunk(num_rows, position=0) for _ in range(num_chunks)]
        chunks = [forward(self.model, step, experts) for step in steps]
        self._head(run_in_turns(*chunks, poll=lambda: None)[-1][-1:])
        return time.perf_counter() - started_s

    def _step_s(self, position: int) -> float:
        captured, (token_id,) = self.captured, self.token_ids(1).tolist()
        if captured is None:
            return self._forward_s(self._chunk(1, position, Phase.DECODE))
        num, ahead = self._num_in_a_row, captured.most_ahead
        if self.draws_tokens:
            captured.choose_by(_ANY_TOKEN)
            captured.expect(position + 1, self.random.random(num))
        captured.begin(token_id, position)
        started_s = time.perf_counter()
        for started in range(1, num + 1):
            captured.start()
            if ahead < started < num:
                captured.token(position + started - ahead)
        captured.token(position + num)
        return (time.perf_counter() - started_s) / num

    def _tree_s(self, num_rows: int, position: int) -> float:
        """A chain of draft tokens."""
        if position == 0:
            position = self._sequence_before_trees()
        tree = Tree(np.arange(-1, num_rows - 1, dtype=np.int32), position)
        token_ids = self.token_ids(num_rows)
        started_s = time.perf_counter()
        if self.captured is not None and self.captured.verify(token_ids, tree, ()) is not None:
            return time.perf_counter() - started_s
        return self._forward_s(Step.of_tree(token_ids, tree, self.cache))

    def _chunk(self, num_rows: int, position: int, phase: Phase = Phase.PREFILL) -> Step:
        return Step.of_chunk(self.token_ids(num_rows), position, self.cache, phase)

    def _forward_s(self, step: Step) -> float:
        """All rows of a tree need the head."""
        started_s = time.perf_counter()
        hidden = run_to_end(forward(self.model, step, self.experts_of(step.phase)))
        self._head(hidden if step.tree is not None else hidden[-1:])
        return time.perf_counter() - started_s

    def _head(self, rows: AnyArray) -> None:
        """Wait for the head's result."""
        self.backend.argmax(self.model.head(rows))

    def _sequence_before_trees(self) -> int:
        """Compute a sequence for a tree to follow, unless its positions may be skipped; returns its
        length."""
        if self.model.spec.can_be_cut:
            return _BEFORE_TREES
        self._step_s(0)
        return self._num_in_a_row

    @property
    def _num_in_a_row(self) -> int:
        return 1 if self.captured is None or self.backend.is_host else STEPS_IN_A_ROW

    def token_ids(self, num: int) -> I32Array:
        """Random ones. Shapes: result [num]."""
        return self.random.integers(0, self.model.spec.vocab_size, num, dtype=np.int32)
