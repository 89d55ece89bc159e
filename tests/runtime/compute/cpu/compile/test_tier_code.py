"""Code of instruction-set tiers: for CPUs other than this one, and AMX tiles run by a model of
them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dflash_adapters.quant import TensorType
from dflash_protocol.ids import AnyArray, U8Array
from dflash_runtime.compute.cpu.compile import tiers
from dflash_runtime.compute.cpu.simd import instruction_sets, tiles
from dflash_runtime.compute.cpu.simd import types as simd_types
from dflash_runtime.compute.cpu.simd.dots import Quants
from dflash_runtime.compute.cpu.simd.emitting import NUM_ROWS
from dflash_runtime.compute.cpu.simd.instruction_sets import Tier, target_features
from dflash_runtime.compute.cpu.simd.types import emit_named
from dflash_runtime.compute.cpu.simd.untyped import ir, llvm
from dflash_runtime.compute.cpu.weights.repacked import amx, kernels
from dflash_runtime.compute.cpu.weights.repacked.formats import FORMATS
from support.cpu_tiers import with_vnni

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"

# -- sums of products -----------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
def test_sums_of_pairs_fit_16_bits(bits: int) -> None:
    quants = Quants(bits)
    largest = 128 if bits == 8 else 2**bits - 1
    assert quants.pairs_in_a_short >= 1
    assert quants.pairs_in_a_short * 2 * largest * 127 < 2**15


# -- code for other machines ----------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _all_targets() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def module_of(emit: Callable[..., Any], num_numbers: int, triple: str) -> Any:
    """A function ``kernel(*numbers)`` whose code is ``emit(builder, *numbers)``."""
    module = ir.Module("kernel")
    module.triple = triple
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * num_numbers)
    function = ir.Function(module, kind, "kernel")
    builder = ir.IRBuilder(function.append_basic_block())
    emit(builder, *function.args)
    builder.ret_void()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    return parsed


def assembly(emit: Callable[..., Any], triple: str, name: str, features: str) -> str:
    """Assembly for a CPU that need not be this one."""
    parsed = module_of(emit, emit.__code__.co_argcount - 1, triple)
    target = llvm.Target.from_triple(triple)
    machine = target.create_target_machine(cpu=name, features=features, opt=3)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3))
    passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))


@pytest.fixture
def emitters(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tier], None]:
    """Kernels as functions that emit them, for a tier that the process has not chosen."""

    def use(tier: Tier) -> None:
        monkeypatch.setattr(tiers, "_chosen", tier)  # undone after the test

    monkeypatch.setattr(kernels, "primitive", lambda *types: lambda emit: emit)
    return use


def emitted_for(tier: Tier, tensor_type: TensorType) -> list[Callable[..., Any]]:
    """All kernels of repacked tiles of a type."""
    form = FORMATS[tensor_type]
    quants = Quants(form.bits).representative(tier)
    some = [kernels.multiplying(size, form.scales_a_block, quants) for size in (1, 8)]
    return [kernels.unpacking(form), kernels.multiplying_one(form), *some]


@pytest.mark.parametrize(
    "tensor_type",
    [
        TensorType.IQ4_NL,
        pytest.param(TensorType.Q4_K, marks=pytest.mark.slow),
        pytest.param(TensorType.Q8_0, marks=pytest.mark.slow),
    ],
)
def test_arm_has_short_instructions_for_it(
    emitters: Callable[[Tier], None], tensor_type: TensorType
) -> None:
    emitters(Tier.NEON_DOT)
    unpack, *products = (
        assembly(emit, ARM, "neoverse-n1", "+neon,+dotprod,+fullfp16")
        for emit in emitted_for(Tier.NEON_DOT, tensor_type)
    )
    assert all("sdot" in code for code in products)
    if tensor_type is TensorType.IQ4_NL:
        assert "tbl\t" in unpack
    assert not re.search(r"\bbl\s", unpack)  # calls nothing


@pytest.mark.parametrize(
    "tensor_type",
    [
        TensorType.Q4_K,
        pytest.param(TensorType.IQ4_NL, marks=pytest.mark.slow),
        pytest.param(TensorType.Q8_0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("tier", "name", "wanted", "unwanted"),
    [
        (Tier.AVX512_VNNI, "cascadelake", ("vpdpbusd", "zmm"), ()),
        (Tier.AVX_VNNI, "alderlake", ("vpdpbusd", "ymm"), ("zmm", "%k1", "ymm16")),
        (Tier.AVX2, "haswell", ("vpmaddubsw", "ymm"), ("zmm", "%k1", "ymm16", "vpdpbusd")),
        (Tier.GENERIC, "ivybridge", ("pmullw",), ("zmm", "%k1", "ymm16", "pmaddubsw")),
    ],
)
def test_code_for_x86_is_of_its_set(
    emitters: Callable[[Tier], None],
    tensor_type: TensorType,
    tier: Tier,
    name: str,
    wanted: tuple[str, ...],
    unwanted: tuple[str, ...],
) -> None:
    emitters(tier)
    features = "+fma" if tier is Tier.GENERIC else ""
    codes = [assembly(emit, X86, name, features) for emit in emitted_for(tier, tensor_type)]
    for text in wanted:
        assert all(text in code for code in codes[1:]), text
    for text in unwanted:
        assert not any(text in code for code in codes), text


# -- prefetches -----------------------------------------------------------------------------------

PREFETCH = re.compile(r"call void @llvm\.prefetch\.p0\(ptr \S+, i32 0, i32 (\d), i32 1\)")


def lines_of_a_turn(tensor_type: TensorType) -> int:
    """Cache lines of 16 rows' chunk; of two chunks and of one where chunks are small."""
    form = FORMATS[tensor_type]
    turns = (1,) if form.chunk_blocks > 1 else (2, 1)
    return sum(-(-count * NUM_ROWS * form.chunk_bytes // 64) for count in turns)


@pytest.mark.parametrize("tensor_type", FORMATS, ids=lambda each: each.name)
def test_every_line_of_both_panels_ahead_is_prefetched(
    emitters: Callable[[Tier], None],
    monkeypatch: pytest.MonkeyPatch,
    tensor_type: TensorType,
) -> None:
    emitters(Tier.AVX512_VNNI)
    monkeypatch.setattr(simd_types, "host_cpu", lambda: "znver4")
    emit = kernels.multiplying_one(FORMATS[tensor_type])
    localities = PREFETCH.findall(str(module_of(emit, 7, X86)))
    assert localities == ["2"] * 2 * lines_of_a_turn(tensor_type)


@pytest.mark.parametrize(
    ("tier", "triple", "name", "features", "wanted"),
    [
        (Tier.AVX512_VNNI, X86, "znver4", "", "prefetcht1"),
        (Tier.AVX512_VNNI, X86, "sapphirerapids", "", "prefetcht1"),
        (Tier.AVX2, X86, "haswell", "", "prefetcht1"),
        (Tier.NEON_DOT, ARM, "neoverse-n1", "+neon,+dotprod", "pldl2keep"),
        (Tier.AVX512_VNNI, X86, "znver5", "", "prefetcht0"),
    ],
)
def test_weights_are_prefetched_into_the_cache_that_has_buffers_for_them(
    emitters: Callable[[Tier], None],
    monkeypatch: pytest.MonkeyPatch,
    tier: Tier,
    triple: str,
    name: str,
    features: str,
    wanted: str,
) -> None:
    emitters(tier)
    monkeypatch.setattr(simd_types, "host_cpu", lambda: name)
    emit = kernels.multiplying_one(FORMATS[TensorType.IQ4_NL])
    code = assembly(emit, triple, name, features)
    found = re.findall(r"prefetch\w+|pld\w+", code)
    times = 2 if tier.has_wide_registers else 1
    assert found == [wanted] * times * lines_of_a_turn(TensorType.IQ4_NL)


# -- tiles ----------------------------------------------------------------------------------------


def emit_tiles(scales_a_block: int) -> Callable[..., Any]:
    def emit(builder: Any, repacked: Any, num_blocks: Any, q8_blocks: Any, totals: Any) -> None:
        tiles.emit_begin(builder)
        amx.emit_multiply(builder, scales_a_block, repacked, num_blocks, q8_blocks, totals)
        tiles.emit_end(builder)

    return emit


@pytest.mark.parametrize("scales_a_block", [1, 2])
def test_tile_code_is_made_of_tile_instructions(scales_a_block: int) -> None:
    code = assembly(emit_tiles(scales_a_block), X86, "sapphirerapids", "")
    for name in ("ldtilecfg", "tileloadd", "tdpbsud", "tilestored", "tilerelease"):
        assert name in code
    assert "llvm." not in code
    assert "memset" not in code


class TileUnit:
    """Tiles in numpy, as the manual describes them."""

    def __init__(self) -> None:
        self._shapes: dict[int, tuple[int, int]] = {}
        self._tiles: dict[int, AnyArray] = {}
        self.num_products = 0

    def ldtilecfg(self, address: int) -> None:
        stored = ctypes.string_at(address, 64)
        assert stored[0] == 1
        assert not any(stored[1:16] + stored[32:48] + stored[56:])
        self._shapes = {t: (stored[48 + t], stored[16 + 2 * t]) for t in range(8)}
        assert all(rows <= 16 and row_bytes <= 64 for rows, row_bytes in self._shapes.values())

    def tilerelease(self) -> None:
        self._shapes, self._tiles = {}, {}

    def tilezero(self, tile: int) -> None:
        self._tiles[tile] = np.zeros(self._shapes[tile], np.uint8)

    def tileloadd64(self, tile: int, address: int, stride: int) -> None:
        rows, row_bytes = self._shapes[tile]
        parts = [ctypes.string_at(address + stride * row, row_bytes) for row in range(rows)]
        self._tiles[tile] = np.frombuffer(b"".join(parts), np.uint8).reshape(rows, row_bytes)

    def tilestored64(self, tile: int, address: int, stride: int) -> None:
        for row, values in enumerate(self._tiles[tile]):
            ctypes.memmove(address + stride * row, values.tobytes(), values.size)

    def tdpbsud(self, c: int, a: int, b: int) -> None:
        (m, c_bytes), (a_rows, a_bytes), (k, b_bytes) = (self._shapes[t] for t in (c, a, b))
        assert (a_rows, a_bytes, b_bytes) == (m, 4 * k, c_bytes)
        left = self._tiles[a].view(np.int8).astype(np.int32).reshape(m, k, 4)
        right = self._tiles[b].astype(np.int32).reshape(k, -1, 4)
        total = self._tiles[c].view(np.int32) + np.einsum("mki,kni->mn", left, right)
        self._tiles[c] = total.astype(np.int32).view(np.uint8)
        self.num_products += 1


_KINDS = {"i8": ctypes.c_uint8, "i64": ctypes.c_int64}


@pytest.fixture
def tile_unit(monkeypatch: pytest.MonkeyPatch) -> TileUnit:
    """Replaces the CPU's tile unit in code that the test emits."""
    unit, kept = TileUnit(), list[Any]()

    def call_unit(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
        if not name.startswith(("llvm.x86.tile", "llvm.x86.tdp", "llvm.x86.ldtile")):
            return emit_named(builder, name, result, *arguments)
        short = name.split(".")[-1]
        kinds = [_KINDS.get(str(each.type), ctypes.c_void_p) for each in arguments]
        callback = ctypes.CFUNCTYPE(None, *kinds)(getattr(unit, short))
        kept.append(callback)
        address = ctypes.cast(callback, ctypes.c_void_p).value
        kind = ir.FunctionType(result, [each.type for each in arguments])
        function = builder.inttoptr(ir.IntType(64)(address), kind.as_pointer())
        return builder.call(function, arguments)

    monkeypatch.setattr(tiles, "emit_named", call_unit)
    monkeypatch.setattr(unit, "kept", kept, raising=False)
    return unit


def aligned(num_bytes: int) -> U8Array:
    room = np.zeros(num_bytes + 64, np.uint8)
    first = -room.ctypes.data % 64
    return room[first : first + num_bytes]


def run_here(emit: Callable[..., Any], *numbers: int) -> None:
    """Emit, compile for this CPU and call."""
    triple = llvm.get_process_triple()
    parsed = module_of(emit, len(numbers), triple)
    features = target_features(tiers.current_tier(), instruction_sets.host_features())
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=2
    )
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    address = engine.get_function_address("kernel")
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(numbers))(address)(*numbers)


@with_vnni
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("scales_a_block", [1, 2])
def test_tiles_give_the_bits_of_other_kernels(
    tile_unit: TileUnit,
    emitters: Callable[[Tier], None],
    scales_a_block: int,
    num_blocks: int,
) -> None:
    rng = np.random.default_rng(num_blocks)
    repacked = aligned(kernels.REPACKED_BYTES)
    repacked[: kernels.SCALES_AT] = rng.integers(0, 256, kernels.SCALES_AT)
    repacked[kernels.SCALES_AT :].view(np.float32)[:] = rng.standard_normal(512)
    x = rng.integers(-127, 128, (num_blocks, 16, 32), np.int8)
    numbers = rng.standard_normal((num_blocks, 4, 16)).astype(np.float32)
    group_blocks = {}
    for size in (16, 8):
        parts = []
        for first in range(0, 16, size):
            chosen = slice(first, first + size)
            group = [x[:, chosen].reshape(num_blocks, -1).view(np.uint8)]
            group.append(np.ascontiguousarray(numbers[:, :, chosen]).view(np.uint8))
            parts.append(np.hstack([each.reshape(num_blocks, -1) for each in group]).reshape(-1))
        group_blocks[size] = parts
    start = rng.standard_normal((16, 16)).astype(np.float32)

    got = start.copy()
    numbers_of = (repacked.ctypes.data, num_blocks)
    (whole,) = group_blocks[16]
    run_here(emit_tiles(scales_a_block), *numbers_of, whole.ctypes.data, got.ctypes.data)
    # The last pair of an odd number of blocks is one block twice.
    products = 2 * num_blocks if scales_a_block == 2 else num_blocks + num_blocks % 2
    assert tile_unit.num_products == products

    emitters(Tier.AVX512_VNNI)
    expected = start.copy()
    multiply = kernels.multiplying(8, scales_a_block, Quants(8))
    for part, rows in zip(group_blocks[8], (expected[:8], expected[8:]), strict=True):
        run_here(multiply, *numbers_of, part.ctypes.data, rows.ctypes.data)
    np.testing.assert_array_equal(got, expected)
