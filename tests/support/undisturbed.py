"""What tests of faults have in common: a small model, the text that an engine writes of it while
nothing happens, and where a daemon listens.

The fixtures are taken over by name: ``model = support.undisturbed.model``.
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
"""So many tokens are written when something happens."""

SHAPE = replace(BLOCK_32_SHAPE, vocab_size=300, context_length=4096)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of `SHAPE`; its tokens are bytes, so that texts can be asked for too."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    return write_qwen3moe(path, SHAPE, seed=3, tensor_type="Q8_0", tokenizer="bytes")


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[int]:
    """The tokens after `PROMPT`. Also compiles what the tests need, so that nothing is written
    under their limits."""
    with Engine.open(model, daemons=["cpu"]) as engine:
        return greedy(engine, PROMPT, NUM_TOKENS)


@pytest.fixture
def endpoint(run_dir: Path) -> str:
    """Where a test's daemon listens."""
    return f"ipc://{run_dir}/daemon.sock"


def settings_with(**changes: Any) -> Settings:
    """The settings of this process, changed; a daemon that is silent is noticed within a second."""
    return replace(load_settings(), heartbeat_ms=200, **changes)
