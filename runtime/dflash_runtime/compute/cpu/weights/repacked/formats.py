"""Interface between quantised types and the generic kernels that multiply repacked tiles.

A value is ``scale * unsigned quant + offset``. A format's functions emit one *chunk*, 16 rows of up
to 256 values: first `scales`, then quads in any order that suits the format. They read no byte
outside the chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.cpu.weights.repacked import formats_32 as of_32
from dflash_runtime.compute.cpu.weights.repacked import formats_256 as of_256
from dflash_runtime.compute.cpu.weights.repacked.rows import Quads, ScalesAndOffsets, TileRows


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

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one row's part of a chunk."""
        return self.tensor_type.row_bytes(32 * self.chunk_blocks)


FORMATS = {
    each.tensor_type: each
    for each in (
        RepackedFormat(TensorType.Q4_0, of_32.scales_q4_0, of_32.quads_q4_0, 4, 1),
        RepackedFormat(TensorType.Q4_1, of_32.scales_q4_1, of_32.quads_q4_1, 4, 1),
        RepackedFormat(TensorType.Q5_0, of_32.scales_q5_0, of_32.quads_q5_0, 5, 1),
        RepackedFormat(TensorType.Q5_1, of_32.scales_q4_1, of_32.quads_q5_1, 5, 1),
        RepackedFormat(TensorType.Q8_0, of_32.scales_q8_0, of_32.quads_q8_0, 8, 1),
        RepackedFormat(TensorType.IQ4_NL, of_32.scales_q8_0, of_32.quads_iq4_nl, 8, 1),
        RepackedFormat(TensorType.MXFP4, of_32.scales_mxfp4, of_32.quads_mxfp4, 5, 1),
        RepackedFormat(TensorType.NVFP4, of_32.scales_nvfp4, of_32.quads_nvfp4, 5, 2, 2),
        RepackedFormat(TensorType.Q2_K, of_256.scales_q2_k, of_256.quads_q2_k, 2, 8, 2),
        RepackedFormat(TensorType.Q3_K, of_256.scales_q3_k, of_256.quads_q3_k, 3, 8, 2),
        RepackedFormat(TensorType.Q4_K, of_256.scales_q4_k, of_256.quads_q4_k, 4, 8),
        RepackedFormat(TensorType.Q5_K, of_256.scales_q4_k, of_256.quads_q5_k, 5, 8),
        RepackedFormat(TensorType.Q6_K, of_256.scales_q6_k, of_256.quads_q6_k, 6, 8, 2),
        RepackedFormat(TensorType.IQ4_XS, of_256.scales_iq4_xs, of_256.quads_iq4_xs, 8, 8),
    )
}
