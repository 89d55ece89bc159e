"""Device memory that experts give back while a text is decoded, and take again: the bits stay. The
GPU is emulated; its memory comes in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.errors import SettingsError
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.device.devices import DeviceMemory
from dflash_runtime.engine import expert_memory
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import TINY, TINY_GPT_OSS, EmulatedGpus, install_emulated_gpus
from support.logprobs import Bits, bits_of
from support.random_gguf import write_model
from support.undisturbed import settings_with

SHAPE = replace(TINY, num_layers=3, num_experts=14, num_experts_used=4)
PROMPT = [5, 9, 2, 40, 11, 3, 17, 8, 1, 30, 22, 6, 7, 60, 33, 12, 13, 14, 15, 16, 18, 19, 21, 24]
NUM_TOKENS = 16
LOCAL = 10
BLOCK_BYTES = 4096
TABLES_BYTES = 2048
"""Of experts that come to prompts through copies: there are more or fewer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_model(path, SHAPE, seed=4, tensor_type="Q8_0")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    monkeypatch.setattr(EmulatedDevice, "block_bytes", BLOCK_BYTES)
    return install_emulated_gpus(monkeypatch)


def opened(path: Path, *, offload: str = "on", slots: int = 0, local: int = LOCAL) -> Engine:
    settings = replace(
        settings_with(), context=64, prefill_offload=offload, moe_cache_slots=slots
    )
    return Engine.open(path, device="cuda:0", settings=settings, local_experts=local)


def tokens_of(engine: Engine, **budgets: int | None) -> list[int]:
    """`budgets`: set after so many tokens, by ``after_N``."""
    found = []
    for token in engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True):
        found.append(token.token_id)
        asked = budgets.get(f"after_{len(found)}", 0)
        if asked != 0:
            engine.set_expert_budget(asked)
    return found


def num_here(engine: Engine) -> int:
    index = engine.placement.owner_names.index(LOCAL_OWNER)
    return engine.placement.owners[index].num_experts


@pytest.mark.parametrize("slots", [0, 2])
def test_memory_is_given_back_within_a_text_and_taken_again(
    model: Path, gpus: EmulatedGpus, slots: int
) -> None:
    with opened(model, slots=slots) as engine:
        expected, logits = tokens_of(engine), engine.logits(PROMPT)
        before, held = gpus.used_bytes(), engine.stats().memory
        assert held is not None
        assert held.held_bytes == held.most_bytes > held.least_bytes
        budget = (held.held_bytes + held.least_bytes) // 2
        texts = tokens_of(engine, after_4=budget)
        assert texts == expected
        cut = engine.stats().memory
        assert cut is not None
        assert cut.held_bytes <= budget
        given_back = held.held_bytes - cut.held_bytes
        assert abs(before - gpus.used_bytes() - given_back) < TABLES_BYTES < given_back
        assert num_here(engine) < LOCAL * SHAPE.num_layers
        np.testing.assert_array_equal(engine.logits(PROMPT), logits)
        asked = engine.stats().owners[HOST_OWNER].pairs
        assert tokens_of(engine, after_3=1, after_9=None) == expected
        assert engine.stats().owners[HOST_OWNER].pairs > asked
        assert abs(gpus.used_bytes() - before) < TABLES_BYTES
        assert num_here(engine) == LOCAL * SHAPE.num_layers
        np.testing.assert_array_equal(engine.logits(PROMPT), logits)
        stats = engine.stats().memory
        assert stats is not None
        assert (stats.num_cuts, stats.num_returns) == (2, 1)
    assert all(not device.num_bytes for device in gpus.opened)
