"""Heat of an engine: counted by phase wherever experts are, kept between runs, never in the way."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.errors import DflashError, SettingsError
from dflash_protocol.hotness import Hotness, write_hotness
from dflash_protocol.ids import I64Array, Phase
from dflash_protocol.settings import Settings, load_settings
from dflash_runtime import Engine
from dflash_runtime.engine import heat_keeper, kept_files
from dflash_runtime.placement.heat import Heat
from dflash_runtime.placement.heat_file import read_heat_file
from support.processes import wait_until
from support.random_models import Qwen3MoeShape, write_qwen3moe

SHAPE = Qwen3MoeShape(num_layers=2, num_experts=6, num_experts_used=2, vocab_size=300)
PROMPT = list(range(5, 25))
NUM_TOKENS = 9
NUM_PAIRS = SHAPE.num_layers * SHAPE.num_experts_used


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return write_qwen3moe(folder / "m.gguf", SHAPE, seed=1, tokenizer="bytes")


@pytest.fixture
def beside(model: Path) -> Path:
    """Where heat is kept."""
    return model.with_name("m.gguf.heat")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


def settings_with(cache: Path | None = None, **options: Any) -> Settings:
    if cache is not None:
        options["cache_dir"] = str(cache)
    return replace(load_settings(), **{"heat": "auto", "threads": 1, **options})


def opened(model: Path, cache: Path, **options: Any) -> Engine:
    return Engine.open(model, backend="reference", settings=settings_with(cache, **options))


def run(engine: Engine, num_tokens: int = NUM_TOKENS) -> None:
    for _ in engine.generate(PROMPT, num_tokens, ignore_eos=True):
        pass


def tokens_of(heat: Heat) -> tuple[int, int]:
    return heat.num_tokens(Phase.PREFILL), heat.num_tokens(Phase.DECODE)


ONE_RUN = len(PROMPT), NUM_TOKENS - 1

WAYS: list[dict[str, Any]] = [
    {},
    {"backend": "reference"},
    {"daemons": ["cpu"]},
    {"daemons": ["cpu"], "local_experts": 2},
]


def test_heat_is_the_same_wherever_experts_are_computed(model: Path) -> None:
    """In recorded steps, by the host layer by layer, in a daemon, and in both."""
    found: list[I64Array] = []
    for way in WAYS:
        with Engine.open(model, settings=settings_with(heat="off"), **way) as engine:
            run(engine)
            engine.prefill(PROMPT[:5])
            engine.verify([7, 8, 9], [-1, 0, 1])
            engine.verify([7, 8, 9], [-1, -1, 1])  # no chain
            heat = engine.heat()
            num_drafts = 3 + 3
        assert tokens_of(heat) == (len(PROMPT) + 5, NUM_TOKENS - 1 + num_drafts)
        owners = np.sum(list(heat.pairs_of_owner.values()), axis=0)
        assert owners.tolist() == [each * NUM_PAIRS for each in tokens_of(heat)]
        assert len(heat.pairs_of_owner) == (1 if way.get("local_experts") is None else 2)
        found.append(heat.totals)
    for totals in found[1:]:
        np.testing.assert_array_equal(totals, found[0])


def test_heat_survives_a_restart(model: Path, beside: Path, cache: Path) -> None:
    with opened(model, cache) as engine:
        assert tokens_of(engine.heat()) == (0, 0)
        run(engine)
        first = engine.heat()
    file = read_heat_file(beside)
    assert (file.model_name, file.num_layers) == (engine.spec.name, SHAPE.num_layers)
    np.testing.assert_array_equal(file.heat.totals, first.totals)
    with opened(model, cache) as engine:
        for name in ("totals", "slow", "fast"):
            np.testing.assert_array_equal(getattr(engine.heat(), name), getattr(first, name))
        run(engine)
        second = engine.heat()
    assert tokens_of(first) == ONE_RUN
    np.testing.assert_array_equal(second.totals, 2 * first.totals)
    assert second.pairs_of_owner == {"local": [2 * each * NUM_PAIRS for each in ONE_RUN]}
    assert not list(beside.parent.glob(".*"))  # nothing half written
    assert not (cache / "heat").exists()


def test_heat_is_counted_while_text_is_written(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as once a token, it is what it is when counted once."""
    with opened(model, cache, heat="off") as engine:
        run(engine, 60)
        expected = engine.heat()
    monkeypatch.setattr(heat_keeper, "_LEAST_APART_S", 0.0)
    monkeypatch.setattr(heat_keeper, "_SHARE_OF_TIME", 1e9)
    with opened(model, cache, heat="off") as engine:
        keeper = engine._steps.heat
        seen = []
        for _ in engine.generate(PROMPT, 60, ignore_eos=True):
            seen.append(tokens_of(keeper.copy()))
        assert len(set(seen)) > 50
        found = engine.heat()
    np.testing.assert_array_equal(found.totals, expected.totals)
    np.testing.assert_allclose(found.fast.sum(axis=2), expected.fast.sum(axis=2))


def test_it_is_saved_now_and_then(
    model: Path, beside: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heat_keeper, "_SAVE_EVERY_S", 0.02)
    with opened(model, cache) as engine:
        run(engine)
        engine.heat()
        wait_until(beside.exists, "saved heat")
        stamp = beside.stat().st_mtime_ns
        time.sleep(0.1)
        assert beside.stat().st_mtime_ns == stamp  # nothing new
    assert tokens_of(read_heat_file(beside).heat) == ONE_RUN


def test_of_two_engines_the_one_that_saves_last_is_kept(
    model: Path, beside: Path, cache: Path
) -> None:
    with opened(model, cache) as first:
        with opened(model, cache) as second:
            run(second)
            run(second)
        assert read_heat_file(beside).heat.num_tokens(Phase.PREFILL) == 2 * len(PROMPT)
        run(first)
    assert tokens_of(read_heat_file(beside).heat) == ONE_RUN


def test_an_engine_that_is_dropped_saves_too(model: Path, beside: Path, cache: Path) -> None:
    engine = opened(model, cache)
    run(engine)
    engine.heat()
    del engine
    assert tokens_of(read_heat_file(beside).heat) == ONE_RUN


def test_nothing_is_written_without_selections_or_if_it_is_off(
    model: Path, beside: Path, cache: Path
) -> None:
    with opened(model, cache):
        pass
    with opened(model, cache, heat="off") as engine:
        run(engine)
        assert tokens_of(engine.heat()) == ONE_RUN
    assert not beside.exists()
    assert not (cache / "heat").exists()


def test_a_folder_that_cannot_be_written_to_is_replaced_by_the_cache(
    model: Path, beside: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beside.mkdir()  # as root may write to any folder
    for num_runs in (1, 2):
        with opened(model, cache) as engine:
            run(engine)
        [kept] = (cache / "heat").iterdir()
        name = hashlib.sha256(os.fsencode(model)).hexdigest()[:32]
        assert kept.name == f"{name}.heat"
        assert read_heat_file(kept).heat.num_tokens(Phase.PREFILL) == num_runs * len(PROMPT)
    beside.rmdir()
    with opened(model, cache) as engine:  # it is taken from there once this folder can be used
        run(engine)
    assert read_heat_file(beside).heat.num_tokens(Phase.PREFILL) == 3 * len(PROMPT)
    assert not caplog.records


def test_heat_that_cannot_be_saved_is_a_warning(
    model: Path,
    beside: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(heat_keeper, "_SAVE_EVERY_S", 0.01)
    beside.mkdir()
    (cache / "heat").write_text("a file in place of a folder")
    with opened(model, cache) as engine:
        run(engine)
        engine.heat()
        time.sleep(0.1)
        run(engine)
        assert engine.heat().num_tokens(Phase.PREFILL) == 2 * len(PROMPT)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert str(beside) in record.getMessage()
    with pytest.raises(SettingsError, match="closed"):
        engine.logits(PROMPT)  # it was given back


def test_a_pipe_in_place_of_heat_is_not_waited_for(model: Path, beside: Path, cache: Path) -> None:
    os.mkfifo(beside)
    with opened(model, cache) as engine:
        assert tokens_of(engine.heat()) == (0, 0)
    with pytest.raises(SettingsError, match="not a file"):
        opened(model, cache, heat=str(beside))


def test_without_a_thread_to_save_it_heat_is_counted(
    model: Path, beside: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with opened(model, cache) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            run(engine)
            assert tokens_of(engine.heat()) == ONE_RUN
        run(engine, 1)
    assert read_heat_file(beside).heat.num_tokens(Phase.PREFILL) == 2 * len(PROMPT)


def test_a_slow_disk_does_not_keep_an_engine_from_closing(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(heat_keeper, "_LAST_SAVE_S", 0.05)
    monkeypatch.setattr(kept_files, "write_file", lambda *_: goes_on.wait(60.0))
    try:
        with opened(model, cache) as engine:
            run(engine)
        [record] = caplog.records
        assert record.args == (0.05,)
    finally:
        goes_on.set()


@pytest.fixture
def other_heat(tmp_path: Path, cache: Path) -> bytes:
    """The heat of another model of the same sizes."""
    path = write_qwen3moe(tmp_path / "other.gguf", SHAPE, seed=2, tokenizer="bytes")
    with opened(path, cache) as engine:
        run(engine)
    return path.with_name("other.gguf.heat").read_bytes()


@pytest.mark.parametrize("kind", ["damaged", "other"])
def test_heat_that_cannot_be_used_is_a_warning_and_kept(
    model: Path,
    beside: Path,
    cache: Path,
    other_heat: bytes,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    content = other_heat if kind == "other" else other_heat[:-7]
    beside.write_bytes(content)
    with opened(model, cache) as engine:
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert str(beside) in record.getMessage()
        assert ("another model" in record.getMessage()) == (kind == "other")
        assert beside.read_bytes() == content  # until there is something to save
        run(engine)
    assert beside.with_name("m.gguf.heat.bad").read_bytes() == content
    assert tokens_of(read_heat_file(beside).heat) == ONE_RUN


def test_a_file_that_is_named_is_used_or_refused(
    model: Path, beside: Path, cache: Path, tmp_path: Path, other_heat: bytes
) -> None:
    named = tmp_path / "named.heat"
    for _ in range(2):
        with opened(model, cache, heat=str(named)) as engine:
            run(engine)
    assert read_heat_file(named).heat.num_tokens(Phase.PREFILL) == 2 * len(PROMPT)
    assert not beside.exists()
    for content in (other_heat, other_heat * 2, b"nothing"):
        named.write_bytes(content)
        with pytest.raises(SettingsError, match=f"heat file {named}: ") as caught:
            opened(model, cache, heat=str(named))
        assert "\n" not in str(caught.value)
        assert named.read_bytes() == content
    with pytest.raises(SettingsError, match="not a file"):
        opened(model, cache, heat=str(tmp_path))


def test_hotness_is_what_experts_are_placed_by_and_nothing_else(
    model: Path, beside: Path, cache: Path, tmp_path: Path, other_heat: bytes
) -> None:
    path = tmp_path / "older.csv"
    counts = np.zeros((SHAPE.num_layers, SHAPE.num_experts), np.uint64)
    counts[:, 3] = 1000
    write_hotness(path, Hotness(counts, 2))
    content = path.read_bytes()
    with opened(model, cache, hotness=str(path)) as engine:
        run(engine)
        engine.heat()
        planning = engine._steps.heat.for_planning()
        assert planning.probabilities(Phase.DECODE, 0).argmax() == 3
        assert planning.num_tokens() == 500
        assert tokens_of(engine.heat()) == ONE_RUN
    assert tokens_of(read_heat_file(beside).heat) == ONE_RUN
    assert path.read_bytes() == content
    with opened(model, cache, hotness=str(beside)) as engine:
        assert tokens_of(engine._steps.heat.for_planning()) == ONE_RUN
    for bad in (other_heat, b"1,2\n", b""):
        path.write_bytes(bad)
        with pytest.raises(SettingsError, match=f"heat file {path}: "):
            opened(model, cache, hotness=str(path), connect=("ipc:///nothing/there",))
    with pytest.raises(SettingsError, match="No such file"):
        opened(model, cache, hotness=str(tmp_path / "none"))


def test_statistics_are_of_one_run(model: Path, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "stats.heat"
    for heat in ("auto", "auto", "off"):
        with opened(model, cache, heat=heat, expert_stats=str(path)) as engine:
            run(engine)
        file = read_heat_file(path)
        assert tokens_of(file.heat) == ONE_RUN
        assert file.heat.pairs_of_owner == {"local": [each * NUM_PAIRS for each in ONE_RUN]}
    with opened(model, cache, heat="off", expert_stats=str(path)):
        pass
    assert read_heat_file(path).heat.num_tokens() == 0
    path.write_bytes(b"of another run")
    with pytest.raises(SettingsError):  # it does not come to a run
        opened(model, cache, expert_stats=str(path), context=1 << 20)
    with pytest.raises(DflashError):
        opened(
            model,
            cache,
            expert_stats=str(path),
            connect=("ipc:///nothing/there",),
            ipc_required=True,
            connect_timeout_ms=1000,
        )
    assert path.read_bytes() == b"of another run"
    for wrong in (tmp_path, tmp_path / "none" / "stats"):
        with pytest.raises(SettingsError, match=f"expert statistics {wrong}: "):
            opened(model, cache, expert_stats=str(wrong))


def test_half_lives_have_an_order(model: Path, cache: Path) -> None:
    with pytest.raises(SettingsError, match="heat_fast=7: must be at most heat_slow, 6"):
        opened(model, cache, heat_fast=7, heat_slow=6)
    with opened(model, cache, heat_fast=6, heat_slow=6) as engine:
        run(engine)
        heat = engine.heat()
    np.testing.assert_array_equal(heat.fast, heat.slow)
