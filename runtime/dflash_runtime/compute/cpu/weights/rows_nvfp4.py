"""Rows of NVFP4: 64-value blocks of four groups, each with its own scale.

The tensor's global scale, stored separately in the file, is applied by the caller. Addresses are in
bytes.

Source: block layout of ggml (checked against the gguf package by tests).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_runtime.compute.cpu.compile.compiling import helper
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.types import LANES, emit_shuffle, primitive, unsigned
from dflash_runtime.compute.cpu.weights.rows_32 import mxfp4_values

_BIAS = np.float32(2 ** (127 - 7 - 1))


def expand_nvfp4(row: int, columns: int, out: int) -> None:
    """Scales[4]; for each group of 16 eight bytes: low halves first, then high halves."""
    for _ in range(columns // 64):
        for pair in range(2):
            quants = _by_group(mxfp4_values(v.load_nibbles(row + 4 + 16 * pair)))
            first = _half_scale(v.load_byte(row + 2 * pair))
            second = _half_scale(v.load_byte(row + 2 * pair + 1))
            v.store_floats(out, v.from_signed(quants) * v.splat_halves(first, second))
            out += 128
        row += 36


@helper
def _half_scale(code: int) -> float:
    """Half of an unsigned E4M3 number (the quants are doubled); 0x7F counts as 0."""
    # As upper bits of a float32 its exponent is too small by the difference of the biases.
    bits = (code & 127) << 20
    scale: float = v.float_from_bits(0 if code == 0x7F else bits) * _BIAS
    return scale


@primitive(unsigned, unsigned)
def _by_group(builder: Any, values: Any) -> Any:
    """Values of the low halves of 16 bytes, then of the high ones, by groups."""
    quarter = LANES // 4
    order = [lane + quarter * part for part in (0, 2, 1, 3) for lane in range(quarter)]
    return emit_shuffle(builder, values, values, order)
