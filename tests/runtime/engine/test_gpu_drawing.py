"""An engine whose parent draws tokens on a GPU, emulated here: they are those that the host draws
from the logits of the same steps, whether host or device sampled the ones before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.ids import AnyArray
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.gpu.run.captured_step import GraphStep
from dflash_runtime.engine import generation, heat_keeper
from support.emulated_device import EmulatedDevice
from support.emulated_device.emulated_device import EmulatedGraph
from support.emulated_gpu import TINY, EmulatedGpus, install_emulated_gpus
from support.random_models import write_qwen3moe

SHAPE = replace(TINY, num_layers=1)
CONTEXT = 48
PROMPT = np.random.default_rng(1).integers(0, SHAPE.vocab_size, 12).tolist()
NUM_TOKENS = 6

WISHES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 20.0, "top_k": 7},
    {"temperature": 2.0, "top_p": 0.9007},
    {"temperature": 2.0, "min_p": 0.0503},
    {"temperature": 3.0, "top_k": 30, "top_p": 0.8003, "min_p": 0.0103},
    {"temperature": 1e-310},
    {},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, SHAPE, seed=4, tensor_type="Q8_0")


@pytest.fixture(scope="module")
def by_host(model: Path) -> list[list[int]]:
    """Tokens of each wish, drawn by the host after each step."""
    with pytest.MonkeyPatch.context() as patched:
        install_emulated_gpus(patched)
        patched.setattr(CupyBackend, "captured_step", lambda *_, **__: None)
        with opened(model) as engine:
            return everything(engine)


def opened(path: Path, **options: Any) -> Engine:
    return Engine.open(path, device="cuda:0", **{"context": CONTEXT, **options})


def generated(engine: Engine, num_tokens: int, **wish: Any) -> list[int]:
    wish = {"seed": 5, "ignore_eos": True, **wish}
    return [token.token_id for token in engine.generate(PROMPT, num_tokens, **wish)]


def everything(engine: Engine) -> list[list[int]]:
    return [generated(engine, NUM_TOKENS, **wish) for wish in WISHES]


class Watch:
    """What an engine asks of its device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_replays = 0
        self.downloads: list[tuple[int, ...]] = []
        replay, download = EmulatedGraph.replay, EmulatedDevice.download

        def counted_replay(graph: EmulatedGraph) -> None:
            self.num_replays += 1
            replay(graph)

        def counted_download(device: EmulatedDevice, array: Any) -> AnyArray:
            self.downloads.append(array.shape)
            return download(device, array)

        monkeypatch.setattr(EmulatedGraph, "replay", counted_replay)
        monkeypatch.setattr(EmulatedDevice, "download", counted_download)


def test_a_token_that_is_drawn_costs_one_launch_of_a_graph(
    model: Path, gpus: EmulatedGpus, by_host: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heat_keeper, "_LEAST_APART_S", 3600.0)  # counts are taken at ends alone
    with opened(model) as engine:
        watch = Watch(monkeypatch)
        for wish, expected in zip(WISHES[:5], by_host[:5], strict=True):
            watch.num_replays = 0
            watch.downloads.clear()
            assert generated(engine, NUM_TOKENS, **wish) == expected
            assert watch.num_replays == NUM_TOKENS - 1
            # The prompt's logits, and at the end what was chosen.
            assert watch.downloads == [(1, SHAPE.vocab_size), (2, SHAPE.num_experts)]


def test_what_the_device_is_not_sure_of_the_host_draws(
    model: Path, gpus: EmulatedGpus, by_host: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = GraphStep.token

    def unsure(step: GraphStep, position: int) -> int | None:
        chosen = token(step, position)
        return None if position in unsure_of and WISHES[index] else chosen

    monkeypatch.setattr(GraphStep, "token", unsure)
    monkeypatch.setattr(generation, "_ALONE", 2)
    monkeypatch.setattr(generation, "_NUMBERS", 3)
    num_steps: list[int] = []
    with opened(model) as engine:
        for index in (1, 3, -1):
            for unsure_of in ((13,), (14, 15, 17), range(CONTEXT)):
                before = engine.stats().hits.layers
                assert generated(engine, NUM_TOKENS, **WISHES[index]) == by_host[index], unsure_of
                num_steps.append(engine.stats().hits.layers - before)
    assert set(num_steps) == {NUM_TOKENS}  # what is done again, or in vain, does not count


def test_requests_do_not_see_each_other(
    model: Path, gpus: EmulatedGpus, by_host: list[list[int]]
) -> None:
    with opened(model) as engine:
        for num_tokens, index in ((2, 1), (3, 3)):
            generated(engine, num_tokens, temperature=1.5, seed=8)
            tokens = engine.generate(PROMPT, 9, temperature=0.5, seed=9, ignore_eos=True)
            next(tokens), next(tokens), next(tokens)
            del tokens
            assert generated(engine, NUM_TOKENS, **WISHES[index]) == by_host[index]
        assert generated(engine, NUM_TOKENS) == by_host[-1]
        # With the logarithms of probabilities the host draws, and does not change the tokens.
        assert generated(engine, NUM_TOKENS, top_logprobs=2, **WISHES[3]) == by_host[3]
        assert generated(engine, NUM_TOKENS) == by_host[-1]


def test_a_generation_of_drawn_tokens_ends_where_it_is_to(model: Path, gpus: EmulatedGpus) -> None:
    wish = {"temperature": 2.0}
    with opened(model, context=18) as engine:
        long = generated(engine, 100, **wish)
        assert len(long) == 18 - len(PROMPT) + 1
        assert engine.last_generation.finish_reason == "context"
        for num_tokens in (1, 2, 6):
            assert generated(engine, num_tokens, **wish) == long[:num_tokens]
        got = generated(engine, 50, **wish, is_cancelled=is_asked_often(4))
        assert got == long[: len(got)]
        assert 1 < len(got) < len(long)
        assert engine.last_generation.finish_reason == "cancelled"


def is_asked_often(most: int) -> Any:
    """Says yes from then on."""
    num_asked = 0

    def is_cancelled() -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked > most

    return is_cancelled


def test_with_experts_elsewhere_the_last_piece_draws(
    model: Path, gpus: EmulatedGpus, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "connect": [f"ipc://{run_dir}/absent"],
        "tolerates_absent": True,
        "threads": 1,
        "local_experts": 3,
        "settings": replace(load_settings(), connect_timeout_ms=100),
    }
    wishes = WISHES[1], WISHES[3], WISHES[-2], WISHES[-1]
    with opened(model, **options) as engine:
        watch = Watch(monkeypatch)
        drawn = [generated(engine, NUM_TOKENS, **wish) for wish in wishes]
        num_of_host = NUM_TOKENS - 1  # too cold for the device
        assert watch.downloads.count((1, SHAPE.vocab_size)) == len(wishes) + num_of_host
    monkeypatch.setattr(CupyBackend, "captured_step", lambda *_, **__: None)
    with opened(model, **options) as engine:
        assert [generated(engine, NUM_TOKENS, **wish) for wish in wishes] == drawn
