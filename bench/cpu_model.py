"""A whole model on the CPU: our tokens per second over llama.cpp's, prefill and decode.

Both sides map the same file, in a process each, with equal threads and KV type, and run
interleaved: a prompt of 512 tokens from an empty state; decode after 16 tokens and after 4096.
Our own memory beyond the mapped weights and the KV cache is measured too. See bench/README.md.

Examples:
  python -m bench.cpu_model                              both files, native peer
  python -m bench.cpu_model --files q4_k_m --contexts 16
  python -m bench.cpu_model --files qwen35moe olmoe --contexts 16
  python -m bench.cpu_model --model big.gguf             a file of your own
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench.build_peer import VARIANTS, build, build_record
from bench.options import add_pair_options, bench_parser
from bench.our_model import OurModel
from bench.pairs import Rounds, Sample, interleave, median_cell, ratio, ratio_cell
from bench.peer_model import peer_model
from bench.peer_source import BuildError
from bench.random_moe import MIXES, model_path
from bench.sides import Side

from bench import report
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import ModelSpec

OURS, PEER, REPACKED = "ours", "peer", "peer, repacked"
_CHECKED_TOKENS = 32
_MIB = 1 << 20
_SHORT_CONTEXT = 256
"""Up to this many positions our side computes the prompt again in each round: a new generation."""

_ROUNDS_AT_MOST = 4
"""Rounds that may be repeated for quiet ones, as a multiple of those asked for."""

Runner = Callable[[int], Sample]
"""One side's sample of a round, given the round's number."""


class ModelBench:
    """All rows of one file."""

    def __init__(
        self, sides: dict[str, Side], spec: ModelSpec, options: argparse.Namespace
    ) -> None:
        self._sides, self._options = sides, options
        self._vocab_size, self._is_recurrent = spec.vocab_size, bool(spec.recurrent_layers)
        self._ids: list[int] = (
            np.random.default_rng(0).integers(0, spec.vocab_size, 1 << 16).tolist()
        )
        self._num_positions = 0

    def prefill(self) -> dict[str, Any]:
        """Tokens per second of a prompt, a different one in each round."""
        size = self._options.prefill

        def prompt(number: int) -> list[int]:
            return self._ids[number * size % 4096 :][:size]

        def runner(side: Side) -> Runner:
            return lambda number: side.sample("prefill", prompt(number))

        peak = self._peak("prefill", size, prompt(0))
        runners = {name: runner(side) for name, side in self._sides.items()}
        return self._row(f"prefill {size}", runners, peak)

    def decode(self, context: int) -> dict[str, Any]:
        """Tokens per second of tokens one by one after `context` others."""
        prompt, count = self._ids[:context], self._options.decode
        following = self._ids[context : context + count]

        def runner(side: Side, method: str, *args: Any) -> Runner:
            return lambda _number: side.sample(method, *args)

        runners: dict[str, Runner] = {}
        peak = None
        for name, side in self._sides.items():
            is_short = context <= _SHORT_CONTEXT
            if name != OURS and (is_short or self._is_recurrent):
                runners[name] = runner(side, "decode_after", prompt, following)
            elif name != OURS:
                side.sample("fill", prompt)
                runners[name] = runner(side, "decode", context, following)
            elif is_short:
                peak = self._peak("decode_after", context + count, prompt, count)
                runners[name] = runner(side, "decode_after", prompt, count)
            else:
                peak = self._peak("fill", context, prompt)
                runners[name] = runner(side, "decode", count)
        return self._row(f"decode at {context}", runners, peak)

    def difference(self) -> float:
        """Relative RMS between our logits and the peer's after a short prompt: a sanity check."""
        ids = self._ids[:_CHECKED_TOKENS]
        theirs = self._sides[PEER].call("logits", ids, self._vocab_size).astype(np.float64)
        ours = self._sides[OURS].call("logits", ids)
        return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))

    def _peak(self, method: str, num_positions: int, *args: Any) -> int | None:
        """Our memory while a method runs, without keys and values of the positions used so far."""
        if OURS not in self._sides:
            return None
        side = self._sides[OURS]
        self._num_positions = max(self._num_positions, num_positions)
        kv_bytes = self._num_positions * int(side.call("kv_bytes_per_position"))
        return int(side.call("peak_bytes", method, *args)) - kv_bytes

    def _row(self, name: str, runners: dict[str, Runner], peak: int | None) -> dict[str, Any]:
        measured: Rounds = interleave(
            runners,
            self._options.rounds,
            timeout_s=self._options.timeout,
            at_most=_ROUNDS_AT_MOST * self._options.rounds,
        )
        values = measured.values
        ratios = {
            peer: ratio(values[OURS], values[peer]).as_dict()
            for peer in values
            if peer != OURS and OURS in values
        }
        return {
            "work": name,
            "quiet_rounds": measured.label(),
            "tokens_per_s": values,
            "ratios": ratios,
            "our_extra_bytes": peak,
        }


COLUMNS = (
    "file, work",
    "ours tokens/s",
    "peer tokens/s",
    "repacked tokens/s",
    "ours ÷ peer (range)",
    "ours ÷ repacked (range)",
    "quiet rounds",
    "our extra MiB",
)


def row_cells(name: str, row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    rates, peak = row["tokens_per_s"], row["our_extra_bytes"]
    return [
        f"{name}, {row['work']}",
        *(median_cell(rates.get(side), 1) for side in (OURS, PEER, REPACKED)),
        *(ratio_cell(row["ratios"], side) for side in (PEER, REPACKED)),
        row["quiet_rounds"],
        "" if peak is None else f"{peak / _MIB:.0f}",
    ]


def measure_file(name: str, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All rows of one file, printed as they are measured."""
    folder = build(options.peer)
    # Our long generation continues from round to round, quiet or not.
    room = options.decode * (_ROUNDS_AT_MOST * options.rounds + 2)
    context = max(*options.contexts, options.prefill) + room
    common = {
        "num_threads": options.threads,
        "context": context,
        "kv_type": options.kv_type,
        "realtime": options.realtime,
    }
    with GgufFile.open(path) as file:
        spec = read_spec(file)
    with contextlib.ExitStack() as open_sides:
        sides: dict[str, Side] = {}
        for side, repack in ((PEER, False), (REPACKED, True)):
            if repack and not options.repacked:
                continue
            sides[side] = open_sides.enter_context(
                Side(side, peer_model, folder, path, repack=repack, **common)
            )
        result: dict[str, Any] = {"file": name, "bytes": path.stat().st_size, "rows": []}
        bench = ModelBench(sides, spec, options)
        if not options.only_peer:
            ours = sides[OURS] = open_sides.enter_context(Side(OURS, OurModel, path, **common))
            result["memory"] = {
                "before_opening_bytes": ours.call("bytes_before_opening"),
                "limit_bytes": 256 * _MIB + 2 * ours.call("largest_expert_bytes"),
            }
            result["logits_difference"] = bench.difference()
            print(f"{name}: logits differ by {result['logits_difference']:.4f} (relative RMS)")
        works: list[Callable[[], dict[str, Any]]] = [bench.prefill]
        works += [partial(bench.decode, each) for each in options.contexts]
        for work in works:
            row = work()
            result["rows"].append(row)
            print("  ".join(cell for cell in row_cells(name, row) if cell), flush=True)
        return result


def notes(results: list[dict[str, Any]]) -> str:
    """What the tables leave out: memory limits."""
    lines = []
    for result in results:
        if memory := result.get("memory"):
            peak = max(row["our_extra_bytes"] for row in result["rows"])
            lines.append(
                f"{result['file']}: our memory beyond weights and KV cache {peak / _MIB:.0f} MiB "
                f"at most, of which {memory['before_opening_bytes'] / _MIB:.0f} before opening "
                f"(limit {memory['limit_bytes'] / _MIB:.0f}); "
                f"logits differ from the peer's by {result['logits_difference']:.4f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("--files", nargs="+", choices=list(MIXES), default=["q4_k_m", "q8_0"])
    parser.add_argument("--model", type=Path, help="a file of your own instead")
    parser.add_argument("--contexts", nargs="*", type=int, default=[16, 4096])
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--decode", type=int, default=8, help="tokens a sample (default 8)")
    parser.add_argument("--kv-type", choices=["f16", "f32"], default="f16")
    add_pair_options(parser, rounds=7, variants=VARIANTS)
    options = parser.parse_args()
    try:
        peer = build_record(build(options.peer))
        if options.model:
            results = [measure_file(options.model.stem, options.model, options)]
        else:
            results = [measure_file(name, model_path(name), options) for name in options.files]
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None
    record = report.head("Whole model: tokens/s", num_threads=options.threads, peer=peer) | {
        "rounds": options.rounds,
        "kv_type": options.kv_type,
        "files": results,
    }
    rows = [row_cells(result["file"], row) for result in results for row in result["rows"]]
    tables = f"{report.table(COLUMNS, rows)}\n\n{notes(results)}"
    report.finish("cpu-model", record, tables, options.save)


if __name__ == "__main__":
    main()
