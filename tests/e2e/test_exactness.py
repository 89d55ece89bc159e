"""The split does not show: logits have the same bits wherever the experts are computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.qwen3moe import read_spec
from dflash_protocol.ids import F32Array
from dflash_runtime import Engine
from support.placements import random_placement
from support.random_models import BLOCK_32_SHAPE, ODD_SHAPES, write_qwen3moe

pytestmark = pytest.mark.e2e

NUM_PREFILL = 56
NUM_DECODE = 200
CHUNKS = [NUM_PREFILL, 1]


def token_ids(vocab_size: int) -> list[int]:
    ids = np.random.default_rng(3).integers(0, vocab_size, NUM_PREFILL + NUM_DECODE)
    return [int(token_id) for token_id in ids]


@pytest.fixture(scope="module", params=["F32", "Q8_0"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = ODD_SHAPES[0] if request.param == "F32" else BLOCK_32_SHAPE
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    return write_qwen3moe(path, shape, seed=10, tensor_type=request.param)


def logits_of_split(path: Path, backend: str, num_daemons: int, seed: int) -> F32Array:
    """Logits with a random placement over the parent and that many daemons."""
    with GgufFile.open(path) as file:
        spec = read_spec(file).moe
    names = ["local", *(f"cpu{index}" for index in range(num_daemons))]
    placement = random_placement(spec, names, np.random.default_rng(seed))
    with Engine.open(
        path,
        backend=backend,
        daemons=["cpu"] * num_daemons,
        placement=placement,
        threads=1 + seed % 2,
    ) as engine:
        logits = engine.logits(token_ids(engine.spec.vocab_size), CHUNKS)
        stats = engine.stats()
    assert stats.events == []
    assert all(owner.requests for owner in stats.owners.values())
    return logits


def check_splits(path: Path, backend: str, num_daemons_and_seeds: list[tuple[int, int]]) -> None:
    with Engine.open(path, backend=backend) as engine:
        expected = engine.logits(token_ids(engine.spec.vocab_size), CHUNKS)
    for num_daemons, seed in num_daemons_and_seeds:
        logits = logits_of_split(path, backend, num_daemons, seed)
        assert np.array_equal(logits, expected), (num_daemons, seed)


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "cpu"])
@pytest.mark.parametrize("model", ["F32"], indirect=True)
def test_bits_do_not_depend_on_the_split(model: Path, backend: str) -> None:
    check_splits(model, backend, [(0, 0), (1, 1), (2, 2), (5, 3)])


def test_bits_of_a_quantised_model_do_not_depend_on_the_split(tmp_path: Path) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", BLOCK_32_SHAPE, seed=10, tensor_type="Q8_0")
    check_splits(path, "cpu", [(2, 4)])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_bits_do_not_depend_on_any_of_twenty_random_splits(model: Path, backend: str) -> None:
    check_splits(model, backend, [((0, 1, 2, 5)[seed % 4], seed) for seed in range(20)])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_no_tokens_are_legal(model: Path, backend: str) -> None:
    with Engine.open(model, backend=backend, daemons=["cpu"]) as engine:
        assert engine.logits([]).shape == (0, engine.spec.vocab_size)
        assert engine.stats().owners["cpu0"].requests == 0
        assert np.isfinite(engine.logits([1, 2, 3])).all()


def test_tokens_without_a_remote_expert_are_not_sent(model: Path) -> None:
    """One expert is remote; most tokens do not choose it and must not travel."""
    with GgufFile.open(model) as file:
        layers = read_spec(file).moe.layers
    num_experts = layers[0].num_experts
    with Engine.open(model, daemons=["cpu"], local_experts=num_experts - 1) as engine:
        ids = token_ids(engine.spec.vocab_size)
        engine.logits(ids, CHUNKS)
        owners = engine.stats().owners
    assert 0 < owners["cpu0"].tokens < len(ids) * len(layers)
    assert owners["cpu0"].tokens == owners["cpu0"].pairs
    assert owners["local"].tokens == len(ids) * len(layers)
