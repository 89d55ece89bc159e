"""Forward passes over trees of draft tokens, captured once and replayed for every tree of a kind.

Trees of a kind (`Branch.kind_of`) have the same number of tokens and the same context bucket; all
else that differs among them is written to the device before a replay. A pass only reads the
sequence's cache; what accepting a path needs is kept apart until the next pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from dflash_protocol.errors import DeviceOutOfMemory
from dflash_protocol.ids import F32Array, I32Array, Phase
from dflash_runtime.compute.gpu.device.buffers import Places
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.launch.decode_tokens import check_token_ids
from dflash_runtime.compute.gpu.launch.row_kernels import ColumnsOf
from dflash_runtime.compute.gpu.layers.branch import Branch
from dflash_runtime.compute.gpu.layers.kv_cache import DeviceKvCache
from dflash_runtime.compute.gpu.layers.placed_step import PlacedStep
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.gpu.model.model import GpuModel
from dflash_runtime.compute.gpu.ops.choice_notes import ChoiceRows, ChoiceTable
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.run.step_path import GraphPiece, StepPath
from dflash_runtime.compute.model import forward, run_to_end
from dflash_runtime.compute.trees import OnAccept, Tree, TreeResult

_MOST_TOKENS_KEPT = 256
"""Tokens of all captures together: each capture keeps memory for accepting a path."""


class CapturedTrees:
    """Captures of trees through one path to the experts, by kind and features, least recently used
    first.

    Used by one thread. Owns: graphs, and memory of the device.
    """

    def __init__(
        self,
        ops: GpuOps,
        model: GpuModel,
        cache: DeviceKvCache,
        *,
        path: StepPath,
        choices: ChoiceRows | None = None,
    ) -> None:
        """`choices` gets the experts that are chosen, if they are wanted."""
        self._choices = choices
        self._ops, self._model, self._cache, self._path = ops, model, cache, path
        self._captures: OrderedDict[_Key, _Capture] = OrderedDict()

    def run(self, token_ids: I32Array, tree: Tree, features: Collection[int]) -> TreeResult | None:
        """Compute a tree's tokens. Every daemon of mailboxes must be ready for steps of so many
        tokens, and none may be under way. None: the result is not to be trusted, or there is no
        memory for a capture; the tree is unchanged.

        Shapes: token_ids [W]. `features`: layers whose hidden states are returned.
        Raises: ContextExceeded, CheckpointMissing; ValueError for ids outside the vocabulary;
        DaemonUnavailable if a mailbox is gone.
        """
        check_token_ids(token_ids, self._model.spec.vocab_size)
        tree.check_size(token_ids.size)
        self._cache.check_tree(tree)
        kind = Branch.kind_of(tree, has_states=bool(self._cache.states.layers))
        key = _Key(kind, frozenset(features))
        capture = self._captures.get(key)
        if capture is None:
            self._make_room(token_ids.size)
            try:
                capture = self._captured(key, token_ids, tree)
            except DeviceOutOfMemory:
                self.forget()
                return None
            self._captures[key] = capture
        else:
            self._captures.move_to_end(key)
            capture.branch.aim(tree)
            self._ops.device.write(capture.token_ids, token_ids.astype(np.int32))
        self._path.run(capture.pieces, token_ids.size)
        download = self._ops.device.download
        argmax: I32Array = download(capture.argmax)
        if not self._path.is_trusted(argmax):
            return None
        if self._choices is not None:
            self._choices.last_tree = capture.choices
        by_layer: dict[int, F32Array] = {
            layer: download(array) for layer, array in capture.features.items()
        }
        for on_accept in capture.on_accept:
            tree.keep(on_accept)
        return TreeResult(argmax, by_layer)

    def _make_room(self, num_tokens: int) -> None:
        """Close the least recently used captures until so many more tokens fit."""
        sizes = [capture.branch.num_tokens for capture in self._captures.values()]
        while sizes and sum(sizes) + num_tokens > _MOST_TOKENS_KEPT:
            del sizes[0]
            self._captures.popitem(last=False)[1].close()

    def forget(self) -> None:
        """Close captures. None may run, and no path of theirs be accepted afterwards."""
        for capture in self._captures.values():
            capture.close()
        self._captures.clear()

    def _captured(self, key: _Key, token_ids: I32Array, tree: Tree) -> _Capture:
        """Run the pass once, which compiles and allocates what it needs, then capture it."""
        device, buffers = self._ops.device, self._ops.steps.buffers
        size, hidden_size = token_ids.size, self._model.spec.hidden_size
        branch = Branch(device, tree, stays=True)
        capture = _Capture(
            branch,
            device.upload(token_ids.astype(np.int32)),
            device.empty(size, np.int32),
            {layer: device.empty((size, hidden_size), np.float32) for layer in key.features},
        )
        if self._choices is not None:
            capture.choices = self._choices.new_rows(size)
            capture.table = self._choices.new_table()
        uncounted, trial = self._ops.step_experts.uncounted(), self._path.trial()
        with buffers.noted(capture.apart) as noted, uncounted, trial:
            # Buffers that layers keep must not be reused until the pass is complete.
            kept = self._launch(capture, tree)
            device.synchronize()  # a trial ends before its context
        kept.clear()
        with buffers.repeated(noted):
            graph = device.capture(lambda: capture.on_accept.extend(self._launch(capture, tree)))
        capture.pieces.append(GraphPiece(graph, None))
        return capture

    def _launch(self, capture: _Capture, tree: Tree) -> list[OnAccept]:
        """Launch one pass; returns the layers' callbacks for an accepted path."""
        experts, kept = self._path.experts(Phase.VERIFY), Tree(tree.parents, tree.position)

        def on_layer(layer_id: int, hidden: Rows) -> None:
            if layer_id in capture.features:
                whole = ColumnsOf.whole(hidden.array)
                self._ops.elementwise.take_columns(whole, capture.features[layer_id])

        step = PlacedStep(
            capture.token_ids,
            capture.branch.positions,
            (self._cache,),
            Phase.VERIFY,
            context=kept.position + int(kept.depths.max()) + 1,
            tree=kept,
            branch=capture.branch,
        )
        choices, table = self._choices, capture.table
        if choices is not None:
            self._ops.notes.begin()
        hidden = run_to_end(forward(self._model, step, experts, on_layer=on_layer))
        if choices is not None and table is not None:
            choices.append(self._ops.notes.end(), table, rows=capture.choices)
        self._model.write_argmax(hidden, capture.argmax)
        return kept.kept


@dataclass(frozen=True, slots=True)
class _Key:
    kind: tuple[int, int, int]
    """From Branch.kind_of."""
    features: frozenset[int]


@dataclass(slots=True, eq=False)
class _Capture:
    """A pass over trees of one kind. Shapes: token_ids, argmax [W]; features each [W, H]."""

    branch: Branch
    token_ids: DeviceArray
    argmax: DeviceArray
    features: dict[int, DeviceArray]
    on_accept: list[OnAccept] = field(default_factory=list)
    apart: Places = field(default_factory=dict)
    """Rows of large trees."""
    choices: DeviceArray | None = None
    """[W, K of all layers], if they are kept, and where the pass has them."""
    table: ChoiceTable | None = None
    pieces: list[GraphPiece] = field(default_factory=list)
    """A single one."""

    def close(self) -> None:
        for piece in self.pieces:
            piece.graph.close()
