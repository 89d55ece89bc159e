"""A model that is larger than memory, on the processor: our engine beside llama.cpp, which maps it.

Each side runs alone in a memory cgroup, turn by turn, with the file dropped from the page cache
before. In a turn it opens the file, decodes after a prompt, and reads another prompt, cold and, as
far as memory goes, warm. Before each turn of ours the disk itself is measured: direct reads of an
expert's size, as many at a time as are fastest. With --without-prefetch there is a third side:
ours, in which no layer has the next one's experts prefetched. (Planted routing is predicted without
an error: trained models gain less.)

The file needs planted routing, and a disk (not tmpfs):
  python -m bench.random_moe q4_k_m --layers 8 --routing qwen3 --out m8.gguf

Examples:
  python -m bench.disk_tier --model m8.gguf --save
  python -m bench.disk_tier --model m8.gguf --part 0.25 --rounds 1
  python -m bench.disk_tier --model m8.gguf --part 2          all of it fits
  python -m bench.disk_tier --model m8.gguf --prompt 2048     of several chunks
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.build_peer import VARIANTS, build, build_record
from bench.memory_cgroup import MemoryCgroup, drop_pages, memory_cgroup
from bench.options import add_save_option, add_threads_option, bench_parser
from bench.our_model import OurModel
from bench.peer_model import peer_model
from bench.planted_routing import Walk
from bench.report import finish, head, table
from bench.sides import Side

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_runtime.engine.measuring.disk import measure_disk

_BEFORE = 448
_DISK_S = 3.0
OURS, WITHOUT, PEER = "ours", "ours, no prefetch", "llama.cpp"
GOALS = {"decode": 2.0, "prompt": 3.0}
"""Ours ÷ llama.cpp that is wanted."""
COLUMNS = ["", "ours", "llama.cpp", "ours ÷ llama.cpp", "wanted"]


def within(
    group: MemoryCgroup, factory: Callable[..., object], *args: Any, **kwargs: Any
) -> object:
    """An object whose process has entered a memory cgroup first."""
    group.enter()
    return factory(*args, **kwargs)


class DiskBench:
    """Turns of both sides with one file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._path, self._options = Path(options.model), options
        self._walk = Walk.of_file(self._path)
        self._limit = int(options.part * self._path.stat().st_size)
        with GgufFile.open(self._path) as file:
            self._expert_bytes = max(each.expert_bytes for each in read_spec(file).moe.layers)
        self.rates: dict[str, dict[str, list[float]]] = {}
        """Tokens per second by work and side."""
        self.disk: list[dict[str, Any]] = []
        """Of each turn of ours: bytes a second of the disk, and of a prompt by its whole time;
        and counts, of all and of decode."""

    def turn(self, name: str, number: int) -> None:
        """One side opens the file, and works."""
        options = self._options
        drop_pages(self._path)
        common: dict[str, Any] = {
            "num_threads": options.threads,
            "context": max(2048, options.prompt + 1),
            "kv_type": "f16",
        }
        if name != PEER:
            own_rate = self._disk_rate()
            arguments: tuple[Any, ...] = (OurModel, self._path)
            common["prefetches"] = name == OURS
        else:
            arguments = peer_model, build(options.peer), self._path
            common["repack"] = False
        step = len(self._walk.token_ids) // (2 * options.rounds + 2)
        text = self._walk.stretch(2 * step * number, _BEFORE + options.tokens)
        prompt = self._walk.stretch(step * (2 * number + 1), options.prompt)
        following: Any = text[_BEFORE:] if name == PEER else options.tokens
        with contextlib.ExitStack() as undo:
            group = undo.enter_context(memory_cgroup(self._limit))
            if group is None:
                raise SystemExit("error: no memory cgroup may be made here")
            side = undo.enter_context(Side(name, within, group, *arguments, **common))
            self._add("decode", name, side.call("decode_after", text[:_BEFORE], following))
            before = {} if name == PEER else side.call("disk")
            speed = side.call("prefill", prompt)
            found = {} if name == PEER else side.call("disk")
            self._add("prompt", name, speed)
            self._add("the same prompt again", name, side.call("prefill", prompt))
            if name == OURS and found:  # there is nothing if all of it fits
                num_bytes = found["read_bytes"] - before["read_bytes"]
                rate = num_bytes * speed / len(prompt)
                self.disk.append({"own": own_rate, "read": rate, "of_decode": before, **found})
            if group.num_kills:
                raise RuntimeError(f"{name} was killed for lack of memory")

    def _disk_rate(self) -> float:
        found = measure_disk(self._path, expert_bytes=self._expert_bytes, limit_s=_DISK_S)
        return 0.0 if found is None else max(rate for _, rate in found.points)

    def _add(self, work: str, name: str, rate: float) -> None:
        print(f"  {name}, {work}: {rate:,.1f} tokens/s", flush=True)
        self.rates.setdefault(work, {}).setdefault(name, []).append(rate)

    def rows(self) -> list[list[str]]:
        """Medians of tokens per second, and what reads reached."""
        rows = []
        for work, by_side in self.rates.items():
            cells = [statistics.median(by_side[name]) if name in by_side else None
                     for name in (OURS, PEER)]  # fmt: skip
            shown = ["" if each is None else f"{each:,.1f}" for each in cells]
            ratio = "" if None in cells else f"{cells[0] / cells[1]:.2f}"  # type: ignore[operator]
            rows.append([f"{work}, tokens/s", *shown, ratio, str(GOALS.get(work, ""))])
            if WITHOUT in by_side:
                rate = statistics.median(by_side[WITHOUT])
                gain = f"{cells[0] / rate:.2f} of it" if cells[0] else ""
                rows.append([f"{work}, no prefetch", f"{rate:,.1f}", "", gain, ""])
        if self.disk:
            own, read = (
                statistics.median(each[key] / 1e6 for each in self.disk) for key in ("own", "read")
            )
            rows.append(["reads of a prompt, MB/s", f"{read:,.0f}", "", "", ""])
            rows.append(["the disk, MB/s", f"{own:,.0f}", "", f"{read / own:.2f}", "0.8"])
            for what, some, every in (
                ("experts predicted, of those chosen", "predicted", "checked"),
                ("used, of those prefetched", "prefetched_used", "prefetched"),
            ):
                num, num_all = (
                    sum(each["of_decode"]["look_ahead"][key] for each in self.disk)
                    for key in (some, every)
                )
                rows.append([what, f"{num / num_all:.2f}" if num_all else "", "", "", ""])
        return rows


def main() -> None:
    """Print the table, and save it with `--save`."""
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("--model", type=Path, required=True, help="a file with planted routing")
    parser.add_argument("--part", type=float, default=0.5, help="of the file's size (default 0.5)")
    parser.add_argument("--rounds", type=int, default=3, help="turns a side (default 3)")
    parser.add_argument("--tokens", type=int, default=32, help="of a decode (default 32)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens (default 512)")
    parser.add_argument("--only", choices=("ours", "peer"), help="one side alone")
    parser.add_argument("--without-prefetch", action="store_true", help="ours, no prefetch, too")
    parser.add_argument("--peer", choices=tuple(VARIANTS), default="native")
    add_threads_option(parser)
    add_save_option(parser)
    options = parser.parse_args()
    bench = DiskBench(options)
    names = {"ours": [OURS], "peer": [PEER]}.get(options.only or "", [OURS, PEER])
    names[1:1] = [WITHOUT] if options.without_prefetch and OURS in names else []
    for number in range(options.rounds):
        for name in names[:: 1 if number % 2 else -1]:
            print(f"round {number + 1}, {name}")
            bench.turn(name, number)
    record = head("A model larger than memory")
    record["model"] = {"name": options.model.name, "bytes": options.model.stat().st_size}
    record |= {"part": options.part, "threads": options.threads}
    record |= {"tokens_per_s": bench.rates, "disk": bench.disk}
    if PEER in names:
        record["peer"] = build_record(build(options.peer))
    finish("disk-tier", record, table(COLUMNS, bench.rows()), options.save)


if __name__ == "__main__":
    main()
