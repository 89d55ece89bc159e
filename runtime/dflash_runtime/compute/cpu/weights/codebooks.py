"""Codebooks of the IQ types, as constants in the code that looks them up.

They come from the gguf package, imported only when such code is generated, not when it is cached.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.cpu.simd.types import (
    FLOAT,
    HALF,
    I8,
    I16,
    I32,
    I64,
    LANES,
    emit_load,
    emit_shuffle,
    f32,
    floats,
    i64,
    lanes_of,
    primitive,
    unsigned,
)
from dflash_runtime.compute.cpu.simd.untyped import ir


def codebook(tensor_type: TensorType, *, entry_bytes: int) -> Callable[..., Any]:
    """Make a primitive that joins the entries of the given indices into 32 bytes, maybe signed.

    Sources: the grids of ggml, as the gguf package has them.
    """
    entry_type = ir.IntType(8 * entry_bytes)
    num_indices = LANES // entry_bytes

    @primitive(unsigned, *[i64] * num_indices)
    def entries(builder: Any, *indices: Any) -> Any:
        table = _table(builder.module, tensor_type, entry_bytes)
        joined = ir.Constant(lanes_of(entry_type, num_indices), ir.Undefined)
        for place, index in enumerate(indices):
            address = builder.add(table, builder.mul(index, I64(entry_bytes)))
            entry = emit_load(builder, address, entry_type)
            joined = builder.insert_element(joined, entry, I32(place))
        return builder.bitcast(joined, lanes_of(I8))

    return entries


def _table(module: Any, tensor_type: TensorType, entry_bytes: int) -> Any:
    """Address of a codebook, a constant of the module."""
    name = f"codebook_{tensor_type.name}"
    table = module.globals.get(name)
    if table is None:
        content = _content(tensor_type)
        array = ir.ArrayType(I8, len(content))
        table = ir.GlobalVariable(module, array, name)
        table.linkage, table.global_constant, table.align = "internal", True, entry_bytes
        table.initializer = ir.Constant(array, bytearray(content))
    return table.ptrtoint(I64)


@cache
def _content(tensor_type: TensorType) -> bytes:
    from gguf import quants

    kind: Any = getattr(quants, tensor_type.name)
    kind.init_grid()
    return bytes(kind.grid.astype("int8").tobytes())


@primitive(i64, i64)
def with_parity(builder: Any, index: Any) -> Any:
    """Seven bits, and above them the bit that makes the number of ones even."""
    ones = builder.ctpop(index)
    return builder.or_(index, builder.shl(builder.and_(ones, I64(1)), I64(7)))


@primitive(f32, i64)
def half_from_bits(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(builder.trunc(bits, I16), HALF), FLOAT)


@primitive(floats, f32, f32, f32, f32)
def splat_quarters(builder: Any, *values: Any) -> Any:
    """Each of four values in eight lanes."""
    four = ir.Constant(lanes_of(FLOAT, 4), ir.Undefined)
    for place, value in enumerate(values):
        four = builder.insert_element(four, value, I32(place))
    return emit_shuffle(builder, four, four, [lane // 8 for lane in range(LANES)])
