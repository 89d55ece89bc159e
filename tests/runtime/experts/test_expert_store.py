"""Placements that come and go: what is read, kept and given back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import MoeLayer, MoeSpec
from dflash_protocol.ids import I32Array, U8Array
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.compute.reference import ReferenceBackend
from dflash_runtime.compute.reference.experts import ReferenceExpertBank
from dflash_runtime.experts.store import ExpertStore, every_expert
from support.random_models import BLOCK_32_SHAPE, write_qwen3moe
from support.routed_batches import batch_of

SHAPE = replace(BLOCK_32_SHAPE, num_layers=3)
FIRST = OwnedExperts.from_lists({0: [7, 2], 2: [0, 10, 1]})
SECOND = OwnedExperts.from_lists({0: [2, 3, 7], 1: [4], 2: [0, 10, 1]})
DISJOINT = OwnedExperts.from_lists({1: [0]})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GgufFile]:
    path: Path = tmp_path_factory.mktemp("model") / "model.gguf"
    with GgufFile.open(write_qwen3moe(path, SHAPE, seed=4)) as file:
        yield file


@pytest.fixture
def spec(model: GgufFile) -> MoeSpec:
    return read_spec(model).moe


class Backend(ReferenceBackend):
    """Counts banks, and fails to make one of a layer if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.num_banks = 0
        self.bad_layer_id = -1

    def load_experts(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> ReferenceExpertBank:
        if layer.layer_id == self.bad_layer_id:
            raise MemoryError("no room")
        self.num_banks += 1
        return super().load_experts(file, layer, global_expert_ids)

    @property
    def expanded_bytes(self) -> int:
        return self._cache.used_bytes


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def store(backend: Backend, model: GgufFile, spec: MoeSpec) -> ExpertStore:
    return ExpertStore(backend, model, spec)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, spec: MoeSpec) -> Callable[[], dict[int, set[int]]]:
    """Which experts' bytes were looked at since it was last asked, by layer."""
    places = {
        (part.offset_bytes + expert * part.stride_bytes): (layer.layer_id, expert)
        for layer in spec.layers
        for part in layer.parts
        for expert in range(layer.num_experts)
    }
    found: list[tuple[int, int]] = []
    region = GgufFile.region

    def recorded(self: GgufFile, shard_index: int, offset_bytes: int, num_bytes: int) -> U8Array:
        found.append(places[offset_bytes])
        return region(self, shard_index, offset_bytes, num_bytes)

    monkeypatch.setattr(GgufFile, "region", recorded)

    def take() -> dict[int, set[int]]:
        by_layer: dict[int, set[int]] = {}
        for layer_id, expert in found:
            by_layer.setdefault(layer_id, set()).add(expert)
        found.clear()
        return by_layer

    return take


def use_all(store: ExpertStore, owned: OwnedExperts) -> dict[tuple[int, int], bytes]:
    """What every expert of a held placement makes of a row, by layer and global id."""
    held = store.hold(owned)
    store.release(held)
    results = {}
    for layer_id, ids in owned.by_layer.items():
        for local_expert_id, global_expert_id in enumerate(ids.tolist()):
            hidden = np.linspace(-1, 1, SHAPE.hidden_size, dtype=np.float32)[None]
            out = np.zeros(hidden.shape)
            batch = batch_of(1, {(0, local_expert_id): 1.0}, hidden=hidden)
            held.banks[layer_id].accumulate(batch, out)
            results[layer_id, global_expert_id] = out.tobytes()
    return results


def test_only_the_difference_is_read(
    store: ExpertStore, backend: Backend, read: Callable[[], dict[int, set[int]]]
) -> None:
    first = store.hold(FIRST)
    assert (first.num_kept, first.num_loaded, first.num_dropped) == (0, 5, 0)
    assert read() == {0: {2, 7}, 2: {0, 1, 10}}
    assert backend.num_banks == 2
    store.release(first)
    second = store.hold(SECOND)
    assert (second.num_kept, second.num_loaded, second.num_dropped) == (5, 2, 0)
    assert second.banks[2] is first.banks[2], "what did not change serves on"
    assert backend.num_banks == 4
    # Warming up runs the first experts of a bank of a kind that is new: two of three, and one.
    assert read() == {0: {3}, 1: {4}}
    assert store.hold(SECOND) is second
    assert read() == {}


def test_experts_stay_what_they_are_whatever_came_before(
    store: ExpertStore, model: GgufFile, spec: MoeSpec
) -> None:
    expected = use_all(ExpertStore(ReferenceBackend(), model, spec), every_expert(spec))
    for owned in (FIRST, SECOND, DISJOINT, FIRST, every_expert(spec), SECOND):
        for place, result in use_all(store, owned).items():
            assert result == expected[place]


def test_what_is_held_is_kept_and_what_nobody_holds_goes_with_the_next_placement(
    store: ExpertStore,
) -> None:
    first, again, second = store.hold(FIRST), store.hold(FIRST), store.hold(SECOND)
    assert again is first
    store.release(first)
    other = store.hold(DISJOINT)
    assert (other.num_dropped, store.num_experts) == (0, 8)
    store.release(again)
    store.release(second)
    assert store.num_experts == 8, "kept for whoever comes back"
    assert store.holds(FIRST)
    held = store.hold(OwnedExperts.from_lists({0: [3]}))
    assert (held.num_kept, held.num_loaded, held.num_dropped) == (1, 0, 6)
    assert store.num_experts == 2
    assert store.holds(DISJOINT)
    assert not store.holds(FIRST)


def test_what_was_expanded_of_dropped_experts_is_given_back(
    store: ExpertStore, backend: Backend
) -> None:
    use_all(store, DISJOINT)
    one = backend.expanded_bytes
    assert one == 3 * 4 * SHAPE.hidden_size * SHAPE.ffn_size
    use_all(store, FIRST)
    assert backend.expanded_bytes == 5 * one
    use_all(store, SECOND)
    assert backend.expanded_bytes == 7 * one
    use_all(store, DISJOINT)
    assert backend.expanded_bytes == one


def test_a_failed_load_leaves_what_is_in_use_alone(store: ExpertStore, backend: Backend) -> None:
    first = store.hold(FIRST)
    backend.bad_layer_id = 1
    with pytest.raises(MemoryError, match="no room"):
        store.hold(SECOND)
    assert not store.holds(SECOND)
    assert store.hold(FIRST) is first
    backend.bad_layer_id = -1
    second = store.hold(SECOND)
    assert (second.num_kept, second.num_loaded) == (6, 1), "expert 3 of layer 0 had been loaded"


def test_an_abandoned_load_is_dropped_by_the_next(store: ExpertStore, backend: Backend) -> None:
    backend.bad_layer_id = 1
    with pytest.raises(MemoryError):
        store.hold(SECOND)
    assert store.num_experts == 3
    held = store.hold(OwnedExperts.from_lists({2: [5]}))
    assert (held.num_loaded, held.num_dropped, store.num_experts) == (1, 3, 1)


def test_progress_is_told_by_layer(store: ExpertStore) -> None:
    reports: list[tuple[int, int]] = []
    store.hold(SECOND, lambda num_done, num_total: reports.append((num_done, num_total)))
    assert reports == [(0, 3), (1, 3), (2, 3), (3, 3)]


def resident_bytes(path: Path) -> int:
    """How much of a mapped file this process has in its memory."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_mapped_pages_of_dropped_experts_are_given_back(tmp_path: Path) -> None:
    """Where banks are views of the file, it is the file's pages that take memory."""
    shape = replace(SHAPE, hidden_size=256, ffn_size=256, num_layers=1, num_experts=16)
    path = write_qwen3moe(tmp_path / "model.gguf", shape, seed=1)
    with GgufFile.open(path) as file:
        spec = read_spec(file).moe
        store = ExpertStore(ReferenceBackend(), file, spec)
        store.release(store.hold(every_expert(spec)))
        full = resident_bytes(path)
        num_bytes = sum(part.num_bytes for part in spec.layers[0].parts)
        assert full >= 16 * num_bytes
        held = store.hold(OwnedExperts.from_lists({0: [5]}))
        assert held.num_dropped == 15
        assert resident_bytes(path) <= full - 14 * num_bytes
