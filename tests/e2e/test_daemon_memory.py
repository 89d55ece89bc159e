"""Another program takes the memory of a daemon's GPU while its parent, on another one, writes: the
coldest experts leave it for the parent's processor, the daemon returns their memory, and takes it
again later; the text stays the same. Both GPUs are emulated."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime import Engine
from dflash_runtime.compute import memory_watch
from dflash_runtime.engine import daemon_memory
from dflash_runtime.engine.steps import Steps
from dflash_runtime.experts.telemetry import ExpertMemoryStats
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from support.emulated_daemon import STAYS_FREE_BYTES
from support.emulated_gpu import TINY
from support.mailbox_rig import PROMPT, Rings, install_mailing_gpus, opened, patient_settings
from support.processes import running_daemon, wait_until
from support.random_gguf import write_model
from support.watched_daemon import HOLDS

pytestmark = pytest.mark.e2e

SHAPE = replace(TINY, num_layers=2, num_experts=16, num_experts_used=3)
DAEMON = "link0"
LISTS = {LOCAL_OWNER: range(3), DAEMON: range(3, 14), HOST_OWNER: range(14, 16)}
NUM_TOKENS = 20
CHANGE_S = 30.0
"""For a change on a busy machine."""
MOST_TOKENS = 2000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_model(path, SHAPE, seed=4, tensor_type="Q8_0")


def placement_of(lists: Mapping[str, range]) -> Placement:
    owners = tuple(
        OwnedExperts.from_lists(dict.fromkeys(range(SHAPE.num_layers), ids))
        for ids in lists.values()
    )
    return Placement(dict.fromkeys(range(SHAPE.num_layers), SHAPE.num_experts), (*lists,), owners)


class Rig:
    """A daemon on a GPU, whose memory other programs take."""

    def __init__(self, model: Path, run_dir: Path, file: Path, undo: ExitStack) -> None:
        self.model, self._undo, self._run_dir, self._file = model, undo, run_dir, file
        self.endpoint = f"ipc://{run_dir}/gpu.sock"
        self.resize(1 << 40)
        self.daemon = self.start()

    def start(self) -> subprocess.Popen[str]:
        """Start a daemon; the last one must have been killed."""
        for left in self._run_dir.glob("gpu.sock*"):  # what is killed cannot clean up
            left.unlink()
        return self._undo.enter_context(
            running_daemon(
                self.model,
                self.endpoint,
                ["--device", "cuda:0"],
                module="support.emulated_daemon",
                DFLASHTEST_DEVICE_BYTES=str(self._file),
            )
        )

    def resize(self, num_bytes: int) -> None:
        """What there is for the daemon, and what is to stay free."""
        part = self._file.with_suffix(".part")
        part.write_text(str(num_bytes))
        part.replace(self._file)

    def held_bytes(self) -> int:
        self.daemon.send_signal(signal.SIGUSR1)
        assert self.daemon.stderr is not None
        while not (line := self.daemon.stderr.readline()).startswith(HOLDS):
            pass
        found: dict[str, int] = json.loads(line.removeprefix(HOLDS))
        return found["bytes of arrays"]

    def take(self, num_bytes: int) -> int:
        """Another program takes so much, of what is to stay free; returns what the daemon has."""
        held_bytes = self.held_bytes()
        self.resize(held_bytes + STAYS_FREE_BYTES - num_bytes)
        return held_bytes

    def opened(self, lists: Mapping[str, range] = LISTS, **changes: Any) -> Engine:
        settings = replace(patient_settings(), heartbeat_ms=400, check_replies=0, heat="off")
        return opened(
            self.model,
            connect=[self.endpoint],
            placement=placement_of(lists),
            settings=replace(settings, **changes),
            context=64,
        )


@pytest.fixture
def rig(
    model: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Rig]:
    install_mailing_gpus(monkeypatch)
    with ExitStack() as undo:
        yield Rig(model, run_dir, tmp_path / "bytes", undo)


def text(engine: Engine, then: Callable[[], object] = lambda: None) -> list[int]:
    """`then` is called after each token."""
    found = []
    for token in engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True):
        found.append(token.token_id)
        then()
    return found


def memory_of(engine: Engine) -> ExpertMemoryStats:
    return engine.stats().daemon_memory[DAEMON]


def wait_between_runs(engine: Engine, condition: Callable[[], bool], what: str) -> None:
    """Nobody asks."""

    def look() -> bool:
        engine.move_experts()
        return condition()

    wait_until(look, what, within_s=CHANGE_S)


def num_at(engine: Engine, name: str) -> int:
    index = engine.placement.owner_names.index(name)
    return engine.placement.owners[index].num_experts


@pytest.mark.parametrize("is_mailed", [True, False])
def test_memory_is_given_back_within_a_text_and_taken_again(rig: Rig, is_mailed: bool) -> None:
    with rig.opened(ipc_transport="auto" if is_mailed else "stream") as engine:
        expected = text(engine)
        before, first = memory_of(engine), engine.placement
        assert before.held_bytes == before.most_bytes > before.least_bytes
        held_bytes = rig.take(80_000)
        taken_s = time.monotonic()

        def take_time() -> None:
            """From the fourth token on, until there is a cut."""
            if next(tokens) > 3 and not memory_of(engine).num_cuts:
                time.sleep(1.0)

        tokens = itertools.count(1)
        assert text(engine, take_time) == expected
        assert memory_of(engine).num_cuts == 1
        wait_until(
            lambda: rig.held_bytes() < held_bytes - 50_000, "memory to come back", within_s=CHANGE_S
        )
        print(f"given back after {time.monotonic() - taken_s:.1f} s at most")
        cut = memory_of(engine)
        assert cut.least_bytes <= cut.held_bytes < before.held_bytes
        assert num_at(engine, DAEMON) + num_at(engine, HOST_OWNER) == 13 * SHAPE.num_layers
        assert text(engine) == expected
        wait_between_runs(
            engine, lambda: engine.stats().owners[DAEMON].give_back_bytes == 0, "enough memory"
        )
        rig.resize(1 << 40)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory_watch, "CALM_S", 0.5)
            wait_between_runs(engine, lambda: memory_of(engine).num_returns > 0, "a return")
        assert memory_of(engine).held_bytes == before.held_bytes
        assert num_at(engine, DAEMON) == 11 * SHAPE.num_layers
        assert text(engine) == expected
        again = engine.placement
        assert again is not first
        with rig.opened() as other:
            other.replace_experts(again)
            assert text(other) == expected


def test_experts_move_together_beside_steps_of_a_mailbox(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings = Rings(monkeypatch)
    with rig.opened() as engine:
        expected = text(engine)

        def has_more_cuts(num_cuts: int) -> bool:
            return memory_of(engine).num_cuts > num_cuts

        for num_before in (0, 1):
            held_bytes = rig.take(51_000)
            wait_between_runs(engine, partial(has_more_cuts, num_before), "a cut")
            rings.count = 0
            end_s = time.monotonic() + CHANGE_S
            while rig.held_bytes() > held_bytes - 30_000:
                assert text(engine) == expected
                assert time.monotonic() < end_s
            assert text(engine) == expected
            assert rings.count >= NUM_TOKENS - 1


def test_a_daemon_that_is_killed_while_it_gives_back_changes_no_text(rig: Rig) -> None:
    with rig.opened() as engine:
        expected = text(engine)
        rig.take(80_000)
        memory = engine._daemon_memory
        assert memory is not None
        tokens = itertools.count(1)

        def kill_once_asked() -> None:
            if memory.is_changing and rig.daemon.poll() is None:
                rig.daemon.kill()
                rig.daemon.wait()
            elif next(tokens) > 3 and rig.daemon.poll() is None:
                time.sleep(1.0)

        assert text(engine, kill_once_asked) == expected
        assert rig.daemon.poll() is not None
        assert text(engine) == expected
        rig.resize(1 << 40)
        rig.daemon = rig.start()
        wait_until(lambda: not engine.stats().owners[DAEMON].is_lost, "the daemon to be back")
        assert text(engine) == expected
        rig.take(80_000)
        wait_between_runs(engine, lambda: memory_of(engine).num_cuts > 0, "a cut")
        assert text(engine) == expected


def test_a_parent_without_another_place_keeps_its_experts_and_what_nobody_needs_goes(
    rig: Rig,
) -> None:
    alone = {LOCAL_OWNER: range(3), DAEMON: range(3, 16)}
    with rig.opened(alone) as engine:
        expected = text(engine)
        held_bytes = rig.take(80_000)
        assert engine.stats().daemon_memory == {}

        def is_asked() -> bool:
            engine.move_experts()
            return engine.stats().owners[DAEMON].give_back_bytes > 0

        wait_until(is_asked, "the daemon to ask", within_s=CHANGE_S)
        assert text(engine) == expected
        assert rig.held_bytes() >= held_bytes
    wait_until(lambda: rig.held_bytes() < held_bytes - 100_000, "all to go", within_s=CHANGE_S)


def test_a_daemon_that_says_anything_is_obeyed_by_the_rules_only(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_of_it = 1 << 61
    said, clock = (0, 0), SimpleNamespace(now_s=time.monotonic())
    monkeypatch.setattr(daemon_memory, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    with rig.opened() as engine:
        expected = text(engine)
        monkeypatch.setattr(Steps, "memory_said", lambda steps: {DAEMON: said})

        def look(num_s: float) -> None:
            """So many seconds, with all the time that a change needs."""
            memory = engine._daemon_memory
            assert memory is not None
            end_s = clock.now_s + num_s
            while clock.now_s < end_s or memory.is_changing:
                clock.now_s += 0.25
                engine.move_experts()
                time.sleep(0.01 * memory.is_changing)

        said = all_of_it, all_of_it
        look(30)
        least = memory_of(engine)
        assert (least.num_cuts, least.held_bytes) == (1, least.least_bytes)
        assert "least" in least.last_reason
        assert num_at(engine, DAEMON) == SHAPE.num_experts_used * SHAPE.num_layers
        assert text(engine) == expected
        said = 0, all_of_it
        look(9)
        assert memory_of(engine).num_returns == 0
        look(4)
        most = memory_of(engine)
        assert (most.num_returns, most.held_bytes) == (1, most.most_bytes)
        assert text(engine) == expected
        look(20)
        assert memory_of(engine).num_returns == 1
        for number in range(20):
            said = (0, all_of_it) if number % 2 else (1, all_of_it)
            look(2)
        assert memory_of(engine).num_returns == 1
        assert memory_of(engine).num_cuts <= 11
        assert text(engine) == expected
