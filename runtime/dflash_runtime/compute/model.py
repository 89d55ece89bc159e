"""A pass: rows of a step through a model's layers, one after the other.

The one interface between the engine and a backend's model. A pass is a generator, so that its
caller decides what happens while a layer's remote experts are computed::

    step ─ place ─ embed ─┬─ layer ─┬─ … ─ head ─ logits
                          │         └─ yields None: remote owners were asked, others may use the
                          │            device now; or HostWork: while a step is captured, what the
                          └─ next layer     host does before the launches that follow
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from dflash_adapters.spec import ModelSpec
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import AnyArray, I32Array, Phase
from dflash_runtime.compute.kv_cache import KvCache
from dflash_runtime.compute.trees import Tree

A = TypeVar("A")
E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)

HostWork: TypeAlias = Callable[[], None]
"""What the host does between two graphs of a captured step."""
Pausable: TypeAlias = Generator[HostWork | None, None, A]
"""Work that its caller advances from one pause to the next; see `run_to_end`. Closed before its
end, it abandons what it has asked remote owners for."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Rows that go through all layers together. Shapes: token_ids, positions, sequences [T] int32.

    Arrays are on the host, or where kernels read them: `Model.place` brings them there.
    Positions of a sequence ascend by one, except in a tree.
    Raises: SettingsError for several sequences, which no backend computes yet.
    """

    token_ids: AnyArray
    positions: AnyArray
    caches: tuple[KvCache, ...]
    """Of each sequence, what its layers keep."""
    phase: Phase
    context: int
    """Positions that rows may attend to: the last position + 1; in a captured step its bucket."""
    tree: Tree | None = None
    """Draft tokens; `tree.parents` names each row's parent row. Without one, each row's parent is
    the row before it."""
    sequences: AnyArray | None = None
    """Each row's sequence, an index into `caches`; None: all rows are the first one's."""

    def __post_init__(self) -> None:
        if len(self.caches) != 1:
            raise SettingsError(f"a step has rows of {len(self.caches)} sequences instead of one")

    @classmethod
    def of_chunk(
        cls, token_ids: I32Array, first_position: int, cache: KvCache, phase: Phase
    ) -> Step:
        """Successive tokens of one sequence. Shapes: token_ids [T]."""
        end = first_position + token_ids.size
        positions = np.arange(first_position, end, dtype=np.int32)
        return cls(token_ids, positions, (cache,), phase, end)

    @classmethod
    def of_tree(cls, token_ids: I32Array, tree: Tree, cache: KvCache) -> Step:
        """Draft tokens to be verified; `cache` stays as it is until a path is accepted.

        Shapes: token_ids [W]. Raises: as KvCache.check_tree; ValueError for another number of ids.
        """
        tree.check_size(token_ids.size)
        cache.check_tree(tree)
        positions = tree.positions
        context = int(positions.max(initial=tree.position - 1)) + 1
        return cls(token_ids, positions, (cache,), Phase.VERIFY, context, tree)

    @property
    def cache(self) -> KvCache:
        """The one sequence's."""
        return self.caches[0]

    def part(self, first: int, last: int) -> Step:
        """The rows [first, last) of a chunk on the host, as a micro-batch."""
        positions = self.positions[first:last]
        return replace(
            self,
            token_ids=self.token_ids[first:last],
            positions=positions,
            context=int(positions[-1]) + 1,
        )


class RoutedExperts(Protocol[A]):
    """Computes the routed experts of one layer, wherever they are."""

    def __call__(self, layer_id: int, hidden: A, topk_ids: A, topk_weights: A) -> Pausable[A]:
        """Weighted sum of the chosen experts.

        In a chunk (Phase.PREFILL) it pauses exactly once in each layer, with None, so that two
        micro-batches can take turns; requests to remote owners are on their way by then. Otherwise
        it need not pause.
        Shapes: hidden [T, H]; topk_ids [T, K] int32 global expert ids; topk_weights [T, K];
        result [T, H].
        """


OnLayer: TypeAlias = Callable[[int, A], None]
"""Gets a layer's id and the hidden states after it [T, H], which it must not keep: the next layer
adds to them in place."""


class Model(Protocol[A, E_contra]):
    """A loaded model on a backend's device.

    `A` are rows as its layers pass them on, `E_contra` the routed experts that they call:
    RoutedExperts[A], or a type of the backend's own, from ComputeBackend.moe. Nothing deferred
    crosses a layer. Used by one thread at a time.
    """

    @property
    def spec(self) -> ModelSpec: ...

    def first_layers(self, num_layers: int) -> Model[A, E_contra]:
        """The same model, with the same weights, that ends after its first layers."""

    def place(self, step: Step) -> Step:
        """The step with its arrays where kernels read them; the step itself if they are there.

        Raises: ContextExceeded if its rows do not fit the cache; ValueError for ids outside the
        vocabulary.
        """

    def embed(self, step: Step) -> A:
        """The rows before the first layer. Shapes: result [T, H]."""

    def layer(self, layer_id: int, x: A, step: Step, experts: E_contra) -> Pausable[A]:
        """One layer: `x` with what it adds, updated in place or new. Shapes: x, result [T, H]."""

    def head(self, x: A) -> A:
        """Logits. Shapes: x [T, H]; result [T, V]."""


def forward(
    model: Model[A, E],
    step: Step,
    experts: E,
    *,
    before_layer: Callable[[], None] | None = None,
    on_layer: OnLayer[A] | None = None,
) -> Pausable[A]:
    """A step through all layers; returns the rows after the last one. Shapes: result [T, H].

    `before_layer` may raise to end the pass; `on_layer` gets the rows after every layer.
    """
    step = model.place(step)
    x = model.embed(step)
    for layer_id in range(model.spec.num_layers):
        if before_layer is not None:
            before_layer()
        x = yield from model.layer(layer_id, x, step, experts)
        if on_layer is not None:
            on_layer(layer_id, x)
    return x


def run_to_end(work: Pausable[A], *, is_trial: bool = False) -> A:
    """Drive a pass to its end and return its result, where nothing else is to be done meanwhile.

    The host's work is done where the pass pauses for it; left out in a trial.
    """
    try:
        while True:
            try:
                host_work = next(work)
            except StopIteration as end:
                result: A = end.value
                return result
            if host_work is not None and not is_trial:
                host_work()
    finally:
        work.close()
