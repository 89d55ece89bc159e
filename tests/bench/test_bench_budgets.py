"""Budgets of device memory: what llama.cpp is told, the search for its best, the table."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.budget_peer import (
    MICRO_BATCHES,
    PeerSearch,
    PeerWork,
    PlacedPeer,
    fewest_elsewhere,
)
from bench.gpu_budgets import (
    OurSide,
    best,
    budgets_table,
    bytes_of,
    learnt_prompts,
    parsed,
    thread_counts,
    work_of,
)
from bench.llama_api import DEVICE_CALLS, REGISTRY_CALLS, declare, open_wheel
from bench.peer import PeerError
from bench.peer_fit import FIT_CALLS, LIMIT_CALLS, FitStatus
from bench.planted_routing import Walk
from bench.sides import SideError
from bench.texts import walk_of
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text.tokenizer import load_tokenizer
from dflash_runtime.engine.demo_model import demo_model_path
from support.random_models import BLOCK_32_SHAPE, write_qwen3moe

DEMO = demo_model_path()
LAYERS = [300, 500, 400, 600]
"""Bytes of each layer's experts."""
WORK = PeerWork(64, [([1, 2, 3], [4, 5])] * 3, {8: [[1] * 8] * 3, 16: [[2] * 16] * 3})


@given(st.lists(st.integers(1, 100), max_size=12), st.integers(-50, 600))
def test_no_fewer_layers_would_fit(layer_bytes: list[int], free: int) -> None:
    found = fewest_elsewhere(layer_bytes, len(layer_bytes), free)
    assert found == len(layer_bytes) or sum(layer_bytes[found:]) <= free
    assert found == 0 or sum(layer_bytes[found - 1 :]) > free


@dataclass
class FakePeer:
    """llama.cpp with so much memory, where a context takes `per_token` bytes of each token that it
    computes at once, and more while it computes, which ends the process."""

    memory: int
    per_token: float = 0.1
    while_computing: float = 0.0
    is_alive: bool = True
    placed: int = 0
    taken: float = 0.0
    threads: int = 4
    caches: bool = False
    cache_bytes: int = 0
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def call(self, method: str, *args: Any) -> Any:
        if not self.is_alive:
            raise SideError("llama.cpp ended: exit code -6")
        self.calls.append((method, *args))
        return getattr(self, method)(*args)

    def close(self) -> None:
        self.is_alive = False

    def drop(self) -> None:
        self.placed, self.taken = 0, 0.0

    def free_bytes(self) -> int:
        return int(self.memory - self.taken)

    def place(self, num_layers: int) -> dict[str, Any]:
        self.drop()
        self._take(sum(LAYERS[num_layers:]))
        self.placed = num_layers
        return {"n_cpu_moe": num_layers}

    def place_by_fit(self, micro_batch: int, margin: int) -> dict[str, Any]:
        return self.place(3) | {"n_gpu_layers": 5}

    def caches_experts(self) -> bool:
        return self.caches

    def open_context(self, micro_batch: int, cache_bytes: int = 0) -> None:
        self.taken = sum(LAYERS[self.placed :])
        self._take(self.per_token * micro_batch + cache_bytes)
        self.micro_batch, self.cache_bytes = micro_batch, cache_bytes

    def prefill(self, prompt: list[int]) -> float:
        self.compute()
        return self.micro_batch / (1 + self.placed)

    def decode_after(self, prompt: list[int], token_ids: list[int]) -> float:
        self.compute()
        return 100 - 10 * self.placed + self.threads + (50 if self.cache_bytes else 0)

    def use_threads(self, num_threads: int) -> None:
        self.threads = num_threads

    def compute(self) -> None:
        if self.taken + self.while_computing > self.memory:
            self.is_alive = False
            raise SideError("llama.cpp ended: exit code -6")

    def _take(self, num_bytes: float) -> None:
        if self.taken + num_bytes > self.memory:
            raise SideError("Traceback\nPeerError: llama.cpp does not load")
        self.taken += num_bytes


def searched(monkeypatch: pytest.MonkeyPatch, memory: int, **options: Any) -> PeerSearch:
    monkeypatch.setattr("bench.budget_peer._SLACK", 10)
    monkeypatch.setattr("bench.budget_peer._OPEN_WORK", 500)
    search = PeerSearch(lambda: FakePeer(memory, **options), LAYERS, 0, WORK)  # type: ignore[arg-type,return-value]
    search.run([4, 2])
    return search


def test_the_fewest_layers_that_fit_and_the_best_micro_batch_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = searched(monkeypatch, 1070)
    assert [str(each) for each in search.setups] == [
        "--n-cpu-moe 2, 512 at once",
        "--n-cpu-moe 3, 4096 at once",
        "--fit, 512 at once",
        "--fit, 4096 at once",
    ]
    assert search.threads == {4: 64, 2: 62}
    assert list(search.setups[0].tokens_per_s) == ["prompt 16", "prompt 8", "decode at 3"]
    assert search.setups[0].tokens_per_s["decode at 3"] == [84.0] * 3
    assert "decode at 3" not in search.setups[1].tokens_per_s
    setups = [{"name": str(each), "tokens_per_s": each.tokens_per_s} for each in search.setups]
    assert best(setups, "decode at 3") == (84.0, "--n-cpu-moe 2, 512 at once")
    assert best(setups, "prompt 16")[1] == "--n-cpu-moe 3, 4096 at once"
    assert best(setups, "prompt 99") == (0.0, "")


def test_one_more_layer_goes_elsewhere_until_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends while it computes; what free memory told was too little."""
    search = searched(monkeypatch, 1070, while_computing=30)
    assert str(search.setups[0]) == "--n-cpu-moe 3, 512 at once"
    assert search.setups[0].tokens_per_s["decode at 3"] == [74.0] * 3


MIB = 1 << 20


@pytest.mark.parametrize(
    ("while_computing", "found"),
    [(0.0, [1017, 659]), (50 * MIB, [916, 593]), (1e12, [])],
)
def test_the_largest_cache_that_fits_is_measured_too(
    monkeypatch: pytest.MonkeyPatch, while_computing: float, found: list[int]
) -> None:
    """Nine tenths of what does not."""
    monkeypatch.setattr("bench.budget_peer._SLACK", MIB)
    options: dict[str, Any] = {"per_token": 0.1 * MIB, "caches": True}
    search = PeerSearch(lambda: FakePeer(1070 * MIB, **options), [*LAYERS], 0, WORK)  # type: ignore[arg-type,return-value]
    for micro_batch in (512, 4096):
        peer: Any = search._side
        peer.while_computing = 0.0
        free = search._left_by_layers_elsewhere(micro_batch)
        assert free == int((1070 - 0.1 * micro_batch - 1) * MIB)
        options["while_computing"] = while_computing
        peer.while_computing = while_computing
        monkeypatch.setattr(search, "_left_by_layers_elsewhere", lambda _, free=free: free)
        search._measure_cached(micro_batch, with_decode=True)
        monkeypatch.undo()
        monkeypatch.setattr("bench.budget_peer._SLACK", MIB)
    assert [str(each) for each in search.setups] == [
        f"--moe-cache-mib {size}, {micro_batch} at once"
        for size, micro_batch in zip(found, (512, 4096), strict=False)
    ]
    assert all(each.tokens_per_s["decode at 3"] == [114.0] * 3 for each in search.setups)


def test_where_all_fits_fit_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    search = searched(monkeypatch, 10_000)
    assert {str(each) for each in search.setups} == {
        "--n-cpu-moe 0, 512 at once",
        "--n-cpu-moe 0, 4096 at once",
    }


def test_what_does_not_fit_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SideError):
        searched(monkeypatch, 40)


@pytest.fixture(scope="module")
def library() -> Any:
    """llama.cpp from the wheel, which has --fit too."""
    opened = open_wheel()
    for calls in (DEVICE_CALLS, REGISTRY_CALLS, FIT_CALLS, LIMIT_CALLS):
        declare(opened, calls)
    opened.llama_backend_init()
    return opened


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("budgets") / "model.gguf"
    return write_qwen3moe(path, BLOCK_32_SHAPE, seed=3, tensor_type="Q8_0")


def test_llama_cpp_is_placed_anew_as_often_as_asked(library: Any, model_path: Path) -> None:
    peer = PlacedPeer(library, model_path, context=256, num_threads=2)
    ids = [(7 * position) % 101 for position in range(40)]
    for method, argument in (("place", 0), ("place", 1), ("place_by_fit", 64)):
        getattr(peer, method)(argument)
        for micro_batch in (32, 64):
            peer.open_context(micro_batch)
            peer.use_threads(1)
            assert peer.prefill(ids) > 0
            assert peer.decode_after(ids[:30], ids[30:]) > 0
    peer.drop()
    assert peer.free_bytes() > 0
    with pytest.raises(PeerError, match="no context"):
        peer.prefill(ids)


def test_fit_says_whether_its_margin_can_be_kept(library: Any, model_path: Path) -> None:
    peer = PlacedPeer(library, model_path, context=256, num_threads=2)
    fitted, params = peer.fitted(512)
    assert (fitted.status, fitted.patterns, params.n_gpu_layers) == (FitStatus.SUCCESS, [], -1)
    with pytest.raises(PeerError, match="--fit: FAILURE"):
        peer.place_by_fit(512, 1 << 50)


def test_bytes_are_counted_by_layer(model_path: Path) -> None:
    layers, others = bytes_of(model_path, 0)
    with GgufFile.open(model_path) as file:
        sizes = {name: tensor.num_bytes for name, tensor in file.tensors.items()}
    assert len(layers) == BLOCK_32_SHAPE.num_layers
    assert all(layers)
    assert sum(layers) + others + sizes["token_embd.weight"] == sum(sizes.values())
    assert bytes_of(model_path, 10)[1] > others


def test_heat_is_learnt_on_other_text_than_is_measured() -> None:
    walk = Walk.of(151_936, 1)
    work = work_of(walk, context=8192, rounds=3, num_tokens=96, lengths=(512, 4096))
    learnt = set(itertools.chain.from_iterable(learnt_prompts(walk)))
    ends = [np.flatnonzero(walk.token_ids == each[-1])[0] for each in learnt_prompts(walk)]
    learnt |= {int(each) for end in ends for each in walk.token_ids[end : end + 401]}
    measured = [*itertools.chain(*work.decode), *itertools.chain(*work.prompts.values())]
    assert not learnt & set(itertools.chain.from_iterable(measured))
    prompt, following = work.decode[1]
    assert (len(prompt), len(following)) == (448, 96)
    assert walk.stretch(walk.token_ids.tolist().index(prompt[-1]) + 1, 96) == following


class SameProcess:
    """A side whose object is in this process."""

    def __init__(
        self, name: str, factory: Callable[..., Any], *args: Any, until_s: float, **options: Any
    ) -> None:
        del name, until_s
        self._object = factory(*args, **options)

    def __enter__(self) -> SameProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """It was closed by a call."""

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._object, method)(*args)


def test_a_model_without_planted_routing_reads_documents_and_writes_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.gpu_budgets.Side", SameProcess)
    walk = walk_of(DEMO)
    work = work_of(walk, context=2560, rounds=2, num_tokens=4, lengths=(16,))
    texts = [following for _, following in work.decode]
    with GgufFile.open(DEMO) as file:
        tokenizer = load_tokenizer(file)
    assert tokenizer is not None
    assert tokenizer.decode(work.decode[0][0]).startswith("# Measurements")
    result: dict[str, Any] = {}
    our_side = OurSide(DEMO, "cpu", work, tmp_path, learnt=learnt_prompts(walk), writes=True)
    our_side.measure(result, time.monotonic() + 60)
    assert result["same_tokens"] == 4
    assert [following for _, following in work.decode] != texts
    assert {each: len(rates) for each, rates in result["tokens_per_s"].items()} == {
        "prompt 16": 2,
        "decode at 448": 2,
    }
    written = [each for each in tmp_path.iterdir() if each.name == "written.heat"]
    assert written, "what is measured must not be known to plans"


def test_llama_cpp_has_no_more_threads_than_the_process_has_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 16 if logical else 8)
    assert thread_counts(None) == [4]
    assert thread_counts(3) == [3]
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 4 if logical else 2)
    assert thread_counts(None) == [4, 2]


def test_the_table_says_what_is_wanted() -> None:
    setups = [{"name": "--fit, 512 at once", "tokens_per_s": {"decode at 448": [50.0, 60.0, 70.0]}}]
    result = {
        "ours": {"tokens_per_s": {"decode at 448": [120.0]}, "peak_bytes": [8 << 30]},
        "peer": {"setups": setups},
    }
    shown = budgets_table({"8": result}, "qwen3").splitlines()[-1]
    cells = [each.strip() for each in shown.split("|")[1:-1]]
    assert cells == [
        "8 GiB, qwen3: decode at 448",
        "120.0",
        "60.0",
        "--fit, 512 at once",
        "2.00",
        "1.7",
        "8,192 /",
    ]
    assert parsed(["--model", "a.gguf"]).budgets == [8, 12, 16, 24]
    assert MICRO_BATCHES[0] == 512
