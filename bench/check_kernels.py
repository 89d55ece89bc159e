"""Compiles every GPU kernel for every architecture that a compiler without a GPU knows here.

NVRTC for NVIDIA, Debian's hipcc for AMD, which is installed if it is not there and we may; if it
cannot be had, that is said, and is an error with --vendor hip. Warnings count as errors. Every file
is compiled for every architecture, its further variants for one of each vendor's in turn. Newer AMD
architectures than Debian's device library knows are compiled by hipRTC where there is one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dflash_protocol.errors import DeviceUnavailable, DflashError
from dflash_protocol.settings import child_environment
from dflash_runtime.compute.cores import usable_cores
from dflash_runtime.compute.cupy.capabilities import (
    Capabilities,
    Vendor,
    cuda_capabilities,
    hip_capabilities,
)
from dflash_runtime.compute.cupy.kernel_sources import (
    KERNELS_FOLDER,
    define_options,
    kernel_source,
)
from dflash_runtime.compute.cupy.kernel_variants import (
    KernelVariant,
    all_variants,
    files_without_variant,
)
from dflash_runtime.compute.cupy.rtc import RuntimeCompiler, architecture_options, runtime_compiler

_CASES = Path(__file__).parents[1] / "tests/support/emulated_device/cases.cu"
"""Uses every name that kernels have in common."""
_INSTALL = (("apt-get", "update"), ("apt-get", "install", "-y", "--no-install-recommends", "hipcc"))
_STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")
_LIMIT_S = 600.0
EXAMPLES = """examples:
  python -m bench.check_kernels
  python -m bench.check_kernels --vendor cuda --file gemm_dense.cu
"""


@dataclass(frozen=True)
class Target:
    """What kernels are compiled for. `lanes` may be more than the architecture's own."""

    capabilities: Capabilities
    lanes: int

    def __str__(self) -> str:
        return f"{self.capabilities.architecture} with logical warps of {self.lanes}"


CUDA_TARGETS = (
    *(Target(cuda_capabilities(*each), 32) for each in ((6, 1), (7, 5), (8, 0), (8, 6), (9, 0))),
    Target(cuda_capabilities(9, 0), 64),
)
HIP_TARGETS = tuple(
    Target(capabilities, capabilities.lanes)
    for capabilities in map(hip_capabilities, ("gfx906", "gfx1030"))
)

Compile = Callable[[KernelVariant, Target], str]
"""What the compiler complained about; empty = nothing."""


@dataclass(frozen=True)
class Compiler:
    """A way to compile, and what it is used for."""

    name: str
    compile_variant: Compile
    targets: tuple[Target, ...]
    compile_more: Compile
    """For variants beyond the first of a file; may be a faster way."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if everything that had to be compiled was."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vendor", choices=("cuda", "hip"), help="only this one")
    parser.add_argument(
        "--file", help="only this kernel file, every variant for every architecture"
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
                compilers.append(_hipcc())
            except (subprocess.SubprocessError, OSError) as error:
                if given.vendor == "hip":
                    raise
                print(f"check-kernels: nothing is compiled for AMD: {error}", file=sys.stderr)
        num_failures = _check(variants, compilers, takes_all=given.file is not None)
        for file in [] if given.file else files_without_variant(declared):
            print(f"{file} is in nobody's KERNEL_VARIANTS", file=sys.stderr)
            num_failures += 1
    except (DflashError, subprocess.SubprocessError, OSError) as error:
        print(f"check-kernels: {error}", file=sys.stderr)
        return 1
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if num_failures else 0


def assign(
    variants: Sequence[KernelVariant], targets: Sequence[Target], *, takes_all: bool = False
) -> dict[Target, list[KernelVariant]]:
    """What is compiled for each target, first of each file first.

    Every file is compiled for every target that may be given it, its other variants for one target
    each, in turn; or with `takes_all` everything for every target.
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


def _check(
    variants: Sequence[KernelVariant], compilers: Sequence[Compiler], *, takes_all: bool
) -> int:
    """How many went wrong. Compiling none for a target is wrong too."""
    num_failures = 0
    files = list(dict.fromkeys(variant.file for variant in variants))
    with ThreadPoolExecutor(len(usable_cores()), "compile") as pool:
        under_way = []
        for compiler in compilers:
            for target, chosen in assign(variants, compiler.targets, takes_all=takes_all).items():
                futures = []
                for index, variant in enumerate(chosen):
                    is_more = variant.file in {other.file for other in chosen[:index]}
                    way = compiler.compile_more if is_more else compiler.compile_variant
                    futures.append(pool.submit(way, variant, target))
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
    by_library = _by_library(compiler)
    return Compiler(compiler.version, by_library, CUDA_TARGETS, by_library)


def _hipcc() -> Compiler:
    """Further variants by hipRTC of the same packages, which reads no headers of the system."""
    name = f"hipcc {_hipcc_version()}"
    try:
        compiler = runtime_compiler(Vendor.HIP)
    except DeviceUnavailable:
        return Compiler(name, _by_hipcc, HIP_TARGETS, _by_hipcc)
    return Compiler(f"{name} and {compiler.version}", _by_hipcc, HIP_TARGETS, _by_library(compiler))


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


def _by_hipcc(variant: KernelVariant, target: Target) -> str:
    command = (
        *("hipcc", "--genco", "-x", "hip", *architecture_options(target.capabilities)),
        *define_options({"LANES": target.lanes, **variant.defines}),
        *(*_STRICT, "-I", str(KERNELS_FOLDER)),
        *(str(KERNELS_FOLDER / variant.file), "-o", "/dev/null"),
    )
    environment = {**child_environment(()), "HIP_PLATFORM": "amd"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=_LIMIT_S, env=environment
    )
    if result.returncode or result.stderr:
        return result.stderr or f"hipcc ended with status {result.returncode}"
    return ""


def _hipcc_version() -> str:
    """Raises: OSError, subprocess.SubprocessError if there is no hipcc and we cannot install it."""
    if shutil.which("hipcc") is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise OSError("there is no hipcc; install Debian's package hipcc, or use --vendor cuda")
        for command in _INSTALL:
            print(" ".join(command), flush=True)
            environment = {**child_environment(()), "DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(
                command, check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_S, env=environment
            )
    result = subprocess.run(
        ("hipcc", "--version"),
        capture_output=True,
        text=True,
        check=True,
        timeout=_LIMIT_S,
        env={**child_environment(()), "HIP_PLATFORM": "amd"},
    )
    return next(_versions(result.stdout), "of unknown version")


def _versions(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.startswith("HIP version:"):
            yield line.removeprefix("HIP version:").strip()


if __name__ == "__main__":
    sys.exit(main())
