"""Quantised types as the generic kernels of repacked tiles see them: quads, scales and offsets.

A value is ``scale * unsigned quant + offset``. A format's functions emit one *chunk*, 16 rows of up
to 256 values: first `scales`, then quads in any order that suits the format. They read no byte
outside the chunk.

A *quad* is 256 bytes, four steps of k: byte ``64 * step + 4 * row + i`` belongs to value ``4 * step
+ i`` of that row. *Words* are 16 x 32 bits and *lanes* 16 x float32, one a row.

Source: block layouts of ggml (checked against the gguf package by tests).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.cpu.compile.tiers import current_tier
from dflash_runtime.compute.cpu.simd.emitting import (
    NUM_ROWS,
    Vec,
    join,
    load,
    look_up,
    shuffle,
    where,
)
from dflash_runtime.compute.cpu.simd.types import FLOAT, I8, I32, lanes_of

# -- 16 rows side by side -------------------------------------------------------------------------

QUAD, WORDS, LANES = lanes_of(I8, 256), lanes_of(I32, NUM_ROWS), lanes_of(FLOAT, NUM_ROWS)

Quads = Iterator[tuple[int, int, Vec]]
"""(block of 32, half, quad) of a chunk; each half of each block once."""

ScalesAndOffsets = tuple[list[Vec], list[Vec]]
"""Lanes for each block of 32, or for each half block if the format scales halves."""

_EACH_LANE = (0, 4, 8, 12)  # first words of the 128-bit lanes of 16 words


class TileRows:
    """The 16 rows from some block on; `stride` is bytes from row to row."""

    def __init__(self, first: Vec, stride: Vec) -> None:
        self._first = first
        self._stride = stride
        # Every fourth row; x86 addressing adds the 1, 2 or 3 strides to the others for free.
        self._fours = [first + stride * (4 * i) for i in range(4)]
        self._multiples = [stride * i for i in range(4)]
        self.builder = first.builder

    def address(self, row: int, offset: int) -> Vec:
        """Address of a byte of one row."""
        return self._fours[row // 4] + self._multiples[row % 4] + offset

    def at(self, offset: Vec) -> TileRows:
        """The same rows `offset` bytes further on."""
        return TileRows(self._first + offset, self._stride)

    def gather(self, offset: int) -> Vec:
        """16 bytes of each row, as a quad.

        Rows 4 lane + j form vector j, so that the rest is a transposition of 4 x 4
        words inside 128-bit lanes, for which every CPU has short instructions.
        """
        four = lanes_of(I32, 4)
        columns = []
        for j in range(4):
            parts = [load(self.address(4 * lane + j, offset), four) for lane in range(4)]
            columns.append(join(join(parts[0], parts[1]), join(parts[2], parts[3])))
        low = [at + i for at in _EACH_LANE for i in (0, 16, 1, 17)]
        high = [at + i for at in _EACH_LANE for i in (2, 18, 3, 19)]
        first = [at + i for at in _EACH_LANE for i in (0, 1, 16, 17)]
        second = [at + i for at in _EACH_LANE for i in (2, 3, 18, 19)]
        steps = []
        for order in (low, high):
            a = shuffle(columns[0], columns[1], order)
            b = shuffle(columns[2], columns[3], order)
            steps += [shuffle(a, b, first), shuffle(a, b, second)]
        return join(join(steps[0], steps[1]), join(steps[2], steps[3])).as_type(QUAD)

    def gather_words(self, offset: int) -> list[Vec]:
        """The same 16 bytes as 4 words of each row; cheap enough even if only one is used.

        Words that are not used are eliminated as dead code.
        """
        return words_of(self.gather(offset))


def words_of(quad: Vec) -> list[Vec]:
    """Split a quad into its four steps, as words."""
    words = quad.as_type(lanes_of(I32, 64))
    return [words.take(list(range(first, first + NUM_ROWS))) for first in range(0, 64, NUM_ROWS)]


# -- blocks of 32 values, and NVFP4's of 64 -------------------------------------------------------

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


# -- super-blocks of 256 --------------------------------------------------------------------------


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


# -- all types ------------------------------------------------------------------------------------

Granules = tuple[tuple[int, int], ...]
"""(block of 32, half) of 16 values each, four for a unit of 64 values; see step_kernels."""


def _in_order(num_units: int) -> tuple[Granules, ...]:
    return tuple(
        tuple((2 * unit + granule // 2, granule % 2) for granule in range(4))
        for unit in range(num_units)
    )


_UNITS_Q6_K = tuple(
    tuple((4 * run + side + 2 * part, half) for part in range(2) for half in range(2))
    for run in range(2)
    for side in range(2)
)
"""32 bytes of low bits are a unit: a block, and the one after the next."""

_UNITS_OF_2_BITS = tuple(
    tuple((4 * run + part, half) for part in range(4)) for run in range(2) for half in range(2)
)
"""16 bytes are a unit: the same halves of four blocks."""


@dataclass(frozen=True, slots=True)
class RepackedFormat:
    """A quantised type as the generic kernels see it."""

    tensor_type: TensorType
    scales: Callable[[TileRows], ScalesAndOffsets]
    quads: Callable[[TileRows], Quads]
    bits: int
    """Quants are below ``2 ** bits``: at most 7, or 8 for full bytes, which are centred on 128."""
    chunk_blocks: int
    """Blocks of 32 that one call of `scales` or `quads` emits."""
    scales_a_block: int = 1
    centre: int = 0
    """GPUs multiply ``quant - centre``, without an offset; 0: quants as they are, and offsets."""
    units: tuple[Granules, ...] = ()
    """Granules of each unit of a chunk, in a GPU's order; none if a unit is more than a chunk."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one row's part of a chunk."""
        return self.tensor_type.row_bytes(32 * self.chunk_blocks)


FORMATS = {
    each.tensor_type: each
    for each in (
        RepackedFormat(TensorType.Q4_0, scales_q4_0, quads_q4_0, 4, 1),
        RepackedFormat(TensorType.Q4_1, scales_q4_1, quads_q4_1, 4, 1),
        RepackedFormat(TensorType.Q5_0, scales_q5_0, quads_q5_0, 5, 1),
        RepackedFormat(TensorType.Q5_1, scales_q4_1, quads_q5_1, 5, 1),
        RepackedFormat(TensorType.Q8_0, scales_q8_0, quads_q8_0, 8, 1, centre=128),
        RepackedFormat(TensorType.IQ4_NL, scales_q8_0, quads_iq4_nl, 8, 1, centre=128),
        RepackedFormat(TensorType.MXFP4, scales_mxfp4, quads_mxfp4, 5, 1, centre=12),
        RepackedFormat(
            TensorType.NVFP4, scales_nvfp4, quads_nvfp4, 5, 2, 2, centre=12, units=_in_order(1)
        ),
        RepackedFormat(TensorType.Q2_K, scales_q2_k, quads_q2_k, 2, 8, 2, units=_UNITS_OF_2_BITS),
        RepackedFormat(TensorType.Q3_K, scales_q3_k, quads_q3_k, 3, 8, 2, units=_UNITS_OF_2_BITS),
        RepackedFormat(TensorType.Q4_K, scales_q4_k, quads_q4_k, 4, 8, units=_in_order(4)),
        RepackedFormat(TensorType.Q5_K, scales_q4_k, quads_q5_k, 5, 8, units=_in_order(4)),
        RepackedFormat(TensorType.Q6_K, scales_q6_k, quads_q6_k, 6, 8, 2, units=_UNITS_Q6_K),
        RepackedFormat(
            TensorType.IQ4_XS, scales_iq4_xs, quads_iq4_xs, 8, 8, centre=128, units=_in_order(4)
        ),
    )
}
