"""Causal convolution of each channel with SiLU.

A value depends only on its channel's last inputs. The kernel, which Python calls, writes a call's
arguments as words; threads run the task on its items.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dflash_protocol.ids import F32Array
from dflash_runtime.compute.cpu.compile.compiling import (
    Kernel,
    RowFunction,
    compile_kernel,
    compile_task,
    helper,
    read_only,
)
from dflash_runtime.compute.cpu.kernels.words import set_word, word
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.exponentials import exp_lanes
from dflash_runtime.compute.cpu.simd.types import f32, i64
from dflash_runtime.compute.cpu.simd.untyped import types
from dflash_runtime.compute.cpu.threads.parallel import claim, run_on

TOKENS_AN_ITEM = 4

NUM_WORDS = 10


@helper
def _silu(x: Any) -> Any:
    return x / (v.splat(1.0) + exp_lanes(v.zeros() - x))


@helper
def _conv_row(rows: int, taps: int, num_taps: int, channels: int, out: int) -> None:
    """One token. Shapes: rows [num_taps], addresses of inputs [C]; taps [num_taps][C]; out [C]."""
    stride = 4 * channels
    for place in range(0, 4 * (channels // 32 * 32), 128):
        total = v.zeros()
        for tap in range(num_taps):
            source = v.load_floats(word(rows, tap) + place)
            total = v.fma(v.load_floats(taps + stride * tap + place), source, total)
        v.store_floats(out + place, _silu(total))
    rest, place = channels % 32, 4 * (channels // 32 * 32)
    if rest:
        total = v.zeros()
        for tap in range(num_taps):
            source = v.load_padded(word(rows, tap) + place, rest)
            total = v.fma(v.load_padded(taps + stride * tap + place, rest), source, total)
        v.store_partial(out + place, _silu(total), rest)


def _conv_task(args: int, counter: int, worker_idx: int) -> None:
    """Words: x, kept inputs, taps, out, tokens, channels, taps of a channel, first position,
    scratch (words for each thread's rows), and addresses of all tokens' rows, or 0."""
    x, kept, taps, out = word(args, 0), word(args, 1), word(args, 2), word(args, 3)
    num_tokens, channels, num_taps = word(args, 4), word(args, 5), word(args, 6)
    first_position, rows = word(args, 7), word(args, 8) + 8 * worker_idx * num_taps
    stride, table = 4 * channels, word(args, 9)
    while True:
        first = claim(counter) * TOKENS_AN_ITEM
        if first >= num_tokens:
            return
        for token in range(first, min(first + TOKENS_AN_ITEM, num_tokens)):
            place = out + stride * token
            if table != 0:
                _conv_row(table + 8 * num_taps * token, taps, num_taps, channels, place)
                continue
            for tap in range(num_taps):
                before = token - num_taps + 1 + tap
                row = x + stride * before
                if before < 0:
                    # Before position 0 there are no inputs: the kept ones are zeros.
                    position = first_position + before + num_taps - 1
                    row = kept + stride * (position % (num_taps - 1))
                set_word(rows, tap, row)
            _conv_row(rows, taps, num_taps, channels, place)


def _conv(
    x: F32Array,
    kept: F32Array,
    taps: F32Array,
    out: F32Array,
    first_position: int,
    table: int,
    memory: tuple[int, ...],
    pool: int,
    task: int,
) -> None:
    """`table`: for every token the addresses of its K inputs, if it does not simply follow the
    token before it in `x`, else 0. Memory: NUM_WORDS words, K words for each thread, the counter.

    Shapes: x, out [T, C]; kept [K - 1, C], position p's input in row ``p % (K - 1)``; taps [K, C].
    """
    args, rows, counter = memory
    set_word(args, 0, v.address_of(x))
    set_word(args, 1, v.address_of(kept))
    set_word(args, 2, v.address_of(taps))
    set_word(args, 3, v.address_of(out))
    set_word(args, 4, x.shape[0])
    set_word(args, 5, x.shape[1])
    set_word(args, 6, taps.shape[0])
    set_word(args, 7, first_position)
    set_word(args, 8, rows)
    set_word(args, 9, table)
    run_on(pool, task, args, counter)


@cache
def conv_kernel() -> tuple[Kernel, RowFunction]:
    """The kernel, and the task whose address it is passed."""
    rows = read_only(f32, 2)
    memory = types.UniTuple(i64, 3)
    arguments = [rows, rows, rows, f32[:, ::1], i64, i64, memory, i64, i64]
    task = compile_task(_conv_task)
    return compile_kernel(_conv, *arguments), task
