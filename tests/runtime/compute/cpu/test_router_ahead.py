"""What a layer's step predicts of the next layer's choice, in trained models."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.scanner import TensorInfo
from dflash_adapters.registry import read_spec
from dflash_runtime import Engine
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.routers_ahead import routers_ahead
from dflash_runtime.compute.expert_arena import ArenaStats
from dflash_runtime.compute.half_lives import HALF_LIVES
from dflash_runtime.engine import opening
from dflash_runtime.engine.demo_model import demo_model_path
from support.undisturbed import settings_with

DEMO = demo_model_path()
TRAINED = [DEMO, *(DEMO.with_name(f"dflash-demo-{kind}.gguf") for kind in ("laguna", "qwen35moe"))]
PROMPT = "def read_lines(path, encoding='utf-8'):\n"
NUM_TOKENS = 150


def written(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, prefetches: bool, policy: str = "auto"
) -> tuple[list[int], ArenaStats]:
    """Tokens written with memory for half of the experts, and what came from the disk."""
    with GgufFile.open(path) as file:
        half = read_spec(file).moe.expert_bytes_total // 2
    monkeypatch.setattr(opening, "_arena_bytes", lambda *_: half)
    settings = settings_with(moe_predict_prefetch=prefetches, moe_cache_policy=policy)
    with Engine.open(path, backend="cpu", threads=1, settings=settings) as engine:
        prompt = engine.encode_prompt(PROMPT)
        tokens = [each.token_id for each in engine.generate(prompt, NUM_TOKENS, ignore_eos=True)]
        disk = engine.stats().disk
    assert disk is not None
    return tokens, disk


@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)
def test_trained_models_choose_what_was_predicted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, disk = written(path, monkeypatch, prefetches=True)
    assert disk.look_ahead.checked > 1000
    assert disk.look_ahead.predicted >= 0.7 * disk.look_ahead.checked
    assert disk.look_ahead.prefetched > 100
    assert disk.look_ahead.prefetched_used >= 0.7 * disk.look_ahead.prefetched
    alone, without = written(path, monkeypatch, prefetches=False, policy="static")
    assert tokens == alone
    assert without.half_life == HALF_LIVES[-1]
    assert without.look_ahead.checked == without.look_ahead.prefetched == 0


def test_routers_that_take_too_much_memory_are_left_out() -> None:
    with GgufFile.open(DEMO) as file, closing(CpuBackend(num_threads=1)) as backend:
        layers = read_spec(file).moe.layers
        banks = {
            each.layer_id: backend.load_experts(
                file, each, np.arange(each.num_experts, dtype=np.int32)
            )
            for each in layers
        }
        num_bytes = sum(2 * each.num_experts * each.hidden_size for each in layers[1:])
        assert len(routers_ahead(file, banks, most_bytes=num_bytes)) == len(banks) - 1
        assert not routers_ahead(file, banks, most_bytes=num_bytes - 1)


def test_a_router_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GgufFile.tensor

    def smaller(file: GgufFile, name: str) -> TensorInfo:
        found = real(file, name)
        if name != "blk.1.ffn_gate_inp.weight":
            return found
        columns, rows = found.file_shape
        return replace(found, file_shape=(columns, rows // 2))

    with GgufFile.open(DEMO) as file, closing(CpuBackend(num_threads=1)) as backend:
        layers = read_spec(file).moe.layers[:2]
        ids = np.arange(layers[0].num_experts, dtype=np.int32)
        banks = {each.layer_id: backend.load_experts(file, each, ids) for each in layers}
        monkeypatch.setattr(GgufFile, "tensor", smaller)
        with pytest.raises(ValueError, match=r"ffn_gate_inp\.weight is"):
            routers_ahead(file, banks, most_bytes=1 << 30)
