"""Tokens of a tree are computed as if each were at the end of its own sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.spec import DeltaShape, KvLayer, Mask
from dflash_protocol.errors import CheckpointMissing
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.compute import sliding_window
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.model import Step
from dflash_runtime.compute.reference.ops import ReferenceOps
from dflash_runtime.compute.trees import MOST_NODES, Tree
from support.examples import examples
from support.recurrent_rig import DeltaInputs, delta_inputs, recurrent_cache
from support.trees import BUSHY, CHAIN, parent_lists, way_to, ways_to_leaves

HostOps: TypeAlias = CpuOps | ReferenceOps


def tree_of(parents: list[int], position: int = 7) -> Tree:
    return Tree(np.array(parents, np.int32), position)


def check_same(ops: HostOps, got: F32Array, expected: F32Array) -> None:
    """The cpu backend must give the bits of single steps."""
    if isinstance(ops, CpuOps):
        np.testing.assert_array_equal(got, expected)
    else:
        np.testing.assert_allclose(got, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


# -- trees ----------------------------------------------------------------------------------------


@given(parent_lists(largest=MOST_NODES))
def test_walks_visit_all_and_leave_ancestors_in_place(parents: list[int]) -> None:
    tree = tree_of(parents)
    assert sorted(tree.walk.tolist()) == list(range(len(parents)))
    assert [node for part in tree.segments for node in part] == tree.walk.tolist()
    at_depth: dict[int, int] = {}
    for part in tree.segments:
        for node in part.tolist():
            way = way_to(parents, node)
            assert tree.depths[node] == len(way) - 1
            at_depth[len(way) - 1] = node
            assert [at_depth[depth] for depth in range(len(way))] == way
            tree.check_path(np.array(way, np.int32))
            before = [-4, -3, -2, -1, *way]
            assert tree.ancestors(4)[node].tolist() == before[-4:]


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-2], [-1, 0, 3, 2], [-1] * (MOST_NODES + 1)])
def test_what_is_no_tree_is_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parent"):
        tree_of(parents)


@pytest.mark.parametrize("nodes", [[1], [0, 3], [0, 1, 1], [0, 2, -1], [5], [4, 0]])
def test_what_is_no_path_is_refused(nodes: list[int]) -> None:
    tree, path = tree_of([-1, 0, 0, 1, -1]), np.array(nodes, np.int32)
    tree.keep(lambda path: pytest.fail("kept"))
    for check in (tree.check_path, tree.accept):
        with pytest.raises(ValueError, match="path"):
            check(path)


# -- attention ------------------------------------------------------------------------------------


def heads(num_tokens: int, num_heads: int, dim: int, *, seed: int) -> F32Array:
    random = np.random.default_rng([seed, num_heads])
    return random.standard_normal((num_tokens, num_heads, dim), dtype=np.float32)


@pytest.mark.wide(2)
@pytest.mark.parametrize("kv_type", [KvType.F32, KvType.F16, KvType.Q8_0])
@pytest.mark.parametrize("mask", [Mask(), Mask(window=20), Mask(chunk=32)], ids=str)
@pytest.mark.parametrize("parents", [BUSHY, CHAIN, [-1], [-1, -1, -1]], ids=len)
def test_attention_sees_the_sequence_and_ancestors(
    ops: HostOps,
    parents: list[int],
    mask: Mask,
    kv_type: KvType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sliding_window, "WINDOW_CHUNK", MOST_NODES)
    begin, size = 122, len(parents)  # a window of 128 rows wraps within the trees
    layer, scale = KvLayer(2, 24, 40, mask), 0.2

    def inputs(count: int, seed: int) -> tuple[F32Array, F32Array, F32Array]:
        return (
            heads(count, 4, 24, seed=seed),
            heads(count, 2, 24, seed=seed + 1),
            heads(count, 2, 40, seed=seed + 2),
        )

    def begun() -> Any:
        cache = ops.new_kv_cache((layer,), 256, kv_type)
        assert cache.windows[0].num_rows == (256 if mask.span is None else 128)
        before = np.arange(begin, dtype=np.int32)
        ops.attention(*inputs(begin, 5), cache, 0, before, scale=scale)
        return cache

    def steps(cache: Any, nodes: list[int], first: int) -> list[F32Array]:
        return [
            ops.attention(
                q[node : node + 1],
                k[node : node + 1],
                v[node : node + 1],
                cache,
                0,
                np.array([first + index], np.int32),
                scale=scale,
            )[0]
            for index, node in enumerate(nodes)
        ]

    q, k, v = inputs(size, 9)
    tree, cache = tree_of(parents, begin), begun()
    got = ops.attention(q, k, v, cache, 0, tree.positions, scale=scale, tree=tree)
    for way in ways_to_leaves(parents):
        for node, row in zip(way, steps(begun(), way, begin), strict=True):
            check_same(ops, got[node], row)
    # After accepting a path the rest of the tree has no effect.
    way = way_to(parents, size - 1)
    tree.accept(np.array(way, np.int32))
    rest = [0, size // 2, size - 1]
    other = begun()
    steps(other, way, begin)
    for one, another in zip(
        steps(cache, rest, begin + len(way)), steps(other, rest, begin + len(way)), strict=True
    ):
        check_same(ops, one, another)


# -- recurrent layers -----------------------------------------------------------------------------


class Recurrent:
    """One layer's convolution and delta rule over a cache, with the same inputs each time."""

    def __init__(self, ops: HostOps, shape: DeltaShape, *, kernel: int = 4) -> None:
        self._ops, self._shape, self._kernel = ops, shape, kernel
        self._weight = delta_inputs(shape, kernel, seed=4).mixed.T.copy()

    def compute(
        self, cache: Any, inputs: DeltaInputs, positions: I32Array, tree: Tree | None = None
    ) -> F32Array:
        mixed = self._ops.causal_conv(inputs.mixed, self._weight, cache, 0, positions, tree=tree)
        return self._ops.delta_rule(replace(inputs, mixed=mixed), cache, 0, positions, tree=tree)

    def begun(self, num_positions: int) -> Any:
        cache = recurrent_cache(self._ops, self._shape, kernel=self._kernel)
        inputs = delta_inputs(self._shape, num_positions, seed=3)
        self.compute(cache, inputs, np.arange(num_positions, dtype=np.int32))
        return cache

    def steps(
        self, cache: Any, inputs: DeltaInputs, nodes: list[int], first: int
    ) -> list[F32Array]:
        return [
            self.compute(
                cache, inputs.of(slice(node, node + 1)), np.array([first + index], np.int32)
            )[0]
            for index, node in enumerate(nodes)
        ]


@pytest.mark.wide(2)
@pytest.mark.parametrize(
    "shape",
    [DeltaShape(2, 4, 16, 16), DeltaShape(1, 3, 20, 45), DeltaShape(2, 2, 7, 64, is_tiled=False)],
    ids=str,
)
@pytest.mark.parametrize("begin", [1, 20, 32, 63, 64, 90])
@pytest.mark.parametrize("parents", [BUSHY, CHAIN, [-1], [-1, -1, 1, 0]], ids=len)
def test_recurrent_layers_go_on_from_their_parents(
    ops: HostOps, parents: list[int], begin: int, shape: DeltaShape
) -> None:
    layer, size = Recurrent(ops, shape, kernel=4 if begin % 2 else 3), len(parents)
    new = delta_inputs(shape, size, seed=8)
    tree, cache = tree_of(parents, begin), layer.begun(begin)
    got = layer.compute(cache, new, tree.positions, tree)
    for way in ways_to_leaves(parents):
        expected = layer.steps(layer.begun(begin), new, way, begin)
        for each, row in zip(way, expected, strict=True):
            check_same(ops, got[each], row)
    # Nothing changes until a path is accepted.
    rest, other = [0, size // 2, size - 1], layer.begun(begin)
    snapshot = cache.snapshot(begin)
    for one, another in zip(
        layer.steps(cache, new, rest, begin), layer.steps(other, new, rest, begin), strict=True
    ):
        np.testing.assert_array_equal(one, another)
    cache.restore(snapshot)
    way, other = way_to(parents, size - 1), layer.begun(begin)
    tree.accept(np.array(way, np.int32))
    layer.steps(other, new, way, begin)
    end = begin + len(way)
    for one, another in zip(
        layer.steps(cache, new, rest, end), layer.steps(other, new, rest, end), strict=True
    ):
        check_same(ops, one, another)


@examples(60)
@given(parents=parent_lists(smallest=1, largest=MOST_NODES), begin=st.integers(1, 130))
def test_random_trees_anywhere(ops: HostOps, parents: list[int], begin: int) -> None:
    test_recurrent_layers_go_on_from_their_parents(ops, parents, begin, DeltaShape(1, 2, 12, 12))


def test_a_tree_goes_on_from_where_the_sequence_is(ops: HostOps) -> None:
    layer = Recurrent(ops, DeltaShape(1, 1, 8, 8))
    cache = layer.begun(30)
    for position in (29, 31):
        with pytest.raises(CheckpointMissing):
            Step.of_tree(np.zeros(1, np.int32), tree_of([-1], position), cache)
    tree = tree_of([-1], 30)
    Step.of_tree(np.zeros(1, np.int32), tree, cache)
    layer.compute(cache, delta_inputs(DeltaShape(1, 1, 8, 8), 1), tree.positions, tree)
    tree.accept(np.empty(0, np.int32))
    assert cache.can_resume(30)


def test_tokens_must_be_as_many_as_the_trees(ops: HostOps) -> None:
    shape = DeltaShape(1, 1, 8, 8)
    layer, new = Recurrent(ops, shape), delta_inputs(shape, 3)
    cache = layer.begun(5)
    kv_cache = ops.new_kv_cache((KvLayer(1, 8, 8),), 64, KvType.F32)
    q = heads(3, 1, 8, seed=1)
    for parents in ([-1, 0], [-1, 0, 1, 2]):
        tree = tree_of(parents, 5)
        positions = tree.positions
        with pytest.raises(ValueError, match=r"\b3 tokens\b.*tree"):
            layer.compute(cache, new, positions, tree)
        with pytest.raises(ValueError, match=r"\b3 tokens\b.*tree"):
            ops.delta_rule(new, cache, 0, positions, tree=tree)
        with pytest.raises(ValueError, match=r"\b3 tokens\b.*tree"):
            ops.attention(q, q, q, kv_cache, 0, positions, scale=1.0, tree=tree)


def test_an_empty_tree_is_nothing(ops: HostOps) -> None:
    shape = DeltaShape(1, 1, 8, 8)
    layer = Recurrent(ops, shape)
    cache, tree = layer.begun(5), tree_of([], 5)
    kv_cache = ops.new_kv_cache((KvLayer(1, 8, 8),), 64, KvType.F32)
    assert layer.compute(cache, delta_inputs(shape, 0), tree.positions, tree).shape == (0, 1, 8)
    nothing, positions = np.empty((0, 1, 8), np.float32), tree.positions
    attended = ops.attention(
        nothing, nothing, nothing, kv_cache, 0, positions, scale=1.0, tree=tree
    )
    assert attended.shape == (0, 1, 8)
    tree.accept(np.empty(0, np.int32))
    assert cache.can_resume(5)
