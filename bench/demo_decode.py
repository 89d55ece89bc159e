"""Prefill and decode rate of the demo model: experts in the parent, in one daemon, in two.

Knows nothing of other models or other programs. Run it with ``make bench``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from datetime import UTC, datetime
from pathlib import Path

from bench.machine import processor
from bench.report import write_result

from dflash_protocol import __version__
from dflash_runtime import Engine

SPLITS: dict[str, list[str]] = {"parent": [], "one daemon": ["cpu"], "two daemons": ["cpu", "cpu"]}
RESULTS = Path(__file__).parent / "results"
PROMPT_TOKENS = 256


def measure(daemons: list[str], num_tokens: int) -> dict[str, float]:
    """Tokens per second of one generation, after one that warms caches up."""
    prompt = [(7 * position) % 4000 for position in range(PROMPT_TOKENS)]
    with Engine.open(daemons=daemons) as engine:
        for _ in range(2):
            for _token in engine.generate(prompt, num_tokens, ignore_eos=True):
                pass
        if events := engine.stats().events:
            raise SystemExit(f"the run was disturbed: {events}")
        last = engine.last_generation
        return {"prefill": last.prefill_tokens_per_s, "decode": last.decode_tokens_per_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="runs of each split (default 7)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to decode (default 200)")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {split: [] for split in SPLITS}
    for round_number in range(options.rounds):
        order = list(SPLITS) if round_number % 2 == 0 else list(reversed(SPLITS))
        for split in order:
            runs[split].append(measure(SPLITS[split], options.tokens))
    record = {
        "what": "demo model, tokens/s",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "machine": f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "prompt_tokens": PROMPT_TOKENS,
        "tokens": options.tokens,
        "runs": runs,
    }
    print(f"{record['machine']}\n{'':14s}{'prefill tokens/s':>24s}{'decode tokens/s':>24s}")
    for split, results in runs.items():
        cells = ""
        for kind in ("prefill", "decode"):
            rates = sorted(result[kind] for result in results)
            spread = f"({rates[0]:.0f}-{rates[-1]:.0f})"
            cells += f"{statistics.median(rates):12.1f} {spread:>11s}"
        print(f"{split:14s}{cells}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"demo-decode-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    write_result(path, json.dumps(record, indent=1) + "\n")
    print(f"kept in {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
