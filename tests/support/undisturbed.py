"""Fixtures of fault tests: a small model, the text it generates without faults, an endpoint.

Tests take the fixtures over by name: ``model = support.undisturbed.model``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_protocol.settings import Settings, load_settings
from dflash_runtime import Engine
from support.faults import greedy
from support.random_models import BLOCK_32_SHAPE, write_qwen3moe

PROMPT = list(range(1, 30))
NUM_TOKENS = 40
FAULT_AFTER = 12
"""Number of tokens before the fault."""

SHAPE = replace(BLOCK_32_SHAPE, vocab_size=300, context_length=4096)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of `SHAPE`, with a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    return write_qwen3moe(path, SHAPE, seed=3, tensor_type="Q8_0", tokenizer="bytes")


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[int]:
    """The tokens after `PROMPT`. Also compiles the kernels, so that tests with resource limits need
    not."""
    with Engine.open(model, daemons=["cpu"]) as engine:
        return greedy(engine, PROMPT, NUM_TOKENS)


@pytest.fixture
def endpoint(run_dir: Path) -> str:
    """The endpoint of a test's daemon."""
    return f"ipc://{run_dir}/daemon.sock"


def settings_with(**changes: Any) -> Settings:
    """This process's settings with changes; a silent daemon is detected within a second."""
    return replace(load_settings(), heartbeat_ms=200, **changes)
