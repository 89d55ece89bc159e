"""How experts that move while serving change speed, and how long requests wait for it.

The file's routing is planted (random_moe.py, --routing), and does not fit the GPU, or its experts
are in daemons. An engine that knows heat of other text writes one request after the other, the text
of a stretch of the walk each time; first with moves, then with experts that stay (--swap-max 0).

Examples:
  python -m bench.random_moe q4_k_m --routing qwen3
  python -m bench.moves build/bench-models/q4_k_m-qwen3.gguf --device cuda:0 --expert-budget-mb 5000
  python -m bench.moves build/bench-models/q4_k_m-qwen3.gguf --device cpu --daemon cpu --daemon cpu
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from bench.options import bench_parser
from bench.planted_routing import Walk
from bench.report import table

from dflash_protocol.device import parse_device
from dflash_protocol.settings import Settings, load_settings
from dflash_runtime import Engine

PROMPT = 48
"""Tokens of each prompt."""
_LEARNT = 8
"""Requests that heat is learnt from."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it went; times in seconds."""

    tokens_per_s: float
    longest_step_s: float
    """The longest time between two written tokens."""
    first_token_s: float
    """Moves among it."""
    num_moved: int
    pause_s: float
    """0 if nothing moved."""
    share_here: float
    """Of the selections, those that the GPU computed."""
    share_of_fullest: float
    """Of the selections, those of the owner that computed most of them."""


def served(engine: Engine, prompts: Iterable[Sequence[int]], num_tokens: int) -> list[Request]:
    """Write so many tokens after each prompt."""
    found = []
    for prompt in prompts:
        before, moved = engine.stats(), engine.stats().moves
        times = [time.perf_counter()]
        for _ in engine.generate(prompt, num_tokens, ignore_eos=True):
            times.append(time.perf_counter())
        after = engine.stats()
        pairs = {name: each.pairs for name, each in after.owners.items()}
        for name, each in before.owners.items():
            pairs[name] -= each.pairs
        total = max(1, sum(pairs.values()))
        found.append(
            Request(
                (num_tokens - 1) / (times[-1] - times[1]),
                max(after - before for before, after in pairwise(times[1:])),
                times[1] - times[0],
                after.moves.experts_moved - moved.experts_moved,
                after.moves.last_pause_s if after.moves.rounds > moved.rounds else 0.0,
                pairs.get("local", 0) / total,
                max(pairs.values()) / total,
            )
        )
    return found


def rows_of(name: str, requests: Sequence[Request]) -> list[list[str]]:
    """One row for each fifth of the requests, with means and the longest times."""
    rows = []
    size = -(-len(requests) // 5)
    for first in range(0, len(requests), size):
        some = requests[first : first + size]
        num = len(some)
        rows.append([
            f"{name}, requests {first + 1} to {first + num}",
            f"{sum(each.tokens_per_s for each in some) / num:.1f}",
            f"{sum(each.share_here for each in some) / num:.1%}",
            f"{sum(each.share_of_fullest for each in some) / num:.1%}",
            f"{sum(each.num_moved for each in some)}",
            *(
                f"{1e3 * max(getattr(each, field) for each in some):.2f}"
                for field in ("pause_s", "first_token_s", "longest_step_s")
            ),
        ])  # fmt: skip
    return rows


def measure(
    settings: Settings,
    walk: Walk,
    *,
    num_requests: int,
    num_tokens: int,
    daemons: Sequence[str] = (),
) -> str:
    """A table. The stretches do not overlap."""
    length = PROMPT + num_tokens
    prompts = [walk.stretch(number * length, PROMPT) for number in range(num_requests + _LEARNT)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="moves-") as folder:
        learnt, used = Path(folder, "learnt.heat"), Path(folder, "used.heat")
        still = replace(settings, heat=str(learnt), swap_max=0)
        with Engine.open(settings=still, daemons=daemons) as engine:
            served(engine, prompts[num_requests:], num_tokens)
        for name, most in (("moves", settings.swap_max), ("stays", 0)):
            shutil.copy(learnt, used)
            own = replace(settings, heat=str(used), swap_max=most)
            with Engine.open(settings=own, daemons=daemons) as engine:
                rows += rows_of(name, served(engine, prompts[:num_requests], num_tokens))
    columns = ["", "tokens/s", "selections here", "of the fullest", "moved", "longest pause, ms"]
    return table([*columns, "longest first token, ms", "longest step, ms"], rows)


def main() -> None:
    """Print the table."""
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--daemon", action="append", default=[], help="DEVICE, once for each")
    parser.add_argument("--expert-budget-mb", type=int, help="of the GPU; default: what fits")
    parser.add_argument("--swap-max", type=int, default=48)
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=400, help="written after each prompt")
    options = parser.parse_args()
    settings = replace(
        load_settings(),
        model=str(options.model),
        device=parse_device(options.device, default_index=0),
        expert_budget_mb=options.expert_budget_mb,
        swap_max=options.swap_max,
        context=max(512, PROMPT + options.tokens),
    )
    walk = Walk.of_file(options.model)
    print(
        measure(
            settings,
            walk,
            num_requests=options.requests,
            num_tokens=options.tokens,
            daemons=options.daemon,
        )
    )


if __name__ == "__main__":
    main()
