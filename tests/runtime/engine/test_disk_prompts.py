"""Prompts of several chunks with a model that is larger than memory: each layer's experts are read
once for all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_runtime.compute.cpu import backend
from dflash_runtime.compute.host import PREFILL_CHUNK
from support.disk_engines import MANY_LAYERS, opened, stats_of
from support.faults import greedy
from support.random_models import write_qwen3moe

LONG = replace(MANY_LAYERS, context_length=4 * PREFILL_CHUNK)
NUM_SLOTS = 3 * LONG.num_experts
PROMPT = np.random.default_rng(1).integers(0, LONG.vocab_size, 3 * PREFILL_CHUNK + 70).tolist()
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(tmp_path_factory.mktemp("model") / "m.gguf", LONG, seed=3)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[int]:
    with opened(path, None) as engine:
        return greedy(engine, PROMPT, NUM_TOKENS)


def read_by(path: Path, expected: list[int]) -> int:
    """Bytes that a prompt has read."""
    with opened(path, NUM_SLOTS) as engine:
        before = stats_of(engine).read_bytes
        assert greedy(engine, PROMPT, 1) == expected[:1]
        read_bytes = stats_of(engine).read_bytes - before
        assert greedy(engine, PROMPT, NUM_TOKENS) == expected
    return read_bytes


def test_an_expert_is_read_once_for_all_chunks(
    path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    once = read_by(path, expected)
    monkeypatch.setattr(backend, "GROUP_TOKENS", 0)
    assert read_by(path, expected) > 3 * once


def test_a_prompt_that_is_cancelled_between_chunks(path: Path, expected: list[int]) -> None:
    with opened(path, NUM_SLOTS) as engine:
        for after in (1, 2, 5, 17):
            asked = iter(range(1000))

            def is_cancelled(asked: object = asked, after: int = after) -> bool:
                return next(asked) >= after  # type: ignore[call-overload,no-any-return]

            assert not [*engine.generate(PROMPT, NUM_TOKENS, is_cancelled=is_cancelled)]
        assert greedy(engine, PROMPT, NUM_TOKENS) == expected
        # What was written before stays, and is used again.
        assert greedy(engine, [*PROMPT, *expected], 1) == greedy(engine, [*PROMPT, *expected], 1)
