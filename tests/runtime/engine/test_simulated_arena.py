"""What `dflash-moe simulate` says of a trace, and what the arena that wrote it has found."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_runtime.cli.simulate import simulate
from dflash_runtime.placement.cache.policies import POLICIES
from dflash_runtime.placement.cache.simulation import WARM_UP
from dflash_runtime.placement.cache.traces import read_trace
from support.disk_engines import TRAINED, opened, stats_of
from support.plain_arena import PlainArena

PROMPT = "def read_lines(path):\n"
FEW, MANY = 200, 600
HALF_LIVES = {"lru": 2.0, "lfu": 128.0, "static": 2048.0}
FAST = (TRAINED[2], 0.5, "lfu", FEW), (TRAINED[1], 0.25, "auto", FEW)
CASES = [
    case if case in FAST else pytest.param(*case, marks=pytest.mark.slow)
    for case in product(TRAINED, [0.125, 0.25, 0.5, 0.75], [*HALF_LIVES, "auto"], [FEW, MANY])
    if case in FAST or case[-1] == MANY
]


@dataclass(frozen=True)
class Found:
    """Shares of the experts that were used after the warm-up."""

    by_engine: float
    by_plain_version: float
    simulated: float
    others: dict[str, float]
    """Simulated too, by policy."""


def found_by(path: Path, part: float, policy: str, num_tokens: int, folder: Path) -> Found | None:
    """In steps, of which `part` of the experts have room; None if that is less than a layer."""
    wishes: dict[str, Any] = {"moe_predict_prefetch": False, "moe_cache_policy": policy}
    trace_path = folder / "it.trace"
    with opened(path, None) as engine:
        layers = engine.spec.moe.layers
    per_layer = round(part * layers[0].num_experts)
    if per_layer * len(layers) < layers[0].num_experts:
        return None
    half_lives = []
    with opened(path, per_layer * len(layers), expert_trace=str(trace_path), **wishes) as engine:
        first = warm = stats_of(engine)
        prompt = engine.encode_prompt(PROMPT)[:1]  # a prompt's chunk would count otherwise
        tokens = engine.generate(prompt, num_tokens, temperature=1.0, seed=1, ignore_eos=True)
        for token, _ in enumerate(tokens):
            half_lives.append(stats_of(engine).half_life)
            if token + 1 == num_tokens // WARM_UP:
                warm = stats_of(engine)
        last = stats_of(engine)
    assert last.failed == 0
    used = last.found + last.missed - first.found - first.missed
    assert used == num_tokens * sum(each.num_experts_used for each in layers)
    plain, num_found, num_used = PlainArena(first.num_slots, len(layers)), 0, 0
    chosen = [ids.tolist() for _, ids in read_trace(trace_path).by_layer()]
    for token, half_life in enumerate(half_lives):
        for layer, ids in enumerate(chosen):
            found = plain.use(layer, ids[token], half_life)
            if token >= num_tokens // WARM_UP:
                num_found, num_used = num_found + found, num_used + len(ids[token])
    arguments = [str(trace_path), "--slots", str(per_layer), "--json"]
    if policy != "auto":
        arguments += ["--half-life", str(HALF_LIVES[policy])]
    done = CliRunner().invoke(simulate, arguments, catch_exceptions=False)
    [replay] = json.loads(done.output)["replays"]
    rows = {name: row["found"] for name, row in replay["policies"].items()}
    return Found(
        (last.found - warm.found) / (last.found + last.missed - warm.found - warm.missed),
        num_found / num_used,
        rows["auto" if policy == "auto" else "lfu"],
        {name: rows[name] for name in POLICIES},
    )


@pytest.mark.parametrize(("path", "part", "policy", "num_tokens"), CASES)
def test_an_arena_finds_what_its_trace_says(
    path: Path, part: float, policy: str, num_tokens: int, tmp_path: Path
) -> None:
    """By a plain version of it, to a quarter of a point: what was there at first is not traced. The
    simulator's `auto` is the same but for that, after which another half-life may be chosen a few
    tokens sooner or later: to a point. A fixed half-life is simulated for each layer by
    itself, and what it does not keep needs no room."""
    found = found_by(path, part, policy, num_tokens, tmp_path)
    if found is None:
        pytest.skip("a layer has more experts")
    print(f"{path.stem} {part} {policy}: {found}")
    assert found.by_engine == pytest.approx(found.by_plain_version, abs=0.0025)
    most = 0.01 if policy == "auto" else 0.035
    assert found.by_engine == pytest.approx(found.simulated, abs=most)
    if policy == "auto":
        assert found.by_engine >= max(found.others.values()) - 0.1
        assert found.by_engine >= found.others["lru"] - 0.005
