"""Memory of a real GPU that experts give back while a text is decoded, and take again: within
seconds, with the same tokens. With `-s` there is a line for each.

The driver's answers count, which sees all programs.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bench.random_moe import MIXES, write

from dflash_protocol.device import Device
from dflash_runtime import Engine
from dflash_runtime.experts.telemetry import ExpertMemoryStats
from support.gpu_devices import first_gpu
from support.undisturbed import settings_with

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MIB, GIB = 1 << 20, 1 << 30
NUM_LAYERS, LOCAL = 16, 100
PROMPT = [(37 * index + 11) % 5000 for index in range(300)]
NUM_TOKENS = 400
CUT_BYTES = 2 * GIB
LIMIT_S = 10.0
MOST_LOOKS_S = 40.0


@pytest.fixture(scope="module")
def device() -> Device:
    return first_gpu()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    write(path, MIXES["q4_k_m"], num_layers=NUM_LAYERS, routing="qwen3")
    return path


@pytest.fixture
def engine(model: Path, device: Device) -> Iterator[Engine]:
    settings = replace(
        settings_with(check_replies=0), context=8192, kv_type="f16", prefill_offload="on"
    )
    with Engine.open(model, device=str(device), local_experts=LOCAL, settings=settings) as engine:
        yield engine


def free_bytes(engine: Engine) -> int:
    memory = engine._steps.device_memory()
    assert memory is not None
    return memory[0]


def memory_of(engine: Engine) -> ExpertMemoryStats:
    memory = engine.stats().memory
    assert memory is not None
    return memory


def text_of(engine: Engine, num_tokens: int = NUM_TOKENS) -> list[int]:
    return [each.token_id for each in engine.generate(PROMPT, num_tokens, ignore_eos=True)]


def test_two_gib_are_given_back_within_a_text(engine: Engine) -> None:
    expected, logits = text_of(engine), engine.logits(PROMPT)
    speed, before = engine.last_generation.decode_tokens_per_s, memory_of(engine)
    assert before.held_bytes - before.least_bytes > CUT_BYTES
    found, times_s = [], {}
    for token in engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True):
        found.append(token.token_id)
        budgets = {100: before.held_bytes - CUT_BYTES, 300: None}
        if len(found) in budgets:
            there, begun_s = free_bytes(engine), time.monotonic()
            engine.set_expert_budget(budgets[len(found)])
            times_s[len(found)] = time.monotonic() - begun_s
            given_back = free_bytes(engine) - there
            assert abs(given_back) >= CUT_BYTES - MIB
            assert (given_back > 0) == (len(found) == 100)
    assert found == expected
    assert max(times_s.values()) < LIMIT_S
    engine.set_expert_budget(before.held_bytes - CUT_BYTES)
    assert text_of(engine) == expected
    cut_speed = engine.last_generation.decode_tokens_per_s
    assert (engine.logits(PROMPT) == logits).all()
    engine.set_expert_budget(None)
    assert text_of(engine) == expected
    assert memory_of(engine).held_bytes == before.held_bytes
    again = engine.last_generation.decode_tokens_per_s
    print(
        f"\n2 GiB given back in {times_s[100]:.2f} s, taken again in {times_s[300]:.2f} s; "
        f"{speed:.0f} tokens/s, {cut_speed:.0f} meanwhile, {again:.0f} after it"
    )


def test_another_process_gets_memory_while_a_text_is_decoded(
    engine: Engine, device: Device
) -> None:
    expected, before = text_of(engine), memory_of(engine)
    command = [sys.executable, "-m", "support.memory_taker", str(device.index), str(CUT_BYTES)]
    lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as taker:
        assert taker.stdout is not None
        assert taker.stdin is not None
        stdout = taker.stdout
        reader = threading.Thread(target=lambda: lines.extend(stdout), daemon=True)
        reader.start()
        try:
            end_s = time.monotonic() + MOST_LOOKS_S
            while not any(line.startswith("has") for line in lines):
                assert time.monotonic() < end_s, (lines, memory_of(engine))
                assert text_of(engine) == expected
            taken_s = float(next(line for line in lines if line.startswith("has")).split()[1])
            cut = memory_of(engine)
            assert text_of(engine) == expected
        finally:
            taker.stdin.close()
            taker.wait(30)
            reader.join(10)
    left_s = time.monotonic()
    while memory_of(engine).held_bytes < before.held_bytes:
        assert time.monotonic() < left_s + MOST_LOOKS_S, memory_of(engine)
        engine.move_experts()
        time.sleep(0.1)
    again_s = time.monotonic() - left_s
    assert text_of(engine) == expected
    print(
        f"\nanother process got 2 GiB in {taken_s:.2f} s, by {cut.num_cuts} cuts "
        f"(the last took {cut.last_pause_s:.3f} s); taken again {again_s:.1f} s after its end"
    )
    assert cut.held_bytes <= before.held_bytes - CUT_BYTES + 256 * MIB
    assert taken_s < LIMIT_S


def test_a_look_costs_little(engine: Engine) -> None:
    begun_s = time.perf_counter()
    for _ in range(100):
        free_bytes(engine)
    look_s = (time.perf_counter() - begun_s) / 100
    print(f"\na look at the device's free memory takes {1e6 * look_s:.0f} µs, once a second")
    assert look_s < 0.02
