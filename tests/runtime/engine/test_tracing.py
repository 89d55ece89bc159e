"""Expert traces of engines: the choices that the engine counts, token by token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import Phase
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from dflash_runtime.placement.cache.traces import PHASES, ExpertTrace, read_trace
from support.emulated_gpu import TINY, install_emulated_gpus
from support.random_models import write_qwen3moe

PROMPT = [5, 9, 2, 40, 11, 3, 17, 8, 1, 30, 22]
NUM_TOKENS = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


def opened(model: Path, trace: Path, **options: Any) -> Engine:
    wishes = options.pop("settings", {})
    settings = replace(load_settings(), expert_trace=str(trace), context=64, **wishes)
    return Engine.open(model, settings=settings, threads=1, **options)


def counts_of(trace: ExpertTrace) -> dict[int, list[int]]:
    return {
        layer.layer_id: np.bincount(ids.ravel(), minlength=layer.num_experts).tolist()
        for layer, ids in trace.by_layer()
    }


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "cpu"},
        {"backend": "reference"},
        {"backend": "cpu", "daemons": ["cpu"], "local_experts": 2},
    ],
    ids=["recorded steps", "layer by layer", "a daemon is asked"],
)
def test_choices_are_those_that_are_counted(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with opened(model, tmp_path / "run.trace", **options) as engine:
        for _ in range(2):
            list(engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True))
        counts, spec = engine.stats().selections, engine.spec
    trace = read_trace(tmp_path / "run.trace")
    assert counts_of(trace) == counts
    assert trace.header.moe_digest == spec.moe.digest
    phases = [PHASES[each] for each in trace.phases]
    run = [Phase.PREFILL] * len(PROMPT) + [Phase.DECODE] * (NUM_TOKENS - 1)
    assert phases == 2 * run
    np.testing.assert_array_equal(trace.ids[: len(run)], trace.ids[len(run) :])


@pytest.mark.parametrize("parents", [[-1, 0, 1, 2], [-1, 0, 0, 1]], ids=["chain", "tree"])
def test_verified_drafts_are_in_it(model: Path, tmp_path: Path, parents: list[int]) -> None:
    with opened(model, tmp_path / "run.trace", backend="cpu") as engine:
        engine.prefill(PROMPT)
        engine.verify([7, 3, 9, 4], parents)
        engine.accept([0])
        list(engine.generate(PROMPT, 2, ignore_eos=True))  # counts what was verified
        counts = engine.stats().selections
    trace = read_trace(tmp_path / "run.trace")
    assert counts_of(trace) == counts
    phases = [PHASES[each] for each in trace.phases[len(PROMPT) :]]
    assert phases[:4] == [Phase.VERIFY] * 4


def test_a_cancelled_prompt_leaves_whole_tokens(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path / "run.trace", backend="cpu") as engine:
        answers = iter([False])
        assert not list(engine.generate(PROMPT, 1, is_cancelled=lambda: next(answers, True)))
        list(engine.generate(PROMPT, 2, ignore_eos=True))
    assert read_trace(tmp_path / "run.trace").num_tokens == len(PROMPT) + 1


def test_a_full_trace_stops_nothing(model: Path, tmp_path: Path) -> None:
    with opened(
        model, tmp_path / "run.trace", backend="cpu", settings={"expert_trace_mb": 1}
    ) as engine:
        assert len(list(engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True))) == NUM_TOKENS


def test_a_parent_on_a_gpu_says_that_it_writes_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_emulated_gpus(monkeypatch)
    with pytest.raises(SettingsError, match=r"expert_trace: .* use device cpu"):
        opened(model, tmp_path / "run.trace", device="cuda:0")
    assert not (tmp_path / "run.trace").exists()


def test_a_file_that_cannot_be_written_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no/run\.trace: No such file"):
        opened(model, tmp_path / "no" / "run.trace")
