"""The GPU backend on a whole model: one run that measures everything, beside llama.cpp.

A random model in the shape of Qwen3-30B-A3B, Q4_K_M, is written if no file is given; --shape names
others. Every part is processes of its own and has a deadline: what fails or takes too long is said
in the result, and the rest goes on, so that the whole ends within --limit seconds. Parts, in this
order:

  device       name, driver, multiprocessors; how fast memory is copied and read
  resident     all experts on one GPU: decode at several contexts and whole prompts, our engine and
               llama.cpp in turns; llama.cpp is left out where it is not built with CUDA
  kernels      each kernel of a decode step: time, bytes of weights, GB/s, share of the copy; the
               time of a token, put together
  mail-gpu     all routed experts in a daemon on a second GPU, which kernels ask
  mail-host    the same, through the host's memory alone
  mail-half    half of them there
  mail-three   all of them in daemons on three more GPUs, each has a third of them; needs four GPUs
  idle         what parent, daemon and both GPUs use in six seconds without work after decode with
               all routed experts in a daemon on a second GPU, through the mailbox
  split-gpu    all of them on the second GPU, and the host asks
  split-half   half of them there
  split-cpu    all of them in a daemon on the CPU
  peer-layers  llama.cpp in one process, its layers shared out between the first two GPUs
  peer-gpu     the same, its experts on the second GPU
  peer-rpc     llama.cpp, its experts in its RPC server on the second GPU, a process of its own
  peer-cpu     llama.cpp, its experts on the CPU
  tests        the tests that need a GPU; only if asked for

Parts that need more GPUs than there are are left out, which is said.

At the end every goal is printed with its figure. The exit status is 1 if a part failed, else 0
whether goals are met or not; with --must it is 2 if one that was measured is missed.

Examples:
  python -m bench.gpu --model /dev/shm/whole.gguf --save         everything, under 8 minutes
  python -m bench.gpu --model /dev/shm/whole.gguf --quick        the figures of one GPU, 2 minutes
  python -m bench.gpu --model /dev/shm/whole.gguf --split        two GPUs or four, under 9 minutes
  python -m bench.gpu --model /dev/shm/whole.gguf --split --parts resident mail-three idle
  python -m bench.gpu --parts device kernels --kernel-contexts 448 32768
  python -m bench.gpu --parts resident split-cpu --peer none
  python -m bench.gpu --parts tests
  python -m bench.gpu --shape qwen35moe --parts resident --contexts 448 8192 --prompts 512 4096
  python -m bench.gpu --layers 12 --contexts 448 --prompts 512 --peer none
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.build_peer import VARIANTS, build_record
from bench.gpu_device import measure_device
from bench.gpu_idle import measure_idle
from bench.gpu_kernels import measure_kernels
from bench.gpu_parts import Parts, Result, say
from bench.gpu_peer import built_peer
from bench.gpu_record import GOALS_OF_SHAPE, tables, verdicts
from bench.gpu_resident import Work, measure_resident
from bench.gpu_split import PEER_SPLITS, SPLITS, Place, SplitWork, measure_peer_split, measure_split
from bench.gpu_tests import measure_tests
from bench.model_shapes import SHAPES
from bench.options import add_save_option, bench_parser
from bench.peer_source import BuildError

from bench import random_moe, report

LIMITS_S = {
    "device": 45.0,
    "resident": 210.0,
    "kernels": 90.0,
    "mail-gpu": 80.0,
    "mail-host": 70.0,
    "mail-half": 70.0,
    "mail-three": 80.0,
    "idle": 60.0,
    "split-gpu": 80.0,
    "split-half": 70.0,
    "split-cpu": 110.0,
    "peer-layers": 60.0,
    "peer-gpu": 60.0,
    "peer-rpc": 150.0,
    "peer-cpu": 60.0,
    "tests": 240.0,
}
"""Longest time of each part."""
_QUICK = ("device", "resident", "kernels")
_USUAL = tuple(name for name in LIMITS_S if name != "tests")
_SPLIT = tuple(name for name in _USUAL if name not in ("kernels", "split-cpu", "peer-cpu"))
_MIX_OF_SHAPE = {"qwen3moe": "q4_k_m", "qwen35moe": "qwen35moe"}
_IDLE_SPLIT = "mail-gpu"
"""After whose work the idle part waits."""
GPUS_NEEDED = {name: each.num_gpus for name, each in (SPLITS | PEER_SPLITS).items()}
GPUS_NEEDED["idle"] = SPLITS[_IDLE_SPLIT].num_gpus
"""By part; those that are missing need one at most."""

Measure = Callable[[Result, float], None]


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """What was asked for, with defaults filled in."""
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("--device", default="cuda:0", help="the parent's (default cuda:0)")
    parser.add_argument("--second", default="cuda:1", help="of a GPU daemon (default cuda:1)")
    parser.add_argument(
        "--more",
        nargs=2,
        default=["cuda:2", "cuda:3"],
        help="of two more for mail-three (default cuda:2 cuda:3)",
    )
    parser.add_argument(
        "--shape", choices=list(GOALS_OF_SHAPE), default="qwen3moe", help="default qwen3moe"
    )
    parser.add_argument("--model", type=Path, help="a file of that shape; written if not given")
    parser.add_argument("--layers", type=int, help="of a file that is written (default: all)")
    parser.add_argument("--parts", nargs="+", choices=list(LIMITS_S), help="default: all but tests")
    parser.add_argument("--quick", action="store_true", help="few rounds of one GPU's figures")
    parser.add_argument(
        "--split",
        action="store_true",
        help="figures of several GPUs, at one context and one prompt",
    )
    parser.add_argument("--contexts", type=int, nargs="+", help="default 448 8192 32768")
    parser.add_argument("--prompts", type=int, nargs="+", help="default 512 4096 8192 32768")
    parser.add_argument("--kernel-contexts", type=int, nargs="+", help="default 448 32768")
    parser.add_argument("--tokens", type=int, default=128, help="a sample of decode (default 128)")
    parser.add_argument("--rounds", type=int, help="a row (default 5; fewer for long prompts)")
    parser.add_argument(
        "--peer",
        choices=["auto", "none", *VARIANTS],
        default="auto",
        help="which build of llama.cpp (default: one with CUDA, if there is one)",
    )
    parser.add_argument("--only-peer", action="store_true", help="leave our side out of `resident`")
    parser.add_argument("--limit", type=float, default=465, help="seconds in all (default 465)")
    parser.add_argument("--must", action="store_true", help="exit status 2 if a goal is missed")
    add_save_option(parser)
    options = parser.parse_args(arguments)
    is_quick, is_short = options.quick, options.quick or options.split
    options.layers = options.layers or SHAPES[options.shape].num_layers
    usual = _SPLIT if options.split else _USUAL
    options.parts = options.parts or list(_QUICK if is_quick else usual)
    options.contexts = options.contexts or ([448] if is_short else [448, 8192, 32768])
    options.prompts = options.prompts or ([4096] if is_short else [512, 4096, 8192, 32768])
    options.kernel_contexts = options.kernel_contexts or ([448] if is_quick else [448, 32768])
    options.rounds = options.rounds or (3 if is_quick else 5)
    return options


def peer_folder(options: argparse.Namespace) -> tuple[Path | None, str]:
    """Where llama.cpp is built, or why it is left out."""
    if options.peer == "none":
        return None, ""
    try:
        return built_peer(options.peer), ""
    except BuildError as error:
        return None, str(error)


def measures(
    options: argparse.Namespace, path: Path, peer: Path | None, parts: Parts
) -> dict[str, Measure]:
    """What each part does, by its name; parts that need what is not there are missing."""
    num_decode = min(options.contexts)
    work = SplitWork(
        num_decode,
        4096 if 4096 in options.prompts else min(options.prompts),
        options.tokens,
        min(3, options.rounds),
    )

    place = Place(path, options.device, [options.second, *options.more])

    def split(name: str, result: Result, until_s: float) -> None:
        text = parts.results.get("resident", {}).get("texts", {}).get(str(num_decode))
        measure_split(result, until_s, split=SPLITS[name], place=place, work=work, text=text)

    table: dict[str, Measure] = {
        "device": partial(measure_device, device=options.device),
        "resident": partial(
            measure_resident,
            path=path,
            device=options.device,
            peer=peer,
            with_ours=not options.only_peer,
            work=Work(options.contexts, options.prompts, options.tokens, options.rounds),
        ),
        "kernels": partial(
            measure_kernels, path=path, device=options.device, contexts=options.kernel_contexts
        ),
        "idle": partial(measure_idle, split=SPLITS[_IDLE_SPLIT], place=place, work=work),
        "tests": measure_tests,
    }
    table |= {name: partial(split, name) for name in SPLITS}
    if peer is not None:
        table |= {
            name: partial(measure_peer_split, split=each, path=path, peer=peer, work=work)
            for name, each in PEER_SPLITS.items()
        }
    return table


def run(options: argparse.Namespace) -> int:
    """Measure, print, keep. Returns the exit status."""
    parts = Parts(options.limit)
    mix = _MIX_OF_SHAPE[options.shape]
    path = options.model or random_moe.MODELS / f"{mix}-{options.layers}.gguf"
    if not path.exists():
        say(f"writing {path}")
        random_moe.write(path, random_moe.MIXES[mix], num_layers=options.layers)
    peer, why_no_peer = peer_folder(options)
    if why_no_peer:
        say(why_no_peer)
    table = measures(options, path, peer, parts)
    if "device" in options.parts or any(GPUS_NEEDED.get(name, 1) > 1 for name in options.parts):
        parts.run("device", LIMITS_S["device"], table["device"])
    num_gpus = len(parts.results.get("device", {}).get("gpus", []))
    for name in options.parts:
        if name == "device" or name not in table:
            continue
        needed = GPUS_NEEDED.get(name, 1)
        if needed > max(1, num_gpus):
            say(f"{name}: left out, it needs {needed} GPUs and there are {num_gpus}")
            continue
        parts.run(name, LIMITS_S[name], table[name])
    results = parts.results
    results.get("resident", {}).pop("texts", None)
    goals = GOALS_OF_SHAPE[options.shape]
    shown = tables(results, [*SPLITS, *PEER_SPLITS], goals)
    record: dict[str, Any] = report.head(
        "The GPU backend on a whole model",
        peer=None if peer is None else build_record(peer),
    )
    record |= {
        "cores": os.cpu_count(),
        "model": {
            "name": path.name,
            "shape": SHAPES[options.shape].name,
            "bytes": path.stat().st_size,
        },
        "why_no_peer": why_no_peer,
        "parts": results,
        "goals": verdicts(results, goals),
    }
    report.finish("gpu", record, shown, options.save)
    if parts.failed:
        return 1
    return 2 if options.must and any(each["met"] is False for each in record["goals"]) else 0


def main() -> None:
    raise SystemExit(run(parsed()))


if __name__ == "__main__":
    main()
