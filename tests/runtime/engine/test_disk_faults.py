"""Requests that end in the middle of reads of experts, files that change, memory for too few
experts: no wrong token, nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import psutil
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.errors import ModelFileError, SettingsError
from dflash_runtime import Engine
from dflash_runtime.cli import main
from dflash_runtime.engine import opening
from support.arena_rig import check_whole, slot_bytes_of
from support.descriptors import num_descriptors
from support.disk_engines import (
    MANY_LAYERS,
    TRAINED,
    arena_of,
    needed_mib_of,
    opened,
    stats_of,
)
from support.faults import greedy
from support.interrupts import interrupt_main_thread
from support.processes import run_main, wait_until
from support.random_models import write_qwen3moe
from support.undisturbed import settings_with

PROMPT = np.random.default_rng(1).integers(0, 256, 40).tolist()
NUM_TOKENS = 12
NUM_SLOTS = 2 * MANY_LAYERS.num_experts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, MANY_LAYERS, seed=5, tensor_type="Q8_0")


def text_of(engine: Engine) -> list[int]:
    tokens = engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True, reuse_prefix=False)
    return [each.token_id for each in tokens]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    with opened(model, None) as engine:
        return text_of(engine)


@pytest.mark.parametrize("rounds", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_requests_that_end_at_any_time_leave_nothing(
    model: Path, expected: list[int], rounds: int
) -> None:
    """Cancelled within the prompt, with the next layer on its way; between tokens; given up."""
    process, before = psutil.Process(), (0, 0)
    rng = np.random.default_rng(0)
    with opened(model, NUM_SLOTS) as engine:
        arena, num_cancelled = arena_of(engine), 0
        for number in range(rounds):
            if number == rounds // 10:
                gc.collect()
                before = num_descriptors(), process.memory_info().rss
            calls, asked = itertools.count(), int(rng.integers(16))
            tokens = engine.generate(
                rng.permutation(PROMPT).tolist(),
                3,
                ignore_eos=True,
                is_cancelled=lambda calls=calls, asked=asked: next(calls) == asked,  # type: ignore[misc]
            )
            list(itertools.islice(tokens, int(rng.integers(1, 4))))
            del tokens
            num_cancelled += engine.last_generation.finish_reason == "cancelled"
            check_whole(arena)
            if number % 10 == 0:
                assert text_of(engine) == expected
        assert num_cancelled > rounds // 4
        assert text_of(engine) == expected
        gc.collect()
        # The thread that watches memory reads a file of the system's now and then.
        wait_until(lambda: num_descriptors() == before[0], "descriptors to be given back")
        assert process.memory_info().rss - before[1] < 8 << 20
        assert stats_of(engine).failed == 0


@pytest.fixture
def interrupted() -> Iterator[list[int]]:
    """Whether interrupts may come now, as the last one of a list says, has effect on them."""
    wanted = [0]

    def handle(number: int, frame: FrameType | None) -> None:
        if wanted[-1]:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    yield wanted
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_at_any_time_leaves_nothing_wrong(
    model: Path, expected: list[int], interrupted: list[int]
) -> None:
    rng, num_interrupted = np.random.default_rng(0), 0
    with opened(model, NUM_SLOTS) as engine:
        began_s = time.monotonic()
        assert text_of(engine) == expected
        took_s = time.monotonic() - began_s
        for delay_s in rng.uniform(0.0, took_s, 12):
            timer = threading.Timer(delay_s, interrupt_main_thread)
            interrupted[:] = [1]
            try:
                timer.start()
                text_of(engine)
                interrupted[:] = [0]
            except KeyboardInterrupt:
                num_interrupted += 1
            interrupted[:] = [0]
            timer.join()
            check_whole(arena_of(engine))
            assert text_of(engine) == expected
        assert num_interrupted > 2
        assert stats_of(engine).failed == 0


@pytest.mark.parametrize("is_written", [False, True], ids=["replaced", "written"])
def test_a_file_that_changes_while_text_is_written(
    model: Path, expected: list[int], tmp_path: Path, is_written: bool
) -> None:
    """Another file under its name is not read; one that is written to ends the text."""
    path = Path(shutil.copy(model, tmp_path / "m.gguf"))
    other = bytes(len(path.read_bytes()))
    with opened(path, NUM_SLOTS) as engine:
        tokens = engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True)
        found = [next(tokens).token_id for _ in range(3)]
        before = stats_of(engine)
        if is_written:
            with path.open("r+b") as file:
                file.write(other)
            with pytest.raises(ModelFileError, match="written"):
                list(tokens)  # of the next tenth of a second some may be wrong, before that is seen
            with pytest.raises(ModelFileError, match="written"):
                text_of(engine)
            return
        (tmp_path / "other").write_bytes(other)
        os.replace(tmp_path / "other", path)
        assert found + [each.token_id for each in tokens] == expected
        assert stats_of(engine).read_bytes > before.read_bytes
        assert stats_of(engine).failed == 0


# -- budgets --------------------------------------------------------------------------------------

MODEL = TRAINED[0]
"""Whose layers take more than a MiB, as budgets are told."""


@pytest.fixture(scope="module")
def needed_mib() -> int:
    """What an engine on the processor needs beside experts."""
    return needed_mib_of(MODEL, context=64)


@pytest.mark.parametrize(
    ("more_mib", "says", "has_arena"),
    [
        (-50, "not read from the disk as a whole", False),
        (0, "not read from the disk as a whole", False),
        (3, r"room for \d+ of 256 experts", True),
        (6, r"room for \d+ of 256 experts", True),
        (20, "", False),
    ],
)
def test_a_budget_costs_time_alone(
    needed_mib: int, caplog: pytest.LogCaptureFixture, more_mib: int, says: str, has_arena: bool
) -> None:
    """Below what a layer takes experts are used where the file is mapped, which is said once."""
    with Engine.open(MODEL, device="cpu", settings=settings_with(heat="off")) as engine:
        expected = greedy(engine, [5, 9, 2], NUM_TOKENS)
    settings = settings_with(context=64, heat="off", host_memory_mb=needed_mib + more_mib)
    caplog.clear()
    with Engine.open(MODEL, device="cpu", settings=settings) as engine:
        assert greedy(engine, [5, 9, 2], NUM_TOKENS) == expected
        disk = engine.stats().disk
    assert (disk is not None) == has_arena
    said = [each.getMessage() for each in caplog.records if "from the disk" in each.getMessage()]
    assert len(said) == bool(says)
    if says:
        assert re.search(says, said[0])


@pytest.mark.parametrize("mib", [0, 1, 100])
def test_a_budget_below_what_an_engine_needs_is_refused(mib: int) -> None:
    settings = settings_with(context=64, heat="off", host_memory_mb=mib)
    with pytest.raises(SettingsError, match=f"this process can have {mib} MiB"):
        Engine.open(MODEL, device="cpu", settings=settings)


def test_a_program_with_too_little_memory_for_a_layer_writes_its_text(needed_mib: int) -> None:
    done = [
        run_main(
            main,
            *("generate", MODEL, "--device", "cpu", "--context", "64", "--token-ids", "5,9,2"),
            *("-n", "9", "--json", *options),
        )
        for options in ([], ["--host-memory-mb", str(needed_mib)])
    ]
    assert [each.returncode for each in done] == [0, 0]
    whole, less = (json.loads(each.stdout) for each in done)
    assert less["tokens"] == whole["tokens"]
    assert less["disk"] is None
    assert "from the disk" in done[1].stderr
    assert "from the disk" not in done[0].stderr


@pytest.mark.parametrize("num_bytes", [0, 1, 100_000, -1])
def test_less_memory_than_a_layer_is_said(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of bytes below zero: that much less than a layer takes."""
    with GgufFile.open(TRAINED[0]) as file:
        least = 32 * slot_bytes_of(file)
    asked = num_bytes if num_bytes >= 0 else least + num_bytes
    monkeypatch.setattr(opening, "_arena_bytes", lambda *_: asked)
    with Engine.open(TRAINED[0], backend="cpu", threads=1, settings=settings_with(heat="off")):
        pass
    [said] = [each for each in caplog.messages if "from the disk" in each]
    assert re.search(r": \d MiB are (0|2|31) experts; a layer has 32$", said)


def test_predictions_leave_a_layer_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers are left out before experts are no longer read as a whole."""
    with GgufFile.open(TRAINED[0]) as file:
        least = 32 * slot_bytes_of(file)
    monkeypatch.setattr(opening, "_arena_bytes", lambda *_: least + 1)
    settings = settings_with(heat="off")
    with Engine.open(TRAINED[0], backend="cpu", threads=1, settings=settings) as engine:
        greedy(engine, [5, 9, 2], 5)
        disk = stats_of(engine)
    assert disk.num_slots == 32
    assert disk.look_ahead.checked == 0
