"""Compiles every GPU kernel for every architecture that compilers support without a GPU.

NVRTC for NVIDIA. For AMD clang, whose assembly is read too: with the defines of real models'
launches no kernel of a step may spill registers (`--table` prints all of them). And hipRTC of ROCm
5.2, for what that knows, with HIP's own header. Debian has both; they are installed if they are not
there and we may. If they cannot be had, that is said, and is an error with --vendor hip. Warnings
count as errors. Every file is compiled for every architecture, further variants for one in turn;
hipRTC leaves these to clang, unless one file is asked for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.clang_hip import PACKAGES, Assembly, assemble, clang_version, why_no_clang
from bench.kernel_variants import KernelVariant, all_variants, files_without_variant
from bench.launched_kernels import LaunchedKernel, launched_kernels
from bench.options import bench_parser

from dflash_protocol.errors import DeviceUnavailable, DflashError
from dflash_protocol.settings import child_environment
from dflash_runtime.compute.cores import usable_cores
from dflash_runtime.compute.gpu.device.capabilities import (
    Capabilities,
    Vendor,
    cuda_capabilities,
    hip_capabilities,
)
from dflash_runtime.compute.gpu.device.kernel_sources import define_options, kernel_source
from dflash_runtime.compute.gpu.device.rtc import (
    RuntimeCompiler,
    architecture_options,
    runtime_compiler,
)

_CASES = Path(__file__).parents[1] / "tests/support/emulated_device/cases.cu"
"""Uses every name that kernels have in common."""
_PACKAGES = (*PACKAGES, "libamdhip64-5")
"""Debian's; the last has hipRTC."""
_INSTALL = (
    ("apt-get", "update"),
    ("apt-get", "install", "-y", "--no-install-recommends", *_PACKAGES),
)
_STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")
_LIMIT_S = 600.0
EXAMPLES = """examples:
  python -m bench.check_kernels
  python -m bench.check_kernels --vendor cuda --file gemm_dense.cu
  python -m bench.check_kernels --vendor hip --table
"""


@dataclass(frozen=True)
class Target:
    """What kernels are compiled for. `lanes` may be more than the architecture's."""

    capabilities: Capabilities
    lanes: int

    def __str__(self) -> str:
        return f"{self.capabilities.architecture} with logical warps of {self.lanes}"


_COMPUTE_CAPABILITIES = ((6, 1), (7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0))
CUDA_TARGETS = (
    *(Target(cuda_capabilities(*each), 32) for each in _COMPUTE_CAPABILITIES),
    Target(cuda_capabilities(9, 0), 64),
)
NUM_MULTIPROCESSORS = {
    "gfx906": 60,
    "gfx90a": 104,
    "gfx942": 304,
    "gfx1030": 40,
    "gfx1100": 48,
    "gfx1151": 20,
    "gfx1201": 32,
}
"""What clang compiles for, and how many HIP counts of a large card: Radeon VII, MI250X (one of its
two), MI300X, RX 6900 XT, RX 7900 XTX, Strix Halo, RX 9070 XT; of RDNA it counts pairs."""
HIP_TARGETS = tuple(
    Target(capabilities, capabilities.lanes)
    for capabilities in map(hip_capabilities, NUM_MULTIPROCESSORS)
)
HIPRTC_TARGETS = tuple(
    each for each in HIP_TARGETS if each.capabilities.architecture in ("gfx906", "gfx1030")
)
"""What ROCm 5.2 knows well."""

STEP_FILES = frozenset(
    (
        *("attention_decode.cu", "attention_merge.cu", "attention_nodes.cu", "attention_tree.cu"),
        *("argmax_logits.cu", "delta_step.cu", "delta_tree.cu", "embed.cu", "experts_decode.cu"),
        *("linear_decode.cu", "quantise_rows.cu", "router.cu", "sample.cu"),
    )
)
"""Whose kernels take part in steps: they may not spill."""
DOT4_FILES = frozenset(("linear_decode.cu", "experts_decode.cu"))
SYSTEM_LOADS = {
    "gfx906": r"(global|flat)_load_dwordx2 .* glc$",
    "gfx90a": r"(global|flat)_load_dwordx2 .* glc$",
    "gfx942": r"(global|flat)_load_dwordx2 .* sc0 sc1$",
    "gfx1030": r"(global|flat)_load_dwordx2 .* glc dlc$",
    "gfx1100": r"(global|flat)_load_b64 .* glc$",
    "gfx1151": r"(global|flat)_load_b64 .* glc$",
    "gfx1201": r"(global|flat)_load_b64 .* scope:SCOPE_SYS$",
}
"""How a half line of a mailbox is read. Source: LLVM's user guide of AMDGPU, memory model: a
relaxed atomic load of system scope."""

Compile = Callable[[KernelVariant, Target], str]
"""What the compiler complained about; empty = nothing."""


@dataclass(frozen=True)
class Compiler:
    """A way to compile, and what it is used for."""

    name: str
    compile_variant: Compile
    targets: tuple[Target, ...]
    takes_variants: bool = True
    """Whether it compiles variants beyond the first of a file."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 if everything that had to be compiled was."""
    parser = bench_parser(__file__, __doc__, EXAMPLES)
    parser.add_argument("--vendor", choices=("cuda", "hip"), help="only this one")
    parser.add_argument(
        "--file", help="only this kernel file, every variant for every architecture"
    )
    parser.add_argument(
        "--table", action="store_true", help="print the registers that AMD's kernels take"
    )
    given = parser.parse_args(arguments)
    begin = time.monotonic()
    try:
        declared = all_variants()
        variants = [
            each
            for each in (KernelVariant(str(_CASES)), *declared)
            if given.file in (None, Path(each.file).name)
        ]
        compilers = []
        if given.vendor != "hip":
            compilers.append(_nvrtc())
        if given.vendor != "cuda":
            try:
                compilers += _amd_compilers()
            except (subprocess.SubprocessError, OSError) as error:
                if given.vendor == "hip":
                    raise
                print(f"check-kernels: nothing is compiled for AMD: {error}", file=sys.stderr)
        num_failures = _check(variants, compilers, takes_all=given.file is not None)
        if any(compiler.targets is HIP_TARGETS for compiler in compilers) and not given.file:
            num_failures += _check_launched(has_table=given.table)
        for file in [] if given.file else files_without_variant(declared):
            print(f"{file} has no variant in bench/kernel_variants.py", file=sys.stderr)
            num_failures += 1
    except (DflashError, subprocess.SubprocessError, OSError) as error:
        print(f"check-kernels: {error}", file=sys.stderr)
        return 1
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if num_failures else 0


def assign(
    variants: Sequence[KernelVariant], targets: Sequence[Target], *, takes_all: bool = False
) -> dict[Target, list[KernelVariant]]:
    """Variants to compile for each target, those that come first in their files first.

    Every file is compiled for every target that supports it, its other variants for one target
    each, in turn; with `takes_all` everything for every target.
    """
    chosen: dict[Target, list[KernelVariant]] = {target: [] for target in targets}
    for target in targets:
        files = set()
        for variant in variants:
            may_be = variant.why_not(target.capabilities, lanes=target.lanes) is None
            if may_be and (takes_all or variant.file not in files):
                chosen[target].append(variant)
                files.add(variant.file)
    turn = 0
    for variant in variants:
        if any(variant is other for taken in chosen.values() for other in taken):
            continue
        for _ in targets:
            target = targets[turn % len(targets)]
            turn += 1
            if variant.why_not(target.capabilities, lanes=target.lanes) is None:
                chosen[target].append(variant)
                break
    return chosen


def first_of_files(variants: Sequence[KernelVariant]) -> list[KernelVariant]:
    """One variant of each file."""
    firsts: dict[str, KernelVariant] = {}
    for each in variants:
        firsts.setdefault(each.file, each)
    return list(firsts.values())


def _check(
    variants: Sequence[KernelVariant], compilers: Sequence[Compiler], *, takes_all: bool
) -> int:
    """Number of failures. Compiling nothing for a target is one."""
    num_failures = 0
    files = list(dict.fromkeys(variant.file for variant in variants))
    with ThreadPoolExecutor(len(usable_cores()), "compile") as pool:
        under_way = []
        for compiler in compilers:
            for target, chosen in assign(variants, compiler.targets, takes_all=takes_all).items():
                if not (takes_all or compiler.takes_variants):
                    chosen = first_of_files(chosen)
                futures = [pool.submit(compiler.compile_variant, each, target) for each in chosen]
                under_way.append((compiler, target, chosen, futures))
        for compiler, target, chosen, futures in under_way:
            complaints = [(each, f.result()) for each, f in zip(chosen, futures, strict=True)]
            num_good = sum(not complaint for _, complaint in complaints)
            found = {variant.file for variant in chosen}
            missing = ", ".join(Path(file).name for file in files if file not in found)
            print(
                f"{compiler.name}, {target}: {num_good} of {len(chosen)} variants "
                f"of {len(found)} kernel files{missing and f'; not for it: {missing}'}",
                flush=True,
            )
            for variant, complaint in complaints:
                if complaint:
                    print(f"  {variant}:\n{complaint}", file=sys.stderr)
            num_failures += len(chosen) - num_good + (not chosen)
    return num_failures


def _nvrtc() -> Compiler:
    """Raises: DeviceUnavailable."""
    compiler = runtime_compiler(Vendor.CUDA)
    return Compiler(compiler.version, _by_library(compiler), CUDA_TARGETS)


def _amd_compilers() -> list[Compiler]:
    """Raises: OSError, subprocess.SubprocessError, DeviceUnavailable."""
    _install()
    clang = Compiler(clang_version(), _by_clang, HIP_TARGETS)
    hiprtc = runtime_compiler(Vendor.HIP)
    by_library = _by_library(hiprtc)
    return [clang, Compiler(hiprtc.version, by_library, HIPRTC_TARGETS, takes_variants=False)]


def _install() -> None:
    """Raises: OSError, subprocess.SubprocessError if a package is missing and cannot be
    installed."""
    reason = why_no_clang() or _why_no_hiprtc()
    if reason is None:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        packages = ", ".join(_PACKAGES)
        raise OSError(f"{reason}; install Debian's packages {packages}, or use --vendor cuda")
    for command in _INSTALL:
        print(" ".join(command), flush=True)
        environment = {**child_environment(()), "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_S, env=environment
        )
    runtime_compiler.cache_clear()


def _why_no_hiprtc() -> str | None:
    try:
        runtime_compiler(Vendor.HIP)
    except DeviceUnavailable as error:
        return str(error)
    return None


def _by_library(compiler: RuntimeCompiler) -> Compile:
    def compile_variant(variant: KernelVariant, target: Target) -> str:
        options = (
            *architecture_options(target.capabilities),
            *define_options({"LANES": target.lanes, **variant.defines}),
            *(_STRICT if target.capabilities.vendor is Vendor.HIP else ()),
        )
        try:
            return compiler.compile(kernel_source(variant.file), options).warnings
        except DflashError as error:
            return str(error)

    return compile_variant


def _by_clang(variant: KernelVariant, target: Target) -> str:
    found = assemble(variant, target.capabilities, lanes=target.lanes)
    return found.complaint or _wrong_loads(variant, found, target.capabilities)


def _wrong_loads(variant: KernelVariant, found: Assembly, capabilities: Capabilities) -> str:
    """What a mailbox's kernels do wrong."""
    if variant.file != "mailbox_daemon.cu":
        return ""
    wanted = SYSTEM_LOADS[capabilities.architecture]
    if re.search(wanted, found.text, re.MULTILINE):
        return ""
    return f"no load is {wanted}"


def _check_launched(*, has_table: bool) -> int:
    """Number of launched kernels with complaints."""
    rows: dict[str, dict[str, str]] = {}
    num_failures = 0
    with ThreadPoolExecutor(len(usable_cores()), "compile") as pool:
        under_way = []
        for target in HIP_TARGETS:
            capabilities = target.capabilities
            count = NUM_MULTIPROCESSORS[capabilities.architecture]
            for launched in launched_kernels(capabilities, count):
                future = pool.submit(
                    assemble, launched.variant, capabilities, lanes=capabilities.lanes
                )
                under_way.append((target, launched, future))
        for target, launched, future in under_way:
            found = future.result()
            architecture = target.capabilities.architecture
            for complaint in complaints_of(launched, found, target.capabilities):
                print(f"{architecture}, {launched.label}: {complaint}", file=sys.stderr)
                num_failures += 1
            for use in found.uses:
                name = f"`{use.name}`, {launched.label}"
                spilled = f", {use.scratch_bytes} B spilled" if not use.is_clean else ""
                rows.setdefault(name, {})[architecture] = f"{use.registers}{spilled}"
    print(
        f"launched for heads of 128: {len(rows)} kernels for {len(HIP_TARGETS)} architectures, "
        f"{num_failures} complaints"
    )
    if has_table:
        print_table(rows)
    return num_failures


def complaints_of(
    launched: LaunchedKernel, found: Assembly, capabilities: Capabilities
) -> list[str]:
    """What is wrong with a kernel that real models launch."""
    file = launched.variant.file
    complaints = [found.complaint] if found.complaint else []
    if file in STEP_FILES:
        complaints += [
            f"{use.name} spills {use.scratch_bytes} bytes a lane"
            for use in found.uses
            if not use.is_clean
        ]
    if file in DOT4_FILES and capabilities.dot4 and not found.count("v_dot4"):
        complaints.append(f"{file} has no v_dot4")
    return complaints


def print_table(rows: dict[str, dict[str, str]]) -> None:
    """Vector registers of a lane, in Markdown; blank for kernels that an architecture does not
    get."""
    names = tuple(NUM_MULTIPROCESSORS)
    print(f"| kernel | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(row.get(each, '') for each in names)} |")


if __name__ == "__main__":
    sys.exit(main())
