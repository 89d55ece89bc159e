"""Panels times 16 tokens by tiles: the matrix instructions of some x86 CPUs.

A tile is up to 16 rows of up to 64 bytes. One product takes the quants of a block of 32 values, or
of a half of it::

    A  16 tokens x 32 signed bytes      a record of 16 tokens, rows 32 bytes apart
    B  8 steps x 16 rows x 4 unsigned   a block of an unpacked panel
    C  16 tokens x 16 rows, int32       the exact sums, to be scaled as those of other kernels are

So results have the bits of the other kernels. While the CPU scales the sums of two products, its
tiles work on the next two.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from typing import Any

from dflash_runtime.compute.cpu.panels.emitting import I8, I64, Vec, call, load
from dflash_runtime.compute.cpu.panels.kernels import OFFSETS_AT, SCALES_AT, Records, scaled
from dflash_runtime.compute.cpu.panels.rows import LANES, NUM_ROWS, WORDS
from dflash_runtime.compute.cpu.tiers import Tier, current_tier
from dflash_runtime.compute.cpu.untyped import cgutils, ir
from dflash_runtime.compute.cpu.vector.types import i64, primitive, void

NUM_TOKENS = 16
"""Of a product."""

_C_TILES = (0, 1)
# Tiles for A and B of the two products of a pair: whole blocks have their own, halves share.
_WHOLE_TILES, _HALF_TILES = ((2, 3), (4, 5)), ((6, 7), (6, 7))
_A_SHAPE = {1: (NUM_TOKENS, 32), 2: (NUM_TOKENS, 16)}  # rows, bytes a row; by scales a block
_B_SHAPE = {1: (8, 64), 2: (4, 64)}
_C_SHAPE = (NUM_TOKENS, 4 * NUM_ROWS)
_SUMS_BYTES = NUM_TOKENS * 4 * NUM_ROWS

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@cache
def request_permission() -> bool:
    """Ask the operating system, once a process, for the right to use tiles."""
    if platform.system() != "Linux":
        return False
    arguments = (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return int(ctypes.CDLL(None).syscall(*map(ctypes.c_long, arguments))) == 0


def emit_permission(builder: Any) -> None:
    """The same in generated code, whatever the answer."""
    kind = ir.FunctionType(I64, [I64], var_arg=True)
    syscall = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    arguments = (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    builder.call(syscall, [I64(number) for number in arguments])


def tile_configuration() -> bytes:
    """What the tiles are shaped like, as ldtilecfg reads it."""
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
    """Shape the tiles of this thread, for as long as it computes undisturbed."""
    content = tile_configuration()
    kind, name = ir.ArrayType(I8, len(content)), "dflash_tile_configuration"
    known = builder.module.globals.get(name)
    if known is None:
        known = ir.GlobalVariable(builder.module, kind, name)
        known.linkage, known.global_constant = "internal", True
        known.initializer = ir.Constant(kind, list(content))
    pointer = builder.bitcast(known, I8.as_pointer())
    call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), pointer)


def emit_end(builder: Any) -> None:
    """Leave no tile state behind: keeping it makes switching threads slower."""
    call(builder, "llvm.x86.tilerelease", ir.VoidType())


@primitive(void, i64)
def begin_tiles(builder: Any, num_vectors: Any) -> None:
    """To be called before a part of a set that has groups of 16; nothing on other tiers."""
    _if_tiles(builder, num_vectors, emit_begin)


@primitive(void, i64)
def end_tiles(builder: Any, num_vectors: Any) -> None:
    """Follows `begin_tiles` with the same argument."""
    _if_tiles(builder, num_vectors, emit_end)


def _if_tiles(builder: Any, num_vectors: Any, emit: Callable[[Any], None]) -> None:
    if current_tier() is Tier.AMX:
        with builder.if_then(builder.icmp_signed(">=", num_vectors, I64(NUM_TOKENS))):
            emit(builder)


def emit_product(
    builder: Any, scales_a_block: int, index: int, quants: Vec, x: Vec, sums: Vec
) -> None:
    """``sums[token][row] = quants · x`` of a block, or a half of one, by the tiles of `index`.

    Shapes: quants [8 / scales_a_block, 16, 4]; x [16 tokens, 32], of which a half counts where
    blocks have two scales; sums [16 tokens, 16] int32.
    """
    nothing = ir.VoidType()
    c = _C_TILES[index]
    a, b = (_WHOLE_TILES if scales_a_block == 1 else _HALF_TILES)[index]

    def move(name: str, tile: int, place: Vec, stride: int) -> None:
        pointer = builder.inttoptr(place.value, I8.as_pointer())
        call(builder, name, nothing, I8(tile), pointer, I64(stride))

    call(builder, "llvm.x86.tilezero", nothing, I8(c))
    move("llvm.x86.tileloadd64", a, x, 32)
    move("llvm.x86.tileloadd64", b, quants, 64)
    call(builder, "llvm.x86.tdpbsud", nothing, I8(c), I8(a), I8(b))
    move("llvm.x86.tilestored64", c, sums, 4 * NUM_ROWS)


def multiplying_by_tiles(scales_a_block: int) -> Callable[..., Any]:
    """``multiply(panel, num_blocks, records, totals)``, see kernels; tiles must have begun."""

    @primitive(void, i64, i64, i64, i64)
    def multiply(builder: Any, panel: Any, num_blocks: Any, records: Any, totals: Any) -> None:
        emit_multiply(builder, scales_a_block, panel, num_blocks, records, totals)

    return multiply


def emit_multiply(
    builder: Any, scales_a_block: int, panel: Any, num_blocks: Any, records: Any, totals: Any
) -> None:
    """A pair of products is that of two blocks, or of the two halves of one."""
    with builder.goto_entry_block():
        room = builder.alloca(ir.ArrayType(I8, 4 * _SUMS_BYTES))  # numba's way would fill it
    room.align = 64
    sums = Vec(builder, builder.ptrtoint(room, I64))  # of two pairs in turn
    place = Vec(builder, totals)
    kept = [cgutils.alloca_once(builder, LANES) for _ in range(NUM_TOKENS)]
    for token in range(NUM_TOKENS):
        builder.store(load(place + 64 * token, LANES).value, kept[token])
    last = builder.sub(num_blocks, I64(1))
    is_whole = scales_a_block == 1
    num_pairs = builder.lshr(builder.add(num_blocks, I64(1)), I64(1)) if is_whole else num_blocks

    def blocks_of(pair: Any) -> list[Any]:
        if not is_whole:
            return [pair, pair]
        first = builder.shl(pair, I64(1))
        second = builder.or_(first, I64(1))
        # An odd block's partner is itself: computed and ignored.
        is_there = builder.icmp_signed("<=", second, last)
        return [first, builder.select(is_there, second, first)]

    def sums_of(pair: Any, index: int) -> Vec:
        turn = Vec(builder, builder.and_(pair, I64(1)))
        return sums + turn * (2 * _SUMS_BYTES) + index * _SUMS_BYTES

    def multiply_pair(pair: Any) -> None:
        for index, block in enumerate(blocks_of(pair)):
            half = 0 if is_whole else index
            quants = Vec(builder, panel) + Vec(builder, block) * 512 + 256 * half
            x = Records(Vec(builder, records), NUM_TOKENS).block(Vec(builder, block))
            out = sums_of(pair, index)
            emit_product(builder, scales_a_block, index, quants, x.quants_at + 16 * half, out)

    def scale(pair: Any, index: int, block: Any) -> None:
        part = 0 if is_whole else index
        at = Vec(builder, panel) + Vec(builder, block) * (64 * scales_a_block) + 64 * part
        factor, offset = load(at + SCALES_AT, LANES), load(at + OFFSETS_AT, LANES)
        x = Records(Vec(builder, records), NUM_TOKENS).block(Vec(builder, block))
        out = sums_of(pair, index)
        for token in range(NUM_TOKENS):
            integers = load(out + 64 * token, WORDS)
            x_sum = x.sum(token, scales_a_block, part)
            total = Vec(builder, builder.load(kept[token]))
            total = scaled(total, integers, factor, offset, x.scale(token), x_sum)
            builder.store(total.value, kept[token])

    multiply_pair(I64(0))
    with cgutils.for_range(builder, num_pairs) as loop:
        pair, following = loop.index, builder.add(loop.index, I64(1))
        with builder.if_then(builder.icmp_signed("<", following, num_pairs)):
            multiply_pair(following)
        first, second = blocks_of(pair)
        scale(pair, 0, first)
        if is_whole:
            with builder.if_then(builder.icmp_signed("!=", first, second)):
                scale(pair, 1, second)
        else:
            scale(pair, 1, second)
    for token in range(NUM_TOKENS):
        Vec(builder, builder.load(kept[token])).store(place + 64 * token)
