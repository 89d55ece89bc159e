"""Rows of weights times one vector, in cache and from memory: do the CPU's kernels compute or wait?

For each tier, type, row length and number of threads, in GB/s of weights:

  cache   rows that stay in L2, again and again, each thread its own: what the instructions take
  memory  a matrix that no cache holds, multiplied as in a decode step
  read    the same bytes, only read (the better of one and of four sequential streams)
  ggml    the same rows through ggml's vec_dot (with --peer), each thread its share

A type is *fed* if memory is at least 0.85 of the smaller of cache and read. Where it is not, its
kernel waits for lines that were requested too late, or that had no miss buffer: see
simd/instruction_sets.prefetch_level and kernels/products.LEAD_BYTES. With all threads, a machine
whose memory gives its cores little cannot show that fault: look at one thread.

Examples:
  python -m bench.cpu_rows                                  every type, one thread and all cores
  python -m bench.cpu_rows --types Q4_K Q6_K --threads 1    two types
  python -m bench.cpu_rows --peer native --save             with ggml beside; keep the result
  python -m bench.cpu_rows --tiers avx512vnni avx2          instruction sets, a process for each
  python -m bench.cpu_rows --check                          exit code 1 if a type is not fed
"""

from __future__ import annotations

import argparse
import ctypes
import math
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench.bandwidth import add_up
from bench.build_peer import VARIANTS, build, build_record
from bench.machine import be_realtime
from bench.options import add_realtime_option, add_save_option, bench_parser
from bench.pairs import Spread, median_cell
from bench.peer import open_peer
from bench.peer_source import BuildError
from bench.sides import Side
from numba import njit

from bench import report
from dflash_adapters.quant import TensorType
from dflash_protocol.ids import I64Array, U8Array
from dflash_protocol.settings import load_settings
from dflash_runtime.compute.cores import usable_cores
from dflash_runtime.compute.cpu.compile.tiers import choose_tier, current_tier
from dflash_runtime.compute.cpu.kernels.products import (
    REPACKED_ROWS,
    TOTALS_BYTES,
    call_7,
    call_10,
    product_scratch_bytes,
)
from dflash_runtime.compute.cpu.ops import CpuOps
from dflash_runtime.compute.cpu.simd.instruction_sets import host_features, offered_tiers
from dflash_runtime.compute.cpu.simd.types import I32, I64, emit_call, i64, primitive, void
from dflash_runtime.compute.cpu.simd.untyped import ir
from dflash_runtime.compute.cpu.threads.scratch import Scratch
from dflash_runtime.compute.cpu.threads.workers import Workers
from dflash_runtime.compute.cpu.weights import rows as fields
from dflash_runtime.compute.cpu.weights.matrix import as_matrix
from dflash_runtime.compute.cpu.weights.repacked.kernels import Q8_BLOCK_BYTES
from dflash_runtime.compute.cpu.weights.repacked.quantising import quantise_function

TYPES = (
    *("Q4_K", "Q6_K", "Q8_0", "Q5_K", "Q4_0", "IQ4_XS", "MXFP4", "Q3_K", "Q2_K"),
    *("F32", "F16", "BF16"),
)
COLUMNS = (2048, 768)
FED = 0.85
"""The share of the smaller of cache and read that memory has to reach."""

CACHE, MEMORY, READ, GGML = "cache", "memory", "read", "ggml"

_CACHED_BYTES = 1 << 18  # stays in L2 with a vector and its products
_STREAMS = (1, 4)
_SAMPLE_S = 0.02
"""With many threads a matrix takes less than a millisecond, and starting them some 100 µs."""

Samples = dict[str, list[float]]


# -- compiled loops -------------------------------------------------------------------------------


@primitive(void, *[i64] * 5)
def _call_dot(builder: Any, function: Any, columns: Any, out: Any, row: Any, x: Any) -> None:
    """ggml's ``vec_dot(n, out, out_stride, row, row_stride, x, x_stride, num_rows)``."""
    count = builder.trunc(columns, I32)
    arguments = [count, out, I64(0), row, I64(0), x, I64(0), I32(1)]
    emit_call(builder, ir.VoidType(), function, arguments)


@njit(nogil=True)
def _multiply_panels(words, times):  # type: ignore[no-untyped-def]
    """Rows as repacked tiles; what they prefetch is in the cache, too."""
    function, first, end, row_bytes, columns, q8_blocks, totals = words
    for _ in range(times):
        for panel in range(first, end, REPACKED_ROWS * row_bytes):
            call_7(function, panel, row_bytes, columns // 32, q8_blocks, panel, panel, totals)


@njit(nogil=True)
def _multiply_floats(words, times):  # type: ignore[no-untyped-def]
    """Rows multiplied as float32."""
    function, first, end, row_bytes, layout, x, totals, scratch = words
    for _ in range(times):
        for panel in range(first, end, REPACKED_ROWS * row_bytes):
            call_10(function, layout, panel, REPACKED_ROWS, x, 0, 0, 1, totals, 64, scratch)


@njit(nogil=True)
def _multiply_by_ggml(words):  # type: ignore[no-untyped-def]
    function, first, end, row_bytes, columns, x, out = words
    for row in range(first, end, row_bytes):
        _call_dot(function, columns, out, row, x)


# -- measuring, in a process for each tier --------------------------------------------------------


def repetitions(
    run: Callable[[int], object], clock: Callable[[], float] = time.perf_counter
) -> int:
    """How often work has to be done for a sample of `_SAMPLE_S` or more. ``run(times)`` does it;
    `clock` is in seconds."""
    times = 1
    run(times)  # compiles
    while True:
        started_s = clock()
        run(times)
        seconds = clock() - started_s
        if seconds >= _SAMPLE_S:
            return times
        # What is shorter than a sample may be mostly the start of threads: not all at once.
        times = math.ceil(times * min(max(1.2 * _SAMPLE_S / max(seconds, 1e-9), 2), 10))


class _Traits(ctypes.Structure):
    """ggml_type_traits_cpu."""

    _fields_ = (
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("num_rows", ctypes.c_int64),
    )


def _memory(num_bytes: int) -> U8Array:
    """Whole pages; every byte is such that halves, float32 and exponents are normal numbers."""
    room = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    tile = np.random.default_rng(0).integers(0x20, 0x3C, 1 << 16, dtype=np.uint8)
    for first in range(0, num_bytes, tile.size):
        part = room[first : first + tile.size]
        part[:] = tile[: part.size]
    return room


class RowBench:
    """Rows of one tier; ggml's, too, if `peer` is the folder of its libraries.

    Owns the memory that rows are taken from, and the threads, until the process ends.
    """

    def __init__(
        self,
        tier: str,
        num_bytes: int,
        thread_counts: list[int],
        peer: Path | None,
        *,
        realtime: bool = False,
    ) -> None:
        if realtime:
            be_realtime()
        choose_tier(tier)
        self._weights = _memory(num_bytes)
        self._vector = _memory(1 << 20)
        self._ops = {count: CpuOps(Workers(count), Scratch()) for count in thread_counts}
        self._pool = ThreadPoolExecutor(max(thread_counts))
        self._traits: Any = None
        if peer is not None:
            open_peer(peer)
            library = ctypes.CDLL(str(peer / "libggml-cpu.so.0"))
            library.ggml_cpu_init()
            self._traits = library.ggml_get_type_traits_cpu
            self._traits.restype = ctypes.POINTER(_Traits)

    def tier(self) -> str:
        """The tier in use: another than the wanted one if that does not work here."""
        return current_tier().value

    def measure(self, type_name: str, columns: int, num_threads: int, rounds: int) -> Samples:
        """Bytes per second of each kind, round by round; the kinds take turns."""
        tensor_type = TensorType[type_name]
        row_bytes = tensor_type.row_bytes(columns)
        step = 2 * REPACKED_ROWS * num_threads
        num_rows = max(self._weights.size // row_bytes // step * step, step)
        weights = self._weights[: num_rows * row_bytes]
        kinds: dict[str, Callable[[int], int]] = {
            CACHE: self._cached(tensor_type, columns, num_threads),
            MEMORY: self._from_memory(tensor_type, columns, num_threads, weights),
            **{
                f"{READ} {streams}": self._reading(weights, streams, num_threads)
                for streams in _STREAMS
            },
        }
        dot = self._traits(int(tensor_type)).contents.vec_dot if self._traits else None
        if dot:
            kinds[GGML] = self._by_ggml(dot, weights, row_bytes, columns, num_threads)
        times = {name: repetitions(run) for name, run in kinds.items()}
        samples: Samples = {name: [] for name in kinds}
        for number in range(rounds):
            for name in list(kinds)[:: 1 if number % 2 else -1]:
                time.sleep(1e-3)  # the workers of the sample before may spin for a while
                started_s = time.perf_counter()
                num_bytes = kinds[name](times[name])
                seconds = time.perf_counter() - started_s
                samples[name].append(num_bytes / seconds)
        reads = [samples.pop(f"{READ} {streams}") for streams in _STREAMS]
        return samples | {READ: max(reads, key=statistics.median)}

    def _shared(self, num_threads: int, part: Callable[[int], None], times: int) -> None:
        """Each thread does its part again and again, and does not wait for the others between."""

        def repeated(index: int) -> None:
            for _ in range(times):
                part(index)

        list(self._pool.map(repeated, range(num_threads)))

    def _from_memory(
        self, tensor_type: TensorType, columns: int, num_threads: int, weights: U8Array
    ) -> Callable[[int], int]:
        rows = weights.size // tensor_type.row_bytes(columns)
        matrix = as_matrix(weights, tensor_type, rows, columns)
        x = self._vector[: 4 * columns].view(np.float32).reshape(1, columns)
        out = np.empty((1, rows), np.float32)

        def run(times: int) -> int:
            for _ in range(times):
                self._ops[num_threads].linear(x, matrix, out)
            return weights.size * times

        return run

    def _reading(self, weights: U8Array, streams: int, num_threads: int) -> Callable[[int], int]:
        words = weights[: weights.size // 8 * 8].view(np.uint64)
        share = words.size // num_threads

        def part(index: int) -> None:
            add_up(words, streams, share * index, share * (index + 1))

        def run(times: int) -> int:
            self._shared(num_threads, part, times)
            return weights.size * times

        return run

    def _cached(
        self, tensor_type: TensorType, columns: int, num_threads: int
    ) -> Callable[[int], int]:
        row_bytes = tensor_type.row_bytes(columns)
        panel_bytes = REPACKED_ROWS * row_bytes
        num_bytes = max(_CACHED_BYTES // panel_bytes, 1) * panel_bytes
        layout = as_matrix(_memory(panel_bytes), tensor_type, REPACKED_ROWS, columns).layout
        parts = [_Part(layout, num_bytes, self._vector) for _ in range(num_threads)]

        def run(times: int) -> int:
            list(self._pool.map(lambda part: part.multiply(times), parts))
            return num_bytes * times * num_threads

        return run

    def _by_ggml(
        self, dot: int, weights: U8Array, row_bytes: int, columns: int, num_threads: int
    ) -> Callable[[int], int]:
        share = weights.size // num_threads
        out, x = _memory(64 * num_threads), self._vector.ctypes.data

        def part(index: int) -> None:
            rows, total = weights.ctypes.data + share * index, out.ctypes.data + 64 * index
            _multiply_by_ggml((dot, rows, rows + share, row_bytes, columns, x, total))

        def run(times: int) -> int:
            self._shared(num_threads, part, times)
            return weights.size * times

        return run


class _Part:
    """One thread's rows in cache, and all that multiplying them by a vector takes."""

    def __init__(self, layout: I64Array, num_bytes: int, vector: U8Array) -> None:
        self._layout = layout
        self._rows = _memory(num_bytes)
        self._vector = vector
        columns = self._columns = int(layout[fields.COLUMNS])
        self._q8_blocks = _memory(Q8_BLOCK_BYTES * -(-columns // 32))
        self._totals = np.zeros(TOTALS_BYTES, np.uint8)
        self._scratch = np.zeros(product_scratch_bytes([layout]), np.uint8)
        if layout[fields.MULTIPLY_ONE]:
            quantise = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(quantise_function().address)
            x, q8_blocks = vector.ctypes.data, self._q8_blocks.ctypes.data
            quantise(x, columns // 32, q8_blocks, 0, 1)

    def multiply(self, times: int) -> None:
        layout, first = self._layout, self._rows.ctypes.data
        panels = first, first + self._rows.size, int(layout[fields.ROW_BYTES])
        totals = self._totals.ctypes.data
        if function := int(layout[fields.MULTIPLY_ONE]):
            q8_blocks = self._q8_blocks.ctypes.data
            _multiply_panels((function, *panels, self._columns, q8_blocks, totals), times)
        else:
            function, x = int(layout[fields.FLOAT_ROWS]), self._vector.ctypes.data
            more = layout.ctypes.data, x, totals, self._scratch.ctypes.data
            _multiply_floats((function, *panels, *more), times)


# -- the table ------------------------------------------------------------------------------------

HEAD = ("type x columns", "tier", "threads", CACHE, MEMORY, READ, GGML, "memory ÷ bound", "fed")


def fed_share(samples: Samples) -> Spread:
    """Memory over the smaller of cache and read, round by round; the cache's median, as its samples
    do not depend on what others read."""
    cache = statistics.median(samples[CACHE])
    pairs = zip(samples[MEMORY], samples[READ], strict=True)
    return Spread.of([memory / min(cache, read) for memory, read in pairs])


def row_cells(row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    samples, share = row["bytes_per_s"], Spread(**row["share"])
    return [
        f"{row['type']} x {row['columns']}",
        row["tier"],
        str(row["threads"]),
        *(median_cell(samples.get(kind), 1, scale=1e-9) for kind in (CACHE, MEMORY, READ, GGML)),
        str(share),
        "yes" if share.median >= FED else "NO",
    ]


def _start(tier: str, options: argparse.Namespace, peer: Path | None) -> Side:
    """`RowBench` in a process of its own, with real-time priority if that is wanted."""
    num_bytes, threads = options.mb << 20, options.threads
    make = partial(RowBench, realtime=options.realtime)
    return Side(tier, make, tier, num_bytes, threads, peer)


def main() -> None:
    parser = bench_parser(__file__, __doc__)
    offered = [tier.value for tier in offered_tiers(host_features())]
    cores = len(usable_cores())
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES, metavar="TYPE")
    parser.add_argument(
        "--columns", nargs="+", type=int, default=COLUMNS, help="multiples of 256 (2048, 768)"
    )
    parser.add_argument(
        "--threads", nargs="+", type=int, default=sorted({1, cores}), help="default: 1, all cores"
    )
    parser.add_argument(
        "--tiers", nargs="+", choices=offered, default=[load_settings().cpu_tier],
        help="default: that of the settings",
    )  # fmt: skip
    parser.add_argument(
        "--mb",
        type=int,
        help="of a matrix: several times the last cache (128, or 32 a thread if that is more)",
    )
    parser.add_argument("--rounds", type=int, default=7, help="default 7")
    parser.add_argument(
        "--quick", action="store_true", help="Q4_K, Q8_0 and F32 of 2048 columns, three rounds"
    )
    parser.add_argument("--peer", choices=list(VARIANTS), help="measure ggml of this build, too")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a type is not fed")
    add_realtime_option(parser)
    add_save_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.types, options.columns, options.rounds = ["Q4_K", "Q8_0", "F32"], [2048], 3
    if any(columns <= 0 or columns % 256 for columns in options.columns):
        parser.error("--columns: multiples of 256")
    if options.mb is None:
        options.mb = max(128, 32 * max(options.threads))
    try:
        peer = build(options.peer) if options.peer else None
        record = report.head(
            "Rows in cache and from memory", peer=build_record(peer) if peer else None
        )
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None
    rows: list[dict[str, Any]] = []
    for tier in options.tiers:
        with _start(tier, options, peer) as side:
            in_use = side.call("tier")
            for name in options.types:
                for columns in options.columns:
                    for threads in options.threads:
                        samples = side.call("measure", name, columns, threads, options.rounds)
                        row = {"type": name, "columns": columns, "tier": in_use, "threads": threads}
                        row |= {"share": fed_share(samples).as_dict()}
                        rows.append(row | {"bytes_per_s": samples})
                        print("  ".join(row_cells(rows[-1])), flush=True)
    record |= {"mb": options.mb, "rounds": options.rounds, "rows": rows}
    report.finish("cpu-rows", record, report.table(HEAD, list(map(row_cells, rows))), options.save)
    hungry = [row for row in rows if row["share"]["median"] < FED]
    if options.check and hungry:
        sys.exit(f"{len(hungry)} of {len(rows)} rows reach less than {FED} of their bound")


if __name__ == "__main__":
    main()
