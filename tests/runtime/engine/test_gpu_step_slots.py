"""Experts that an emulated GPU's steps fetch and keep besides those that live there: the bits are
those of a model that is on the GPU as a whole, whatever is kept, moved or lost."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import Phase
from dflash_protocol.placement import Placement
from dflash_runtime import Engine
from dflash_runtime.cli.main import main
from dflash_runtime.compute.cpu.captured.mail_thread import MailThread
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.mailbox import parent, processor_peer
from dflash_runtime.compute.gpu.run.captured_step import GraphStep
from dflash_runtime.compute.step_slots import HALF_LIFE, MARGIN
from dflash_runtime.engine import planning
from dflash_runtime.placement.box import AskedSpeed, Box, Curve
from dflash_runtime.placement.cache.simulation import StepState
from dflash_runtime.placement.cache.step_slots import replay_steps
from dflash_runtime.placement.cache.traces import PHASES, read_trace
from dflash_runtime.placement.footprint import Memory, footprint
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from support.disk_engines import TRAINED
from support.emulated_gpu import TINY, EmulatedGpus, install_emulated_gpus
from support.engine_slots import check_tables, empty_some, kept, slots_of
from support.gpu_models import SHAPES
from support.logprobs import Bits, bits_of
from support.moved_experts import lists_of, placed
from support.plain_slots import PlainSlots
from support.planned_gpu import GPU, OneGpu, made_up_box
from support.processes import run_main
from support.random_gguf import write_model
from support.undisturbed import settings_with

SHAPE = replace(TINY, num_layers=3, num_experts=14, num_experts_used=4)
PROMPT = [5, 9, 2, 40, 11, 3, 17, 8, 1, 30, 22]
NUM_TOKENS = 24
LOCAL = 4
DECODE = Phase.DECODE


@pytest.fixture(scope="module", params=["Q8_0", pytest.param("F16", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_model(path, SHAPE, seed=4, tensor_type=request.param)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    return install_emulated_gpus(monkeypatch)


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[Bits]:
    with pytest.MonkeyPatch.context() as patch:
        install_emulated_gpus(patch)
        with opened(model, local_experts=SHAPE.num_experts) as engine:
            yield bits_of(engine, PROMPT, num_tokens=NUM_TOKENS)


def opened(path: Path, *, local_experts: int = LOCAL, slots: int = 0, **wishes: Any) -> Engine:
    settings = replace(
        settings_with(), context=64, prefill_offload="on", moe_cache_slots=slots, **wishes
    )
    return Engine.open(path, device="cuda:0", settings=settings, local_experts=local_experts)


def pairs_of_processor(engine: Engine) -> int:
    return engine.stats().owners[HOST_OWNER].pairs


def swapped(placement: Placement, number: int) -> Placement:
    """With so many experts of each layer in the other owner's place."""
    lists = lists_of(placement)
    for layer_id in placement.experts_per_layer:
        one, other = (lists[name][layer_id] for name in (LOCAL_OWNER, HOST_OWNER))
        one[:number], other[:number] = other[:number], one[:number]
    return placed(placement, lists)


@pytest.mark.parametrize("bus", [1e9, 0.0])
def test_a_plan_has_slots_where_they_are_worth_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, expected: Bits, bus: float
) -> None:
    """Where nothing is known of the bus there are none."""

    def box() -> Box:
        found = made_up_box(GPU)
        asked = Curve(((1e4, 1e-3), (4e4, 4e-3)))
        copies = replace(found.copies[str(GPU)], kernel_reads=bus)
        return replace(
            found,
            copies={str(GPU): copies},
            host_asked={str(GPU): AskedSpeed(asked, asked)},
        )

    monkeypatch.setattr(planning, "SLOTS", 1)
    gpu = OneGpu(monkeypatch, model)
    monkeypatch.setattr(planning, "box_of_machine", lambda *_, **__: box())
    gpu.make_room_for(18)
    settings = replace(settings_with(), context=64, prefill_offload="on", swap_max=0)
    with Engine.open(model, device="cuda:0", settings=settings) as engine:
        assert engine.plan is not None
        assert engine.plan.setup.cache_slots == (1 if bus else 0)
        assert bool(slots_of(engine)) == bool(bus)
        assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == expected


def test_steps_keep_what_they_fetch(model: Path, gpus: EmulatedGpus, expected: Bits) -> None:
    asked = []
    for slots in (0, 1, 3, 8):
        with opened(model, slots=slots) as engine:
            assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == expected
            asked.append(pairs_of_processor(engine))
            assert len(slots_of(engine)) == (SHAPE.num_layers if slots else 0)
            check_tables(engine, slots)
    assert asked[0] > asked[1] >= asked[2] > asked[3]
    assert not any(device._range_bytes for device in gpus.opened)


def replayed(path: Path, engine: Engine, num_slots: int) -> list[PlainSlots]:
    """What a plain version does in each layer, in the steps of a trace, and then in its tree."""
    trace, placement, layers = read_trace(path), engine.placement, []
    in_steps, in_trees = (trace.phases == PHASES.index(each) for each in (DECODE, Phase.VERIFY))
    for layer, ids in trace.by_layer():
        routing = placement.routing[layer.layer_id]
        is_own = routing.owner_index == placement.owner_names.index(HOST_OWNER)
        own_ids = np.where(is_own, routing.local_expert_id, -1).astype(np.int32)
        plain = PlainSlots(own_ids, num_slots, decay=0.5 ** (1 / HALF_LIFE), fetches=num_slots > 0)
        for token in ids[in_steps].tolist():
            plain.step(token)
        plain.step(ids[in_trees].reshape(-1).tolist())
        layers.append(plain)
    return layers


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("slots", [0, 3, pytest.param(1, marks=pytest.mark.slow), 8])
def test_what_slots_do_is_counted(model: Path, tmp_path: Path, slots: int) -> None:
    """In steps and in a tree of drafts; each pair is of the owner that has computed it."""
    path = tmp_path / "run.trace"
    with opened(model, slots=slots, expert_trace=str(path)) as engine:
        list(engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True))
        engine.prefill(PROMPT)
        engine.verify([7, 3, 9, 4], [-1, 0, 0, 2])
        list(engine.generate(PROMPT, 1, ignore_eos=True))  # ends, so that all is counted
        stats, [_, chosen] = engine.stats(), engine._owners.runtime.selections_by_phase()
        expert_bytes = {layer.expert_bytes for layer in engine.spec.moe.layers}
    plain = replayed(path, engine, slots)

    def expected(name: str) -> int:
        return sum(getattr(each, name) for each in plain)

    assert stats.hits.layers_hot_only == expected("hot_only")
    pairs = {
        name: sum(owner.of_phase(phase).pairs for phase in (DECODE, Phase.VERIFY))
        for name, owner in stats.owners.items()
    }
    assert pairs[HOST_OWNER] == expected("asked")
    assert sum(pairs.values()) == chosen.sum()
    in_prompts = sum(owner.of_phase(Phase.PREFILL).pairs for owner in stats.owners.values())
    assert stats.hits.hot == in_prompts + chosen.sum()
    if not slots:
        assert stats.slots is None
        return
    assert stats.slots is not None
    counts = [expected(name) for name in ("found", "fetched", "kept")]
    assert all(counts)
    assert counts == [stats.slots.found, stats.slots.fetched, stats.slots.kept]
    assert stats.slots.num_slots == slots
    assert expert_bytes == {stats.slots.fetched_bytes / stats.slots.fetched}


@pytest.mark.usefixtures("gpus")
def test_what_slots_did_is_in_the_summary_of_a_generation(model: Path) -> None:
    for slots in (0, 3):
        done = run_main(
            main,
            *("generate", model, "--device", "cuda:0", "--context", "64"),
            *("--token-ids", ",".join(map(str, PROMPT)), "-n", str(NUM_TOKENS), "--ignore-eos"),
            *("--local-experts", str(LOCAL), "--moe-cache-slots", str(slots), "--json"),
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)["slots"]
        if not slots:
            assert found is None
            continue
        assert found.keys() == {"num_slots", "found", "fetched", "kept", "fetched_bytes", "pins"}
        assert found["num_slots"] == slots
        assert found["found"] > 0
        assert found["fetched"] >= found["kept"] > 0


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("share", [0.3, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("slots", [1, pytest.param(3, marks=pytest.mark.slow), 8])
def test_experts_may_leave_slots_between_any_two_steps(
    model: Path, expected: Bits, monkeypatch: pytest.MonkeyPatch, slots: int, share: float
) -> None:
    """What is not in a slot is NaNs there, also in the one for what is not kept."""
    monkeypatch.setattr(GraphStep, "most_ahead", 0)
    rng, num_left = np.random.default_rng(slots), 0
    with opened(model, slots=slots) as engine:
        for _ in range(2):
            tokens = engine.generate(
                PROMPT, NUM_TOKENS, ignore_eos=True, top_logprobs=SHAPE.vocab_size
            )
            for token, each in zip(tokens, expected, strict=True):
                assert (token.token_id, token.logprobs) == each
                num_left += sum(empty_some(layer, rng, share) for layer in slots_of(engine))
                check_tables(engine, slots, least=0)
        assert num_left > NUM_TOKENS // 2


@pytest.mark.slow
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)
def test_trained_models_write_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphStep, "most_ahead", 0)
    with GgufFile.open(path) as file:
        [num_experts] = {each.num_experts for each in read_spec(file).moe.layers}
    with opened(path, local_experts=num_experts) as engine:
        expected = bits_of(engine, PROMPT, num_tokens=40)
    rng, num_left = np.random.default_rng(0), 0
    for local, slots in ((num_experts // 8, 2), (num_experts // 4, 4)):
        with opened(path, local_experts=local, slots=slots) as engine:
            vocab_size = engine.spec.vocab_size
            tokens = engine.generate(PROMPT, 40, ignore_eos=True, top_logprobs=vocab_size)
            for token, each in zip(tokens, expected, strict=True):
                assert (token.token_id, token.logprobs) == each
                num_left += sum(empty_some(layer, rng, 0.1) for layer in slots_of(engine))
            counts = engine.stats().slots
            assert counts is not None
            assert counts.found > 0
            assert counts.kept > 0
    assert num_left > 0


@pytest.mark.usefixtures("gpus")
def test_experts_that_move_empty_the_slots(model: Path, expected: Bits) -> None:
    with opened(model, slots=3) as engine:
        for number in (1, 3):
            assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == expected
            before = kept(engine)
            engine.replace_experts(swapped(engine.placement, number))
            assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == expected
            assert all(before)
            assert all(kept(engine))


@pytest.mark.parametrize(
    "at",
    [9, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, NUM_TOKENS - 1))],
)
def test_a_step_that_is_not_served_changes_nothing(
    model: Path,
    gpus: EmulatedGpus,
    expected: Bits,
    at: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parent, "LIMIT_MS", 1000)
    ask, count = MailThread.ask, 0

    def counted(thread: MailThread, num_tokens: int) -> None:
        nonlocal count
        count += 1
        if count != at:
            ask(thread, num_tokens)

    monkeypatch.setattr(MailThread, "ask", counted)
    with opened(model, slots=3) as engine:
        assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == expected
        assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == expected
    assert not any(device._range_bytes for device in gpus.opened)


@pytest.mark.usefixtures("gpus")
def test_drafts_find_what_steps_have_kept(model: Path, expected: Bits) -> None:
    with opened(model, slots=6) as engine:
        assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == expected
        text = [token_id for token_id, _ in expected]
        first = engine.prefill(PROMPT)
        before = pairs_of_processor(engine)
        found = engine.verify(text[:6], [-1, 0, 1, 2, 3, 4])
        assert [int(first.next_token_ids[-1]), *found.next_token_ids.tolist()] == text[:7]
        engine.accept(range(6))
        one = engine.verify(text[6:7], [-1])
        assert one.next_token_ids.tolist() == text[7:8]
        assert pairs_of_processor(engine) > before


def test_memory_that_cannot_be_locked_costs_the_slots_only(
    model: Path,
    gpus: EmulatedGpus,
    expected: Bits,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refused(*_: object) -> None:
        raise DeviceUnavailable("cuda:0: out of memory that can be locked")

    monkeypatch.setattr(processor_peer, "FetchedMemory", refused)
    with caplog.at_level(logging.WARNING), opened(model, slots=3) as engine:
        assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == expected
        assert not slots_of(engine)
    [said] = [each for each in caplog.messages if "over the bus" in each]
    assert "out of memory" in said


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("kind", ["Q8_0", pytest.param("MXFP4", marks=pytest.mark.slow)])
def test_layers_with_biases_keep_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whichever leave slots between steps, and after experts were moved."""
    monkeypatch.setattr(GraphStep, "most_ahead", 0)
    shape, rng = SHAPES["gpt_oss"], np.random.default_rng(8)
    path = write_model(tmp_path / "m.gguf", shape, seed=2, tensor_type=kind)
    with opened(path, local_experts=shape.num_experts) as engine:
        expected = bits_of(engine, PROMPT, num_tokens=10)
    with opened(path, local_experts=2, slots=3) as engine:
        assert len(slots_of(engine)) == len(engine.spec.moe.layers)
        for number in (0, 1):
            engine.replace_experts(swapped(engine.placement, number))
            tokens = engine.generate(PROMPT, 10, ignore_eos=True, top_logprobs=shape.vocab_size)
            for token, each in zip(tokens, expected, strict=True):
                assert (token.token_id, token.logprobs) == each
                for layer in slots_of(engine):
                    empty_some(layer, rng, 0.3)
        counts = engine.stats().slots
        assert counts is not None
        assert counts.found > 0
        assert counts.kept > 0


@pytest.mark.usefixtures("gpus")
def test_slots_take_the_memory_that_is_counted(model: Path) -> None:
    numbers = {layer: LOCAL for layer in range(SHAPE.num_layers)}

    def held(slots: int) -> tuple[int, int]:
        with GgufFile.open(model) as file:
            room = footprint(file, read_spec(file), Memory.GPU, cache_slots=slots)
        with opened(model, slots=slots) as engine:
            bits_of(engine, PROMPT, num_tokens=3)
            used = sum(each.experts.gate.weights.nbytes for each in resident_of(engine))
            return used, room.experts_bytes(numbers)

    (before, counted_before), (after, counted) = held(0), held(3)
    assert after == before * (LOCAL + 4) // LOCAL
    assert counted - counted_before >= 2 * (after - before)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("slots", [1, 3])
def test_simulated_slots_keep_what_steps_have_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """No step is started ahead and discarded, as a trace has none of these."""
    monkeypatch.setattr(GraphStep, "most_ahead", 0)
    with opened(model, slots=slots, expert_trace=str(tmp_path / "run.trace")) as engine:
        for first in range(3):
            list(engine.generate(PROMPT[first:], NUM_TOKENS, ignore_eos=True))
        local = lists_of(engine.placement)[LOCAL_OWNER]
        tables = [np.asarray(layer.slot_experts).tolist() for layer in slots_of(engine)]
        scores = [np.array(layer.scores) for layer in slots_of(engine)]
    trace, states = read_trace(tmp_path / "run.trace"), []
    rates = np.array([0.5 ** (1.0 / HALF_LIFE), MARGIN], np.float32)
    for layer, ids in trace.by_layer():
        state = StepState(layer.num_experts, np.array(local[layer.layer_id]), slots)
        hits, brought = np.zeros((2, *ids.shape), np.uint8)
        replay_steps(ids, trace.phases, rates, *state.arrays, hits, brought)
        assert brought.sum() > slots
        states.append(state)
    assert [state.slots.tolist() for state in states] == tables
    for state, expected in zip(states, scores, strict=True):
        np.testing.assert_array_equal(state.scores, expected)


def resident_of(engine: Engine) -> list[ResidentLayer]:
    captured: Any = engine._steps._captured
    return list(captured._choice.mailbox._resident.values())
