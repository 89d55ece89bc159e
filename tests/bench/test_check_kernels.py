"""Which kernels `make check-kernels` compiles for which architecture, and when it fails."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from bench.check_kernels import (
    CUDA_TARGETS,
    DOT4_FILES,
    HIP_TARGETS,
    NUM_MULTIPROCESSORS,
    STEP_FILES,
    Compiler,
    Target,
    assign,
    complaints_of,
    first_of_files,
    main,
)
from bench.clang_hip import Assembly, assemble, why_no_clang
from bench.kernel_variants import KernelVariant, all_variants, files_without_variant
from bench.launched_kernels import launched_kernels

from bench import check_kernels
from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime.compute.gpu.device.capabilities import hip_capabilities

TARGETS = (*CUDA_TARGETS, *HIP_TARGETS)
VARIANTS = [KernelVariant(file, {"N": number}) for file in ("a.cu", "b.cu") for number in range(9)]


def compilers(complaint: str = "") -> Compiler:
    """A compiler with this complaint about every variant."""
    return Compiler("fake", lambda variant, target: complaint, TARGETS)


@pytest.fixture
def fake_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_kernels, "_nvrtc", compilers)
    monkeypatch.setattr(check_kernels, "_amd_compilers", lambda: [compilers()])


def test_every_file_is_for_every_target_and_every_variant_for_one() -> None:
    chosen = assign(VARIANTS, TARGETS)
    for variants in chosen.values():
        assert {variant.file for variant in variants} == {"a.cu", "b.cu"}
    count = Counter(str(variant) for variants in chosen.values() for variant in variants)
    assert count == Counter(
        {str(each): len(TARGETS) if each.defines["N"] == 0 else 1 for each in VARIANTS}
    )


@pytest.mark.parametrize("takes_all", [False, True])
def test_a_compiler_beside_another_compiles_every_file_once(takes_all: bool) -> None:
    """And everything if one file is asked for."""
    compiled = Counter[str]()

    def compile_variant(variant: KernelVariant, target: Target) -> str:
        compiled[f"{variant}, {target}"] += 1
        return ""

    compiler = Compiler("fake", compile_variant, TARGETS[:2], takes_variants=False)
    assert check_kernels._check(VARIANTS, [compiler], takes_all=takes_all) == 0
    each_target = VARIANTS if takes_all else first_of_files(VARIANTS)
    assert compiled == Counter(
        f"{each}, {target}" for each in each_target for target in TARGETS[:2]
    )


def test_one_file_is_compiled_as_a_whole() -> None:
    chosen = assign(VARIANTS[:9], TARGETS, takes_all=True)
    assert all(variants == VARIANTS[:9] for variants in chosen.values())


def test_no_target_is_given_what_no_device_of_it_is() -> None:
    variants = [
        KernelVariant("a.cu", {"N": 0}, needs=("mma",), lanes=(32,)),
        KernelVariant("a.cu", {"N": 1}),
        KernelVariant("b.cu", {"N": 2}, needs=("wgmma",)),
        KernelVariant("b.cu", {"N": 3}, needs=("wgmma",), lanes=(32,)),
    ]
    chosen = assign(variants, TARGETS)
    for target, found in chosen.items():
        numbers = {variant.defines["N"] for variant in found}
        has_mma = target.capabilities.mma and target.lanes == 32
        assert {0 if has_mma else 1} <= numbers
        assert not numbers & {2, 3} or target.capabilities.wgmma
    counted = Counter(each.defines["N"] for found in chosen.values() for each in found)
    assert all(counted[number] for number in range(4))
    assert variants[0].why_not(TARGETS[0].capabilities, lanes=32) == "no mma"
    assert variants[0].why_not(CUDA_TARGETS[-1].capabilities, lanes=64) == "logical warps of 64"


@pytest.mark.usefixtures("fake_compilers")
def test_what_was_compiled_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(TARGETS) + 1
    num_files = len({variant.file for variant in all_variants()}) + 1
    assert f"of {num_files} kernel files" in lines[0]


@pytest.mark.parametrize("arguments", [[], ["--vendor", "cuda"], ["--file", "argmax_logits.cu"]])
def test_a_complaint_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(check_kernels, "_nvrtc", lambda: compilers("line 3: wrong"))
    monkeypatch.setattr(check_kernels, "_amd_compilers", lambda: [compilers()])
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert "line 3: wrong" in captured.err
    assert "0 of " in captured.out


@pytest.mark.usefixtures("fake_compilers")
def test_compiling_none_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--file", "nothing.cu"]) == 1
    monkeypatch.setattr(check_kernels, "all_variants", lambda: ())
    assert main([]) == 1  # every kernel file is in no list of variants


def test_without_a_compiler_nothing_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(vendor: object) -> None:
        raise DeviceUnavailable("no compiler for cuda kernels")

    monkeypatch.setattr(check_kernels, "runtime_compiler", missing)
    assert main([]) == 1
    assert capsys.readouterr().err == "check-kernels: no compiler for cuda kernels\n"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["--vendor", "hip"]) == 1
    assert "there is no clang-19" in capsys.readouterr().err


def test_every_kernel_file_has_a_variant() -> None:
    assert files_without_variant(all_variants()) == []
    assert files_without_variant([]) != []
    assert all(Path(variant.file).suffix == ".cu" for variant in all_variants())


def test_targets_are_those_that_are_promised() -> None:
    found = {str(Target(each.capabilities, each.lanes)) for each in TARGETS}
    architectures = {f"sm_{number}" for number in ("61", "75", "80", "86", "90a", "100", "120")}
    architectures |= {"gfx906", "gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1151", "gfx1201"}
    assert {text.split()[0] for text in found} == architectures
    assert "sm_90a with logical warps of 64" in found


ASSEMBLY = """
\tv_dot4_i32_iu8 v1, v2, v3, v4 neg_lo:[1,1,0]
amdhsa.kernels:
  - .args:
    .group_segment_fixed_size: 512
    .name:           linear_decode
    .private_segment_fixed_size: 0
    .sgpr_count:     48
    .sgpr_spill_count: 2
    .symbol:         linear_decode.kd
    .vgpr_count:     77
    .vgpr_spill_count: 0
"""


def test_kernels_of_steps_may_not_spill_and_multiply_bytes_by_fours() -> None:
    capabilities = hip_capabilities("gfx1100")
    launched = next(
        each for each in launched_kernels(capabilities, 48) if each.variant.file in DOT4_FILES
    )
    good = Assembly("", ASSEMBLY)
    (use,) = good.uses
    assert (use.name, use.registers, use.shared_bytes, use.scalar_spills) == (
        *("linear_decode", 77, 512),
        2,
    )
    assert complaints_of(launched, good, capabilities) == []
    spilling = Assembly(
        "", ASSEMBLY.replace("private_segment_fixed_size: 0", "private_segment_fixed_size: 64")
    )
    assert complaints_of(launched, spilling, capabilities) == [
        "linear_decode spills 64 bytes a lane"
    ]
    without = Assembly("", ASSEMBLY.replace("v_dot4", "v_mul"))
    assert "has no v_dot4" in complaints_of(launched, without, capabilities)[0]
    assert complaints_of(launched, Assembly("line 3: wrong"), capabilities)[0] == "line 3: wrong"


def test_launches_of_real_models_reach_every_kernel_of_a_step() -> None:
    for architecture, count in NUM_MULTIPROCESSORS.items():
        capabilities = hip_capabilities(architecture)
        launched = launched_kernels(capabilities, count)
        assert {each.variant.file for each in launched} >= STEP_FILES
        assert all(
            each.variant.why_not(capabilities, lanes=capabilities.lanes) is None
            for each in launched
        )
        heads = [each.variant.defines.get("KEY_DIM", 128) for each in launched]
        assert set(heads) == {128}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", NUM_MULTIPROCESSORS)
def test_attention_of_heads_of_128_stays_in_registers(architecture: str) -> None:
    reason = why_no_clang()
    if reason:
        pytest.skip(reason)
    capabilities = hip_capabilities(architecture)
    for launched in launched_kernels(capabilities, NUM_MULTIPROCESSORS[architecture]):
        if launched.variant.file == "attention_decode.cu":
            found = assemble(launched.variant, capabilities, lanes=capabilities.lanes)
            assert complaints_of(launched, found, capabilities) == []
