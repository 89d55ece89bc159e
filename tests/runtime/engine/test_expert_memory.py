"""Device memory that experts give back while a text is decoded, and take again: the bits stay. The
GPU is emulated; its memory comes in blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_protocol.errors import DeviceOutOfMemory, DeviceUnavailable, SettingsError
from dflash_protocol.ids import Phase
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.device.devices import DeviceMemory
from dflash_runtime.engine import expert_memory
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import TINY, TINY_GPT_OSS, EmulatedGpus, install_emulated_gpus
from support.logprobs import bits_of
from support.random_gguf import write_model
from support.undisturbed import settings_with

SHAPE = replace(TINY, num_layers=2, num_experts=14, num_experts_used=4)
PROMPT = [5, 9, 2, 40, 11, 3, 17, 8, 1, 30, 22]
NUM_TOKENS = 10
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
    settings = replace(settings_with(), context=64, prefill_offload=offload, moe_cache_slots=slots)
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


@pytest.mark.parametrize("slots", [0, pytest.param(2, marks=pytest.mark.slow)])
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
        assert tokens_of(engine, after_3=1, after_8=None) == expected
        assert engine.stats().owners[HOST_OWNER].pairs > asked
        assert abs(gpus.used_bytes() - before) < TABLES_BYTES
        assert num_here(engine) == LOCAL * SHAPE.num_layers
        np.testing.assert_array_equal(engine.logits(PROMPT), logits)
        stats = engine.stats().memory
        assert stats is not None
        assert (stats.num_cuts, stats.num_returns) == (2, 1)
    assert all(not device.num_bytes for device in gpus.opened)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt-oss", "F16"])
def test_the_bits_are_those_of_an_engine_that_never_had_more(
    kind: str, tmp_path: Path, gpus: EmulatedGpus
) -> None:
    """Biases; types that are copied as they are. Prompts through copies, trees, logits."""
    shape: Any = replace(TINY_GPT_OSS, num_experts=9) if kind == "gpt-oss" else SHAPE
    path = write_model(tmp_path / "m.gguf", shape, seed=5, tensor_type="F16")
    with opened(path, local=6) as engine:
        expected = bits_of(engine, PROMPT, num_tokens=NUM_TOKENS)
        rng = np.random.default_rng(2)
        stats = engine.stats().memory
        assert stats is not None
        for _ in range(4):
            engine.set_expert_budget(int(rng.integers(0, stats.most_bytes)))
            assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == expected
        engine.set_expert_budget(None)
        assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == expected


def test_the_coldest_experts_leave_and_the_hottest_come_back(
    model: Path, gpus: EmulatedGpus
) -> None:
    with opened(model) as engine:
        tokens_of(engine)
        before = engine.stats().memory
        assert before is not None
        engine.set_expert_budget(0)
        least = engine.stats().memory
        assert least is not None
        assert least.held_bytes == before.least_bytes
        assert "least" in least.last_reason
        heat, here = engine.heat(), engine.placement.owners
        names = engine.placement.owner_names
        local, host = (here[names.index(name)].by_layer for name in (LOCAL_OWNER, HOST_OWNER))
        at_first = [range(LOCAL)] * SHAPE.num_layers
        for layer_id, first in enumerate(at_first):
            chosen = heat.probabilities(Phase.DECODE, layer_id)
            left = sorted({*first} - {*local[layer_id].tolist()})
            assert left
            assert chosen[left].max() <= chosen[local[layer_id]].min()
        owners = engine.stats().owners
        assert owners[LOCAL_OWNER].num_experts == sum(map(len, local.values()))
        assert owners[HOST_OWNER].num_experts == sum(map(len, host.values()))
        engine.set_expert_budget(None)
        names = engine.placement.owner_names
        local = engine.placement.owners[names.index(LOCAL_OWNER)].by_layer
        for layer_id, ids in local.items():
            chosen = heat.probabilities(Phase.DECODE, layer_id)
            away = sorted({*range(SHAPE.num_experts)} - {*ids.tolist()})
            came = sorted({*ids.tolist()} - {*at_first[layer_id]})
            assert ids.size == LOCAL
            assert not came or chosen[came].min() >= chosen[away].max()


@pytest.mark.slow
def test_steps_go_on_where_prompts_have_other_bits_then(model: Path, gpus: EmulatedGpus) -> None:
    """The processor computes its experts of prompts: what is cached is not reused."""
    with opened(model, offload="off") as engine:
        expected = tokens_of(engine)
        assert tokens_of(engine, after_4=0) == expected
        with opened(model, offload="off", local=LOCAL) as other:
            other.replace_experts(engine.placement)
            logits = other.logits(PROMPT)
            text = tokens_of(other)
        assert tokens_of(engine) == text
        assert engine.last_generation.num_reused_tokens == 0
        np.testing.assert_array_equal(engine.logits(PROMPT), logits)


def test_memory_that_cannot_be_taken_again_leaves_all_as_it_is(
    model: Path, gpus: EmulatedGpus, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(model) as engine:
        expected = tokens_of(engine)
        engine.set_expert_budget(0)
        placement, device = engine.placement, gpus.opened[0]
        held_bytes = device.num_bytes
        for free_bytes in (0, 9 * BLOCK_BYTES):
            device.free_block_bytes = free_bytes
            with pytest.raises(DeviceOutOfMemory):
                engine.set_expert_budget(None)
            assert engine.placement is placement
            assert abs(device.num_bytes - held_bytes) < TABLES_BYTES
        assert tokens_of(engine) == expected
        device.free_block_bytes = 1 << 40
        engine.set_expert_budget(None)
        assert tokens_of(engine) == expected


class Watched:
    """The device's memory as another program leaves it, and the clock."""

    def __init__(self, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.taken_bytes, self.stays_free_bytes = 1000.0, 0, 100_000
        self._gpus, self._most = gpus, 0
        monkeypatch.setattr(gpus, "_memory", self._memory)
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(expert_memory, "time", clock)

    def settle(self) -> None:
        """So much as is in use now leaves what is to stay free."""
        self._most = self._gpus.used_bytes() + self.stays_free_bytes

    def _memory(self) -> DeviceMemory:
        free_bytes = 1 << 40
        if self._most:
            free_bytes = max(0, self._most - self.taken_bytes - self._gpus.used_bytes())
        return DeviceMemory(
            free_bytes, 1 << 40, is_shared_with_host=False, stays_free_bytes=self.stays_free_bytes
        )


def test_another_program_takes_memory_and_leaves_it_again(
    model: Path,
    gpus: EmulatedGpus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched(gpus, monkeypatch)
    with opened(model) as engine:
        expected = tokens_of(engine)
        watched.settle()

        def text(*taken_bytes: int, pause_s: float = 2.0) -> list[int]:
            """The other program has so much at each token."""
            found = []
            for number, token in enumerate(engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True)):
                found.append(token.token_id)
                watched.now_s += pause_s
                watched.taken_bytes = taken_bytes[min(number, len(taken_bytes) - 1)]
            return found

        before = engine.stats().memory
        assert before is not None
        assert text(0) == expected
        assert engine.stats().memory == before
        caplog.clear()
        caplog.set_level("INFO", logger=expert_memory.__name__)
        assert text(0, 0, 0, 60_000) == expected  # within the text
        cut = engine.stats().memory
        assert cut is not None
        assert cut.num_cuts == 1
        assert before.held_bytes - cut.held_bytes >= 60_000
        assert len(caplog.messages) == 1
        assert "another program" in caplog.messages[0]
        watched.now_s += 30.0
        engine.move_experts()  # while nobody asks
        assert engine.stats().memory == cut
        watched.taken_bytes = 1 << 30
        watched.now_s += 1.0
        engine.move_experts()
        least = engine.stats().memory
        assert least is not None
        assert least.held_bytes == before.least_bytes
        assert text(1 << 30) == expected
        assert "least" in engine.stats().memory.last_reason  # type: ignore[union-attr]
        assert text(1 << 30, 1 << 30, 0) == expected
        again = engine.stats().memory
        assert again is not None
        assert (again.held_bytes, again.num_returns) == (before.held_bytes, 1)
        assert len(caplog.messages) == 3


def test_a_device_that_fails_to_tell_its_memory_ends_no_text(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(model) as engine:
        expected = tokens_of(engine)

        def fails() -> DeviceMemory:
            raise DeviceUnavailable("it has fallen off the bus")

        monkeypatch.setattr(engine._steps._backend, "_memory", fails)
        monkeypatch.setattr(expert_memory, "LOOK_S", 0.0)
        engine._memory._next_look_s = 0.0  # type: ignore[union-attr]
        assert tokens_of(engine) == expected
        assert "bus" in engine.stats().memory.last_reason  # type: ignore[union-attr]


def test_without_experts_that_can_leave_a_budget_is_an_error(
    model: Path, gpus: EmulatedGpus
) -> None:
    with opened(model, local=SHAPE.num_experts) as engine:
        assert engine.stats().memory is None
        with pytest.raises(SettingsError, match="take over"):
            engine.set_expert_budget(0)
    with opened(model) as engine, pytest.raises(ValueError, match="-1"):
        engine.set_expert_budget(-1)
