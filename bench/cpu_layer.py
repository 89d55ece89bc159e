"""One expert layer on the CPU: our time over llama.cpp's, decode and chunks of 2 to 512 tokens.

Both sides read the same file where it is mapped, in a process each, and run interleaved. Decode
draws 8 fresh experts in every layer, so that weights come from memory, not from a cache; chunks
route their tokens zipf-skewed. See bench/README.md.

Examples:
  python -m bench.cpu_layer                                  everything, native peer
  python -m bench.cpu_layer --files q4_k_m --tokens 1 512    two rows
  DFLASH_MOE_EXPERT_COMPUTE_CPU_TIER=avx2 python -m bench.cpu_layer --peer avx2
                                                             both sides with AVX2 alone
  python -m bench.cpu_layer --only-peer --files q8_0         the peer's figures alone
  python -m bench.cpu_layer --step-order --tokens 1 8        ours beside ours as beside a GPU
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.bandwidth import STREAMS, Reader
from bench.build_peer import VARIANTS, build, build_record
from bench.expert_reference import expert_reference, relative_error
from bench.options import add_pair_options, bench_parser
from bench.our_layer import OurLayers
from bench.pairs import Sample, Spread, interleave, median_cell, ratio, ratio_cell
from bench.peer_layer import PeerLayers
from bench.peer_source import BuildError
from bench.random_moe import HIDDEN, MIXES, NUM_EXPERTS, NUM_USED, model_path
from bench.sides import Side
from bench.workload import Work, make_work

from bench import report
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec

MAIN_FILES = ("q4_k_m", "q8_0")
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
_TOKENS_A_SAMPLE = 96
"""Tokens that a sample computes at least, over one layer or several."""
_CHECKED_TOKENS = 2

OURS, PEER, REPACKED, _READ = "ours", "peer", "peer, repacked", "read"
STEP_ORDER = "ours, in step order"


class LayerBench:
    """All rows of one file."""

    def __init__(
        self, path: Path, sides: dict[str, Side], reader: Side, rounds: int, timeout_s: float
    ) -> None:
        self._path, self._sides, self._reader = path, sides, reader
        self._rounds, self._patience_s = rounds, timeout_s
        with GgufFile.open(path) as file:
            layers = read_spec(file).moe.layers
        self._expert_bytes = [layer.expert_bytes for layer in layers]

    def measure(self, num_tokens: int) -> dict[str, Any]:
        """One row: each side's samples in seconds a layer, ratios, errors; bandwidth for one
        token."""
        runners: dict[str, Callable[[int], Sample]] = {
            name: self._runner(side, num_tokens) for name, side in self._sides.items()
        }
        row: dict[str, Any] = {"tokens": num_tokens}
        if num_tokens == 1:
            kind, streams = row["best_read"] = self._best_read()
            runners[_READ] = lambda number: self._reader.sample("read", kind, streams, number)
        measured = interleave(runners, self._rounds, timeout_s=self._patience_s, seed=num_tokens)
        samples = measured.values
        row["quiet_rounds"] = measured.label()
        row["seconds_a_layer"] = {name: samples[name] for name in self._sides}
        row["ratios"] = {
            name: ratio(samples[OURS], samples[name]).as_dict()
            for name in self._sides
            if name != OURS and OURS in self._sides
        }
        row["errors"] = self._errors(num_tokens)
        if num_tokens == 1:
            expert_bytes = statistics.mean(self._expert_bytes)
            row["read_bytes_per_s"] = samples[_READ]
            row["share_of_read"] = {
                name: Spread.of(
                    [
                        NUM_USED * expert_bytes / seconds / reading
                        for seconds, reading in zip(samples[name], samples[_READ], strict=True)
                    ]
                ).as_dict()
                for name in self._sides
            }
        for side in self._sides.values():
            side.call("end_row")
        return row

    def _best_read(self) -> tuple[str, int]:
        """Kind of memory and number of streams with the fastest plain read."""
        ways = [(kind, streams) for kind in ("mapped", "anonymous") for streams in STREAMS]
        best = {
            way: max(self._reader.sample("read", *way, number).value for number in range(5))
            for way in ways
        }
        return max(ways, key=lambda way: best[way])

    def _works(self, num_tokens: int, round_number: int) -> list[Work]:
        """Layers of one sample: all of them for few tokens, else the next one of the file."""
        num_layers = len(self._expert_bytes)
        # One token goes through each layer at least once, and more often in short files.
        count = max(1, min(_TOKENS_A_SAMPLE // num_tokens, max(12, num_layers)))
        first = round_number * count
        return [
            make_work(
                (first + index) % num_layers,
                num_tokens,
                hidden_size=HIDDEN,
                num_experts=NUM_EXPERTS,
                num_used=NUM_USED,
                seed=(first + index + 1_000_000,),
            )
            for index in range(count)
        ]

    def _runner(self, side: Side, num_tokens: int) -> Callable[[int], Sample]:
        def run(round_number: int) -> Sample:
            works = self._works(num_tokens, round_number)
            sample = side.sample("run", works)
            return replace(sample, value=sample.value / len(works))

        return run

    def _errors(self, num_tokens: int) -> dict[str, float]:
        work = self._works(num_tokens, 0)[0]
        reference = expert_reference(self._path, work, min(num_tokens, _CHECKED_TOKENS))
        return {
            name: relative_error(side.call("result", work), reference)
            for name, side in self._sides.items()
        }


OTHERS = PEER, REPACKED, STEP_ORDER

COLUMNS = (
    "file, tokens",
    "ours µs",
    "peer µs",
    "repacked µs",
    "step order µs",
    "ours ÷ peer (range)",
    "ours ÷ repacked (range)",
    "ours ÷ step order (range)",
    "quiet rounds",
    "read GB/s",
    "ours of it",
    "peer of it",
    "error ours",
    "error peer",
)


def row_cells(name: str, row: dict[str, Any]) -> list[str]:
    """One line of the table."""

    def share(side: str) -> str:
        shares = row.get("share_of_read", {})
        return f"{shares[side]['median']:.2f}" if side in shares else ""

    def error(side: str) -> str:
        return f"{row['errors'][side]:.4f}" if side in row["errors"] else ""

    seconds = row["seconds_a_layer"]
    return [
        f"{name}, {row['tokens']}",
        *(median_cell(seconds.get(side), scale=1e6) for side in (OURS, *OTHERS)),
        *(ratio_cell(row["ratios"], side) for side in OTHERS),
        row["quiet_rounds"],
        median_cell(row.get("read_bytes_per_s"), 1, scale=1e-9),
        *map(share, (OURS, PEER)),
        *map(error, (OURS, PEER)),
    ]


def measure_file(name: str, tokens: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """All rows of one file, printed as they are measured."""
    path, threads = model_path(name), options.threads
    folder = None if options.step_order else build(options.peer)
    with contextlib.ExitStack() as open_sides:

        def start(side: str, factory: Callable[..., object], *args: Any, **kwargs: Any) -> Side:
            return open_sides.enter_context(
                Side(
                    side,
                    factory,
                    *args,
                    num_threads=threads,
                    realtime=options.realtime,
                    **kwargs,
                )
            )

        sides = {}
        if options.step_order:
            sides[STEP_ORDER] = start(STEP_ORDER, OurLayers, path, in_step_order=True)
        else:
            sides[PEER] = start(PEER, PeerLayers, folder, path, repack=False)
        result: dict[str, Any] = {"file": name, "bytes": path.stat().st_size, "rows": []}
        if not options.only_peer:
            sides[OURS] = start(OURS, OurLayers, path)
            result["kernels"] = sides[OURS].call("numeric_class")
        if options.repacked and not options.step_order:
            repacked = start(REPACKED, PeerLayers, folder, path, repack=True)
            if types := repacked.call("repacked_types"):
                sides[REPACKED] = repacked
                result["repacked"] = types
        bench = LayerBench(
            path, sides, start("reader", Reader, path), options.rounds, options.timeout
        )
        for num_tokens in tokens:
            row = bench.measure(num_tokens)
            result["rows"].append(row)
            print("  ".join(cell for cell in row_cells(name, row) if cell), flush=True)
        return result


def main() -> None:
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("--files", nargs="+", choices=list(MIXES), default=list(MIXES))
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        help=f"chunk sizes (default: {' '.join(map(str, TOKENS))}; one-type files: 1)",
    )
    parser.add_argument(
        "--step-order", action="store_true", help="compare with ours as beside a GPU, not the peer"
    )
    add_pair_options(parser, rounds=9, variants=VARIANTS)
    options = parser.parse_args()
    results = []
    try:
        for name in options.files:
            default = TOKENS if name in MAIN_FILES else (1,)
            results.append(measure_file(name, options.tokens or list(default), options))
        peer = None if options.step_order else build_record(build(options.peer))
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None
    record = report.head("One expert layer: seconds", num_threads=options.threads, peer=peer) | {
        "rounds": options.rounds,
        "files": results,
    }
    rows = [row_cells(result["file"], row) for result in results for row in result["rows"]]
    tables = report.table(COLUMNS, rows)
    if kernels := {result["kernels"] for result in results if "kernels" in result}:
        tables += f"\n\nOur kernels: {', '.join(sorted(kernels))}."
    report.finish("cpu-layer", record, tables, options.save)


if __name__ == "__main__":
    main()
