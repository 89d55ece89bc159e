"""Experts that move between owners of an open engine: texts stay, nothing is lost, whatever happens
to the daemons meanwhile."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_protocol.errors import DaemonUnavailable, DflashError, HandshakeRefused, SettingsError
from dflash_protocol.ids import F32Array, Phase
from dflash_protocol.placement import Placement
from dflash_runtime import Engine
from dflash_runtime.experts import runtime
from dflash_runtime.experts.replacing import Prepared
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from support import undisturbed as rig
from support.descriptors import num_descriptors
from support.emulated_daemon import FREE
from support.emulated_gpu import TINY
from support.faults import greedy, shared_memory_of
from support.interrupts import interrupt_main_thread
from support.moved_experts import (
    DAEMONS,
    daemon_called,
    lists_of,
    moved,
    opened,
    placed,
    same_owners,
    shuffled,
)
from support.processes import MOST_POOL_THREADS, running_daemon, wait_until
from support.random_models import write_qwen3moe
from support.scripted_moves import move_between_daemons
from support.undisturbed import FAULT_AFTER, NUM_TOKENS, PROMPT
from support.watched_daemon import HOLDS, RESIDENT, resident_bytes

pytestmark = pytest.mark.e2e

model = rig.model
undisturbed = rig.undisturbed


@pytest.fixture(scope="module")
def expected(model: Path) -> F32Array:
    with Engine.open(model) as engine:
        return engine.logits(PROMPT)


def assert_right(engine: Engine, undisturbed: list[int], expected: F32Array) -> None:
    """Steps and prompts, by daemons alone."""
    before = engine.stats().owners
    assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
    assert (engine.logits(PROMPT) == expected).all()
    for name, owned in zip(engine.placement.owner_names, engine.placement.owners, strict=True):
        now = engine.stats().owners[name]
        assert now.num_experts == owned.num_experts
        assert (now.pairs > before[name].pairs) == (owned.num_experts > 0)


@pytest.mark.parametrize(
    ("transport", "is_spawned"),
    [("shared", True), ("stream", False), pytest.param("stream", True, marks=pytest.mark.slow)],
)
def test_text_is_the_same_wherever_experts_are_moved(
    model: Path,
    run_dir: Path,
    undisturbed: list[int],
    expected: F32Array,
    transport: str,
    is_spawned: bool,
) -> None:
    """All of a layer, all of a daemon, none, and back."""
    with contextlib.ExitStack() as undo:
        connect = [] if is_spawned else [f"ipc://{run_dir}/{name}.sock" for name in DAEMONS]
        for each in connect:
            undo.enter_context(running_daemon(model, each))
        engine = undo.enter_context(opened(model, ipc_transport=transport, connect=connect))
        first = engine.placement
        for after in (
            moved(first, 1),
            moved(first, -2),
            moved(first, 1000),
            moved(first, -1000),
            first,
            shuffled(first, 1),
        ):
            engine.replace_experts(after)
            assert same_owners(engine.placement, after)
            assert_right(engine, undisturbed, expected)
        stats = engine.stats()
        assert stats.events == []
        assert all(owner.restarts == 0 for owner in stats.owners.values())
        assert all(owner.transport == transport for owner in stats.owners.values())


def test_experts_move_between_the_parent_and_daemons(
    model: Path, undisturbed: list[int], expected: F32Array
) -> None:
    """Its own are replaced in place, as many of each layer as before."""
    with opened(model, local_experts=2) as engine:
        first = engine.placement
        lists = lists_of(first)
        for layer_id, here in lists["local"].items():
            here[0], lists["cpu1"][layer_id][1] = lists["cpu1"][layer_id][1], here[0]
        engine.replace_experts(placed(first, lists))
        assert_right(engine, undisturbed, expected)
        for layer_id, here in lists["local"].items():
            lists["cpu0"][layer_id].append(here.pop())
        with pytest.raises(ValueError, match="room"):
            engine.replace_experts(placed(first, lists))
        assert_right(engine, undisturbed, expected)
        engine.replace_experts(first)
        assert_right(engine, undisturbed, expected)


def test_a_placement_is_that_of_a_new_engine(model: Path, undisturbed: list[int]) -> None:
    with opened(model) as engine:
        engine.replace_experts(shuffled(engine.placement, 3))
        after = engine.placement
        tokens = greedy(engine, PROMPT, NUM_TOKENS)
    with opened(model, placement=after) as engine:
        assert same_owners(engine.placement, after)
        assert greedy(engine, PROMPT, NUM_TOKENS) == tokens == undisturbed


@pytest.mark.parametrize(("dtype", "is_kept"), [("f32", True), ("f16", False)])
def test_prefixes_are_reused_after_moves_unless_sums_are_rounded(
    model: Path, dtype: str, is_kept: bool
) -> None:
    """Rounded sums show which of a token's experts one owner has."""

    def reused(engine: Engine) -> int:
        options: dict[str, Any] = {"reuse_prefix": True, "ignore_eos": True}
        for _ in engine.generate(PROMPT, 2, **options):
            pass
        return engine.last_generation.num_reused_tokens

    with opened(model, ipc_dtype=dtype) as engine:
        assert reused(engine) == 0
        most = reused(engine)
        assert most > 0
        engine.replace_experts(shuffled(engine.placement, 1))
        assert reused(engine) == (most if is_kept else 0)
        assert reused(engine) == most


# Faults within a move


STAGES = {
    "begun": (Prepared, "wait"),
    "ready": (MoeExpertComputeRuntime, "replace"),
    "here": (runtime, "replace_experts"),
    "over": (MoeExpertComputeRuntime, "replace"),
}
"""Before these functions, for the last stage after it."""


class Within:
    """Calls a fault once, at a stage of the next move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stage = ""
        self.fault: Callable[[], object] = gc.collect
        for place in {*STAGES.values()}:
            monkeypatch.setattr(*place, self._watched(place))

    def arm(self, stage: str, fault: Callable[[], object]) -> None:
        self.stage, self.fault = stage, fault

    def _watched(self, place: tuple[Any, str]) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(*place)

        def call(*args: Any, **options: Any) -> Any:
            is_here = self.stage and STAGES[self.stage] == place
            if is_here and self.stage != "over":
                self._set_off()
            found = function(*args, **options)
            if is_here and self.stage == "over":
                self._set_off()
            return found

        return call

    def _set_off(self) -> None:
        self.stage = ""
        self.fault()


@pytest.fixture
def within(monkeypatch: pytest.MonkeyPatch) -> Within:
    return Within(monkeypatch)


def assert_both_used(engine: Engine, undisturbed: list[int]) -> None:
    """In the end, by the same text meanwhile."""

    def is_back() -> bool:
        before = engine.stats().owners
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        now = engine.stats().owners
        return all(
            now[name].pairs > before[name].pairs and now[name].retries == before[name].retries
            for name in DAEMONS
        )

    wait_until(is_back, "the daemons to be used", pause_s=0.1)


def assert_moved_or_not(engine: Engine, after: Placement, stage: str) -> None:
    """A move, in which a fault was set off, has been made, or not at all."""
    first = engine.placement
    try:
        engine.replace_experts(after)
    except DaemonUnavailable:
        assert same_owners(engine.placement, first)
    else:
        assert same_owners(engine.placement, after)
        assert stage != "begun"


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_daemon_that_is_killed_within_a_move_changes_no_token(
    model: Path, undisturbed: list[int], within: Within, index: int
) -> None:
    with opened(model, ipc_required=False) as engine:
        for number, stage in enumerate(STAGES):
            within.arm(stage, daemon_called(DAEMONS[index]).kill)
            assert_moved_or_not(engine, shuffled(engine.placement, number), stage)
            assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
            assert_both_used(engine, undisturbed)
        assert engine.stats().owners[DAEMONS[index]].restarts == len(STAGES)
        engine.replace_experts(shuffled(engine.placement, len(STAGES)))
        assert_both_used(engine, undisturbed)


def test_a_daemon_that_is_stopped_within_a_move_changes_no_token(
    model: Path, undisturbed: list[int], within: Within
) -> None:
    with opened(model, ipc_required=False, deadline_ms=300) as engine:
        victim = daemon_called("cpu1")
        for number, stage in enumerate(STAGES):
            after = shuffled(engine.placement, number)
            if stage == "begun":  # or it would be ready before
                victim.suspend()
            within.arm(stage, victim.suspend)
            try:
                assert_moved_or_not(engine, after, stage)
                assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
            finally:
                victim.resume()
            assert_both_used(engine, undisturbed)
        assert "daemon_lost" in {event.kind for event in engine.stats().events}


def take_memory(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGRTMIN)
    assert process.stderr is not None
    while FREE not in process.stderr.readline():
        pass


def test_a_daemon_without_memory_for_both_keeps_what_it_has(tmp_path: Path, run_dir: Path) -> None:
    """A second program takes the memory of its GPU, and then gives it back."""
    model = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    endpoint = f"ipc://{run_dir}/gpu.sock"
    with (
        running_daemon(
            model, endpoint, ["--device", "cuda:0"], module="support.emulated_daemon"
        ) as process,
        opened(model, connect=[endpoint], local_experts=2) as engine,
    ):
        first, expected = engine.placement, engine.logits(PROMPT)
        lists = lists_of(first)
        for ids in lists[first.owner_names[1]].values():
            ids.reverse()
        reversed_ = placed(first, lists)
        for here, there in zip(*(each.values() for each in lists.values()), strict=True):
            here[0], there[0] = there[0], here[0]
        after = placed(first, lists)
        take_memory(process)
        with pytest.raises(HandshakeRefused, match="1,000 of") as caught:
            engine.replace_experts(after)
        assert caught.value.code == "memory"
        assert same_owners(engine.placement, first)
        assert (engine.logits(PROMPT) == expected).all()
        engine.replace_experts(reversed_)  # both share their memory
        assert (engine.logits(PROMPT) == expected).all()
        take_memory(process)  # gives it back
        engine.replace_experts(after)
        with opened(model, connect=[endpoint], placement=after) as new:
            assert (engine.logits(PROMPT) == new.logits(PROMPT)).all()
        assert {event.kind for event in engine.stats().events} == {"numeric_class_differs"}


def test_ctrl_c_leaves_one_placement_or_the_other(
    model: Path, undisturbed: list[int], within: Within
) -> None:
    with opened(model) as engine:
        for number, stage in enumerate(STAGES):
            first = engine.placement
            within.arm(stage, interrupt_main_thread)
            with pytest.raises(KeyboardInterrupt):
                engine.replace_experts(shuffled(first, number))
            assert same_owners(engine.placement, first) == (stage == "begun")
            assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
            engine.replace_experts(shuffled(first, number + 7))
            assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed


def test_an_engine_may_be_closed_within_a_move(model: Path) -> None:
    """And then nothing is prepared any more."""
    with opened(model) as engine:
        after = moved(engine.placement, 1)
        prepared = engine._steps.prepare(after)
    with pytest.raises(DflashError):
        prepared.wait()
    with pytest.raises(SettingsError, match="closed"):
        engine.replace_experts(after)


def test_nothing_is_begun_with_a_lost_daemon(model: Path, undisturbed: list[int]) -> None:
    with opened(model, ipc_required=False) as engine:
        first = engine.placement
        victim = daemon_called("cpu1")
        victim.suspend()
        try:
            wait_until(lambda: engine.stats().owners["cpu1"].is_lost, "silence to be noticed")
            with pytest.raises(DaemonUnavailable, match="cpu1"):
                engine.replace_experts(moved(first, 1))
            assert same_owners(engine.placement, first)
        finally:
            victim.resume()
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed


@pytest.mark.parametrize("num_rounds", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_memory_stays_flat_over_rounds_of_moves(
    model: Path, run_dir: Path, undisturbed: list[int], num_rounds: int
) -> None:
    """Of this process and the daemons: memory, descriptors, shared memory; and threads."""
    with contextlib.ExitStack() as undo:
        connect = [f"ipc://{run_dir}/{name}.sock" for name in DAEMONS]
        daemons = [
            undo.enter_context(running_daemon(model, each, module="support.watched_daemon"))
            for each in connect
        ]
        engine = undo.enter_context(opened(model, connect=connect))
        first = engine.placement

        def held() -> list[tuple[int, int]]:
            pids = [os.getpid(), *(each.pid for each in daemons)]
            return [(num_descriptors(pid), len(shared_memory_of(pid))) for pid in pids]

        def resident() -> list[int]:
            return [resident_bytes(), *(held_by(each)[RESIDENT] for each in daemons)]

        def turn(number: int) -> None:
            engine.replace_experts(moved(first, 1 + number % 3) if number % 2 else first)
            if number % 10 == 0:
                greedy(engine, PROMPT, 3)

        for number in range(100):
            turn(number)
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed  # as before the last count

        def have_links_ended() -> bool:
            at_first = held()
            time.sleep(1)  # on a machine in use a link takes a while to let go
            return held() == at_first

        wait_until(have_links_ended, "the last links to end")
        before, before_held = resident(), held()
        for number in range(num_rounds):
            turn(number)
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        wait_until(lambda: held() == before_held, f"{held()} to become {before_held}", within_s=5)
        grown = [now - then for now, then in zip(resident(), before, strict=True)]
        assert max(grown) <= 4 << 20, grown
        num_threads = [psutil.Process(each.pid).num_threads() for each in daemons]
        assert max(num_threads) <= 4 + MOST_POOL_THREADS


def held_by(process: subprocess.Popen[str]) -> dict[str, int]:
    process.send_signal(signal.SIGUSR1)
    assert process.stderr is not None
    while not (line := process.stderr.readline()).startswith(HOLDS):
        pass
    found: dict[str, int] = json.loads(line.removeprefix(HOLDS))
    return found


def test_a_move_by_hand_ends_the_one_that_is_being_prepared(
    model: Path, undisturbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    move_between_daemons(monkeypatch)
    with opened(model) as engine:
        first, mover = engine.placement, engine._mover
        assert mover is not None
        num_pending = 0
        for number in range(5):
            assert greedy(engine, PROMPT, 3) == undisturbed[:3]
            num_pending += mover._next is not None
            after = shuffled(first, number)
            engine.replace_experts(after)
            assert same_owners(engine.placement, after)
            assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        assert num_pending > 0
        other = replace(first, experts_per_layer={**first.experts_per_layer, 99: 0})
        with pytest.raises(ValueError, match="model"):
            engine.replace_experts(other)


def test_what_takes_over_is_used_from_the_next_step_on(model: Path, undisturbed: list[int]) -> None:
    """Between any two tokens of a run, as all owners are of one class."""
    with opened(model) as engine:
        steps, first, tokens = engine._steps, engine.placement, []
        for token in engine.generate(PROMPT, NUM_TOKENS):
            tokens.append(token.token_id)
            if len(tokens) % 4 == 0:
                after = shuffled(first, len(tokens))
                assert steps.keeps_classes(after)
                steps.replace(steps.prepare(after), ends_run=False)
                assert same_owners(engine.placement, after)
            if len(tokens) == FAULT_AFTER:
                before = engine.stats().owners
        assert tokens == undisturbed
        now = engine.stats().owners
        for name in DAEMONS:
            assert now[name].phases[Phase.DECODE].pairs > before[name].phases[Phase.DECODE].pairs
        assert engine.stats().events == []


def test_daemons_of_several_parents_move_for_each_alone(
    model: Path, run_dir: Path, undisturbed: list[int]
) -> None:
    """While the other writes."""
    connect = [f"ipc://{run_dir}/{name}.sock" for name in DAEMONS]
    with contextlib.ExitStack() as undo:
        for each in connect:
            undo.enter_context(running_daemon(model, each))
        one, other = (undo.enter_context(opened(model, connect=connect)) for _ in range(2))
        found: list[list[int]] = []
        writer = threading.Thread(
            target=lambda: found.extend(greedy(other, PROMPT, NUM_TOKENS) for _ in range(8))
        )
        writer.start()
        first = one.placement
        for number in range(8):
            one.replace_experts(moved(first, 2) if number % 2 else moved(first, -1))
            assert greedy(one, PROMPT, NUM_TOKENS) == undisturbed
        writer.join()
        assert found == [undisturbed] * 8
        assert other.stats().events == []
