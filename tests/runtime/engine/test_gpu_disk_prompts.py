"""A GPU, emulated here, that copies experts of prompts from an arena beside it, or reads them past
the page cache: the same bits as from the mapped file, whatever reads do."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_runtime import Engine
from dflash_runtime.compute.cpu.kernels import arena_words as w
from dflash_runtime.compute.cpu.kernels import copy_runs
from dflash_runtime.compute.gpu.transfers.file_copier import FileCopier, FileRuns
from dflash_runtime.engine import opening
from support.arena_rig import check_whole, read_from
from support.disk_engines import arena_of, stats_of
from support.emulated_gpu import MAX_CHUNK, TINY, EmulatedGpus, install_emulated_gpus
from support.logprobs import bits_of
from support.random_models import write_qwen3moe
from support.undisturbed import settings_with

LOCAL = 2
ARENA_BYTES = (TINY.num_experts - LOCAL + 1) * 3 * 8192
"""For experts of the processor of one layer, not of all."""
PROMPT = np.random.default_rng(3).integers(0, TINY.vocab_size, 2 * MAX_CHUNK + 9).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    found = install_emulated_gpus(monkeypatch)
    found.group_tokens = 2 * MAX_CHUNK
    return found


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """While it has anything, copies of experts that take bytes from the mapped file get others."""
    given: list[bool] = []
    wrong, begin = np.full(1 << 20, 0xA5, np.uint8), FileCopier.begin

    def begun(copier: FileCopier, runs: FileRuns, **options: Any) -> Any:
        if given and copier.arena is not None:
            assert runs.table[:, copy_runs.LAYER].all()
            table = runs.table.copy()
            table[:, copy_runs.SOURCE] = wrong.ctypes.data
            runs = FileRuns(table, (runs, wrong))
        return begin(copier, runs, **options)

    monkeypatch.setattr(FileCopier, "begin", begun)
    return given


def opened(model: Path, monkeypatch: pytest.MonkeyPatch, arena_bytes: int | None) -> Engine:
    settings = replace(
        settings_with(check_replies=0), context=256, prefill_offload="on", heat="off"
    )
    with monkeypatch.context() as patch:
        patch.setattr(opening, "_arena_bytes", lambda *_: arena_bytes)
        return Engine.open(model, device="cuda:0", settings=settings, local_experts=LOCAL)


def test_prompts_draw_from_the_arena(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch, spoilt: list[bool]
) -> None:
    """Not from the mapped file."""
    with opened(model, monkeypatch, None) as engine:
        expected = [bits_of(engine, [each, *PROMPT], num_tokens=5) for each in range(3)]
    threads = set(threading.enumerate())
    with opened(model, monkeypatch, ARENA_BYTES) as engine:
        spoilt.append(True)
        arena = arena_of(engine)
        for number, bits in enumerate(expected):
            before = stats_of(engine)
            engine.logits([number, *PROMPT], len(PROMPT))
            after = stats_of(engine)
            assert after.missed > before.missed
            assert after.read_bytes > before.read_bytes
            assert bits_of(engine, [number, *PROMPT], num_tokens=5) == bits
        words = arena._words
        assert min(words[w.COPIES_FOUND], words[w.COPIES_MISSED]) > 0
        assert stats_of(engine).failed == 0
        check_whole(arena)
    assert set(threading.enumerate()) <= threads


def test_reads_that_fail_cost_a_prompt_time_alone(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(model, monkeypatch, None) as engine:
        expected = bits_of(engine, PROMPT, num_tokens=5)
    with opened(model, monkeypatch, ARENA_BYTES) as engine:
        read_from(arena_of(engine), "/dev/null")
        assert bits_of(engine, PROMPT, num_tokens=5) == expected
        assert stats_of(engine).failed > 0
