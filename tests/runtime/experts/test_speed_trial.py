"""Times of a few experts: every kind of layer, within the time, and nothing stays loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import MoeLayer, MoeSpec
from dflash_protocol.errors import DeviceOutOfMemory
from dflash_protocol.ids import I32Array
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.compute.reference import ReferenceBackend
from dflash_runtime.compute.reference.experts import ReferenceExpertBank
from dflash_runtime.experts.speed_trial import KindSpeed, kinds_of, measure_kinds
from dflash_runtime.experts.store import ExpertStore
from support.random_models import BLOCK_32_SHAPE, write_qwen3moe

SHAPE = replace(BLOCK_32_SHAPE, num_layers=3)


class Backend(ReferenceBackend):
    """Notes what is loaded and not dropped; fails in layers without room."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: set[tuple[int, int]] = set()
        self.without_room: set[int] = set()

    def load_experts(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> ReferenceExpertBank:
        if layer.layer_id in self.without_room:
            raise DeviceOutOfMemory("cuda:0", num_bytes=2, free_bytes=1, total_bytes=1, what="x")
        self.loaded |= {(layer.layer_id, each) for each in global_expert_ids.tolist()}
        return super().load_experts(file, layer, global_expert_ids)

    def drop_experts(self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array) -> None:
        self.loaded -= {(layer.layer_id, each) for each in global_expert_ids.tolist()}
        super().drop_experts(file, layer, global_expert_ids)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GgufFile]:
    path: Path = tmp_path_factory.mktemp("model") / "model.gguf"
    with GgufFile.open(write_qwen3moe(path, SHAPE, seed=4)) as file:
        yield file


@pytest.fixture
def spec(model: GgufFile) -> MoeSpec:
    """Layers 0 and 2 are of one kind."""
    first, second, third = read_spec(model).moe.layers
    return MoeSpec((first, replace(second, num_experts_used=1), third))


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def store(backend: Backend, model: GgufFile, spec: MoeSpec) -> ExpertStore:
    return ExpertStore(backend, model, spec)


def test_each_kind_is_measured_and_nothing_stays(store: ExpertStore, backend: Backend) -> None:
    assert kinds_of(store.spec.first_of_kind) == (0, 1)
    progress: list[tuple[int, int]] = []
    speeds = measure_kinds(store, backend, on_progress=lambda *done: progress.append(done))
    assert [*sorted(speeds)] == [0, 1]
    for speed in speeds.values():
        assert min(speed.one_s, speed.used_s, speed.chunk_pairs_per_s) > 0.0
    assert {*progress} == {(0, 2), (1, 2)}
    assert backend.loaded == set()
    assert store.num_experts == 0


def test_the_time_is_kept(store: ExpertStore, backend: Backend) -> None:
    begun_s = time.perf_counter()
    assert measure_kinds(store, backend, limit_s=0.0) == {0: KindSpeed(), 1: KindSpeed()}
    assert backend.loaded == set()
    # A fraction of a second is not over before the first kind was computed once.
    speeds = measure_kinds(store, backend, limit_s=1e-3)
    assert speeds[0].used_s > 0.0
    assert time.perf_counter() - begun_s < 5.0


def test_a_kind_without_memory_is_left_out(store: ExpertStore, backend: Backend) -> None:
    backend.without_room = {0}
    speeds = measure_kinds(store, backend)
    assert speeds[0] == KindSpeed()
    assert speeds[1].used_s > 0.0
    assert backend.loaded == set()


def test_what_a_placement_holds_stays(store: ExpertStore, backend: Backend) -> None:
    held = store.hold(OwnedExperts.from_lists({0: [1], 2: [0, 3]}))
    measure_kinds(store, backend)
    assert backend.loaded == {(0, 1), (2, 0), (2, 3)}
    assert store.held_bytes(dict.fromkeys(range(3), 10)) == 30
    assert np.array_equal(store.hold(held.owned).owned.by_layer[2], [0, 3])


def test_an_interrupted_trial_drops_what_it_loaded(store: ExpertStore, backend: Backend) -> None:
    def stop(num_done: int, num_total: int) -> None:
        if backend.loaded:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_kinds(store, backend, on_progress=stop)
    assert backend.loaded == set()
