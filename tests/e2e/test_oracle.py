"""Logits of whole models against llama.cpp, with experts here, there and everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_runtime import Engine
from support.oracle_cases import BACKENDS, OracleCase, check_logits, oracle_case
from support.random_models import ODD_SHAPES, Qwen3MoeShape, write_qwen3moe

pytestmark = pytest.mark.e2e

Case = tuple[Qwen3MoeShape, OracleCase]


@pytest.fixture(scope="session", params=ODD_SHAPES, ids=lambda shape: shape.name)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A random model and what llama.cpp makes of it."""
    shape: Qwen3MoeShape = request.param
    return shape, oracle_case(tmp_path_factory.mktemp("model"), shape)


def check(case: Case, backend: str, split: str) -> None:
    shape, of_oracle = case
    options: dict[str, Any] = {}
    if split == "half local":
        split, options = "one daemon", {"local_experts": shape.num_experts // 2}
    check_logits(of_oracle, backend, split, **options)


@pytest.mark.wide(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_shape_agrees_with_llama_cpp(case: Case, backend: str) -> None:
    check(case, backend, "all local")


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "cpu"])
@pytest.mark.parametrize(
    "split", ["three daemons", "half local", pytest.param("one daemon", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("case", ODD_SHAPES[:1], indirect=True, ids=lambda shape: shape.name)
def test_every_split_agrees_with_llama_cpp(case: Case, backend: str, split: str) -> None:
    check(case, backend, split)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", ["one daemon", "three daemons", "half local"])
def test_every_shape_agrees_with_llama_cpp_in_every_split(
    case: Case, backend: str, split: str
) -> None:
    check(case, backend, split)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_split_file_gives_the_same_bits_as_a_whole_one(tmp_path: Path, backend: str) -> None:
    shape = ODD_SHAPES[0]
    whole = write_qwen3moe(tmp_path / "whole.gguf", shape, seed=10)
    parts = write_qwen3moe(tmp_path / "parts.gguf", shape, seed=10, split_into=3)
    token_ids = list(range(shape.vocab_size))
    logits = []
    for path in (whole, parts):
        with Engine.open(path, backend=backend) as engine:
            logits.append(engine.logits(token_ids))
    assert np.array_equal(logits[0], logits[1])
