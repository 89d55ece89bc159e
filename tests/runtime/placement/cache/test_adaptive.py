"""The processor's arena, whose half-life follows the trace: against a plain version, and beside all
other policies on what trained models and planted routing choose."""

from __future__ import annotations

import configparser
import difflib
import fractions
import inspect
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_protocol.ids import I32Array
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from dflash_runtime.compute.half_lives import (
    FIRST,
    HALF_LIVES,
    LEAST_GAIN,
    LEAST_TOKENS,
    WINDOW,
)
from dflash_runtime.engine.demo_model import demo_model_path
from dflash_runtime.placement.cache import simulation
from dflash_runtime.placement.cache.adaptive import AUTO
from dflash_runtime.placement.cache.policies import POLICIES
from dflash_runtime.placement.cache.simulation import replayed
from dflash_runtime.placement.cache.traces import (
    PHASES,
    ExpertTrace,
    TraceHeader,
    TraceLayer,
    read_trace,
)
from support.plain_arena import PlainArena
from support.planted_choices import planted_choices

TRAINED = ("dflash-demo", "dflash-demo-laguna", "dflash-demo-qwen35moe")
PARTS = (0.12, 0.25, 0.5, 0.75)
_PROMPT_TOKENS, _PROMPTS = 900, 20


def trace_of(chosen: I32Array, num_experts: int) -> ExpertTrace:
    """Shapes: chosen [L, T, K]."""
    num_layers, num_tokens, num_used = chosen.shape
    layers = tuple(TraceLayer(layer, num_experts, num_used, 10) for layer in range(num_layers))
    ids = chosen.transpose(1, 0, 2).reshape(num_tokens, -1).astype(np.uint16)
    header = TraceHeader("ab" * 32, "", "cd" * 32, layers)
    return ExpertTrace(header, np.full(num_tokens, len(PHASES) - 1, np.uint8), ids)


def plain_lfu(chosen: list[list[int]], num_slots: int, half_lives: list[float]) -> list[int]:
    """Misses of a layer by token. `half_lives`: the one that decides, by token."""
    used_at: dict[int, list[int]] = {}
    held: set[int] = set()
    misses = []
    for token, (experts, half_life) in enumerate(zip(chosen, half_lives, strict=True)):
        misses.append(sum(expert not in held for expert in experts))
        for expert in experts:
            used_at.setdefault(expert, []).append(token)

        def uses(expert: int, now: int = token, half_life: float = half_life) -> float:
            return float(sum(0.5 ** ((now - then) / half_life) for then in used_at[expert]))

        for expert in experts:
            if expert in held:
                continue
            if len(held) == num_slots:
                others = sorted(held - {*experts})
                leaving = min(others, key=lambda each: (round(uses(each), 12), each), default=None)
                if leaving is None or round(uses(expert), 12) <= round(uses(leaving), 12):
                    continue
                held.remove(leaving)
            held.add(expert)
    return misses


def plain_auto(chosen: I32Array, num_slots: int) -> int:
    """Misses after the warm-up of one pool, with so many slots for each layer. Shapes: chosen
    [L, T, K]."""
    num_layers, num_tokens, _ = chosen.shape
    tried = np.array([
        np.sum([plain_lfu(ids.tolist(), num_slots, [each] * num_tokens) for ids in chosen], axis=0)
        for each in HALF_LIVES
    ])  # fmt: skip
    averages, present, deciding = np.zeros(len(HALF_LIVES)), FIRST, [HALF_LIVES[FIRST]]
    for token in range(num_tokens):
        averages += (tried[:, token] - averages) / WINDOW
        best = int(np.argmin(averages))
        if token + 1 >= LEAST_TOKENS and averages[best] < (1 - LEAST_GAIN) * averages[present]:
            present = best
        deciding.append(HALF_LIVES[present])
    assert len({*deciding}) > 1  # else this shows nothing
    plain, num_missed = PlainArena(num_layers * num_slots, num_layers), 0
    for token in range(num_tokens):
        for layer in range(num_layers):
            experts = chosen[layer, token].tolist()
            found = plain.use(layer, experts, deciding[token + (layer + 1 == num_layers)])
            num_missed += (len(experts) - found) * (token >= num_tokens // simulation.WARM_UP)
    return num_missed


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "plain"])
def test_it_is_what_it_says(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_compiled:
        monkeypatch.setattr(simulation, "_functions", lambda: simulation.PLAIN)
    chosen = planted_choices(
        "qwen3", 3, length=600, num_layers=2, num_experts=32, num_used=4
    ).astype(np.int32)
    found = replayed(trace_of(chosen, 32), [5, 5])[AUTO]
    missed = int(found.num_selections.sum() - found.hits.sum())
    assert missed == plain_auto(chosen, 5)


def planted(kind: str) -> ExpertTrace:
    chosen = planted_choices(
        kind, 5, length=3_000, num_layers=24, num_experts=128, num_used=8
    ).astype(np.int32)
    return trace_of(chosen, 128)


def trained(name: str, folder: Path) -> ExpertTrace:
    """What Python source chooses that the model was not trained on, prompt after prompt."""
    path = demo_model_path().with_name(f"{name}.gguf")
    settings = replace(load_settings(), heat="off", expert_trace=str(folder / "it.trace"))
    source = "".join(map(inspect.getsource, (difflib, fractions, configparser)))
    with Engine.open(path, device="cpu", settings=settings) as engine:
        ids = engine.encode_prompt(source)[: _PROMPT_TOKENS * _PROMPTS]
        for first in range(0, len(ids), _PROMPT_TOKENS):
            prompt = ids[first : first + _PROMPT_TOKENS]
            assert [*engine.generate(prompt, 1, ignore_eos=True)]
    return read_trace(folder / "it.trace")


@pytest.mark.parametrize(
    "name",
    [
        *TRAINED,
        "qwen3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("fickle", "flat")),
    ],
)
def test_it_is_near_the_best_and_never_below_lru(name: str, tmp_path: Path) -> None:
    """Within ten points of the best online or static policy were asked; half a point below LRU at
    most."""
    trace = trained(name, tmp_path) if name in TRAINED else planted(name)
    layers = trace.header.layers
    for part in PARTS:
        slots = [max(x.num_experts_used, round(part * x.num_experts)) for x in layers]
        found = replayed(trace, slots, cache_slots=0)
        shares = {policy: each.hit_share for policy, each in found.items()}
        print(name, part, {policy: f"{100 * share:.1f}" for policy, share in shares.items()})
        best = max(shares[policy] for policy in POLICIES)
        assert shares[AUTO] >= best - 0.03
        assert shares[AUTO] >= shares["lru"] - 0.005


@pytest.mark.parametrize("seed", [1, 2])
def test_experts_that_come_soon_stay_where_there_is_room_for_one_token(seed: int) -> None:
    """Found: experts whose layer had just been computed kept the slots of such as came sooner, so
    that with any half-life less was found than by LRU, by three points here."""
    rng, num_layers, num_tokens, num_used = np.random.default_rng(seed), 8, 1500, 2
    chosen = np.zeros((num_layers, num_tokens, num_used), np.int32)
    for layer in chosen:
        popularity = rng.dirichlet(np.full(16, 2.0))
        for token in range(num_tokens):
            stays = token > 0 and rng.random() < 0.1
            fresh = rng.choice(16, num_used, replace=False, p=popularity)
            layer[token] = layer[token - 1] if stays else fresh
    found = replayed(trace_of(chosen, 16), [num_used] * num_layers)
    assert found[AUTO].hit_share >= found["lru"].hit_share - 0.02
