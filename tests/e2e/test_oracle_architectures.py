"""Logits of every architecture but qwen3moe against llama.cpp, wherever experts are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_protocol.ids import F32Array
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from support.architectures import RANDOM
from support.llama_oracle import relative_error
from support.oracle_cases import (
    BACKENDS,
    OracleCase,
    check_logits,
    check_no_less_accurate,
    oracle_case,
)
from support.random_gguf import RandomShape, YarnRope, with_fused_qkv, with_scales, write_model
from support.random_gpt_oss import GptOssShape
from support.random_laguna import LagunaShape
from support.random_llama import LlamaShape, with_separate_experts
from support.random_llama4 import Llama4Shape
from support.random_qwen2moe import Qwen2MoeShape

pytestmark = pytest.mark.e2e

SHAPES: list[RandomShape] = [shape for module in RANDOM.values() for shape in module.SHAPES]
IN_EVERY_RUN = ("llama4", "qwen35moe")
"""Of what takes long: those whose layers of experts have the most that is their own."""
SEEDS = {"qwen35moe": 1}
"""A recurrent layer's norm makes much of rounding where its heads' results nearly cancel: for one
of some ten models llama.cpp's own logits differ by more than 2e-5 from those token by token."""


def name_of(shape: RandomShape) -> str:
    return f"{shape.architecture}, {shape.name}"


@pytest.fixture(scope="session", params=SHAPES, ids=name_of)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OracleCase:
    """A random model and what llama.cpp makes of it."""
    shape: RandomShape = request.param
    seed = SEEDS.get(shape.architecture, 10)
    return oracle_case(tmp_path_factory.mktemp("model"), shape, seed=seed)


@pytest.mark.wide(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_shape_agrees_with_llama_cpp(case: OracleCase, backend: str) -> None:
    check_logits(case, backend)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            module.SHAPES[1 if name == "qwen35moe" else 0],
            id=name,
            marks=() if name in IN_EVERY_RUN else pytest.mark.slow,
        )
        for name, module in RANDOM.items()
    ],
    indirect=True,
)
def test_experts_in_daemons_agree_with_llama_cpp(case: OracleCase) -> None:
    check_logits(case, "cpu", "three daemons")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", ["one daemon", "three daemons"])
def test_every_shape_agrees_with_llama_cpp_in_every_split(
    case: OracleCase, backend: str, split: str
) -> None:
    check_logits(case, backend, split)


def test_cpu_gives_the_same_bits_in_any_chunks(case: OracleCase) -> None:
    with Engine.open(case.path, backend="cpu") as engine:
        chunks = (None, 1, [1, 63, 2], [31, 34])
        found = {engine.logits(case.token_ids, chunk).tobytes() for chunk in chunks}
    assert len(found) == 1


# -- the same model in other tensors --------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [LlamaShape(has_qkv_biases=True), Qwen2MoeShape(), LagunaShape()], ids=name_of
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_keys_and_values_may_be_one_matrix(
    tmp_path: Path, shape: RandomShape, backend: str
) -> None:
    check_logits(oracle_case(tmp_path, shape, change=with_fused_qkv), backend, chunks=[None])


@pytest.mark.parametrize("backend", BACKENDS)
def test_matrices_may_have_scales(tmp_path: Path, backend: str) -> None:
    case = oracle_case(tmp_path, LlamaShape(has_output_bias=True), change=with_scales)
    check_logits(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_may_be_tensors_of_their_own(tmp_path: Path, backend: str) -> None:
    """llama.cpp reads no such files any more: the logits are those of the stacks."""
    shape = LlamaShape(hidden_size=64, num_heads=4, ffn_size=96)
    ids = list(range(40))
    logits = []
    for name, change in (("stacked", None), ("separate", with_separate_experts)):
        for split_into in (1, 5):
            path = write_model(
                tmp_path / f"{name}{split_into}.gguf",
                shape,
                seed=10,
                tensor_type="Q8_0",
                split_into=split_into,
                change=change,
            )
            with Engine.open(path, backend=backend) as engine:
                logits.append(engine.logits(ids).tobytes())
    assert len(set(logits)) == 1


def test_a_file_may_say_what_scores_are_multiplied_by(tmp_path: Path) -> None:
    """As if queries were larger by as much."""
    shape = LlamaShape(num_layers=2)
    factor = np.float32(0.25 * (shape.hidden_size / shape.num_heads) ** 0.5)

    def with_larger_queries(tensors: dict[str, F32Array]) -> dict[str, F32Array]:
        larger = {name: values * factor for name, values in tensors.items() if ".attn_q." in name}
        return {**tensors, **larger}

    logits = []
    for keys, change in (({"llama.attention.scale": 0.25}, None), ({}, with_larger_queries)):
        path = write_model(tmp_path / "model.gguf", shape, seed=10, keys=keys, change=change)
        with Engine.open(path, backend="reference") as engine:
            logits.append(engine.logits(list(range(40))))
    assert relative_error(*logits) <= 1e-5


# -- many positions -------------------------------------------------------------------------------

LONG_LAGUNA = LagunaShape(
    "yarn, in a ring",
    num_heads=(4, 4, 2),
    head_dim=36,
    num_rotated=32,
    num_rotated_in_window=36,
    window=16,
    rope_scaling=YarnRope(32.0, 4096, beta_fast=64.0),
    context_length=2048,
)
LONG_LLAMA4 = Llama4Shape(
    "past its first chunk",
    num_layers=4,
    hidden_size=16,
    num_heads=1,
    num_kv_heads=1,
    head_dim=6,
    num_experts=3,
    ffn_size=8,
    vocab_size=31,
)


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "cpu"])
def test_a_window_in_a_ring_agrees_with_llama_cpp(tmp_path: Path, backend: str) -> None:
    """Twice round, with a beta of the file's own, which llama.cpp has to be told."""
    case = oracle_case(tmp_path, LONG_LAGUNA, num_tokens=1200, yarn_beta_fast=64.0)
    check_logits(case, backend, chunks=[None, [1180, 1]], context=2048)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_llama4_agrees_with_llama_cpp_past_its_first_chunk(tmp_path: Path, backend: str) -> None:
    case = oracle_case(tmp_path, LONG_LLAMA4, num_tokens=8300)
    check_logits(case, backend, chunks=[None, [8280, 1]], context=9000)


# -- files of fewer bits --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor_type", "seeds"),
    [
        ("Q4_K", range(20, 21)),
        pytest.param("Q4_K", range(20, 22), marks=pytest.mark.slow),
        # Nearly all of the error is that of activations in 8 bits, on both sides.
        pytest.param("Q8_0", range(20, 28), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.parametrize(
    "shape",
    [module.BLOCK_256_SHAPE for module in RANDOM.values()],
    ids=lambda shape: shape.architecture,
)
def test_logits_are_no_further_from_float32_than_llama_cpps(
    tmp_path: Path, shape: RandomShape, tensor_type: str, seeds: range
) -> None:
    check_no_less_accurate(tmp_path, shape, tensor_type, seeds=seeds, most_error=0.06)


def test_recurrent_layers_are_no_further_from_float32_in_8_bits(tmp_path: Path) -> None:
    shape = RANDOM["qwen35moe"].BLOCK_256_SHAPE
    check_no_less_accurate(tmp_path, shape, "Q8_0", seeds=range(20, 22), most_error=0.06)


@pytest.mark.parametrize("seed", [20, pytest.param(21, marks=pytest.mark.slow)])
def test_experts_in_mxfp4_are_no_further_from_float32_than_llama_cpps(
    tmp_path: Path, seed: int
) -> None:
    """As gpt-oss is published: rows of whole blocks of 32, not of 256."""
    shape = GptOssShape(
        num_layers=2, hidden_size=96, num_heads=6, num_experts_used=11, head_dim=32, ffn_size=160
    )
    types = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "MXFP4")
    check_no_less_accurate(tmp_path, shape, types, seeds=[seed], most_error=0.06)


# -- YaRN -----------------------------------------------------------------------------------------


def test_yarn_is_what_the_file_says_unless_llama_cpps_is_wanted(tmp_path: Path) -> None:
    case = oracle_case(tmp_path, LONG_LAGUNA)
    settings = load_settings({"DFLASH_MOE_EXPERT_COMPUTE_YARN": "llama.cpp"})
    check_logits(case, "cpu", settings=settings)
    with Engine.open(case.path, backend="cpu") as engine:
        difference = np.abs(engine.logits(case.token_ids) - case.expected).max()
    assert difference > 0.01 * np.abs(case.expected).max()
