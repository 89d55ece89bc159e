"""Pairs sorted by expert on the device against numpy's stable sort."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_protocol.batch import group_by_expert, slice_tokens
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import AnyArray, F32Array, I32Array, Phase
from dflash_runtime.compute.gpu.launch.prefill_groups import MAX_EXPERTS, ExpertGroups, GroupedPairs
from support.emulated_device import EmulatedDevice
from support.prefill_rig import choose

TILE_ROWS = 8


def check(groups: GroupedPairs, ids: I32Array, weights: F32Array, resident: AnyArray) -> None:
    """All arrays against numpy's. Shapes: ids, weights [T, K]; resident [E] bool."""
    num_used, flat = ids.shape[1], ids.reshape(-1)
    is_known = (flat >= 0) & (flat < resident.size)
    is_here = is_known & resident[np.where(is_known, flat, 0)]
    order = np.flatnonzero(is_here)[np.argsort(flat[is_here], kind="stable")]
    experts, starts = np.unique(flat[order], return_index=True)
    bounds = np.append(starts, order.size)
    counts = groups.counts[:3].tolist()
    num_groups, num_tiles, num_rows = counts
    assert (num_groups, num_rows) == (experts.size, order.size)
    np.testing.assert_array_equal(groups.expert_ids[:num_groups], experts)
    np.testing.assert_array_equal(groups.token_indices[:num_rows], order // num_used)
    np.testing.assert_array_equal(groups.weights[:num_rows], weights.reshape(-1)[order])
    rows = np.full(flat.size, -1)
    rows[order] = np.arange(order.size)
    np.testing.assert_array_equal(groups.rows_of_tokens[: flat.size], rows)
    tiles = [
        (group, expert, row, min(row + TILE_ROWS, bounds[group + 1]))
        for group, expert in enumerate(experts)
        for row in range(bounds[group], bounds[group + 1], TILE_ROWS)
    ]
    assert num_tiles == len(tiles) <= groups.max_tiles
    np.testing.assert_array_equal(groups.tiles[:num_tiles], np.array(tiles).reshape(-1, 4))


@pytest.mark.wide(2)
@pytest.mark.parametrize("lanes", [32, 64])
@pytest.mark.parametrize("runs_backward", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_used"),
    [(1, 3, 1), (1, 9, 4), (16, 9, 4), (70, 9, 3), (70, 9, 1), (23, 130, 4)],
)
def test_order_is_that_of_a_stable_sort(
    lanes: int, runs_backward: bool, num_tokens: int, num_experts: int, num_used: int
) -> None:
    device = EmulatedDevice(lanes=lanes, runs_backward=runs_backward)
    groups = ExpertGroups(
        device, num_experts=num_experts, max_pairs=280, tile_rows=TILE_ROWS, chunk_pairs=16
    )
    rng = np.random.default_rng(num_tokens + num_experts)
    ids, weights = choose(rng, num_tokens, num_experts, num_used)
    grouped = groups.group_chosen(device.upload(ids), device.upload(weights))
    check(grouped, ids, weights, np.ones(num_experts, bool))


@pytest.mark.parametrize("case", ["some", "none", "one takes all", "ids of nobody"])
def test_only_resident_experts_get_rows(case: str) -> None:
    device = EmulatedDevice()
    groups = ExpertGroups(device, num_experts=9, max_pairs=280, tile_rows=TILE_ROWS, chunk_pairs=16)
    rng = np.random.default_rng(3)
    ids, weights = choose(rng, 70, 9, 3)
    slots = np.arange(9, dtype=np.int32)
    if case == "some":
        slots[[0, 4, 8]] = -1
    elif case == "none":
        slots[:] = -1
    elif case == "one takes all":
        ids[:] = 7
    else:
        ids[::5, 1], ids[1::5, 0] = 9, -3
    selections = device.upload(np.arange(9, dtype=np.uint32))
    grouped = groups.group_chosen(
        device.upload(ids),
        device.upload(weights),
        slot_of_expert=device.upload(slots),
        selections=selections,
    )
    check(grouped, ids, weights, slots >= 0)
    chosen = [int((ids == expert).sum()) if slots[expert] >= 0 else 0 for expert in range(9)]
    assert selections.tolist() == [before + count for before, count in enumerate(chosen)]


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_a_sorted_batch_is_taken_over(num_tokens: int) -> None:
    device = EmulatedDevice()
    groups = ExpertGroups(device, num_experts=9, max_pairs=160, tile_rows=TILE_ROWS, chunk_pairs=16)
    rng = np.random.default_rng(num_tokens)
    ids, weights = choose(rng, num_tokens, 9, 4)
    kept = rng.random(ids.shape) < 0.7  # tokens have different numbers of pairs here
    kept[0, 0] = True
    tokens, _ = np.nonzero(kept)
    batch = group_by_expert(
        np.zeros((num_tokens, 32), np.float32),
        tokens.astype(np.int32),
        ids[kept],
        weights=weights[kept],
        phase=Phase.PREFILL,
    )
    one_token = next(slice_tokens(batch, 1))[1]
    for before in (one_token, None):  # whatever was there before
        if before is None:
            earlier = groups.group_chosen(device.upload(ids), device.upload(weights))
            assert earlier.counts[2] == ids.size
        else:
            earlier = groups.load(before)
            assert earlier.counts[2] == before.num_pairs
        grouped = groups.load(batch)
    assert grouped.layout != earlier.layout  # the arrays are others
    assert grouped.counts[:3].tolist() == [
        batch.num_groups,
        sum(-(-size // TILE_ROWS) for size in np.diff(batch.group_starts).tolist()),
        batch.num_pairs,
    ]
    assert grouped.pairs_per_token == kept.sum(axis=1).max()
    rows = grouped.rows_of_tokens[: num_tokens * grouped.pairs_per_token].reshape(num_tokens, -1)
    for token in range(num_tokens):
        wanted = np.flatnonzero(batch.token_indices == token)
        np.testing.assert_array_equal(rows[token, : wanted.size], wanted)
        assert (rows[token, wanted.size :] == -1).all()
    tiles = grouped.tiles[: grouped.counts[1]]
    covered = np.concatenate([np.arange(first, end) for _, _, first, end in tiles])
    np.testing.assert_array_equal(covered, np.arange(batch.num_pairs))
    np.testing.assert_array_equal(tiles[:, 1], batch.expert_ids[tiles[:, 0]])


def test_what_does_not_fit_is_refused() -> None:
    device = EmulatedDevice()
    with pytest.raises(SettingsError, match=str(MAX_EXPERTS)):
        ExpertGroups(device, num_experts=MAX_EXPERTS + 1, max_pairs=8, tile_rows=TILE_ROWS)
    groups = ExpertGroups(device, num_experts=9, max_pairs=280, tile_rows=TILE_ROWS, chunk_pairs=16)
    ids, weights = choose(np.random.default_rng(1), 71, 9, 4)
    with pytest.raises(SettingsError, match=r"\b280 pairs"):
        groups.group_chosen(device.upload(ids), device.upload(weights))
    with pytest.raises(SettingsError, match="weights"):
        groups.group_chosen(device.upload(ids[:8]), device.upload(weights[:7]))
    with pytest.raises(SettingsError, match="int64"):
        groups.group_chosen(device.upload(ids[:8].astype(np.int64)), device.upload(weights[:8]))
    batch = group_by_expert(
        np.zeros((300, 32), np.float32),
        np.arange(300, dtype=np.int32),
        np.zeros(300, np.int32),
        weights=np.ones(300, np.float32),
        phase=Phase.PREFILL,
    )
    with pytest.raises(SettingsError, match=r"\b280 pairs"):
        groups.load(batch)
