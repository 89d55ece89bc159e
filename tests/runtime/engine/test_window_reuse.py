"""A prompt that begins like the one before, where layers have a sliding window."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_runtime import Engine
from dflash_runtime.compute import sliding_window
from support.emulated_gpu import install_emulated_gpus
from support.logprobs import bits_of
from support.random_gguf import write_model
from support.random_laguna import LagunaShape

SHAPE = LagunaShape(num_heads=(6, 4, 2), context_length=1024)
WIDE = LagunaShape(
    num_heads=(4, 4),
    hidden_size=64,
    num_experts=5,
    num_experts_used=2,
    ffn_size=32,
    head_dim=16,
    num_rotated=8,
    num_rotated_in_window=16,
    dense_ffn_size=32,
    shared_ffn_size=32,
    window=5,
    context_length=1024,
)
"""As kernels of GPUs take it."""


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_reuse_of_what_a_ring_has_lost_does_not_show_in_the_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(sliding_window, "WINDOW_CHUNK", 24)
    path = write_model(tmp_path / "model.gguf", SHAPE, seed=3)
    random = np.random.default_rng(2)
    base = random.integers(0, SHAPE.vocab_size, 480).tolist()
    with (
        Engine.open(path, backend=backend, context=512) as engine,
        Engine.open(path, backend=backend, context=512) as fresh,
    ):
        for length, own, num_tokens in (
            (150, 4, 3),
            (150, 9, 80),  # goes on, and round the window more than once
            (160, 3, 3),  # back to where only a kept state can help
            (70, 5, 2),
            (70, 0, 2),
            (480, 2, 2),
            (200, 7, 2),
        ):
            prompt = base[:length] + random.integers(0, SHAPE.vocab_size, own).tolist()
            got = bits_of(engine, prompt, reuse=True, num_tokens=num_tokens)
            assert got == bits_of(fresh, prompt, reuse=False, num_tokens=num_tokens), (
                length,
                own,
            )


@pytest.mark.slow
def test_the_same_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_emulated_gpus(monkeypatch)
    monkeypatch.setattr(sliding_window, "WINDOW_CHUNK", 20)
    monkeypatch.setattr(sliding_window, "_ROW_UNIT", 8)
    path = write_model(tmp_path / "model.gguf", WIDE, seed=3, tensor_type="Q8_0")
    random = np.random.default_rng(2)
    base = random.integers(0, WIDE.vocab_size, 120).tolist()
    with (
        Engine.open(path, device="cuda:0", context=160) as engine,
        Engine.open(path, device="cuda:0", context=160) as fresh,
    ):
        for length, own, num_tokens, num_reused in (
            (80, 0, 45, 0),  # round the window, by captured steps
            (80, 12, 2, 80),  # back to where only a kept state can help
            (60, 9, 2, 0),
        ):
            prompt = base[:length] + random.integers(0, WIDE.vocab_size, own).tolist()
            got = bits_of(engine, prompt, reuse=True, num_tokens=num_tokens)
            assert got == bits_of(fresh, prompt, reuse=False, num_tokens=num_tokens), (
                length,
                own,
            )
            assert engine.last_generation.num_reused_tokens == num_reused
