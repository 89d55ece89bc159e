"""Instruction-set tiers: which is chosen, how it is tested, and that all agree."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np
import pytest

from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import AUTO_TIER, CPU_TIERS
from dflash_runtime.compute import BackendName, make_backend
from dflash_runtime.compute.cpu.compile import tier_test, tiers
from dflash_runtime.compute.cpu.compile.tiers import choose_tier
from dflash_runtime.compute.cpu.simd import dots, instruction_sets, tiles
from dflash_runtime.compute.cpu.simd.instruction_sets import Tier, offered_tiers, target_features
from dflash_runtime.compute.cpu.simd.types import emit_named
from support.cpu_tiers import HERE, on_x86, with_vnni
from support.processes import environment

CACHE_VARIABLE = "DFLASH_MOE_EXPERT_COMPUTE_CACHE_DIR"

AVX2_NAMES = ("avx", "avx2", "fma", "f16c")
AVX512_NAMES = (*AVX2_NAMES, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
AMX_NAMES = (*AVX512_NAMES, "amx-tile", "amx-int8")


def cpu(*names: str) -> dict[str, bool]:
    """CPU features with these set, among all that the tests use."""
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
    """An AMX machine whose process has not chosen; returns what LLVM is restricted to."""
    restricted: list[str] = []
    monkeypatch.setattr(tiers, "_chosen", None)
    monkeypatch.setattr(tiers, "host_features", lambda: cpu(*AMX_NAMES))
    monkeypatch.setattr(tiers, "_restrict_llvm", restricted.append)
    monkeypatch.setattr(tiers, "why_not", lambda tier, features, cache_dir: None)
    return restricted


def test_the_best_is_chosen_once(undecided: list[str]) -> None:
    assert choose_tier("auto") is Tier.AMX
    assert choose_tier("auto") is choose_tier("amx") is tiers.current_tier() is Tier.AMX
    with pytest.raises(SettingsError, match=r"\bavx2\b.*\bamx\b"):
        choose_tier("avx2")
    assert undecided == [target_features(Tier.AMX, cpu(*AMX_NAMES))]


def test_a_lower_tier_may_be_asked_for(undecided: list[str]) -> None:
    assert choose_tier("avx2") is Tier.AVX2
    assert choose_tier("auto") is Tier.AVX2
    assert undecided == [target_features(Tier.AVX2, cpu(*AMX_NAMES))]


@pytest.mark.usefixtures("undecided")
def test_a_tier_that_the_cpu_lacks_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"\bneondot\b.* amx, avx512vnni, avxvnni, avx2"):
        choose_tier("neondot")
    with pytest.raises(SettingsError, match="neondot"):
        make_backend(BackendName.AUTO, num_threads=1, cpu_tier="neondot")


@pytest.mark.usefixtures("undecided")
def test_a_tier_that_fails_its_test_is_replaced_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        tiers, "why_not", lambda tier, *_: "not today" if tier is Tier.AMX else None
    )
    with caplog.at_level(logging.WARNING):
        assert choose_tier("auto") is Tier.AVX512_VNNI
    assert [record.args for record in caplog.records] == [(Tier.AMX, "not today", Tier.AVX512_VNNI)]
    monkeypatch.setattr(tiers, "_chosen", None)
    monkeypatch.setattr(tiers, "why_not", lambda *_: "never")
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
    return tier_test.why_not(tier, target_features(tier, instruction_sets.host_features()))


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
    assert "llvm.x86.avx512.vpdpbusd.of.yore" in (why_not(Tier.AVX512_VNNI) or "")


@with_vnni
@pytest.mark.usefixtures("cache")
def test_a_changed_signature_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def call_with_fewer(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
        return emit_named(builder, name, result, *arguments[:-1])

    monkeypatch.setattr(dots, "emit_named", call_with_fewer)
    reason = why_not(Tier.AVX512_VNNI)
    assert reason is not None
    assert "\n" not in reason


@on_x86
@pytest.mark.usefixtures("cache")
def test_what_would_end_the_process_ends_another() -> None:
    """An intrinsic that LLVM knows but may not translate."""
    reason = tier_test.why_not(
        Tier.AVX2, target_features(Tier.GENERIC, instruction_sets.host_features())
    )
    assert reason is not None
    assert reason.startswith("signal ")


@with_vnni
@pytest.mark.skipif(Tier.AMX in HERE, reason="this CPU has tiles")
@pytest.mark.usefixtures("cache")
def test_a_cpu_that_claims_too_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "request_permission", lambda: True)
    claimed = {**instruction_sets.host_features(), "amx-tile": True, "amx-int8": True}
    reason = tier_test.why_not(Tier.AMX, target_features(Tier.AMX, claimed))
    assert reason is not None
    assert reason.startswith("signal ")


@on_x86
@pytest.mark.usefixtures("cache")
def test_wrong_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_test, "_expected_dots", lambda *arguments: np.zeros(3, np.int64))
    assert "results" in (why_not(Tier.AVX2) or "")


@pytest.mark.usefixtures("cache")
def test_tiles_need_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "request_permission", lambda: False)
    assert "tiles" in (why_not(Tier.AMX) or "")


# -- whole processes ------------------------------------------------------------------------------

PRODUCTS = """
import hashlib, json, sys
import numpy as np
from dflash_adapters.quant import TensorType
from dflash_runtime.compute import BackendName, make_backend
from dflash_runtime.compute.cpu.weights.matrix import as_matrix, repacked_functions
from dflash_runtime.compute.cpu.weights.rows import MULTIPLY

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
code = repacked_functions(TensorType.Q4_K)[MULTIPLY + 8]._callback._library.get_asm_str()
answer["wide"] = "zmm" in code
print(json.dumps(answer))
"""


def products_of(tier: str, cache: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS, tier],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment(**{CACHE_VARIABLE: str(cache)}),
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
