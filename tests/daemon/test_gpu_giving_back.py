"""Placements in use at a daemon on a GPU share a layer's memory, and what no placement needs goes
back to the driver, in whole blocks: the bits stay. The GPU is emulated; its memory comes in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_daemon.host import ExpertHost
from dflash_protocol.batch import RoutedBatch, group_by_expert
from dflash_protocol.errors import DeviceOutOfMemory
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.experts.store import HeldPlacement
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import TINY, TINY_GPT_OSS, EmulatedGpus, install_emulated_gpus
from support.random_gguf import RandomShape, write_model

BLOCK_BYTES = 2048
SHAPES: list[RandomShape] = [
    replace(TINY, num_layers=2, num_experts=12),
    replace(TINY_GPT_OSS, num_layers=2, num_experts=12),
]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    monkeypatch.setattr(EmulatedDevice, "block_bytes", BLOCK_BYTES)
    return install_emulated_gpus(monkeypatch)


@pytest.fixture
def shape(request: pytest.FixtureRequest) -> RandomShape:
    return getattr(request, "param", SHAPES[0])


@pytest.fixture
def host(tmp_path: Path, shape: RandomShape, gpus: EmulatedGpus) -> Iterator[ExpertHost]:
    path = write_model(tmp_path / "m.gguf", shape, seed=4, tensor_type="Q8_0")
    host = ExpertHost(path, gpus.open_first())
    host.warm_up()
    yield host
    host.close()


def owned(*ids: int) -> OwnedExperts:
    return OwnedExperts.from_lists({0: ids, 1: ids[::-1]})


def batch_of(ids: Sequence[int], chosen: Sequence[int], shape: RandomShape) -> RoutedBatch:
    """A token that chooses these experts, of those with the local ids that `ids` says."""
    rows = np.random.default_rng(7).standard_normal((1, shape.hidden_size), np.float32)
    local = np.array([list(ids).index(each) for each in chosen], np.int32)
    weights = np.arange(1, len(chosen) + 1, dtype=np.float32)
    tokens = np.zeros(local.size, np.int32)
    return group_by_expert(rows, tokens, local, weights=weights, phase=Phase.DECODE)


def sums_of(held: HeldPlacement, chosen: Sequence[int], shape: RandomShape) -> list[F64Array]:
    found = []
    for layer_id, bank in held.banks.items():
        batch = batch_of(held.owned.by_layer[layer_id].tolist(), chosen, shape)
        found.append(np.zeros(batch.hidden.shape))
        bank.accumulate(batch, found[-1])
    return found


def assert_same(found: list[F64Array], expected: list[F64Array]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("shape", SHAPES, ids=["qwen3moe", "gpt-oss"], indirect=True)
def test_fewer_experts_lie_where_they_were_and_the_others_go(
    host: ExpertHost, gpus: EmulatedGpus, shape: RandomShape
) -> None:
    device, ready_bytes = gpus.opened[0], gpus.opened[0].num_bytes
    many = host.load(owned(*range(10)))
    most_bytes = device.num_bytes - ready_bytes
    expected = {pair: sums_of(many, pair, shape) for pair in ((1, 8), (8, 9), (9, 5))}
    few = host.load(owned(9, 1, 8, 5))
    assert device.num_bytes - ready_bytes < 1.1 * most_bytes  # tables alone
    for pair, sums in expected.items():
        assert_same(sums_of(few, pair, shape), sums)
        assert_same(sums_of(many, pair, shape), sums)
    host.store.give_back()
    assert device.num_bytes - ready_bytes > most_bytes  # both are in use
    host.release(many)
    del many
    host.store.give_back()
    few_bytes = device.num_bytes - ready_bytes
    assert few_bytes < 0.6 * most_bytes
    for pair, sums in expected.items():
        assert_same(sums_of(few, pair, shape), sums)
    more = host.load(owned(5, 0, 9, 1, 8, 2))
    assert few_bytes < device.num_bytes - ready_bytes < 0.8 * most_bytes
    assert (more.num_kept, more.num_loaded) == (8, 4)
    for pair, sums in expected.items():
        assert_same(sums_of(more, pair, shape), sums)
        assert_same(sums_of(few, pair, shape), sums)
    host.release(more)
    host.release(few)
    del more, few
    host.store.give_back()
    assert device.num_bytes - ready_bytes < 0.1 * most_bytes


def test_memory_that_is_not_there_is_an_error_that_leaves_all_as_it_was(
    host: ExpertHost, gpus: EmulatedGpus, shape: RandomShape
) -> None:
    device = gpus.opened[0]
    many = host.load(owned(*range(10)))
    few = host.load(owned(1, 9))
    expected = sums_of(few, (9, 1), shape)
    host.release(many)
    del many
    host.store.give_back()
    held_bytes, device.free_block_bytes = device.num_bytes, BLOCK_BYTES
    with pytest.raises(DeviceOutOfMemory):
        host.load(owned(*range(1, 10)))
    host.store.give_back()
    assert device.num_bytes == held_bytes
    assert_same(sums_of(few, (9, 1), shape), expected)


@pytest.mark.parametrize("seed", range(2))
def test_random_placements_have_the_bits_of_new_ones(
    host: ExpertHost, gpus: EmulatedGpus, shape: RandomShape, seed: int
) -> None:
    random, num_experts = np.random.default_rng(seed), 12
    device, ready_bytes = gpus.opened[0], gpus.opened[0].num_bytes
    whole = host.load(owned(*range(num_experts)))
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)]
    chosen = {pair: sums_of(whole, pair, shape) for pair in pairs}
    whole_bytes = device.num_bytes - ready_bytes
    first = host.load(owned(0, 1, 4))
    host.release(whole)
    del whole
    in_use = [first]
    del first
    for _ in range(12):
        count = int(random.integers(2, num_experts))
        in_use.append(host.load(owned(*random.permutation(num_experts)[:count].tolist())))
        if len(in_use) > int(random.integers(1, 4)):
            host.release(in_use.pop(int(random.integers(0, len(in_use)))))
        if random.integers(0, 2):
            host.store.give_back()
        for held in in_use:
            here = {*held.owned.by_layer[0].tolist()}
            for pair, sums in chosen.items():
                if here.issuperset(pair):
                    assert_same(sums_of(held, pair, shape), sums)
    for held in in_use:
        host.release(held)
    del held
    in_use.clear()
    host.store.give_back()
    assert device.num_bytes - ready_bytes < 0.1 * whole_bytes
