"""Logits of quantised files stay nearer to float32 than llama.cpp's do, on the same file."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.oracle_cases import check_no_less_accurate
from support.random_models import Qwen3MoeShape, TensorTypes

pytestmark = pytest.mark.e2e

SHAPE = Qwen3MoeShape(
    "every expert used",
    num_layers=2,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    num_experts=4,
    # All of them: a router whose choice flips would drown what is measured.
    num_experts_used=4,
    ffn_size=256,
    vocab_size=400,
)


def q4_k_m(name: str) -> str:
    """The mix of types in files of that name."""
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if kind == "output" or (kind in ("attn_v", "ffn_down_exps") and ".0." in name):
        return "Q6_K"
    return "F32" if kind == "ffn_gate_inp" else "Q4_K"


MIXES: dict[str, TensorTypes] = {
    "Q4_K_M": q4_k_m,
    "Q8_0": "Q8_0",
    "MXFP4": "MXFP4",
    "IQ4_XS": "IQ4_XS",
}
IN_EVERY_RUN = ("Q4_K_M", "Q8_0")


@pytest.mark.parametrize(
    "mix",
    [pytest.param(mix, marks=() if mix in IN_EVERY_RUN else pytest.mark.slow) for mix in MIXES],
)
def test_logits_are_no_further_from_float32_than_llama_cpps(mix: str, tmp_path: Path) -> None:
    check_no_less_accurate(tmp_path, SHAPE, MIXES[mix], seeds=(20, 21, 22), most_error=0.03)
