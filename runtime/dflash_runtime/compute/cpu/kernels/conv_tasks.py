"""Causal convolution of each channel with SiLU.

A value depends only on its channel's last inputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dflash_protocol.ids import F32Array
from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task, helper
from dflash_runtime.compute.cpu.kernels.words import (
    FIRST_FIELD,
    Call,
    address,
    get,
    set_word,
    task_call,
    word,
)
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.exponentials import exp_lanes
from dflash_runtime.compute.cpu.threads.parallel import claim

TOKENS_AN_ITEM = 4

(
    X,
    KEPT,  # [NUM_TAPS - 1, C]: the inputs before, position p's in row p % (NUM_TAPS - 1)
    TAPS,  # [NUM_TAPS, C]
    OUT,
    NUM_TOKENS,
    CHANNELS,
    NUM_TAPS,
    FIRST_POSITION,
    ROWS,  # scratch: NUM_TAPS words for each thread
    TABLE,  # [T, NUM_TAPS] addresses of the tokens' inputs, or 0 if each follows the one before it
) = range(FIRST_FIELD, FIRST_FIELD + 10)


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
    x, kept, taps, out = get(args, X), get(args, KEPT), get(args, TAPS), get(args, OUT)
    num_tokens, channels, num_taps = get(args, NUM_TOKENS), get(args, CHANNELS), get(args, NUM_TAPS)
    first_position, rows = get(args, FIRST_POSITION), get(args, ROWS) + 8 * worker_idx * num_taps
    stride, table = 4 * channels, get(args, TABLE)
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


def _keep_task(args: int, counter: int, worker_idx: int) -> None:
    """Keep the last inputs for the tokens that follow. One item."""
    num_tokens, stride = get(args, NUM_TOKENS), 4 * get(args, CHANNELS)
    num_kept, first = get(args, NUM_TAPS) - 1, get(args, FIRST_POSITION)
    if claim(counter) > 0:
        return
    for token in range(max(0, num_tokens - num_kept), num_tokens):
        place = get(args, KEPT) + stride * ((first + token) % num_kept)
        v.copy_bytes(place, get(args, X) + stride * token, stride)


def conv_call(
    x: F32Array,
    kept: F32Array,
    taps: F32Array,
    out: F32Array,
    *,
    first_position: int,
    table: int,
    num_threads: int,
) -> Call:
    """`table`: for every token the addresses of its K inputs, if it does not simply follow the
    token before it in `x`, else 0.

    Shapes: x, out [T, C]; kept [K - 1, C], position p's input in row ``p % (K - 1)``; taps [K, C].
    """
    fields = _fields(x, kept, taps, first_position)
    fields[OUT - FIRST_FIELD], fields[TABLE - FIRST_FIELD] = address(out), table
    return task_call(
        conv_task(),
        x.size,
        fields,
        per_token=(NUM_TOKENS,),
        per_position=((FIRST_POSITION, 1),),
        scratch=((ROWS, 8 * taps.shape[0] * num_threads),),
    )


def keep_call(x: F32Array, kept: F32Array, taps: F32Array, *, first_position: int) -> Call:
    """Keep the last of the inputs. Shapes: as `conv_call`'s."""
    fields = _fields(x, kept, taps, first_position)
    position = ((FIRST_POSITION, 1),)
    return task_call(keep_task(), 0, fields, per_token=(NUM_TOKENS,), per_position=position)


def _fields(x: F32Array, kept: F32Array, taps: F32Array, first_position: int) -> list[int]:
    places = address(x), address(kept), address(taps)
    return [*places, 0, *x.shape, taps.shape[0], first_position, 0, 0]


@cache
def conv_task() -> RowFunction:
    return compile_task(_conv_task)


@cache
def keep_task() -> RowFunction:
    return compile_task(_keep_task)
