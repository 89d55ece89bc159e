"""The first start of a model reads a text, so that its plan knows which experts are hot."""

from __future__ import annotations

import configparser
import difflib
import inspect
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.ids import I64Array
from dflash_protocol.settings import Settings, load_settings
from dflash_runtime import Engine
from dflash_runtime.engine import first_heat
from dflash_runtime.engine.deciding import plan_of_file
from dflash_runtime.engine.demo_model import demo_model_path
from dflash_runtime.placement.plan_record import as_json
from support.emulated_gpu import TINY
from support.planned_gpu import CONTEXT, OneGpu
from support.random_models import write_qwen3moe

SHAPE = replace(TINY, vocab_size=300)
NUM_TOKENS = 100


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, SHAPE, seed=4, tensor_type="Q8_0", tokenizer="bytes")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, model: Path) -> OneGpu:
    """With room for some of the experts."""
    monkeypatch.setattr(first_heat, "MOST_TOKENS", NUM_TOKENS)
    found = OneGpu(monkeypatch, model)
    found.make_room_for(5)
    return found


def settings_of(model: Path, **wishes: Any) -> Settings:
    options = {"context": CONTEXT, "kv_type": "f16", **wishes}
    return replace(load_settings(), model=str(model), **options)


def opened(settings: Settings, on_progress: Any) -> Engine:
    return Engine.open(settings=settings, learns_heat=True, on_progress=on_progress)


class Stages:
    """What was reported while an engine was opened."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.last: tuple[str, str, int, int] | None = None

    def __call__(self, owner: str, stage: str, num_done: int, num_total: int) -> None:
        self.names.append(stage)
        self.last = owner, stage, num_done, num_total


def test_the_first_start_learns_and_plans_with_it(gpu: OneGpu, model: Path, tmp_path: Path) -> None:
    heat, first, second = tmp_path / "m.heat", Stages(), Stages()
    with opened(settings_of(model, heat=str(heat)), first) as engine:
        assert engine.plan is not None
        assert engine.plan.origin.heat_tokens == NUM_TOKENS
        assert not any(map(sum, engine.stats().selections.values()))
        held = gpu.emulated.held()
    assert first.last == ("parent", "ready", 1, 1)
    assert first.names.count("ready") == 1
    assert "learn heat" in first.names
    with opened(settings_of(model, heat=str(heat)), second) as engine:
        assert engine.plan is not None
        assert engine.plan.origin.heat_tokens == NUM_TOKENS
        assert gpu.emulated.held() == held  # nothing of the engine that has learnt
    assert "learn heat" not in second.names


@pytest.mark.parametrize(
    "wishes",
    [{"heat": "off"}, {"cpu_moe": True}, {"n_cpu_moe": 1}, {"local_experts": 2}, {"plan": "it"}],
    ids=lambda wishes: " ".join(wishes),
)
def test_nothing_is_learnt_where_it_would_change_nothing(
    gpu: OneGpu, model: Path, tmp_path: Path, wishes: dict[str, Any]
) -> None:
    wishes = {"heat": str(tmp_path / "m.heat"), **wishes}
    if "plan" in wishes:
        found = plan_of_file(settings_of(model, heat="off"))
        wishes["plan"] = str(tmp_path / "it.plan")
        Path(wishes["plan"]).write_text(as_json(found))
    stages = Stages()
    opened(settings_of(model, **wishes), stages).close()
    assert "learn heat" not in stages.names


def test_nothing_is_learnt_where_all_fits_or_without_a_tokenizer(
    gpu: OneGpu, model: Path, tmp_path: Path
) -> None:
    stages = Stages()
    gpu.make_room_for(1000)
    opened(settings_of(model, heat=str(tmp_path / "m.heat")), stages).close()
    gpu.make_room_for(5)
    path = write_qwen3moe(tmp_path / "m.gguf", SHAPE, seed=4, tensor_type="Q8_0")
    opened(settings_of(path), stages).close()
    assert "learn heat" not in stages.names


def test_ctrl_c_while_it_learns_gives_all_back(gpu: OneGpu, model: Path, tmp_path: Path) -> None:
    def interrupt(owner: str, stage: str, num_done: int, num_total: int) -> None:
        if stage == "learn heat" and num_done:
            raise KeyboardInterrupt

    held = set()  # what stays is the backend's, and the same each time
    for number in range(2):
        with pytest.raises(KeyboardInterrupt):
            opened(settings_of(model, heat=str(tmp_path / f"{number}.heat")), interrupt)
        held.add(gpu.emulated.held()["bytes of arrays"])
    assert len(held) == 1


def test_a_slow_model_reads_less(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, reported = list[int](), list[tuple[int, int]]()
    monkeypatch.setattr(first_heat, "_LIMIT_S", 0.0)
    first_heat.learn(
        range(5000),
        lambda token_ids: sizes.append(len(token_ids)),
        num_positions=101,
        on_progress=lambda *progress: reported.append(progress),
    )
    assert sizes == [100]
    assert reported == [(0, first_heat.MOST_TOKENS), (first_heat.MOST_TOKENS,) * 2]


@pytest.mark.parametrize("name", ["dflash-demo", "dflash-demo-laguna", "dflash-demo-qwen35moe"])
def test_the_text_tells_what_is_hot_in_others(name: str) -> None:
    """Of what Python source chooses that the models were not trained on, the hottest half of the
    experts by the first text has nearly as much as the hottest half by other such source."""
    chosen = selections(name, inspect.getsource(difflib)[:20_000] + inspect.getsource(textwrap))

    def share(hottest: I64Array) -> float:
        return float(np.take_along_axis(chosen, hottest, axis=1).sum() / chosen.sum())

    found = share(hottest_half(name, first_heat.first_text()))
    expected = share(hottest_half(name, inspect.getsource(configparser)[8_000:24_000]))
    print(f"{name}: {found:.3f} by the first text, {expected:.3f} by such source")
    assert expected > 0.6
    assert found - 0.5 >= 0.8 * (expected - 0.5)  # half of the experts have half by chance


def hottest_half(name: str, text: str) -> I64Array:
    counts = selections(name, text)
    order: I64Array = np.argsort(-counts, axis=1, kind="stable")
    return order[:, : counts.shape[1] // 2]


def selections(name: str, text: str) -> I64Array:
    """Shapes: result [L, E]."""
    path = demo_model_path().with_name(f"{name}.gguf")
    with Engine.open(path, device="cpu", settings=replace(load_settings(), heat="off")) as engine:
        first_heat.learn(
            engine.encode_prompt(text),
            lambda token_ids: list(engine.generate(token_ids, 1, ignore_eos=True)),
            num_positions=engine.num_positions,
            on_progress=lambda *progress: None,
        )
        return np.array([*engine.stats().selections.values()])
