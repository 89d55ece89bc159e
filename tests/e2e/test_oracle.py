"""Logits of whole models against llama.cpp, with experts here, there and everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.ids import F32Array
from dflash_runtime import Engine
from support.llama_oracle import LlamaOracle, relative_error
from support.random_models import ODD_SHAPES, Qwen3MoeShape, write_qwen3moe

pytestmark = pytest.mark.e2e

NUM_TOKENS = 90
CHUNKS: list[int | list[int] | None] = [None, [70, 1], [33, 33, 24]]
SPLITS: dict[str, dict[str, Any]] = {
    "all local": {},
    "one daemon": {"daemons": ["cpu"]},
    "three daemons": {"daemons": ["cpu"] * 3},
    "half local": {"daemons": ["cpu"], "local_experts": 0.5},
}
BACKENDS = ["reference", "cpu"]


def token_ids(shape: Qwen3MoeShape) -> list[int]:
    ids = np.random.default_rng(10).integers(0, 90, NUM_TOKENS) % shape.vocab_size
    return [int(token_id) for token_id in ids]


def engine_arguments(split: str, shape: Qwen3MoeShape) -> dict[str, Any]:
    arguments = dict(SPLITS[split])
    if "local_experts" in arguments:
        arguments["local_experts"] = shape.num_experts // 2
    return arguments


@pytest.fixture(scope="session", params=ODD_SHAPES, ids=lambda shape: shape.name)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Qwen3MoeShape, Path, F32Array]:
    """A random model and what llama.cpp makes of it."""
    shape: Qwen3MoeShape = request.param
    path = write_qwen3moe(tmp_path_factory.mktemp("model") / "model.gguf", shape, seed=10)
    with LlamaOracle(path, context_length=256, kv_type="f32") as oracle:
        return shape, path, oracle.logits(token_ids(shape))


def check_logits(case: tuple[Qwen3MoeShape, Path, F32Array], backend: str, split: str) -> None:
    shape, path, expected = case
    with Engine.open(path, backend=backend, **engine_arguments(split, shape)) as engine:
        for chunk in CHUNKS:
            logits = engine.logits(token_ids(shape), chunk)
            assert relative_error(logits, expected) <= 1e-4, chunk
        stats = engine.stats()
    assert stats.events == []
    if split != "all local":
        assert any(o.bytes_received for o in stats.owners.values() if o.kind.value == "daemon")


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_shape_agrees_with_llama_cpp(
    case: tuple[Qwen3MoeShape, Path, F32Array], backend: str
) -> None:
    check_logits(case, backend, "all local")


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "cpu"])
@pytest.mark.parametrize(
    "split", ["three daemons", "half local", pytest.param("one daemon", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("case", ODD_SHAPES[:1], indirect=True, ids=lambda shape: shape.name)
def test_every_split_agrees_with_llama_cpp(
    case: tuple[Qwen3MoeShape, Path, F32Array], backend: str, split: str
) -> None:
    check_logits(case, backend, split)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", [split for split in SPLITS if split != "all local"])
def test_every_shape_agrees_with_llama_cpp_in_every_split(
    case: tuple[Qwen3MoeShape, Path, F32Array], backend: str, split: str
) -> None:
    check_logits(case, backend, split)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_split_file_gives_the_same_bits_as_a_whole_one(tmp_path: Path, backend: str) -> None:
    shape = ODD_SHAPES[0]
    whole = write_qwen3moe(tmp_path / "whole.gguf", shape, seed=10)
    parts = write_qwen3moe(tmp_path / "parts.gguf", shape, seed=10, split_into=3)
    logits = []
    for path in (whole, parts):
        with Engine.open(path, backend=backend) as engine:
            logits.append(engine.logits(token_ids(shape)))
    assert np.array_equal(logits[0], logits[1])
