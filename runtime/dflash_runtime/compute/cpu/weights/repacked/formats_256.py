"""Super-blocks of 256 values as quads, scales and offsets: see formats.

Source: block layouts of ggml (checked against the gguf package by tests).
"""

from __future__ import annotations

from itertools import pairwise

from dflash_runtime.compute.cpu.compile.tiers import current_tier
from dflash_runtime.compute.cpu.simd.emitting import Vec, look_up
from dflash_runtime.compute.cpu.weights.repacked.formats_32 import IQ4_QUANTS, nibble_quads
from dflash_runtime.compute.cpu.weights.repacked.rows import Quads, ScalesAndOffsets, TileRows


def _scaled_bytes(words: Vec, mask: int, factor: Vec, addend: Vec | None = None) -> list[Vec]:
    """``(byte & mask) * factor + addend`` for the four bytes of each word; factors are halves.

    A byte is converted in place within its word, with a factor smaller by as much: exact.
    """
    scaled = []
    for i in range(4):
        if mask << (8 * i) < 1 << 31:
            byte, unit = words & (mask << (8 * i)), factor * 2.0 ** (-8 * i)
        else:
            byte, unit = (words >> (8 * i)) & mask, factor
        number = byte.to_float()
        scaled.append(number * unit if addend is None else number.times_plus(unit, addend))
    return scaled


def scales_q4_k(rows: TileRows) -> ScalesAndOffsets:
    """Also for Q5_K: 6 bits for each block; those of the last four blocks are split in two."""
    head, first, second, third = rows.gather_words(0)
    d, minus_dmin = head.half_to_float(), ((head >> 16) ^ 0x8000).half_to_float()
    last_scales = (third & 0x0F0F0F0F) | ((first >> 2) & 0x30303030)
    last_minima = ((third >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030)
    return (
        _scaled_bytes(first, 63, d) + _scaled_bytes(last_scales, 63, d),
        _scaled_bytes(second, 63, minus_dmin) + _scaled_bytes(last_minima, 63, minus_dmin),
    )


def quads_q4_k(rows: TileRows) -> Quads:
    for pair in range(4):
        for half in range(2):
            packed = rows.gather(16 + 32 * pair + 16 * half)
            yield 2 * pair, half, packed & 15
            yield 2 * pair + 1, half, packed >> 4


def quads_q5_k(rows: TileRows) -> Quads:
    """The fifth bits of block b are bit b of 32 bytes."""
    for half in range(2):
        fifth_bits = rows.gather(16 + 16 * half)
        for pair in range(4):
            packed = rows.gather(48 + 32 * pair + 16 * half)
            for side, low in enumerate((packed & 15, packed >> 4)):
                block = 2 * pair + side
                yield block, half, low | (_moved(fifth_bits, block, 4) & 16)


def _moved(values: Vec, source: int, target: int) -> Vec:
    """Shift so that bit `source` becomes bit `target`."""
    if source == target:
        return values
    return values << (target - source) if target > source else values >> (source - target)


def scales_q2_k(rows: TileRows) -> ScalesAndOffsets:
    """16 bytes: 4 bits of scale, 4 bits of minimum; d and dmin end the block."""
    tail = rows.gather_words(68)[3]
    d, minus_dmin = tail.half_to_float(), ((tail >> 16) ^ 0x8000).half_to_float()
    minus_dmin = minus_dmin * 0.0625
    words = rows.gather_words(0)
    return (
        [scale for each in words for scale in _scaled_bytes(each, 0x0F, d)],
        [minimum for each in words for minimum in _scaled_bytes(each, 0xF0, minus_dmin)],
    )


def quads_q2_k(rows: TileRows) -> Quads:
    for run in range(2):  # of 128 values
        for half in range(2):
            packed = rows.gather(16 + 32 * run + 16 * half)
            for part in range(4):
                yield 4 * run + part, half, (packed >> (2 * part)) & 3


def scales_q3_k(rows: TileRows) -> ScalesAndOffsets:
    """12 bytes of 16 scales, 6 bits each: 4 bits in the first 8 bytes, 2 in the last 4; d."""
    words = rows.gather_words(94)
    d = (words[3] >> 16).half_to_float()
    first, second, high = ((low >> 16) | (following << 16) for low, following in pairwise(words))
    scales = []
    for index, low in enumerate((first, second, first >> 4, second >> 4)):
        high_bits = _moved(high, 2 * index, 4) & 0x30303030
        scales += _scaled_bytes((low & 0x0F0F0F0F) | high_bits, 63, d, d * -32.0)
    return scales, [scale * -4.0 for scale in scales]


def quads_q3_k(rows: TileRows) -> Quads:
    """The third bits of block b are bit b of 32 bytes."""
    for half in range(2):
        third_bits = rows.gather(16 * half)
        for run in range(2):  # of 128 values
            packed = rows.gather(32 + 32 * run + 16 * half)
            for part in range(4):
                block = 4 * run + part
                high = _moved(third_bits, block, 2) & 4
                yield block, half, ((packed >> (2 * part)) & 3) | high


def scales_q6_k(rows: TileRows) -> ScalesAndOffsets:
    """16 signed bytes; d ends the block."""
    d = (rows.gather_words(194)[3] >> 16).half_to_float()
    words = [each ^ 0x80808080 for each in rows.gather_words(192)]
    minus_128 = d * -128.0
    scales = [scale for each in words for scale in _scaled_bytes(each, 255, d, minus_128)]
    return scales, [scale * -32.0 for scale in scales]


def quads_q6_k(rows: TileRows) -> Quads:
    for run in range(2):  # of 128 values
        for half in range(2):
            high = rows.gather(128 + 32 * run + 16 * half)
            for side in range(2):
                low = rows.gather(64 * run + 32 * side + 16 * half)
                block = 4 * run + side
                yield block, half, (low & 15) | (_moved(high, 2 * side, 4) & 48)
                yield block + 2, half, (low >> 4) | (_moved(high, 2 * side + 4, 4) & 48)


def scales_iq4_xs(rows: TileRows) -> ScalesAndOffsets:
    """6 bits for each block: two in 16 bits behind d, four in the following 4 bytes."""
    head, low = rows.gather_words(0)[:2]
    d = head.half_to_float()
    high = head >> 16
    high = (high | (high << 8)) & 0x00FF00FF  # of blocks 0 to 3 and 4 to 7
    even = (low & 0x0F0F0F0F) | ((high << 4) & 0x00300030) | ((high << 8) & 0x30003000)
    odd = ((low >> 4) & 0x0F0F0F0F) | ((high << 2) & 0x00300030) | ((high << 6) & 0x30003000)
    sides = (_scaled_bytes(each, 63, d, d * -32.0) for each in (even, odd))
    scales = [scale for pair in zip(*sides, strict=True) for scale in pair]
    return scales, [scale * -128.0 for scale in scales]


def quads_iq4_xs(rows: TileRows) -> Quads:
    for block in range(8):
        for half, quad in enumerate(nibble_quads(rows, 8 + 16 * block)):
            yield block, half, look_up(quad, IQ4_QUANTS, current_tier())
