"""Attention of a tree's tokens, emulated: each has its bits as the last token of a sequence."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_adapters.rope import RopePairing
from dflash_adapters.spec import Mask
from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows, meta_shape
from dflash_runtime.compute.gpu.layers.attention_plan import context_bucket
from dflash_runtime.compute.gpu.layers.attention_tree import TreeAttention
from dflash_runtime.compute.gpu.layers.branch import Branch
from dflash_runtime.compute.gpu.layers.kv_rows import KvRows, LayerKvCache
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.step_order import padded_columns
from dflash_runtime.compute.trees import Tree
from support.attention_rig import AttentionRig, LayerCase
from support.trees import way_to

SMALL = LayerCase(num_heads=4, key_dim=32, value_dim=32, num_rotated=32)
HALVES = SMALL.having(use_mma=True)
CASES = (
    SMALL.having(kv_type=KvType.F32),
    HALVES,
    SMALL.having(kv_type=KvType.Q8_0, lanes=64, runs_backward=True),
    # Rows of a warp are of two tokens.
    SMALL.having(
        num_heads=7,
        num_kv_heads=1,
        key_dim=18,
        value_dim=10,
        num_rotated=12,
        pairing=RopePairing.INTERLEAVED,
        has_norm=False,
    ),
    *(
        pytest.param(each, marks=pytest.mark.slow)
        for each in (SMALL, SMALL.having(kv_type=KvType.Q8_0, use_mma=True))
    ),
)
PARENTS = [-1, 0, 0, 1, -1, 3, 2, 5, 5, 8, 9]
"""More than go through a step's kernels at once; the last one seven below a root."""


def tree_of(rig: AttentionRig, parents: list[int], first: int) -> tuple[Tree, Branch]:
    tree = Tree(np.array(parents, np.int32), first)
    return tree, Branch(rig.device, tree)


def results(rig: AttentionRig, count: int) -> StepRows:
    """What so many tokens' results go to."""
    heads, dim, empty = rig.case.num_heads, rig.case.value_dim, rig.device.empty
    values = empty((count, heads, dim), np.float32)
    if dim % 16:
        return StepRows(values=values)
    quants = empty((count, padded_columns(heads * dim)), np.int8)
    return StepRows(quants, empty(meta_shape(count, heads * dim), np.float32), values)


def check_same(got: StepRows, token: int, expected: StepRows, num_columns: int) -> None:
    """One token's results have the bits of a step's only one."""
    for kind, columns in (("values", None), ("quants", num_columns), ("meta", num_columns // 16)):
        one, other = getattr(got, kind), getattr(expected, kind)
        if other is not None:
            np.testing.assert_array_equal(
                np.asarray(one)[token, :columns], np.asarray(other)[0, :columns]
            )


def stored(layer: LayerKvCache, positions: slice) -> list[AnyArray]:
    """Bytes of some rows."""

    def of(rows: KvRows) -> list[AnyArray]:
        arrays = [rows.elements] if rows.scales is None else [rows.elements, rows.scales]
        return [np.ascontiguousarray(np.asarray(each)[:, positions]) for each in arrays]

    return [each.view(np.uint8) for each in (*of(layer.keys), *of(layer.values))]


def check_tree(case: LayerCase, parents: list[int], first: int, last: int) -> None:
    """Results are those of steps, and so is what is in the cache once the path to `last` counts."""
    size, columns = len(parents), case.num_heads * case.value_dim
    rig, other = AttentionRig(case), AttentionRig(case)
    for each in (rig, other):
        each.fill_cache(first)
    before = stored(rig.cache.layers[0], slice(None))
    tree, branch = tree_of(rig, parents, first)
    bucket = context_bucket(first + size)
    attention = TreeAttention(rig.device, case.shape, bucket)
    nodes, got = attention.new_nodes(size), results(rig, size)
    attention.launch(
        rig.rows_of(range(first, first + size)),
        rig.cache.layers[0],
        branch,
        nodes=nodes,
        scratch=rig.device.empty(attention.scratch_bytes, np.uint8),
        out=got,
    )

    def step(node: int) -> StepRows:
        out, position = results(other, 1), first + int(tree.depths[node])
        other.decode_into(out, position, 1, bucket=bucket, rows=other.rows_of([first + node]))
        return out

    for node in tree.walk.tolist():  # each finds its ancestors' rows in their places
        check_same(got, node, step(node), columns)
    for one, another in zip(stored(rig.cache.layers[0], slice(None)), before, strict=True):
        np.testing.assert_array_equal(one, another)
    path = way_to(parents, last)
    attention.accept(
        rig.cache.layers[0], branch, rig.device.upload(np.array(path, np.int32)), nodes=nodes
    )
    for node in path:
        step(node)
    end = first + len(path)
    pairs = zip(*(stored(each.cache.layers[0], slice(end)) for each in (rig, other)), strict=True)
    for one, another in pairs:
        np.testing.assert_array_equal(one, another)
    for one, another in zip(stored(rig.cache.layers[0], slice(end, None)), before, strict=True):
        np.testing.assert_array_equal(one, another[:, end:])


@pytest.mark.parametrize("case", CASES)
def test_a_token_has_the_bits_of_a_step(case: LayerCase) -> None:
    check_tree(case, PARENTS, 60, last=10)  # where a run of positions ends


@pytest.mark.parametrize("parents", [[-1], [-1] * 5, [-1, *range(9)]], ids=len)
@pytest.mark.parametrize("first", [1, 127])
def test_trees_of_any_kind(parents: list[int], first: int) -> None:
    check_tree(HALVES, parents, first, last=len(parents) - 1)


@pytest.mark.parametrize("mask", [Mask(window=5), Mask(33, 24)], ids=str)
def test_what_a_mask_hides_is_not_seen(mask: Mask) -> None:
    check_tree(HALVES.having(mask=mask), PARENTS, 67, last=7)


def test_arrays_of_another_tree_are_refused() -> None:
    rig = AttentionRig(SMALL.having(kv_type=KvType.F32))
    attention = TreeAttention(rig.device, rig.case.shape, 1024)
    _, branch = tree_of(rig, [-1, 0], 4)
    scratch = rig.device.empty(attention.scratch_bytes, np.uint8)
    for rows, nodes, reason in ((2, 3, "3 rows of"), (3, 2, r"float32 \[T=2, columns=128\]")):
        with pytest.raises(ValueError, match=reason):
            attention.launch(
                rig.rows_of(range(rows)),
                rig.cache.layers[0],
                branch,
                nodes=attention.new_nodes(nodes),
                scratch=scratch,
                out=results(rig, 2),
            )
