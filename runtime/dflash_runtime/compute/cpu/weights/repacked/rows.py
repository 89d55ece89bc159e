"""Reads the 16 rows of a repacked tile side by side.

A *quad* is 256 bytes, four steps of k: byte ``64 * step + 4 * row + i`` belongs to value ``4 * step
+ i`` of that row. *Words* are 16 x 32 bits and *lanes* 16 x float32, one a row.
"""

from __future__ import annotations

from collections.abc import Iterator

from dflash_runtime.compute.cpu.simd.emitting import NUM_ROWS, Vec, join, load, shuffle
from dflash_runtime.compute.cpu.simd.types import FLOAT, I8, I32, lanes_of

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

        TileRows 4 lane + j form vector j, so that the rest is a transposition of 4 x 4
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
