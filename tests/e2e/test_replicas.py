"""Experts that two daemons have: whoever answers, and whoever is lost, the text is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import MoeSpec
from dflash_protocol.ids import Phase
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime import Engine
from dflash_runtime.placement.split import LOCAL_OWNER, make_placement
from support import undisturbed as rig
from support.faults import spawned_daemons
from support.undisturbed import FAULT_AFTER, NUM_TOKENS, settings_with

pytestmark = pytest.mark.e2e

model = rig.model
undisturbed = rig.undisturbed
DAEMONS = "cpu0", "cpu1"


@pytest.fixture(scope="module")
def moe(model: Path) -> MoeSpec:
    with GgufFile.open(model) as file:
        return read_spec(file).moe


def replicated(moe: MoeSpec, answering: str, *, num_local: int = 1) -> Placement:
    """All but `num_local` experts of each layer in both daemons; `answering`: who answers."""
    local, both, table = {}, {}, {}
    random = np.random.default_rng(1)
    for layer in moe.layers:
        local[layer.layer_id] = range(num_local)
        both[layer.layer_id] = range(num_local, layer.num_experts)
        indices = {
            "first": np.full(layer.num_experts, 1),
            "second": np.full(layer.num_experts, 2),
            "either": random.integers(1, 3, layer.num_experts),
        }.get(answering)
        if indices is not None:
            indices[:num_local] = -1
            table[layer.layer_id] = indices.astype(np.int32)
    owners = {LOCAL_OWNER: local, **dict.fromkeys(DAEMONS, both)}
    lists = {name: OwnedExperts.from_lists(by_layer) for name, by_layer in owners.items()}
    return replace(make_placement(moe, lists), answering=table)


def opened(model: Path, placement: Placement, dtype: str = "f32") -> Engine:
    settings = settings_with(check_replies=0, ipc_required=True, ipc_dtype=dtype)
    return Engine.open(model, daemons=["cpu", "cpu"], placement=placement, settings=settings)


def generated(engine: Engine, *, kill: psutil.Process | None = None) -> list[int]:
    tokens = []
    for token in engine.generate(rig.PROMPT, NUM_TOKENS):
        tokens.append(token.token_id)
        if len(tokens) == FAULT_AFTER and kill is not None:
            kill.kill()
    return tokens


def pairs(engine: Engine, phase: Phase) -> list[int]:
    """Of each daemon, in all."""
    owners = engine.stats().owners
    return [
        owners[name].phases[phase].pairs if phase in owners[name].phases else 0 for name in DAEMONS
    ]


def test_whoever_answers_the_text_is_the_same(
    model: Path, moe: MoeSpec, undisturbed: list[int]
) -> None:
    with Engine.open(model) as engine:
        expected = engine.logits(rig.PROMPT)
    with opened(model, replicated(moe, "first")) as engine:
        assert generated(engine) == undisturbed
        decoded, prompt = pairs(engine, Phase.DECODE), pairs(engine, Phase.PREFILL)
        assert decoded[0] > 0 == decoded[1]
        # A chunk's pairs are shared: the difference is of single experts.
        assert min(prompt) > 0.35 * sum(prompt)
        for answering in ("second", "either"):
            engine.replace_experts(replicated(moe, answering))
            before = decoded
            assert generated(engine) == undisturbed
            assert (engine.logits(rig.PROMPT) == expected).all()
            decoded = pairs(engine, Phase.DECODE)
            assert decoded[1] > before[1]
            assert (decoded[0] > before[0]) == (answering == "either")
        assert "fallback" not in engine.stats().owners


@pytest.mark.parametrize(("answering", "dtype"), [("", "f32"), ("either", "f16")])
def test_the_first_answers_alone_without_a_choice_or_if_sums_are_rounded(
    model: Path, moe: MoeSpec, undisturbed: list[int], answering: str, dtype: str
) -> None:
    with opened(model, replicated(moe, answering), dtype) as engine:
        assert generated(engine) == undisturbed or dtype == "f16"
        assert pairs(engine, Phase.PREFILL)[1] == pairs(engine, Phase.DECODE)[1] == 0


@pytest.mark.parametrize("index", [0, 1])
def test_a_copy_takes_over_from_a_killed_daemon(
    model: Path, moe: MoeSpec, undisturbed: list[int], index: int
) -> None:
    """Daemons are required, so that there is no fallback."""
    with opened(model, replicated(moe, "either")) as engine:
        victim = next(
            each for each in spawned_daemons() if f"/{DAEMONS[index]}" in " ".join(each.cmdline())
        )
        assert generated(engine, kill=victim) == undisturbed
        stats = engine.stats()
        assert "daemon_lost" in {event.kind for event in stats.events}
        assert "fallback" not in stats.owners
        assert stats.owners[DAEMONS[index]].retries > 0
        assert stats.owners[DAEMONS[index]].fallbacks == 0
