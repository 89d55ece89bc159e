"""Experts that are pinned in the slots of an emulated GPU's steps, by `--moe-warmpin`: once they
are there nothing else gets their slot, and the bits are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.run.captured_step import GraphStep
from dflash_runtime.compute.slot_pins import SlotPins, WarmPins
from support.emulated_gpu import TINY, EmulatedGpus, install_emulated_gpus
from support.engine_slots import empty_some, kept, slots_of
from support.logprobs import bits_of
from support.moved_experts import lists_of, placed
from support.random_gguf import write_model
from support.undisturbed import settings_with

SHAPE = replace(TINY, num_layers=2, num_experts=14, num_experts_used=4)
PROMPT = [5, 9, 2, 40, 11, 3, 17, 8, 1, 30, 22]
LOCAL, SLOTS, PINS, NUM_TOKENS = 4, 4, 1, 12


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    monkeypatch.setattr(GraphStep, "most_ahead", 0)
    return install_emulated_gpus(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", SHAPE, seed=4, tensor_type="Q8_0")


def opened(path: Path, *, local_experts: int = LOCAL, slots: int = 0, pins: int = 0) -> Engine:
    settings = replace(
        settings_with(),
        context=64,
        prefill_offload="on",
        moe_cache_slots=slots,
        moe_warmpin=pins,
        moe_warmpin_after=2 * NUM_TOKENS,
    )
    return Engine.open(path, device="cuda:0", settings=settings, local_experts=local_experts)


def pins_of(engine: Engine) -> dict[int, list[int]]:
    slots = engine.stats().slots
    assert slots is not None
    return {layer_id: list(ids) for layer_id, ids in slots.pins.items()}


@pytest.mark.usefixtures("gpus")
def test_pinned_experts_do_not_leave_their_slots(model: Path) -> None:
    with opened(model, local_experts=SHAPE.num_experts) as engine:
        expected = bits_of(engine, PROMPT, num_tokens=NUM_TOKENS)
    rng = np.random.default_rng(2)
    with opened(model, slots=SLOTS, pins=3 * PINS) as engine:
        for _ in range(2):
            assert not pins_of(engine)
            assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == expected
        list(engine.generate(PROMPT[3:], NUM_TOKENS, ignore_eos=True))
        pins = pins_of(engine)
        assert [len(ids) for ids in pins.values()] == [SLOTS // 2] * SHAPE.num_layers
        before: list[set[int]] = [set() for _ in pins]
        num_changes = 0
        for number, prompt in enumerate((PROMPT[4:], PROMPT[2:], PROMPT)):
            for _ in engine.generate(prompt, NUM_TOKENS, ignore_eos=True):
                now = kept(engine)
                for pinned, was, there in zip(pins.values(), before, now, strict=True):
                    assert was & {*pinned} <= there
                    num_changes += bool(was - there)
                before = now
            if number == 0:  # pins outlast what empties the slots
                for layer in slots_of(engine):
                    empty_some(layer, rng, 1.0)
                before = [set() for _ in pins]
        assert num_changes > 0
        assert all({*ids} & there for ids, there in zip(pins.values(), before, strict=True))
        for layer, ids in zip(slots_of(engine), pins.values(), strict=True):
            assert [e for e in range(SHAPE.num_experts) if layer.is_pinned(e)] == ids
        assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == expected
        assert pins_of(engine) == pins


@pytest.mark.slow
@pytest.mark.usefixtures("gpus")
def test_pins_follow_experts_that_move(model: Path) -> None:
    """What lives on the GPU needs no slot."""
    with opened(model, slots=SLOTS, pins=PINS) as engine:
        for _ in range(3):
            list(engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True))
        pins, placement = pins_of(engine), engine.placement
        lists = lists_of(placement)
        local, host = lists.values()
        for layer_id, [pinned] in pins.items():
            host[layer_id][host[layer_id].index(pinned)] = local[layer_id][0]
            local[layer_id][0] = pinned
        engine.replace_experts(placed(placement, lists))
        list(engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True))
        after = pins_of(engine)
        assert after.keys() == pins.keys()
        for layer, layer_id in zip(slots_of(engine), after, strict=True):
            [chosen] = after[layer_id]
            assert chosen != pins[layer_id][0]
            assert chosen in host[layer_id]
            assert layer.is_pinned(chosen)
            assert not layer.is_pinned(pins[layer_id][0])
            layer.unpin(chosen)
            assert not layer.is_pinned(chosen)
            layer.pin(chosen)
            assert layer.is_pinned(chosen)


def test_the_hottest_that_live_elsewhere_are_chosen(model: Path) -> None:

    with GgufFile.open(model) as file:
        layer = read_spec(file).moe.layers[0]
    uses = np.array([9, 0, 3, 8, 7, 0, 6, 1, 0, 0, 0, 0, 0, 2])
    own_ids = np.where(np.arange(14) % 3 == 0, -1, np.arange(14)).astype(np.int32)
    pins = SlotPins(WarmPins(3, after=18))
    assert not pins.count(layer, uses)  # 36 of 72
    assert not pins.has_chosen(layer.layer_id)
    assert pins.count(layer, uses)
    assert pins.choose(layer.layer_id, own_ids, num_slots=8) == {4, 2, 13}
    assert pins.experts == {layer.layer_id: [2, 4, 13]}
    assert not pins.count(layer, uses)
    assert pins.choose(layer.layer_id, own_ids, num_slots=5) == {4, 2}
    assert pins.is_pinned(layer.layer_id, 4)
    assert not pins.is_pinned(layer.layer_id, 13)
    assert not pins.is_pinned(layer.layer_id + 1, 4)
    assert pins.choose(layer.layer_id, own_ids, num_slots=1) == frozenset()
    assert not SlotPins(WarmPins()).count(layer, uses)
