"""What two ways save where a GPU has some of the experts: its kernels ask the processor without the
host, and prompts go layer by layer.

One engine writes and reads the same tokens in turns: steps through the processor's mailbox, and
with the host asking between graphs; prompts as groups of chunks, and each chunk through all layers.
All of them have the same bits. Plans are made with heat of other text, learnt first.

Examples:
  python -m bench.random_moe q4_k_m --layers 48 --routing qwen3 --out /dev/shm/m48.gguf
  python -m bench.gpu_ways /dev/shm/m48.gguf --expert-budget-mb 6000 12000 --save
  python -m bench.gpu_ways /dev/shm/m48.gguf --device-memory-mb 8192 --prompts 4096 --save
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from bench.options import add_save_option, bench_parser
from bench.planted_routing import Walk
from bench.report import finish, head, table
from bench.texts import written_s

from dflash_protocol.device import parse_device
from dflash_protocol.settings import Settings, load_settings
from dflash_runtime import Engine
from dflash_runtime.engine.steps import Steps
from dflash_runtime.placement.plan_text import plan_text

COLUMNS = ["within", "work", "tokens/s", "tokens/s", "times as fast"]
PROMPTS = (512, 4096)
BEFORE = 448
"""Tokens before those that are written."""
LEARNT = 500
"""Tokens written of each text that heat is learnt on."""

Times = dict[str, list[float]]
Way = Callable[[Engine], Any]


@contextmanager
def _as_opened(engine: Engine) -> Iterator[None]:
    yield


@contextmanager
def _by_host(engine: Engine) -> Iterator[None]:
    """Refuse the mailbox for a while."""
    captured: Any = engine._steps._captured
    choice, sessions = captured._choice, captured._choice.sessions
    choice.leave_mailboxes()
    sessions._refused = sessions.present().mail.routes
    sessions.close()
    yield
    sessions._refused = ()


@contextmanager
def _by_chunk(engine: Engine) -> Iterator[None]:
    with mock.patch.object(Steps, "_groups_chunks", False):
        yield


def learn(settings: Settings, walk: Walk) -> None:
    """Write texts, so that the heat file of these settings knows which experts are chosen."""
    step = len(walk.token_ids) // 5
    with Engine.open(settings=settings) as engine:
        for number in (3, 4):
            prompt = walk.stretch(step * number, BEFORE)
            for _ in engine.generate(prompt, LEARNT, ignore_eos=True):
                pass


WRITING: dict[str, Way] = {"mailbox": _as_opened, "host": _by_host}
READING: dict[str, Way] = {"by layer": _as_opened, "by chunk": _by_chunk}


def in_turns(
    ways: dict[str, Way], engine: Engine, run: Callable[[], tuple[Any, float]], rounds: int
) -> Times:
    """Seconds of each way, in turns, every other round backwards, of every second run; one more
    turn of each comes first.

    Raises: RuntimeError if they find different things.
    """
    times: Times = {name: [] for name in ways}
    expected = None
    for number in range(rounds + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            with ways[name](engine):
                run()  # captures steps anew
                found, seconds = run()
            if expected is None:
                expected = found
            if found != expected:
                raise RuntimeError(f"{name} finds something else")
            if number:
                times[name].append(seconds)
    return times


def measure(
    settings: Settings, walk: Walk, *, rounds: int, num_tokens: int, prompts: Sequence[int]
) -> dict[str, Any]:
    """Seconds of a token and of prompts, by way, of one engine; and what it has."""
    with Engine.open(settings=settings) as engine:
        before = walk.stretch(0, BEFORE)
        captured: Any = engine._steps._captured
        sessions = captured._choice.sessions
        ways = WRITING
        if sessions is None or sessions.present() is None:
            ways = {"all there" if sessions is None else "host": _as_opened}
        found: dict[str, Any] = {
            "written": in_turns(ways, engine, lambda: written_s(engine, before, num_tokens), rounds)
        }
        for length in prompts:
            prompt = walk.stretch(BEFORE + num_tokens, length)

            def read(prompt: Sequence[int] = prompt) -> tuple[list[int], float]:
                [token] = engine.generate(prompt, 1, ignore_eos=True)
                return [token.token_id], engine.last_generation.prefill_s

            found[f"prompt of {length}"] = in_turns(READING, engine, read, rounds)
        stats = engine.stats()
        found["pairs"] = {name: each.pairs for name, each in stats.owners.items()}
        found["layers"], found["hot_only"] = stats.hits.layers, stats.hits.layers_hot_only
        found["plan"] = plan_text(engine.plan) if engine.plan else ""
        found["chunk"] = engine._steps._backend.chunking.preferred
        return found


def rows_of(budget: str, found: dict[str, Any]) -> list[list[str]]:
    """A row for each kind of work: tokens/s both ways, the median of the ratios of rounds, and the
    least and the largest."""
    rows = []
    for what, times in found.items():
        if what != "written" and not what.startswith("prompt"):
            continue
        num = 1 if what == "written" else int(what.rpartition(" ")[2])
        speeds = [f"{num / statistics.median(each):.1f}" for each in times.values()]
        row = [budget, f"{what}: {', '.join(times)}", *speeds]
        if len(times) == 2:
            new, old = times.values()
            ratios = sorted(before / after for after, before in zip(new, old, strict=True))
            row.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        rows.append(row + [""] * (5 - len(row)))
    return rows


def main() -> None:
    """Print the table, and save it with `--save`."""
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda:0")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--expert-budget-mb", type=int, nargs="+", help="default: 6000")
    given.add_argument("--device-memory-mb", type=int, nargs="+", help="of all that is there")
    parser.add_argument("--cache-slots", type=int, default=0, help="of steps (default 0)")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, nargs="*", default=list(PROMPTS))
    add_save_option(parser)
    options = parser.parse_args()
    walk, rows = Walk.of_file(options.model), list[list[str]]()
    record = head("Ways to the experts of a GPU's processor, in turns")
    budget = "device_memory_mb" if options.device_memory_mb else "expert_budget_mb"
    sizes = getattr(options, budget) or [6000]
    settings = replace(
        load_settings(),
        model=str(options.model),
        device=parse_device(options.device, default_index=0),
        context=max([BEFORE + max(options.tokens, LEARNT), *options.prompts]) + 8,
        swap_max=0,
        moe_cache_slots=options.cache_slots,
    )
    with tempfile.TemporaryDirectory() as name:
        learnt = Path(name) / "learnt.heat"
        learn(replace(settings, heat=str(learnt), **{budget: max(sizes)}), walk)
        for size in sizes:
            used = Path(name) / f"{size}.heat"
            shutil.copy(learnt, used)
            found = measure(
                replace(settings, heat=str(used), **{budget: size}),
                walk,
                rounds=options.rounds,
                num_tokens=options.tokens,
                prompts=options.prompts,
            )
            record[str(size)] = found
            rows += rows_of(f"{size} MiB", found)
            print(table(COLUMNS, rows), flush=True)
    finish("gpu-ways", record, table(COLUMNS, rows), options.save)


if __name__ == "__main__":
    main()
