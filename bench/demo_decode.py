"""Prefill and decode rate of the demo model: experts in the parent, in one daemon, in two.

Run it with ``make bench``.
"""

from __future__ import annotations

import statistics

from bench.options import SPREAD, add_save_option, bench_parser

from bench import report
from dflash_runtime import Engine

SPLITS: dict[str, list[str]] = {"parent": [], "one daemon": ["cpu"], "two daemons": ["cpu", "cpu"]}
PROMPT_TOKENS = 256


def measure(daemons: list[str], num_tokens: int) -> dict[str, float]:
    """Tokens per second of one generation, after a warm-up."""
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
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each split (default 7)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to decode (default 200)")
    add_save_option(parser, SPREAD)
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {split: [] for split in SPLITS}
    for round_number in range(options.rounds):
        order = list(SPLITS) if round_number % 2 == 0 else list(reversed(SPLITS))
        for split in order:
            runs[split].append(measure(SPLITS[split], options.tokens))
    record = report.head("Demo model, tokens/s")
    record |= {"prompt_tokens": PROMPT_TOKENS, "tokens": options.tokens, "runs": runs}
    rows = []
    for split, results in runs.items():
        cells = []
        for kind in ("prefill", "decode"):
            rates = [result[kind] for result in results]
            middle = statistics.median(rates)
            cells.append(f"{middle:.1f} ({min(rates):.0f}…{max(rates):.0f})")
        rows.append([split, *cells])
    text = report.table(["experts in", "prefill tokens/s", "decode tokens/s"], rows)
    report.finish("demo-decode", record, text, options.save)


if __name__ == "__main__":
    main()
