"""Planted routing as it is chosen: figures of each kind, and the same experts in both engines."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.llama_api import open_wheel
from bench.peer import keep_errors
from bench.peer_model import load_model
from bench.planted_routing import KINDS, Walk
from bench.random_moe import MIXES, write
from bench.routing_figures import (
    WANTED,
    Run,
    equal_selections,
    expected_run,
    figures,
    our_run,
    peer_run,
    selections,
    total,
)

from bench import model_shapes, routing_figures
from dflash_protocol.ids import I32Array
from dflash_runtime import Engine

POINTS = 0.03
PROMPT, WRITTEN = 40, 12


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of experts of the real models, with small matrices."""
    for name, shape in model_shapes.SHAPES.items():
        kv_heads = 4 if name == "olmoe" else 1
        small = replace(shape, hidden=512, ffn=256, num_heads=4, num_kv_heads=kv_heads)
        monkeypatch.setitem(model_shapes.SHAPES, name, small)


def written(path: Path, mix: str, routing: str, *, vocabulary: int, num_layers: int) -> Path:
    resized = replace(MIXES[mix], vocabulary=vocabulary)
    write(path, resized, num_layers=num_layers, seed=3, routing=routing)
    return path


@pytest.mark.usefixtures("small_shapes")
@pytest.mark.parametrize("kind", list(KINDS))
def test_figures_are_those_wanted(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", "q4_k_m", kind, vocabulary=12_000, num_layers=4)
    walk = Walk.of_file(path)
    learnt, chosen = (selections(path, walk.stretch(begin, 5_900)) for begin in (0, 6_000))
    found = figures(chosen, learnt, 128)
    far = {
        name: found[name] for name in WANTED[kind] if abs(found[name] - WANTED[kind][name]) > POINTS
    }
    assert far == {}
    # Each layer has its own popular experts.
    hot = [set(np.argsort(np.bincount(layer.ravel(), minlength=128))[-40:]) for layer in chosen]
    assert max(len(one & other) for one in hot for other in hot if one is not other) < 25


def rows(*tokens: tuple[int, ...]) -> I32Array:
    return np.array([tokens], np.int32)


def test_figures_of_selections_that_are_known() -> None:
    steady = rows(*[(0, 1)] * 40)
    found = figures(steady, steady, 16)
    assert found["next"] == found["eight"] == found["half"] == found["LRU 8"] == 1
    assert found["static 8"] == 1

    # Eight pairs in turns: all 16 experts alike, each again after 8 tokens.
    turns = rows(*[(2 * (t % 8), 2 * (t % 8) + 1) for t in range(80)])
    found = figures(turns, turns, 16)
    assert (found["next"], found["eight"], found["half"]) == (0, 1, 0.5)
    assert (found["LRU 8"], found["static 8"]) == (0, 0.5)
    assert "LRU 24" not in found

    # One of two stays: it is found, but the other evicts it where there is room for the last two.
    found = figures(rows(*[(0, 1 + t % 12) for t in range(120)]), steady, 16)
    assert found["next"] == found["LRU 8"] == 0.5
    assert found["static 8"] == pytest.approx((120 + 7 * 10) / 240)  # of equals, the first ids


def test_selections_are_compared_call_by_call() -> None:
    expected = Run([1, 2], np.array([[[3, 1, 0]], [[1, 1, 0]]]))
    assert equal_selections(expected, expected) == (6, 6)
    other = Run([1, 2], np.array([[[2, 1, 1]], [[1, 0, 1]]]))
    assert equal_selections(other, expected) == (4, 6)
    assert equal_selections(total(other), total(expected)) == (4, 6)
    fewer = Run([1, 2], np.array([[[1, 0, 0]], [[1, 1, 0]]]))
    assert equal_selections(fewer, expected) == (3, 3)


@pytest.fixture(scope="module")
def library() -> Any:
    opened = open_wheel()
    keep_errors(opened)
    return opened


@pytest.mark.usefixtures("small_shapes")
@pytest.mark.parametrize(
    ("mix", "kind"),
    [("q4_k_m", "qwen3"), ("q8_0", "fickle"), ("q4_k_m", "flat"), ("olmoe", "qwen3")],
)
def test_both_engines_choose_as_computed_and_go_on_with_the_walk(
    mix: str, kind: str, library: Any, tmp_path: Path
) -> None:
    path = written(tmp_path / "model.gguf", mix, kind, vocabulary=2_000, num_layers=3)
    check_engines(library, path, least=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("mix", ["q4_k_m", "qwen35moe", "olmoe"])
def test_real_shapes_choose_as_computed(mix: str, library: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", mix, "qwen3", vocabulary=4_096, num_layers=5)
    check_engines(library, path, least=0.999)


def check_engines(library: Any, path: Path, *, least: float) -> None:
    ids = Walk.of_file(path).stretch(700, PROMPT + WRITTEN)
    prompt, expected = ids[:PROMPT], expected_run(path, ids, PROMPT)
    with Engine.open(path, context=64, threads=2) as engine:
        ours = our_run(engine, prompt, WRITTEN)
    peers = peer_run(library, load_model(library, path), prompt, expected, num_threads=2)
    all_of_it = expected.counts.sum()
    # llama.cpp computes the last token of a prompt alone in the last layer.
    of_peer = all_of_it - (PROMPT - 1) * expected.counts[1, 0].sum()
    for run, wanted, num_made in ((ours, total(expected), all_of_it), (peers, expected, of_peer)):
        assert run.text == wanted.text == ids[PROMPT:]
        assert run.counts.sum() == num_made
        equal, compared = equal_selections(run, wanted)
        assert compared == num_made
        assert equal >= least * compared


@pytest.mark.usefixtures("small_shapes")
def test_the_command_tells_figures_and_both_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "model.gguf", "q4_k_m", "fickle", vocabulary=2_000, num_layers=2)
    monkeypatch.setattr(sys, "argv", ["figures", str(path), "--prompt", "20", "--write", "4"])
    routing_figures.main()
    out = capsys.readouterr().out
    assert "fickle" in out
    assert "static 40" in out
    assert out.count("goes on with the walk") == 2
    assert "672 of 672 selections" in out or "368 of 368 selections" in out


def test_a_file_without_planted_routing_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(sys, "argv", ["figures", str(path)])
    with pytest.raises(SystemExit, match=r"^error: "):
        routing_figures.main()
