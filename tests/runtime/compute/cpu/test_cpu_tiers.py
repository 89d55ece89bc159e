"""Instruction-set tiers: which is chosen, that its code is of its set, and that all agree."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np
import pytest

from dflash_adapters.quant import TensorType
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import AnyArray, U8Array
from dflash_protocol.settings import AUTO_TIER, CPU_TIERS
from dflash_runtime.compute import BackendName, make_backend
from dflash_runtime.compute.cpu import tier_test, tiers
from dflash_runtime.compute.cpu.panels import amx, dots, kernels
from dflash_runtime.compute.cpu.panels.dots import Quants
from dflash_runtime.compute.cpu.panels.emitting import call
from dflash_runtime.compute.cpu.panels.formats import FORMATS
from dflash_runtime.compute.cpu.tiers import Tier, choose_tier, offered_tiers, target_features
from dflash_runtime.compute.cpu.untyped import ir, llvm

REPOSITORY = Path(__file__).parents[4]
SOURCE_ROOTS = [str(REPOSITORY / name) for name in ("protocol", "adapters", "runtime")]
CACHE_VARIABLE = "DFLASH_MOE_EXPERT_COMPUTE_CACHE_DIR"

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
AVX2_NAMES = ("avx", "avx2", "fma", "f16c")
AVX512_NAMES = (*AVX2_NAMES, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
AMX_NAMES = (*AVX512_NAMES, "amx-tile", "amx-int8")

HERE = offered_tiers(tiers.host_features())
on_x86 = pytest.mark.skipif(Tier.AVX2 not in HERE, reason="needs an x86 CPU with AVX2")
with_vnni = pytest.mark.skipif(Tier.AVX512_VNNI not in HERE, reason="needs AVX512-VNNI")


def cpu(*names: str) -> dict[str, bool]:
    """Features of a CPU that has these, among all that the tests know."""
    known = (*AMX_NAMES, "avxvnni", "vaes", "neon", "dotprod")
    return {name: name in names for name in known}


# -- what there is to choose from -----------------------------------------------------------------


def test_settings_know_every_tier() -> None:
    assert (AUTO_TIER, *Tier) == CPU_TIERS


@pytest.mark.parametrize(
    ("names", "best_first"),
    [
        (AMX_NAMES, "amx avx512vnni avxvnni avx2 generic"),
        (AVX512_NAMES, "avx512vnni avxvnni avx2 generic"),
        ((*AVX2_NAMES, "avxvnni"), "avxvnni avx2 generic"),
        (AVX2_NAMES, "avx2 generic"),
        (("avx", "f16c"), "generic"),
        (("neon", "dotprod"), "neondot generic"),
        (("neon",), "generic"),
        ((), "generic"),
    ],
)
def test_a_cpu_offers_what_it_has_the_instructions_for(
    names: tuple[str, ...], best_first: str
) -> None:
    assert offered_tiers(cpu(*names)) == best_first.split()


@pytest.mark.parametrize(
    ("tier", "names", "left"),
    [
        (Tier.AMX, AMX_NAMES, AMX_NAMES),
        (Tier.AVX512_VNNI, AMX_NAMES, AMX_NAMES),
        (Tier.AVX_VNNI, AVX512_NAMES, AVX512_NAMES),
        (Tier.AVX_VNNI, (*AMX_NAMES, "avxvnni"), (*AVX2_NAMES, "avxvnni")),
        (Tier.AVX2, (*AMX_NAMES, "avxvnni", "vaes"), (*AVX2_NAMES, "vaes")),
        (Tier.GENERIC, (*AMX_NAMES, "vaes"), ("avx", "fma", "f16c")),
        (Tier.GENERIC, ("neon", "dotprod"), ("neon",)),
    ],
)
def test_llvm_may_use_no_more_than_the_tier(
    tier: Tier, names: tuple[str, ...], left: tuple[str, ...]
) -> None:
    features = target_features(tier, cpu(*names)).split(",")
    assert {name[1:] for name in features if name.startswith("+")} == set(left)
    assert {name[1:] for name in features} == set(cpu())


# -- choosing -------------------------------------------------------------------------------------


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A process on an AMX machine that has not chosen; what LLVM is restricted to."""
    restricted: list[str] = []
    monkeypatch.setattr(tiers, "_chosen", None)
    monkeypatch.setattr(tiers, "host_features", lambda: cpu(*AMX_NAMES))
    monkeypatch.setattr(tiers, "_restrict_llvm", restricted.append)
    monkeypatch.setattr(tier_test, "why_not", lambda tier, features: None)
    return restricted


def test_the_best_is_chosen_once(undecided: list[str]) -> None:
    assert choose_tier("auto") is Tier.AMX
    assert choose_tier("auto") is choose_tier("amx") is tiers.current_tier() is Tier.AMX
    with pytest.raises(SettingsError, match=r"CPU tier avx2: .* made for amx already"):
        choose_tier("avx2")
    assert undecided == [target_features(Tier.AMX, cpu(*AMX_NAMES))]


def test_a_lower_tier_may_be_asked_for(undecided: list[str]) -> None:
    assert choose_tier("avx2") is Tier.AVX2
    assert choose_tier("auto") is Tier.AVX2
    assert undecided == [target_features(Tier.AVX2, cpu(*AMX_NAMES))]


@pytest.mark.usefixtures("undecided")
def test_a_tier_that_the_cpu_lacks_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"CPU tier neondot: .* amx, avx512vnni, avxvnni, avx2"):
        choose_tier("neondot")
    with pytest.raises(SettingsError, match="neondot"):
        make_backend(BackendName.AUTO, num_threads=1, cpu_tier="neondot")


@pytest.mark.usefixtures("undecided")
def test_a_tier_that_fails_its_test_is_replaced_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        tier_test, "why_not", lambda tier, features: "not today" if tier is Tier.AMX else None
    )
    with caplog.at_level(logging.WARNING):
        assert choose_tier("auto") is Tier.AVX512_VNNI
    assert caplog.messages == ["CPU tier amx does not work here (not today); using avx512vnni"]
    monkeypatch.setattr(tiers, "_chosen", None)
    monkeypatch.setattr(tier_test, "why_not", lambda tier, features: "never")
    assert choose_tier("avx2") is Tier.GENERIC


def test_amx_computes_the_bits_of_avx512() -> None:
    assert Tier.AMX.numerics == Tier.AVX512_VNNI.numerics
    others = [tier.numerics for tier in Tier if tier is not Tier.AMX]
    assert len(set(others)) == len(others)


# -- the test of a tier ---------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return tmp_path


def why_not(tier: Tier) -> str | None:
    return tier_test.why_not(tier, target_features(tier, tiers.host_features()))


@pytest.mark.parametrize("tier", [tier for tier in HERE if tier is not Tier.AMX])
@pytest.mark.usefixtures("cache")
def test_what_this_cpu_offers_works(tier: Tier) -> None:
    assert why_not(tier) is None


@on_x86
def test_a_verdict_is_kept_until_something_changes(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not(Tier.AVX2) is None
    monkeypatch.setattr(tier_test, "_run", lambda job: "was run again")
    assert why_not(Tier.AVX2) is None
    monkeypatch.setattr(llvmlite, "__version__", "another")
    assert why_not(Tier.AVX2) == "was run again"
    assert len(list(cache.iterdir())) == 2
    assert why_not(Tier.AVX2) == "was run again"


@on_x86
def test_without_a_place_for_verdicts_every_start_pays(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.chmod(0o755)  # open to others: refused
    runs: list[str] = []
    monkeypatch.setattr(tier_test, "_run", runs.append)
    assert why_not(Tier.AVX2) is None
    assert why_not(Tier.AVX2) is None
    assert len(runs) == 2


@with_vnni
@pytest.mark.usefixtures("cache")
def test_a_missing_intrinsic_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dots, "VPDPBUSD_512", "llvm.x86.avx512.vpdpbusd.of.yore")
    assert why_not(Tier.AVX512_VNNI) == "no intrinsic llvm.x86.avx512.vpdpbusd.of.yore"


@with_vnni
@pytest.mark.usefixtures("cache")
def test_a_changed_signature_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def call_with_fewer(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
        return call(builder, name, result, *arguments[:-1])

    monkeypatch.setattr(dots, "call", call_with_fewer)
    reason = why_not(Tier.AVX512_VNNI)
    assert reason is not None
    assert "\n" not in reason


@on_x86
@pytest.mark.usefixtures("cache")
def test_what_would_end_the_process_ends_another() -> None:
    """An intrinsic that LLVM knows but may not translate."""
    reason = tier_test.why_not(Tier.AVX2, target_features(Tier.GENERIC, tiers.host_features()))
    assert reason is not None
    assert reason.startswith("signal ")


@with_vnni
@pytest.mark.skipif(Tier.AMX in HERE, reason="this CPU has tiles")
@pytest.mark.usefixtures("cache")
def test_a_cpu_that_claims_too_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "request_permission", lambda: True)
    claimed = {**tiers.host_features(), "amx-tile": True, "amx-int8": True}
    reason = tier_test.why_not(Tier.AMX, target_features(Tier.AMX, claimed))
    assert reason is not None
    assert reason.startswith("signal ")


@on_x86
@pytest.mark.usefixtures("cache")
def test_wrong_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_test, "_expected_dots", lambda *arguments: np.zeros(3, np.int64))
    assert why_not(Tier.AVX2) == "it gives wrong numbers"


@pytest.mark.usefixtures("cache")
def test_tiles_need_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "request_permission", lambda: False)
    assert why_not(Tier.AMX) == "the operating system does not permit tiles"


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
    """For a CPU that need not be ours."""
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
    """All panel kernels of a type."""
    form = FORMATS[tensor_type]
    quants = Quants(form.bits).treated_alike(tier)
    some = [kernels.multiplying(size, form.scales_a_block, quants) for size in (1, 8)]
    return [kernels.unpacking(form), kernels.multiplying_one(form), *some]


@pytest.mark.parametrize("tensor_type", [TensorType.Q4_K, TensorType.IQ4_NL, TensorType.Q8_0])
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


@pytest.mark.parametrize("tensor_type", [TensorType.Q4_K, TensorType.IQ4_NL, TensorType.Q8_0])
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


# -- tiles ----------------------------------------------------------------------------------------


def emit_tiles(scales_a_block: int) -> Callable[..., Any]:
    def emit(builder: Any, panel: Any, num_blocks: Any, records: Any, totals: Any) -> None:
        amx.emit_begin(builder)
        amx.emit_multiply(builder, scales_a_block, panel, num_blocks, records, totals)
        amx.emit_end(builder)

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
    """In place of the CPU's, for code that is emitted by the test."""
    unit, kept = TileUnit(), list[Any]()

    def call_unit(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
        if not name.startswith(("llvm.x86.tile", "llvm.x86.tdp", "llvm.x86.ldtile")):
            return call(builder, name, result, *arguments)
        short = name.split(".")[-1]
        kinds = [_KINDS.get(str(each.type), ctypes.c_void_p) for each in arguments]
        callback = ctypes.CFUNCTYPE(None, *kinds)(getattr(unit, short))
        kept.append(callback)
        address = ctypes.cast(callback, ctypes.c_void_p).value
        kind = ir.FunctionType(result, [each.type for each in arguments])
        function = builder.inttoptr(ir.IntType(64)(address), kind.as_pointer())
        return builder.call(function, arguments)

    monkeypatch.setattr(amx, "call", call_unit)
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
    features = target_features(tiers.current_tier(), tiers.host_features())
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
    panel = aligned(kernels.PANEL_BYTES)
    panel[: kernels.SCALES_AT] = rng.integers(0, 256, kernels.SCALES_AT)
    panel[kernels.SCALES_AT :].view(np.float32)[:] = rng.standard_normal(512)
    x = rng.integers(-127, 128, (num_blocks, 16, 32), np.int8)
    numbers = rng.standard_normal((num_blocks, 4, 16)).astype(np.float32)
    records = {}
    for size in (16, 8):
        parts = []
        for first in range(0, 16, size):
            chosen = slice(first, first + size)
            group = [x[:, chosen].reshape(num_blocks, -1).view(np.uint8)]
            group.append(np.ascontiguousarray(numbers[:, :, chosen]).view(np.uint8))
            parts.append(np.hstack([each.reshape(num_blocks, -1) for each in group]).reshape(-1))
        records[size] = parts
    start = rng.standard_normal((16, 16)).astype(np.float32)

    got = start.copy()
    numbers_of = (panel.ctypes.data, num_blocks)
    (whole,) = records[16]
    run_here(emit_tiles(scales_a_block), *numbers_of, whole.ctypes.data, got.ctypes.data)
    # The last pair of an odd number of blocks is one block twice.
    products = 2 * num_blocks if scales_a_block == 2 else num_blocks + num_blocks % 2
    assert tile_unit.num_products == products

    emitters(Tier.AVX512_VNNI)
    expected = start.copy()
    multiply = kernels.multiplying(8, scales_a_block, Quants(8))
    for part, rows in zip(records[8], (expected[:8], expected[8:]), strict=True):
        run_here(multiply, *numbers_of, part.ctypes.data, rows.ctypes.data)
    np.testing.assert_array_equal(got, expected)


# -- whole processes ------------------------------------------------------------------------------

PRODUCTS = """
import hashlib, json, sys
import numpy as np
from dflash_adapters.quant import TensorType
from dflash_runtime.compute import BackendName, make_backend
from dflash_runtime.compute.cpu.matrix import as_matrix
from dflash_runtime.compute.cpu.panels.functions import panel_functions

backend = make_backend(BackendName.CPU, num_threads=1, cpu_tier=sys.argv[1])
answer = {"class": backend.numeric_class}
for tensor_type in (TensorType.Q4_K, TensorType.NVFP4, TensorType.Q8_0):
    rng = np.random.default_rng(int(tensor_type))
    columns, rows = 512, 17
    data = rng.integers(0, 64, rows * tensor_type.row_bytes(columns), np.uint8)
    matrix = as_matrix(data, tensor_type, rows, columns)
    x = rng.standard_normal((33, columns)).astype(np.float32)
    whole = backend.ops.linear(x, matrix)
    assert np.isfinite(whole).all() and whole.any()
    for count in (1, 2, 7, 16):
        np.testing.assert_array_equal(backend.ops.linear(x[:count], matrix), whole[:count])
    answer[tensor_type.name] = hashlib.sha256(whole.tobytes()).hexdigest()
code = panel_functions(TensorType.Q4_K).multiply[8]._callback._library.get_asm_str()
answer["wide"] = "zmm" in code
print(json.dumps(answer))
"""


def products_of(tier: str, cache: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS, tier],
        capture_output=True,
        text=True,
        timeout=280,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS),
            CACHE_VARIABLE: str(cache),
        },
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@on_x86
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "others",
    [(Tier.AVX2,), (Tier.AVX_VNNI, Tier.GENERIC)],
    ids="+".join,
)
def test_tiers_agree_on_every_bit_where_their_formulas_do(
    cache: Path, others: tuple[Tier, ...]
) -> None:
    chosen = [tier for tier in HERE if tier is HERE[0] or tier in others]
    answers = {tier: products_of(tier.value, cache) for tier in chosen}
    assert len({each["class"] for each in answers.values()}) == len(answers)
    for name in ("Q4_K", "NVFP4"):
        assert len({each[name] for each in answers.values()}) == 1
    # Full bytes need an offset if they are multiplied as unsigned.
    formulas = {tier.has_vpdpbusd: answers[tier]["Q8_0"] for tier in chosen}
    assert all(answers[tier]["Q8_0"] == formulas[tier.has_vpdpbusd] for tier in chosen)
    for tier, answer in answers.items():
        if tier is not Tier.AVX_VNNI:  # which here may be a part of AVX-512
            assert answer["wide"] == tier.has_wide_registers
