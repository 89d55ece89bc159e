"""AMX tiles, the matrix instructions of some x86 CPUs.

A tile is up to 16 rows of up to 64 bytes. One product multiplies the quants of a block of 32
values, or of half a block::

    A  16 tokens x 32 signed bytes      the q8 block of 16 tokens, rows 32 bytes apart
    B  8 steps x 16 rows x 4 unsigned   a block of an unpacked chunk
    C  16 tokens x 16 rows, int32       the exact sums, scaled like those of other kernels

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any

from dflash_runtime.compute.cpu.simd.emitting import NUM_ROWS, Vec
from dflash_runtime.compute.cpu.simd.types import I8, I64, emit_named
from dflash_runtime.compute.cpu.simd.untyped import cgutils, ir

NUM_TOKENS = 16
"""Tokens of one product."""

_C_TILES = (0, 1)
# Tiles for A and B of a pair's two products: whole blocks have separate tiles, halves share.
_WHOLE_TILES, _HALF_TILES = ((2, 3), (4, 5)), ((6, 7), (6, 7))
_A_SHAPE = {1: (NUM_TOKENS, 32), 2: (NUM_TOKENS, 16)}  # rows, bytes of a row; by scales of a block
_B_SHAPE = {1: (8, 64), 2: (4, 64)}
_C_SHAPE = (NUM_TOKENS, 4 * NUM_ROWS)
SUMS_BYTES = NUM_TOKENS * 4 * NUM_ROWS
"""Bytes of a product's sums."""

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@cache
def request_permission() -> bool:
    """Ask the operating system, once for the process, for permission to use tiles."""
    if platform.system() != "Linux":
        return False
    arguments = (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return int(ctypes.CDLL(None).syscall(*map(ctypes.c_long, arguments))) == 0


def emit_permission(builder: Any) -> None:
    """The same request in generated code; the answer is ignored."""
    kind = ir.FunctionType(I64, [I64], var_arg=True)
    syscall = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    arguments = (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    builder.call(syscall, [I64(number) for number in arguments])


def tile_configuration() -> bytes:
    """The shapes of the tiles, as ldtilecfg reads them."""
    shapes = dict.fromkeys(_C_TILES, _C_SHAPE)
    for tiles, scales_a_block in ((_WHOLE_TILES, 1), (_HALF_TILES, 2)):
        for a, b in tiles:
            shapes[a], shapes[b] = _A_SHAPE[scales_a_block], _B_SHAPE[scales_a_block]
    configuration = bytearray(64)
    configuration[0] = 1  # the palette of 8 tiles
    for tile, (rows, row_bytes) in shapes.items():
        configuration[16 + 2 * tile] = row_bytes
        configuration[48 + tile] = rows
    return bytes(configuration)


def emit_begin(builder: Any) -> None:
    """Configure this thread's tiles."""
    content = tile_configuration()
    kind, name = ir.ArrayType(I8, len(content)), "dflash_tile_configuration"
    known = builder.module.globals.get(name)
    if known is None:
        known = ir.GlobalVariable(builder.module, kind, name)
        known.linkage, known.global_constant = "internal", True
        known.initializer = ir.Constant(kind, list(content))
    pointer = builder.bitcast(known, I8.as_pointer())
    emit_named(builder, "llvm.x86.ldtilecfg", ir.VoidType(), pointer)


def emit_end(builder: Any) -> None:
    """Release the tile state: keeping it makes thread switches slower."""
    emit_named(builder, "llvm.x86.tilerelease", ir.VoidType())


def emit_product(
    builder: Any, scales_a_block: int, index: int, quants: Vec, x: Vec, sums: Vec
) -> None:
    """``sums[token][row] = quants · x`` of a block, or half of one, in the tiles of pair member
    `index`.

    Shapes: quants [8 / scales_a_block, 16, 4]; x [16 tokens, 32], of which half is used if blocks
    have two scales; sums [16 tokens, 16] int32.
    """
    nothing = ir.VoidType()
    c = _C_TILES[index]
    a, b = (_WHOLE_TILES if scales_a_block == 1 else _HALF_TILES)[index]

    def move(name: str, tile: int, place: Vec, stride: int) -> None:
        pointer = builder.inttoptr(place.value, I8.as_pointer())
        emit_named(builder, name, nothing, I8(tile), pointer, I64(stride))

    emit_named(builder, "llvm.x86.tilezero", nothing, I8(c))
    move("llvm.x86.tileloadd64", a, x, 32)
    move("llvm.x86.tileloadd64", b, quants, 64)
    emit_named(builder, "llvm.x86.tdpbsud", nothing, I8(c), I8(a), I8(b))
    move("llvm.x86.tilestored64", c, sums, 4 * NUM_ROWS)
