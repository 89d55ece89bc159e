"""A daemon that is slow is not late: deadlines follow what is measured."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_protocol.settings import Settings, load_settings
from dflash_runtime import Engine
from dflash_runtime.engine.engine import EngineStats
from support.faults import drop_from_memory, greedy, resident_bytes
from support.processes import ROOT, environment, own_children
from support.random_models import BLOCK_32_SHAPE, write_qwen3moe

pytestmark = pytest.mark.e2e

SLOWER = 20
TRIES = 3
SHAPE = replace(
    BLOCK_32_SHAPE,
    num_layers=2,
    hidden_size=384,
    ffn_size=512,
    num_experts=8,
    num_experts_used=4,
    context_length=4096,
)
"""One chunk of a long prompt keeps the slow daemon busy for longer than the shortest deadline."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    return write_qwen3moe(path, SHAPE, seed=3, tensor_type="Q8_0")


@pytest.fixture
def slow_launcher(tmp_path: Path) -> Path:
    """Starts a daemon whose experts take twenty times as long."""
    path = tmp_path / "slow.sh"
    paths = f"{ROOT}:{environment()['PYTHONPATH']}"
    command = f'"{sys.executable}" -P -m bench.imposed_daemon --compute-factor {SLOWER}'
    path.write_text(f'#!/bin/sh\nexport PYTHONPATH="{paths}"\nexec {command} -- "$@"\n')
    path.chmod(0o700)
    return path


def contract(**changes: Any) -> Settings:
    """Deadlines as users have them; a plan would leave the daemon without experts."""
    return replace(load_settings(), deadline_ms=250, fit="off", **changes)


def check_nothing_is_late(
    model: Path, launcher: Path, prompts: list[int], settings: Settings
) -> float:
    """The longest that a chunk of a prompt kept the daemon busy, in seconds.

    Other work on the machine may hold a daemon up until it is late indeed, but not every time.
    """
    with Engine.open(model) as engine:
        expected = [greedy(engine, prompt_of(each), 4) for each in prompts]
    for _ in range(TRIES):
        longest_s, stats = ask_slow_daemon(model, launcher, prompts, expected, settings)
        if not stats.events:
            break
    owner = stats.owners["cpu0"]
    assert stats.events == []
    assert "fallback" not in stats.owners
    assert (owner.deadline_failures, owner.retries, owner.daemon_late) == (0, 0, 0)
    assert (owner.restarts, owner.breaker) == (0, "closed")
    assert owner.requests > 0
    return longest_s


def ask_slow_daemon(
    model: Path,
    launcher: Path,
    prompts: list[int],
    expected: list[list[int]],
    settings: Settings,
) -> tuple[float, EngineStats]:
    """The longest that a chunk kept it busy, in seconds, and what the engine has counted."""
    longest_s = 0.0
    drop_from_memory(model, [os.getpid()])
    with Engine.open(model, daemons=[f"cpu@{launcher}"], settings=settings) as engine:
        [daemon] = own_children()
        for num_tokens, tokens in zip(prompts, expected, strict=True):
            before = engine.stats().owners["cpu0"].wait_s
            drop_from_memory(model, [daemon.pid, os.getpid()])
            assert greedy(engine, prompt_of(num_tokens), 4) == tokens
            stats = engine.stats()
            num_chunks = SHAPE.num_layers * -(-num_tokens // 512)
            longest_s = max(longest_s, (stats.owners["cpu0"].wait_s - before) / num_chunks)
        return longest_s, stats


def prompt_of(num_tokens: int) -> list[int]:
    return [1 + (7 * place) % (SHAPE.vocab_size - 1) for place in range(num_tokens)]


def test_prompts_of_1_and_64_tokens_with_a_daemon_twenty_times_slower(
    model: Path, slow_launcher: Path
) -> None:
    check_nothing_is_late(model, slow_launcher, [1, 64], contract())


@pytest.mark.slow
def test_long_prompts_with_a_daemon_twenty_times_slower_and_nothing_in_any_cache(
    model: Path, slow_launcher: Path, tmp_path: Path
) -> None:
    settings = contract(ipc_mode="batched", cache_dir=str(tmp_path / "empty cache"))
    longest_s = check_nothing_is_late(model, slow_launcher, [1, 64, 2048], settings)
    if longest_s < 0.25:
        pytest.skip("this machine is in time without any measuring")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stream", "auto"])
def test_long_prompts_in_many_requests_with_a_daemon_twenty_times_slower(
    model: Path, slow_launcher: Path, mode: str
) -> None:
    settings = contract(ipc_transport="stream", ipc_mode=mode)
    check_nothing_is_late(model, slow_launcher, [1, 64, 2048], settings)


def test_dropping_a_file_from_memory_does(model: Path) -> None:
    """Or what is said above of caches would mean little."""
    with Engine.open(model, daemons=["cpu"]) as engine:
        [daemon] = own_children()
        expected = greedy(engine, prompt_of(64), 4)
        before = resident_bytes(daemon.pid, model)
        assert before > model.stat().st_size / 2
        drop_from_memory(model, [daemon.pid, os.getpid()])
        if resident_bytes(daemon.pid, model) >= before:
            pytest.skip("this kernel does not let us")
        assert resident_bytes(daemon.pid, model) < before / 2
        assert greedy(engine, prompt_of(64), 4) == expected
