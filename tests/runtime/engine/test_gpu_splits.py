"""Logits have the same bits wherever experts are on equal GPUs, emulated here: all with the parent,
some with it, none with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_protocol.errors import DaemonUnavailable
from dflash_runtime import Engine
from dflash_runtime.placement.split import LOCAL_OWNER
from support.emulated_gpu import TINY, TINY_GPT_OSS, TINY_LLAMA4
from support.gpu_models import error_of
from support.gpu_splits import Layers, Split
from support.random_gguf import RandomShape, write_model
from support.random_models import write_qwen3moe

CHUNKS = [20, 3, 1, 9, 1, 1]
IDS = np.random.default_rng(1).integers(0, TINY.vocab_size, sum(CHUNKS)).astype(np.int32)

PAIRS = IDS.size * TINY.num_layers * TINY.num_experts_used
WHOLE: Layers = dict.fromkeys(range(TINY.num_layers), range(TINY.num_experts))


@pytest.fixture(scope="module", params=["F32", "Q8_0"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type=request.param)


def opened(undo: contextlib.ExitStack, path: Path, owners: Mapping[str, Layers]) -> Split:
    return Split(undo, path, owners, ids=IDS, chunks=CHUNKS)


@pytest.fixture
def undo() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_every_split_has_the_same_bits(model: Path, undo: contextlib.ExitStack) -> None:
    resident = opened(undo, model, {LOCAL_OWNER: WHOLE})
    expected = resident.logits()
    assert resident.runtime.hits.hot == PAIRS
    assert (resident.captured_logits() == expected[-2:]).all()
    remote = opened(undo, model, {"gpu1": WHOLE})
    assert (remote.logits() == expected).all()
    assert remote.runtime.hits.remote == PAIRS
    assert (remote.captured_logits() == expected[-2:]).all()
    assert remote.runtime.hits.layers_hot_only == 0
    hot: Layers = {0: [4, 0, 2], 1: [3]}
    some = opened(undo, model, {LOCAL_OWNER: hot, "gpu1": {0: [3, 1]}, "gpu2": {1: [0, 4, 2, 1]}})
    assert (some.logits() == expected).all()
    hits, selections = some.runtime.hits, some.runtime.selections()
    assert sum(map(sum, selections.values())) == PAIRS
    assert hits.hot == sum(selections[layer][e] for layer, ids in hot.items() for e in ids)
    assert hits.hot + hits.remote == PAIRS
    assert 0 < hits.layers_hot_only < hits.layers == len(CHUNKS) * TINY.num_layers
    stats = some.runtime.stats()
    assert stats[LOCAL_OWNER].pairs == hits.hot
    assert stats["gpu1"].pairs + stats["gpu2"].pairs == hits.remote
    some.steps.try_out()  # which sends no request
    assert hits.hot + hits.remote == PAIRS
    assert (some.captured_logits() != expected[-2:]).any()  # over what was tried
    some.logits()
    before = replace(hits)
    assert (some.captured_logits() == expected[-2:]).all()
    steps_pairs = 2 * TINY.num_layers * TINY.num_experts_used
    assert hits.hot + hits.remote == before.hot + before.remote + steps_pairs
    assert hits.layers == before.layers + 2 * TINY.num_layers
    assert some.runtime.stats()[LOCAL_OWNER].pairs == hits.hot


@pytest.mark.parametrize(
    ("shape", "experts_type"),
    [(TINY_LLAMA4, "Q8_0"), (TINY_GPT_OSS, "MXFP4")],
    ids=["scaled inputs", "biases of experts"],
)
def test_experts_with_more_than_matrices_have_the_same_bits_everywhere(
    tmp_path: Path, undo: contextlib.ExitStack, shape: RandomShape, experts_type: str
) -> None:
    def type_of(name: str) -> str:
        is_router = "ffn_gate_inp." in name
        return "F32" if is_router else experts_type if "_exps" in name else "Q8_0"

    path = write_model(tmp_path / "m.gguf", shape, seed=5, tensor_type=type_of)
    resident = opened(undo, path, {LOCAL_OWNER: WHOLE})
    expected = resident.logits()
    assert (resident.captured_logits() == expected[-2:]).all()
    # A layer of which a part is here, and one of which nothing is.
    split = opened(undo, path, {LOCAL_OWNER: {0: [4, 0, 2]}, "gpu1": {0: [3, 1], 1: WHOLE[1]}})
    assert (split.logits() == expected).all()
    assert (split.captured_logits() == expected[-2:]).all()
    assert 0 < split.runtime.hits.hot < split.runtime.hits.remote
    found = {"gpu": expected, "both": opened(undo, path, {"cpu1": WHOLE}).logits()}
    for backend in ("cpu", "reference"):
        with Engine.open(path, backend=backend, kv_type="f16", threads=1) as engine:
            found[backend] = engine.logits(IDS.tolist())
    errors = {name: error_of(each, found["reference"]) for name, each in found.items()}
    assert 0 < errors["gpu"] <= 1.5 * errors["cpu"] < 0.03
    assert 0 < errors["both"] <= 1.5 * errors["cpu"]


def test_a_layer_without_experts_here(model: Path, undo: contextlib.ExitStack) -> None:
    expected = opened(undo, model, {LOCAL_OWNER: WHOLE}).logits()
    half = opened(undo, model, {LOCAL_OWNER: {1: WHOLE[1]}, "gpu1": {0: WHOLE[0]}})
    assert (half.logits() == expected).all()
    assert half.runtime.hits.layers_hot_only == len(CHUNKS)
    assert (half.captured_logits() == expected[-2:]).all()
    assert half.runtime.hits.layers_hot_only == len(CHUNKS) + 2


def test_replicas_here_are_used_when_their_owner_is_lost(
    model: Path, undo: contextlib.ExitStack
) -> None:
    expected = opened(undo, model, {LOCAL_OWNER: WHOLE}).logits()
    # The first owner answers: the parent computes its copies only when that one cannot.
    for name in ("gpu1", "lost1"):
        split = opened(undo, model, {name: {0: [2, 3]}, LOCAL_OWNER: WHOLE})
        assert (split.logits() == expected).all()
        stats = split.runtime.stats()
        assert stats[LOCAL_OWNER].pairs + stats[name].pairs == PAIRS
        assert (split.captured_logits() == expected[-2:]).all()
        stats = split.runtime.stats()
        assert (stats[name].pairs > 0) == (name == "gpu1")
        assert (stats[name].retries > 0) == (name == "lost1")


def test_whichever_equal_device_answers_the_bits_are_the_same(
    model: Path, undo: contextlib.ExitStack
) -> None:
    expected = opened(undo, model, {LOCAL_OWNER: WHOLE}).logits()
    owners: dict[str, Layers] = {LOCAL_OWNER: {0: [4, 0, 2], 1: [3]}, "gpu1": WHOLE, "gpu2": WHOLE}
    random, found = np.random.default_rng(2), []
    for _ in range(2):
        answering = {layer: random.integers(0, 3, TINY.num_experts) for layer in WHOLE}
        for layer, indices in answering.items():  # the parent answers for what it has
            missing = [each for each in WHOLE[layer] if each not in owners[LOCAL_OWNER][layer]]
            indices[missing] = random.integers(1, 3, len(missing))
        split = Split(
            undo,
            model,
            owners,
            ids=IDS,
            chunks=CHUNKS,
            answering={layer: indices.tolist() for layer, indices in answering.items()},
        )
        assert (split.logits() == expected).all()
        assert (split.captured_logits() == expected[-2:]).all()
        stats = split.runtime.stats()
        found.append([stats[name].pairs for name in owners])
        assert sum(found[-1]) == PAIRS + 2 * PAIRS // IDS.size
        assert min(found[-1][1:]) > 0
        # Other devices may be asked from now on, but the parent's tables do not follow.
        tables = split.placement.answering
        others = {layer: np.where(each > 0, 3 - each, each) for layer, each in tables.items()}
        split.steps.replace(split.steps.prepare(replace(split.placement, answering=others)))
        assert (split.logits() == expected).all()
        assert (split.captured_logits() == expected[-2:]).all()
        here = {layer: np.where(each == 0, 1, each) for layer, each in others.items()}
        with pytest.raises(ValueError, match=r"others answer .*local"):
            split.steps.prepare(replace(split.placement, answering=here))
        assert (split.logits() == expected).all()
    assert found[0] != found[1]


def test_a_step_without_any_owner_left_fails_and_the_next_one_does_not(
    model: Path, undo: contextlib.ExitStack
) -> None:
    split = opened(undo, model, {LOCAL_OWNER: {0: WHOLE[0], 1: [0, 1]}, "lost1": {1: [2, 3, 4]}})
    with pytest.raises(DaemonUnavailable, match=r"gone; .*required"):
        split.logits()
    captured = split.steps.captured(split.steps.begin())
    assert captured is not None
    num_done = 0
    for token_id in range(TINY.vocab_size):  # some choose what is here
        captured.begin(token_id, 0)
        try:
            captured.start()
        except DaemonUnavailable:
            continue
        chosen = captured.token(1)
        assert chosen is not None
        assert 0 <= chosen < TINY.vocab_size
        num_done += 1
    assert 0 < num_done < TINY.vocab_size
