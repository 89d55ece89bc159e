"""What comparing weights costs: blocks of a large file, warm and cold, by one process and by two at
once; and how much slower decoding is while the file's full digest is made in the background.

The model is any large GGUF file. For the cold figures its pages are evicted from the page cache.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.daemons import made_up_prompt
from bench.machine import ROOT
from bench.options import add_save_option, bench_parser

from bench import report
from dflash_adapters.gguf import weight_check
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.weight_blocks import NONCE_BYTES, expert_blocks
from dflash_adapters.gguf.weight_check import WeightCheck
from dflash_adapters.registry import read_spec
from dflash_protocol.settings import child_environment, package_roots
from dflash_runtime import Engine
from dflash_runtime.experts.store import every_expert

WARM_GOAL_S, COLD_GOAL_S, DECODE_GOAL = 0.2, 2.0, 0.99
_SPAN_S = 2.0
_PACKAGES = ("dflash_protocol", "dflash_adapters", "dflash_runtime", "dflash_daemon")
EXAMPLES = """examples:
  python -m bench.weight_check --model model.gguf --save
"""


def seconds_of_blocks(model: Path, nonces: list[bytes]) -> list[float]:
    """Times of answers about all experts, one for each nonce."""
    found = []
    with GgufFile.open(model) as file:
        moe = read_spec(file).moe
        check, owned = WeightCheck(file, moe), every_expert(moe)
        for nonce in nonces:
            started_s = time.perf_counter()
            check.answer(owned, nonce)
            found.append(time.perf_counter() - started_s)
    return found


def forget(model: Path) -> None:
    """Evict the file from the page cache."""
    with GgufFile.open(model) as file:
        for path in file.shard_paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def by_two_processes(model: Path, nonce: bytes, rounds: int) -> list[float]:
    """Times of the slower of two processes that hash the same blocks at once."""
    command = [sys.executable, "-m", "bench.weight_check", "--model", str(model), "--nonce"]
    roots = (*package_roots(_PACKAGES), ROOT)
    found = []
    for _ in range(rounds):
        children = [
            subprocess.Popen(
                [*command, nonce.hex()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(roots),
                text=True,
            )
            for _ in range(2)
        ]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        found.append(max(float(child.communicate(timeout=120)[0]) for child in children))
    return found


def answer_when_told(model: Path, nonce: bytes) -> None:
    """One of the two processes."""
    with GgufFile.open(model) as file:
        moe = read_spec(file).moe
        check, owned = WeightCheck(file, moe), every_expert(moe)
        print("ready", flush=True)
        sys.stdin.readline()
        started_s = time.perf_counter()
        check.answer(owned, nonce)
        print(time.perf_counter() - started_s, flush=True)


def decode_ratios(model: Path, rounds: int) -> list[float]:
    """Tokens per second while the model's digest is made in the background, over those without."""
    weight_check._DIGEST_AFTER_S = 0.0
    ratios = []
    with Engine.open(threads=os.cpu_count()) as engine:
        tokens_per_s(engine)
        for number in range(rounds):
            rates = {}
            for with_digest in (True, False) if number % 2 else (False, True):
                with GgufFile.open(model) as file:
                    check = WeightCheck(file, read_spec(file).moe)
                    if with_digest:
                        check.start()
                    rates[with_digest] = tokens_per_s(engine)
                    assert not check.full_digest, "the file is too small, or its digest is kept"
                    check.close()
            ratios.append(rates[True] / rates[False])
    return ratios


def tokens_per_s(engine: Engine) -> float:
    """Rate of the demo model over some seconds."""
    started_s, num_tokens = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - started_s) < _SPAN_S:
        num_tokens += sum(1 for _ in engine.generate(made_up_prompt(8), 64, ignore_eos=True))
    return num_tokens / elapsed_s


def measure(model: Path, rounds: int) -> dict[str, Any]:
    nonces = [secrets.token_bytes(NONCE_BYTES) for _ in range(rounds)]
    cold = []
    for nonce in nonces:
        forget(model)
        cold += seconds_of_blocks(model, [nonce])
    warm = seconds_of_blocks(model, [nonces[-1]] * (2 * rounds + 1))[1:]
    with GgufFile.open(model) as file:
        moe = read_spec(file).moe
        tensors = file.tensors.values()
        num_blocks = len(expert_blocks(nonces[0], moe, every_expert(moe), tensors=tensors).places)
    return {
        "num_blocks": num_blocks,
        "warm_s": warm,
        "two_at_once_s": by_two_processes(model, nonces[-1], rounds),
        "cold_s": cold,
        "decode_ratios": decode_ratios(model, 4 * rounds),
    }


def tables(result: dict[str, Any]) -> str:
    rows = []
    for name, key, goal in (
        ("warm", "warm_s", WARM_GOAL_S),
        ("warm, both sides on one machine", "two_at_once_s", WARM_GOAL_S),
        ("cold", "cold_s", COLD_GOAL_S),
    ):
        median, worst = statistics.median(result[key]), max(result[key])
        reached = "yes" if median <= goal else "NO"
        rows.append([name, f"{median:.3f} s", f"{worst:.3f} s", f"{goal} s", reached])
    ratios = result["decode_ratios"]
    median, worst = statistics.median(ratios), min(ratios)
    reached = "yes" if median >= DECODE_GOAL else "NO"
    rows.append(
        ["decode while all is hashed", f"{median:.3f}", f"{worst:.3f}", f"{DECODE_GOAL}", reached]
    )
    what = f"{result['num_blocks']:,} blocks"
    return report.table([what, "median", "worst", "goal", "reached"], rows)


def main() -> None:
    parser = bench_parser(__file__, __doc__, EXAMPLES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nonce", help=argparse.SUPPRESS)
    add_save_option(parser)
    options = parser.parse_args()
    if options.nonce:
        answer_when_told(options.model, bytes.fromhex(options.nonce))
        return
    result = measure(options.model, options.rounds)
    record = report.head("what comparing weights costs") | result
    record["model_bytes"] = options.model.stat().st_size
    text = tables(result)
    report.finish("weight-check", record, text, options.save)


if __name__ == "__main__":
    main()
