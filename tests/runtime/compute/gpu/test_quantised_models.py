"""Logits of quantised files: no further from the float reference than those of the CPU backend, but
for half as much again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_runtime import Engine
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.kv_cache import KvType
from support.gpu_models import GpuModel, error_of, reference_logits
from support.random_gguf import RandomShape, write_model
from support.random_gpt_oss import GptOssShape
from support.random_llama4 import Llama4Shape
from support.random_models import Qwen3MoeShape

SHAPE = Qwen3MoeShape(
    "rows of one block of 256",
    num_layers=1,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_experts=4,
    num_experts_used=2,
    ffn_size=256,
    vocab_size=131,
)

LLAMA4 = Llama4Shape(
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_experts=4,
    interleave_step=2,
    ffn_size=256,
    dense_ffn_size=256,
    vocab_size=131,
)
"""A dense layer, and one of experts whose inputs are scaled."""

GPT_OSS = GptOssShape(
    num_layers=2,
    hidden_size=96,
    num_heads=4,
    head_dim=64,
    window=5,
    num_experts=4,
    num_experts_used=2,
    ffn_size=160,
    vocab_size=131,
)
"""Rows of blocks of 32, of which no 64 or 256 make one."""

MATRICES = (
    *("attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "output", "token_embd"),
)
ALIKE = {"ffn_gate": "ffn_gate_exps", "ffn_up": "ffn_up_exps", "ffn_down": "ffn_down_exps"}
"""Dense FFNs and shared experts have the types of experts."""
MIXES = {
    "q4_k_m": "Q4_K Q4_K Q6_K Q4_K Q4_K Q4_K Q6_K Q6_K Q4_K",
    "blocks of 32": "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q8_0 Q5_0 Q8_0 Q4_0",
    "blocks of 256": "Q2_K Q3_K Q5_K Q2_K Q3_K Q3_K Q5_K Q5_K Q3_K",
    "mxfp4": "Q8_0 Q8_0 Q8_0 Q8_0 MXFP4 MXFP4 MXFP4 Q8_0 Q8_0",
    "tables": "IQ4_NL IQ4_XS MXFP4 NVFP4 IQ4_XS IQ4_XS MXFP4 IQ4_NL IQ4_XS",
}
"""Types of these matrices; gate and up of an expert have the same. All types are there."""

NUM_TOKENS, FIRST_STEP = 17, 9


@pytest.mark.parametrize(
    ("shape", "mix"),
    [
        (SHAPE, "q4_k_m"),
        pytest.param(LLAMA4, "q4_k_m", marks=pytest.mark.slow),
        (GPT_OSS, "mxfp4"),
        *(pytest.param(SHAPE, mix, marks=pytest.mark.slow) for mix in list(MIXES)[1:]),
    ],
    ids=lambda each: each if isinstance(each, str) else each.architecture,
)
def test_errors_are_no_larger_than_the_cpus(
    any_device: KernelDevice, tmp_path: Path, shape: RandomShape, mix: str
) -> None:
    types = dict(zip(MATRICES, MIXES[mix].split(), strict=True))
    types |= {
        f"{kind}{suffix}": types[of] for kind, of in ALIKE.items() for suffix in ("", "_shexp")
    }
    path = write_model(tmp_path / "m.gguf", shape, seed=2, tensor_type=types)
    ids = np.random.default_rng(1).integers(0, shape.vocab_size, NUM_TOKENS).astype(np.int32)
    reference = reference_logits(path, ids, KvType.F16)
    with Engine.open(path, backend="cpu", threads=1, kv_type=KvType.F16.value) as engine:
        cpu = engine.logits(ids.tolist())
    model = GpuModel(path, any_device, kv_type=KvType.F16)
    found = {
        "prefill": model.logits(ids, [NUM_TOKENS]),
        "decode": model.logits(ids, [FIRST_STEP, *[1] * (NUM_TOKENS - FIRST_STEP)]),
        "steps of several": model.logits(ids, [FIRST_STEP, 5, 3]),
    }
    model.close()
    steps = slice(FIRST_STEP, None)
    assert 0 < error_of(found["prefill"], reference) <= 1.5 * error_of(cpu, reference)
    for what in ("decode", "steps of several"):
        error = error_of(found[what][steps], reference[steps])
        assert 0 < error <= 1.5 * error_of(cpu[steps], reference[steps]), what
    assert error_of(cpu, reference) < 0.03
