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
from dflash_runtime.compute.gpu.ops import choice_notes
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


@pytest.mark.parametrize(
    "options",
    [{}, {"local_experts": 2, "daemons": ["cpu"]}, {"local_experts": 0, "daemons": ["cpu"]}],
    ids=["all on the GPU", "some in a daemon", "all in a daemon"],
)
def test_choices_on_a_gpu_are_those_that_are_counted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    install_emulated_gpus(monkeypatch)
    monkeypatch.setattr(choice_notes, "MOST_CHOICE_ROWS", 6)  # written in parts
    with opened(model, tmp_path / "run.trace", device="cuda:0", **options) as engine:
        for _ in range(2):
            list(engine.generate(PROMPT, NUM_TOKENS + 4, ignore_eos=True))
        list(engine.generate(PROMPT, 5, ignore_eos=True, temperature=2.0, seed=1))
    trace = read_trace(tmp_path / "run.trace")
    run = [Phase.PREFILL] * len(PROMPT) + [Phase.DECODE] * (NUM_TOKENS + 3)
    assert [PHASES[each] for each in trace.phases[: 2 * len(run)]] == 2 * run
    np.testing.assert_array_equal(trace.ids[: len(run)], trace.ids[len(run) : 2 * len(run)])
    assert trace.num_tokens == 2 * len(run) + len(PROMPT) + 4
    # Counts on a device include steps that were started ahead and discarded.
    with opened(model, tmp_path / "host.trace", backend="cpu") as engine:
        list(engine.generate(PROMPT, NUM_TOKENS + 4, ignore_eos=True))
    on_host = read_trace(tmp_path / "host.trace").ids
    assert (on_host == trace.ids[: len(run)]).mean() > 0.95  # bits of activations differ


@pytest.mark.parametrize("parents", [[-1, 0, 1, 2], [-1, 0, 0, 1]], ids=["chain", "tree"])
def test_drafts_verified_on_a_gpu_are_in_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parents: list[int]
) -> None:
    install_emulated_gpus(monkeypatch)
    drafts = [7, 3, 9, 4]
    with opened(model, tmp_path / "run.trace", device="cuda:0") as engine:
        engine.prefill(PROMPT)
        for _ in range(2):  # captured, then replayed
            engine.verify(drafts, parents)
    trace = read_trace(tmp_path / "run.trace")
    assert [PHASES[each] for each in trace.phases[len(PROMPT) :]] == [Phase.VERIFY] * 8
    first, second = trace.ids[-8:-4], trace.ids[-4:]
    np.testing.assert_array_equal(first, second)
    with opened(model, tmp_path / "host.trace", backend="cpu") as engine:
        engine.prefill(PROMPT)
        engine.verify(drafts, parents)
    assert (read_trace(tmp_path / "host.trace").ids[-4:] == first).mean() > 0.9


def test_a_gpus_shares_of_a_chunk_are_in_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that would be computed in two halves, in turns, are not while choices are traced."""
    install_emulated_gpus(monkeypatch)
    prompt = [each % TINY.vocab_size for each in range(40)]
    with opened(model, tmp_path / "run.trace", device="cuda:0", daemons=["cpu"]) as engine:
        list(engine.generate(prompt, 1, ignore_eos=True))
        counts = engine.stats().selections
    trace = read_trace(tmp_path / "run.trace")
    assert trace.num_tokens == len(prompt)
    assert counts_of(trace) == counts


def test_a_file_that_cannot_be_written_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no/run\.trace: No such file"):
        opened(model, tmp_path / "no" / "run.trace")
