"""A daemon that outlives its parents: reused as it is, placed anew, and when its file changes."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_protocol.errors import HandshakeRefused, ModelFileError
from dflash_protocol.ids import F32Array
from dflash_runtime import Engine
from dflash_runtime.engine.demo_model import demo_model_path
from dflash_runtime.experts.daemons.supervisor import Supervisor
from support.processes import START_S, running_daemon, wait_until
from support.random_models import ODD_SHAPES, write_qwen3moe

pytestmark = pytest.mark.e2e

SHAPE = ODD_SHAPES[0]
IDS = [1, 2, 3, 4]
READY_S = 1.0
"""From a parent's first step towards a running daemon with its experts to readiness, at most."""


@pytest.fixture
def ready_times_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each handshake took from now on, sharing memory included."""
    times_s: list[float] = []
    start = Supervisor.start

    def timed(self: Supervisor) -> None:
        started_s = time.perf_counter()
        start(self)
        times_s.append(time.perf_counter() - started_s)

    monkeypatch.setattr(Supervisor, "start", timed)
    return times_s


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_qwen3moe(tmp_path / "m.gguf", SHAPE, seed=10)


@pytest.fixture
def endpoint(run_dir: Path) -> str:
    return f"ipc://{run_dir}/d.sock"


def reference_daemon(model: Path, endpoint: str) -> Iterator[subprocess.Popen[str]]:
    """It speaks through sockets, so that it need not load what kernels and rings are made with."""
    options = ["--backend", "reference", "--ipc-transport", "stream"]
    with running_daemon(model, endpoint, options) as process:
        yield process


@pytest.fixture
def daemon(model: Path, endpoint: str) -> Iterator[subprocess.Popen[str]]:
    """A daemon of the small model."""
    yield from reference_daemon(model, endpoint)


Open = Callable[..., Engine]


@pytest.fixture
def open_engine(model: Path, endpoint: str) -> Open:
    """Opens an engine that is connected to the daemon, of `model` unless told otherwise."""

    def opened(path: Path = model, **options: object) -> Engine:
        return Engine.open(path, connect=[endpoint], backend="reference", **options)  # type: ignore[arg-type]

    return opened


def rest_of_log(process: subprocess.Popen[str]) -> list[str]:
    """What the daemon says until it ends, which it is told to unless it has."""
    if process.poll() is None:
        process.terminate()
    _, errors = process.communicate(timeout=START_S)
    return [line.removeprefix("dflash-daemon: ") for line in errors.splitlines()]


def placements_in(log: list[str]) -> list[tuple[int, int, int]]:
    """How many experts were kept, loaded and dropped for each placement that a daemon tells of."""
    lines = (line.partition(": ") for line in log)
    texts = (text for what, _, text in lines if what.startswith("placement "))
    counts = (list(map(int, re.findall(r"\d+", text))) for text in texts)
    return [(kept, loaded, dropped) for kept, loaded, dropped in counts]


def logits(engine: Engine) -> F32Array:
    return engine.logits(IDS)


def test_a_running_daemon_is_reused_at_once(endpoint: str, ready_times_s: list[float]) -> None:
    """The demo model with the fast kernels, as a user has it."""
    with running_daemon(demo_model_path(), endpoint) as process:
        found = []
        for _ in range(4):
            with Engine.open(connect=[endpoint]) as engine:
                found.append(logits(engine))
                assert engine.stats().owners["link0"].requests > 0
        log = rest_of_log(process)
    assert all(each.tobytes() == found[0].tobytes() for each in found)
    assert len([line for line in log if line.startswith("placement")]) == 1, log
    assert statistics.median(ready_times_s[1:]) < READY_S, ready_times_s
    print("ready after (ms):", [round(each * 1e3, 1) for each in ready_times_s])


def test_other_placements_load_and_drop_the_difference(
    daemon: subprocess.Popen[str], open_engine: Open, model: Path
) -> None:
    with Engine.open(model, backend="reference") as alone:
        expected = logits(alone)
    num_layers = len(alone.spec.moe.layers)
    for local_experts in (4, 2, 4):
        with open_engine(local_experts=local_experts, require_daemons=True) as engine:
            np.testing.assert_array_equal(logits(engine), expected)
            assert engine.stats().owners["link0"].requests > 0
        time.sleep(0.3)  # for its goodbye to come before the next one's hello
    few, many = (num_layers * (SHAPE.num_experts - local) for local in (4, 2))
    assert placements_in(rest_of_log(daemon)) == [
        (0, few, 0),
        (few, many - few, 0),
        (few, 0, many - few),
    ]


def test_parents_of_different_placements_work_at_the_same_time(
    daemon: subprocess.Popen[str], open_engine: Open
) -> None:
    with (
        open_engine(local_experts=4, require_daemons=True) as first,
        open_engine(local_experts=1, require_daemons=True) as second,
    ):
        expected = logits(first)
        for engine in (second, first, second):
            np.testing.assert_array_equal(logits(engine), expected)
    placements = placements_in(rest_of_log(daemon))
    assert placements
    assert not any(changes == [0, 0] for _, *changes in placements)


def test_a_file_that_was_replaced_is_served_as_it_was_to_whoever_had_it(
    daemon: subprocess.Popen[str], open_engine: Open, model: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.gguf"
    shutil.copyfile(model, kept)
    with open_engine(require_daemons=True) as engine:
        before = logits(engine)
        write_qwen3moe(tmp_path / "other.gguf", SHAPE, seed=99).replace(model)
        np.testing.assert_array_equal(logits(engine), before)
        with pytest.raises(HandshakeRefused, match="file was replaced"):
            open_engine()
        with open_engine(kept, require_daemons=True) as same:
            np.testing.assert_array_equal(logits(same), before)
        time.sleep(1.5)  # a daemon looks every second
        assert [event.kind for event in engine.stats().events] == []
        np.testing.assert_array_equal(logits(engine), before)
    log = rest_of_log(daemon)
    [line] = [line for line in log if "replaced" in line and "refused" not in line]
    assert str(model) in line
    with Engine.open(model, backend="reference") as other:
        assert not np.array_equal(logits(other), before)


def change_last_byte(path: Path) -> None:
    data = path.read_bytes()[-1:]
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([data[0] ^ 1]))


def test_a_file_that_was_written_to_ends_its_daemon_and_the_parent_computes_on(
    daemon: subprocess.Popen[str], open_engine: Open, model: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.gguf"
    shutil.copyfile(model, kept)
    with open_engine(kept) as engine:
        before = logits(engine)
        change_last_byte(model)
        assert daemon.wait(START_S) == 1
        wait_until(lambda: engine.stats().events, "an event")
        assert engine.stats().events[0].kind == "daemon_lost"
        np.testing.assert_array_equal(logits(engine), before)
        assert engine.stats().owners["fallback"].requests > 0
    assert re.match(rf"error: {re.escape(str(model))}: .*\bwritten\b", rest_of_log(daemon)[-1])


def test_a_parent_does_not_fall_back_on_a_file_that_was_written_to(
    daemon: subprocess.Popen[str], open_engine: Open, model: Path
) -> None:
    with open_engine() as engine:
        logits(engine)
        change_last_byte(model)
        assert daemon.wait(START_S) == 1
        wait_until(lambda: engine.stats().events, "an event")
        with pytest.raises(ModelFileError, match=r"\bwritten\b"):
            logits(engine)
    rest_of_log(daemon)
