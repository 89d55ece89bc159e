"""Blocks of 32 values, and NVFP4's of 64, as quads, scales and offsets: see formats.

Source: block layouts of ggml (checked against the gguf package by tests).
"""

from __future__ import annotations

from dflash_runtime.compute.cpu.compile.tiers import current_tier
from dflash_runtime.compute.cpu.simd.emitting import NUM_ROWS, Vec, join, look_up, where
from dflash_runtime.compute.cpu.simd.types import I8, lanes_of
from dflash_runtime.compute.cpu.weights.repacked.rows import (
    WORDS,
    Quads,
    ScalesAndOffsets,
    TileRows,
)

IQ4_QUANTS = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241]
"""IQ4's values, 128 added."""

_E2M1_QUANTS = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0]
"""Twice the E2M1 numbers, 12 added; scales are halved to match."""


def nibble_quads(rows: TileRows, offset: int) -> tuple[Vec, Vec]:
    """16 bytes: low halves are a block's first 16 values, high halves the rest."""
    packed = rows.gather(offset)
    return packed & 15, packed >> 4


def scales_q4_0(rows: TileRows) -> ScalesAndOffsets:
    d = rows.gather_words(0)[0].half_to_float()
    return [d], [d * -8.0]


def quads_q4_0(rows: TileRows) -> Quads:
    for half, quad in enumerate(nibble_quads(rows, 2)):
        yield 0, half, quad


def scales_q4_1(rows: TileRows) -> ScalesAndOffsets:
    head = rows.gather_words(0)[0]
    return [head.half_to_float()], [(head >> 16).half_to_float()]


def quads_q4_1(rows: TileRows) -> Quads:
    for half, quad in enumerate(nibble_quads(rows, 4)):
        yield 0, half, quad


def scales_q5_0(rows: TileRows) -> ScalesAndOffsets:
    d = rows.gather_words(0)[0].half_to_float()
    return [d], [d * -16.0]


def quads_q5_0(rows: TileRows) -> Quads:
    first, second = rows.gather_words(0)[:2]
    return _quads_q5(rows, 6, (first >> 16) | (second << 16))


def quads_q5_1(rows: TileRows) -> Quads:
    return _quads_q5(rows, 8, rows.gather_words(0)[1])


def _quads_q5(rows: TileRows, offset: int, fifth_bits: Vec) -> Quads:
    """`fifth_bits`: words with one bit for each value."""
    for half, quad in enumerate(nibble_quads(rows, offset)):
        yield 0, half, where(_spread_bits(fifth_bits, half), quad + 16, quad)


def _spread_bits(words: Vec, half: int) -> Vec:
    """Bytes, nonzero where the bit of a half block's value is set."""
    bytes_of_rows = words.as_type(lanes_of(I8, 4 * NUM_ROWS))
    places = [(step, row, i) for step in range(4) for row in range(NUM_ROWS) for i in range(4)]
    replicated = bytes_of_rows.take([4 * row + 2 * half + step // 2 for step, row, _ in places])
    return replicated & [1 << (4 * (step % 2) + i) for step, _, i in places]


def scales_q8_0(rows: TileRows) -> ScalesAndOffsets:
    d = rows.gather_words(0)[0].half_to_float()
    return [d], [d * -128.0]


def quads_q8_0(rows: TileRows) -> Quads:
    yield 0, 0, rows.gather(2) ^ 128
    yield 0, 1, rows.gather(18) ^ 128


def quads_iq4_nl(rows: TileRows) -> Quads:
    for half, quad in enumerate(nibble_quads(rows, 2)):
        yield 0, half, look_up(quad, IQ4_QUANTS, current_tier())


def scales_mxfp4(rows: TileRows) -> ScalesAndOffsets:
    """Half of 2^(exponent - 127): the two smallest are subnormal, handled by a maximum."""
    exponent = rows.gather_words(0)[0] & 255
    d = ((exponent << 23) - (1 << 23)).maximum((exponent << 21) + (1 << 21)).bits_to_float()
    return [d], [d * -12.0]


def quads_mxfp4(rows: TileRows) -> Quads:
    for half, quad in enumerate(nibble_quads(rows, 1)):
        yield 0, half, look_up(quad, _E2M1_QUANTS, current_tier())


def scales_nvfp4(rows: TileRows) -> ScalesAndOffsets:
    """Unsigned E4M3: shifted left by 7 bits, a half of 2^-8 times the value; 0x7F counts as 0."""
    head = rows.gather_words(0)[0]
    codes = head.as_type(lanes_of(I8, 4 * NUM_ROWS))
    codes = where(codes ^ 0x7F, codes, codes ^ codes).as_type(WORDS)
    scales = []
    for pair in range(2):
        for halves in ((codes << 7) & 0x3F803F80, (codes >> 1) & 0x3F803F80):
            scales.append((halves >> (16 * pair)).half_to_float())
    return [half * 128.0 for half in scales], [half * -1536.0 for half in scales]


def quads_nvfp4(rows: TileRows) -> Quads:
    """16 bytes hold two half blocks, 8 bytes each: low halves first, then high halves."""
    for block in range(2):
        low, high = (
            look_up(each, _E2M1_QUANTS, current_tier())
            for each in nibble_quads(rows, 4 + 16 * block)
        )
        for half in range(2):
            order = list(range(128 * half, 128 * half + 128))
            yield block, half, join(low.take(order), high.take(order))
