"""Sequences whose state cannot be cut are gone on from where it was kept, and nowhere else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import CheckpointMissing, DeviceOutOfMemory
from dflash_runtime import Engine
from dflash_runtime.compute import sliding_window
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.kv_cache import KvCache, Snapshot
from dflash_runtime.compute.reference import ReferenceBackend
from dflash_runtime.compute.sliding_window import MOST_KEPT
from dflash_runtime.engine.reuse import StateCheckpoints
from support import random_laguna, random_models
from support.logprobs import bits_of
from support.random_gguf import END_OF_TEXT_ID, RandomShape, write_model
from support.random_qwen35moe import SHAPES

CHUNK = 16
SHAPE = replace(SHAPES[0], vocab_size=300)
BACKENDS = ["cpu", "reference"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_model(path, SHAPE, seed=4, tokenizer="bytes")


@pytest.fixture(params=BACKENDS)
def engines(
    request: pytest.FixtureRequest, model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, Engine]]:
    """One that is to reuse what it has, and one that never does."""
    for kind in (CpuBackend, ReferenceBackend):
        monkeypatch.setattr(kind, "chunking", replace(kind.chunking, preferred=CHUNK))
    defaults = {"most_kept": MOST_KEPT, "least_apart": 1}
    monkeypatch.setattr(StateCheckpoints.__init__, "__kwdefaults__", defaults)
    with (
        Engine.open(model, backend=request.param) as engine,
        Engine.open(model, backend=request.param) as other,
    ):
        yield engine, other


def random_ids(num_tokens: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(1).integers(0, 250, num_tokens)]


def test_reuse_does_not_show_in_the_bits(engines: tuple[Engine, Engine]) -> None:
    engine, other = engines
    base, end = random_ids(90), END_OF_TEXT_ID
    turn = [*base[:40], end, *base[40:45]]
    first = bits_of(engine, turn, reuse=True)
    written: list[int] = [token[0] for token in first]
    num_reused = []
    for prompt in (
        [*turn, *written, *base[45:50]],  # all that was there, and more
        [*turn, *written],  # a little less than that: up to the end of the first prompt
        [*turn[:41], *base[60:70]],  # another last turn
        [*turn[:41], 7, end, 8],  # and one more turn
        [*turn[:39], 7, 7],  # before every place that was kept
        base[:1],
        [*base[:1], 5, 6],
    ):
        assert bits_of(engine, prompt, reuse=True) == bits_of(other, prompt, reuse=False)
        num_reused.append(engine.last_generation.num_reused_tokens)
    assert other.last_generation.num_reused_tokens == 0
    expected = {
        "cpu": [51, 46, 41, 41, 0, 0, 1],
        "reference": [41, 41, 41, 0, 0, 0, 0],
    }
    assert num_reused == expected[engine.backend_name]


def test_chunks_of_the_first_tokens_alone_are_kept_by_a_backend_whose_bits_depend_on_them(
    model: Path,
) -> None:
    """A prompt without turns is kept at its end only, which for another prompt is no chunk's."""
    with Engine.open(model, backend="reference") as engine:
        prompt = random_ids(80)
        bits_of(engine, prompt, reuse=True)
        bits_of(engine, [*prompt, 3], reuse=True)
        assert engine.last_generation.num_reused_tokens == 0


def test_a_run_that_was_cancelled_within_a_chunk_spoils_nothing(
    engines: tuple[Engine, Engine],
) -> None:
    engine, other = engines
    base, end = random_ids(70), END_OF_TEXT_ID
    prompt = [*base[:40], end, *base[40:45]]
    expected = bits_of(other, prompt, reuse=False)
    bits_of(engine, [*prompt[:41], 9], reuse=True)
    for asked in (0, 2, 7):
        calls = itertools.count()
        cancelled = engine.generate(
            [*prompt[:41], *base[50:]],
            5,
            reuse_prefix=True,
            is_cancelled=lambda calls=calls, asked=asked: next(calls) == asked,  # type: ignore[misc]
        )
        assert list(cancelled) == []
        assert engine.last_generation.finish_reason == "cancelled"
        assert bits_of(engine, prompt, reuse=True) == expected
        assert engine.last_generation.num_reused_tokens == 41


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "shape",
    [SHAPE, random_laguna.SHAPES[0], random_models.ODD_SHAPES[0]],
    ids=["recurrent", "windows", "plain"],
)
def test_logits_of_a_snapshot_are_the_same_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: RandomShape, backend: str
) -> None:
    monkeypatch.setattr(sliding_window, "WINDOW_CHUNK", 64)
    path = write_model(tmp_path / "m.gguf", shape, seed=4)
    with Engine.open(path, backend=backend) as engine:
        steps, ids = engine._steps, np.array(random_ids(250), np.int32) % shape.vocab_size
        run = steps.begin()
        steps.forward(run, ids[:100], 0)
        snapshot = steps._cache.snapshot(100)
        for size in (17, 1):
            logits = []
            for _ in range(2):
                logits.append(
                    b"".join(
                        steps.head(steps.forward(run, ids[first : first + size], first)).tobytes()
                        for first in range(100, 117, size)
                    )
                )
                steps.forward(run, ids[117:], 117)  # once round the windows
                if not engine.spec.can_be_cut:
                    with pytest.raises(CheckpointMissing):
                        steps.forward(run, ids[100:117], 100)
                steps._cache.restore(snapshot)
            assert logits[0] == logits[1]


def test_short_sequences_use_the_memory_of_those_before(
    engines: tuple[Engine, Engine],
) -> None:
    engine, _ = engines
    base, end, sizes = random_ids(60), END_OF_TEXT_ID, []
    for first in range(12):
        bits_of(engine, [*base[first : first + 20], end, *base[40:]], reuse=True)
        sizes.append(engine._steps.reuse.checkpoints.nbytes)
    assert sizes[0] == sizes[-1] > 0
    assert len(engine._steps.reuse.checkpoints.positions) == 2


# -- which are kept -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """Implements kv_cache.Snapshot."""

    num_positions: int
    nbytes: int = 100


class Cache:
    """Implements what StateCheckpoints asks of kv_cache.KvCache."""

    def __init__(self) -> None:
        self.num_positions = 0
        self.num_snapshots = 0
        self.is_full = False

    def can_resume(self, num_positions: int) -> bool:
        return num_positions in (0, self.num_positions)

    def snapshot(self, num_positions: int, instead_of: Snapshot | None = None) -> Kept:
        assert num_positions == self.num_positions
        if instead_of is None:
            if self.is_full:
                raise DeviceOutOfMemory("cuda:0", num_bytes=9, free_bytes=1, total_bytes=2)
            self.num_snapshots += 1
        return Kept(num_positions)

    def restore(self, snapshot: Snapshot) -> None:
        self.num_positions = snapshot.num_positions


def kept_states(cache: Cache, *, most_kept: int = 4, least_apart: int = 1) -> StateCheckpoints:
    given: KvCache = cache  # type: ignore[assignment]
    return StateCheckpoints(given, most_kept=most_kept, least_apart=least_apart)


def keep(cache: Cache, states: StateCheckpoints, num_positions: int) -> None:
    cache.num_positions = num_positions
    states.save(num_positions)


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 200)), max_size=30))
def test_few_are_kept_and_none_of_what_was_overwritten(events: list[tuple[int, int]]) -> None:
    cache = Cache()
    states = kept_states(cache, most_kept=3, least_apart=5)
    end = 0
    for ahead, cut in events:
        keep(cache, states, end := end + ahead)
        positions = states.positions
        assert len(positions) <= 3
        assert all(after - before >= 5 for before, after in itertools.pairwise([0, *positions]))
        assert positions == [] or end - positions[-1] < 5
        assert states.nbytes <= 3 * 100
        states.cut(cut)
        assert all(each <= cut for each in states.positions)
        end = max(states.positions, default=0)
    assert cache.num_snapshots <= 3


def test_the_one_least_far_from_others_gives_way() -> None:
    cache = Cache()
    states = kept_states(cache)
    for place in (100, 400, 420, 900, 1500):
        keep(cache, states, place)
    assert states.positions == [100, 420, 900, 1500]
    assert cache.num_snapshots == 4


def test_only_what_is_not_there_is_restored() -> None:
    cache = Cache()
    states = kept_states(cache)
    keep(cache, states, 10)
    cache.num_positions = 12
    states.restore(12)
    states.restore(11)
    assert cache.num_positions == 12
    states.restore(10)
    assert cache.num_positions == 10


def test_without_memory_nothing_is_kept() -> None:
    cache = Cache()
    states = kept_states(cache)
    cache.is_full = True
    keep(cache, states, 10)
    assert (states.positions, states.nbytes) == ([], 0)
