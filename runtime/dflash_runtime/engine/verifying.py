"""Speculative verification: chains and trees of draft tokens, in one pass each.

A sequence begins with a prompt; then, again and again, a tree of draft tokens is computed at once
and a path through it accepted. Where drafts come from is the caller's matter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_adapters.spec import ModelSpec
from dflash_protocol.errors import ContextExceeded, SettingsError
from dflash_protocol.ids import AnyArray, F32Array, I32Array
from dflash_runtime.compute.trees import MOST_NODES, Tree
from dflash_runtime.engine.arguments import index_array
from dflash_runtime.engine.steps import Steps


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """The result of `prefill` or `verify`."""

    next_token_ids: I32Array
    """The most likely token after each draft token, or after the prompt. Shapes: [W]."""
    features: dict[int, F32Array]
    """Hidden states of all tokens after each of the `feature_layers`. Shapes: [T, H]."""


class Verifier:
    """One sequence of an engine: its prompt, the accepted tokens, and the drafts last verified."""

    def __init__(self, steps: Steps, spec: ModelSpec, prompt: I32Array) -> None:
        """Begin a run. Shapes: prompt [T]. Raises: SettingsError if it is empty."""
        if prompt.size == 0:
            raise SettingsError("the prompt is empty")
        self._steps = steps
        self._spec = spec
        self._run = steps.begin()
        self._prompt = prompt
        self._pending: tuple[I32Array, Tree] | None = None
        self.num_positions = 0
        """Length of the sequence: the prompt and the accepted tokens."""

    def prefill(self, feature_layers: Collection[int]) -> Verified:
        """Compute the prompt.

        Raises: as Steps.forward.
        """
        features = self._features(feature_layers, self._prompt.size)
        for first, last in self._steps.chunks(self._prompt.size):
            features.first = first
            hidden = self._steps.forward(
                self._run, self._prompt[first:last], first, features.on_layer
            )
        self.num_positions = self._prompt.size
        verified = Verified(self._steps.argmax(hidden[-1:]), features.by_layer)
        self._steps.check_last()
        self._steps.settle()
        return verified

    def verify(
        self, token_ids: I32Array, parents: Sequence[int], feature_layers: Collection[int]
    ) -> Verified:
        """See Engine.verify. Shapes: token_ids, parents [W]."""
        num_tokens = token_ids.size
        if num_tokens > MOST_NODES:
            raise SettingsError(f"{num_tokens} tokens: up to {MOST_NODES} can be verified at once")
        parent_ids = index_array("parent", parents, smallest=-1, largest=num_tokens - 1)
        if parent_ids.size != num_tokens:
            raise SettingsError(f"{num_tokens} tokens with {parent_ids.size} parents")
        try:
            tree = Tree(parent_ids, self.num_positions)
        except ValueError as error:
            raise SettingsError(f"parents: {error}") from error
        end = self.num_positions + int(tree.depths.max(initial=-1)) + 1
        if end > self._steps.num_positions:
            raise ContextExceeded(end, self._steps.num_positions)
        features = self._features(feature_layers, num_tokens)
        self._pending = None
        self._steps.check(self._run)
        next_token_ids = np.empty(0, np.int32)
        if num_tokens:
            captured = self._steps.verify_captured(
                self._run, token_ids, tree, features=features.by_layer
            )
            if captured is not None:
                next_token_ids, features.by_layer = captured.next_token_ids, captured.features
            else:
                hidden = self._steps.forward_tree(
                    self._run, token_ids, tree, on_layer=features.on_layer
                )
                next_token_ids = self._steps.argmax(hidden)
            self._steps.check_last()
        self._pending = token_ids, tree
        return Verified(next_token_ids, features.by_layer)

    def accept(self, path: Sequence[int]) -> None:
        """See Engine.accept."""
        self._steps.check(self._run)
        if self._pending is None:
            raise SettingsError("nothing to accept: accept may be called once after each verify")
        token_ids, tree = self._pending
        nodes = index_array("node", path, smallest=0, largest=token_ids.size - 1)
        try:
            tree.check_path(nodes)
        except ValueError as error:
            raise SettingsError(f"path: {error}") from error
        self._pending = None
        self._steps.accept(self._run, token_ids, tree=tree, path=nodes)
        self.num_positions += nodes.size

    def _features(self, layers: Collection[int], num_tokens: int) -> _Features:
        """Raises: SettingsError for a layer that does not exist."""
        spec = self._spec
        layer_ids = index_array("feature layer", layers, smallest=0, largest=spec.num_layers - 1)
        by_layer = {
            layer_id: np.empty((num_tokens, spec.hidden_size), np.float32)
            for layer_id in layer_ids.tolist()
        }
        return _Features(self._steps, by_layer)


class _Features:
    """Collects hidden states of some layers, chunk by chunk. Shapes: by_layer [T, H]."""

    def __init__(self, steps: Steps, by_layer: dict[int, F32Array]) -> None:
        self._steps = steps
        self.by_layer = by_layer
        self.first = 0
        """The first token of the current chunk."""

    def on_layer(self, layer_id: int, hidden: AnyArray) -> None:
        """Keep the rows if the layer is asked for. Shapes: hidden [T, H]."""
        if layer_id in self.by_layer:
            rows = self._steps.to_host(hidden)
            self.by_layer[layer_id][self.first : self.first + rows.shape[0]] = rows
