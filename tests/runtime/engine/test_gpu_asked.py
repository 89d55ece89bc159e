"""A parent on a GPU, emulated here, whose steps ask a CPU daemon from compiled code: the tokens and
counts of steps that Python runs, also when the daemon is killed, or a graph cannot be started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.run import host_path
from dflash_runtime.experts.daemons import link_task
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from support.emulated_device.emulated_device import EmulatedGraph
from support.emulated_gpu import TINY, EmulatedGpus, install_emulated_gpus
from support.faults import spawned_daemons
from support.random_models import write_qwen3moe
from support.undisturbed import settings_with

PROMPT = [5, 9, 2, 40, 11, 3, 17, 8, 1, 30, 22]
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    return install_emulated_gpus(monkeypatch)


class ByHost:
    """Counts the layers that Python has asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_layers = 0
        ask = host_path._Exchange.__call__

        def counted(exchange: host_path._Exchange) -> None:
            self.num_layers += 1
            ask(exchange)

        monkeypatch.setattr(host_path._Exchange, "__call__", counted)


def opened(model: Path, **options: Any) -> Engine:
    # Without mailboxes, by which the device would ask.
    settings = replace(settings_with(check_replies=0), context=48, ipc_transport="shared")
    return Engine.open(model, device="cuda:0", daemons=["cpu"], settings=settings, **options)


def tokens_of(engine: Engine, **wish: Any) -> list[int]:
    options = {"ignore_eos": True, **wish}
    return [each.token_id for each in engine.generate(PROMPT, NUM_TOKENS, **options)]


@pytest.mark.parametrize("local_experts", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_tokens_and_counts_are_those_of_steps_that_python_runs(
    model: Path, gpus: EmulatedGpus, local_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_host, found = ByHost(monkeypatch), []
    for is_asked in (True, False):
        with monkeypatch.context() as patch:
            if not is_asked:
                patch.setattr(MoeExpertComputeRuntime, "ask_routes", lambda self: None)
            with opened(model, local_experts=local_experts) as engine:
                # Sampled steps are other captures.
                tokens = [*tokens_of(engine), *tokens_of(engine, temperature=2.0, seed=3)]
                tokens += tokens_of(engine)
                stats = engine.stats()
                pairs = {name: owner.pairs for name, owner in stats.owners.items()}
                found.append((tokens, pairs, stats.hits, stats.selections))
        if is_asked:
            assert by_host.num_layers == 0
    assert by_host.num_layers >= 3 * (NUM_TOKENS - 1) * TINY.num_layers
    assert found[0] == found[1]


def test_a_daemon_killed_between_two_tokens_costs_none(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_host = ByHost(monkeypatch)
    # A daemon that were back at once would be asked by the host instead of the fallback.
    monkeypatch.setattr(link_task, "_BACKOFF_FIRST_S", link_task._BACKOFF_LAST_S)
    with opened(model, local_experts=2) as engine:
        expected = tokens_of(engine)
        assert by_host.num_layers == 0
        tokens = engine.generate(PROMPT, NUM_TOKENS, ignore_eos=True)
        found = [next(tokens).token_id for _ in range(4)]
        for daemon in spawned_daemons():
            daemon.kill()
        assert found + [each.token_id for each in tokens] == expected
        assert by_host.num_layers > 0
        assert engine.stats().owners["fallback"].pairs > 0


def test_a_graph_that_cannot_be_started_ends_the_step(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, num_left = EmulatedGraph.replay, 1 << 30

    def failing(graph: EmulatedGraph) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left <= 0:
            raise DeviceUnavailable("it fell off the bus")
        replay(graph)

    monkeypatch.setattr(EmulatedGraph, "replay", failing)
    with opened(model) as engine:
        expected = tokens_of(engine)
        num_left = 7
        with pytest.raises(DeviceUnavailable, match="bus"):
            tokens_of(engine)
        num_left = 1 << 30
        assert tokens_of(engine) == expected
