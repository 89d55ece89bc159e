"""Kernels compiled for AMD by clang alone, without GPU or ROCm, and resource use from the assembly.

HIP's header is replaced by ``hip_header/``; mathematics is clang's own and that of AMD's device
library, which is linked in: called functions cost registers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.kernel_variants import KernelVariant

from dflash_protocol.settings import child_environment
from dflash_runtime.compute.gpu.device.capabilities import Capabilities
from dflash_runtime.compute.gpu.device.kernel_sources import (
    define_options,
    kernel_folders,
    kernel_path,
)
from dflash_runtime.compute.gpu.device.rtc import architecture_options

CLANG = "clang-19"
PACKAGES = (CLANG, "rocm-device-libs")
"""Debian's."""
_HEADERS = Path(__file__).parent / "hip_header"
_DEVICE_LIBRARY = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode/ocml.bc")
_STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")
_LIMIT_S = 600.0

_METADATA = re.compile(
    r"^    \.group_segment_fixed_size: (?P<shared_bytes>\d+)$.*?"
    r"^    \.name: +(?P<name>\S+)$.*?"
    r"^    \.private_segment_fixed_size: (?P<scratch_bytes>\d+)$.*?"
    r"^    \.sgpr_count: +(?P<scalar_registers>\d+)$.*?"
    r"^    \.sgpr_spill_count: (?P<scalar_spills>\d+)$.*?"
    r"^    \.vgpr_count: +(?P<registers>\d+)$.*?"
    r"^    \.vgpr_spill_count: (?P<spills>\d+)$",
    re.MULTILINE | re.DOTALL,
)
_INSTRUCTION = re.compile(r"^\t([a-z][a-z0-9_]+)\b", re.MULTILINE)


@dataclass(frozen=True)
class KernelUse:
    """What one kernel uses of a processor."""

    name: str
    shared_bytes: int
    scratch_bytes: int
    """Memory for each lane: spills, and arrays that are not in registers."""
    scalar_registers: int
    scalar_spills: int
    registers: int
    spills: int

    @property
    def is_clean(self) -> bool:
        """Whether nothing is in memory; spilled scalars go into lanes of registers."""
        return not (self.scratch_bytes or self.spills)


@dataclass(frozen=True)
class Assembly:
    """Assembly of one file. `complaint` is empty if the compiler had none."""

    complaint: str
    text: str = ""

    @property
    def uses(self) -> tuple[KernelUse, ...]:
        """Use of all its kernels."""
        return tuple(
            KernelUse(
                **{name: int(text) for name, text in found.groupdict().items() if name != "name"},
                name=found["name"],
            )
            for found in _METADATA.finditer(self.text)
        )

    def count(self, prefix: str) -> int:
        """Number of instructions whose name starts with `prefix`."""
        return sum(name.startswith(prefix) for name in _INSTRUCTION.findall(self.text))


def why_no_clang() -> str | None:
    """What is missing; None if kernels can be compiled."""
    if shutil.which(CLANG) is None:
        return f"there is no {CLANG}"
    return None if _DEVICE_LIBRARY.is_file() else f"there is no {_DEVICE_LIBRARY}"


def clang_version() -> str:
    """Raises: OSError, subprocess.SubprocessError."""
    result = subprocess.run(
        (CLANG, "--version"),
        capture_output=True,
        text=True,
        check=True,
        timeout=_LIMIT_S,
        env=child_environment(()),
    )
    found = re.search(r"version ([0-9.]+)", result.stdout)
    return f"clang {found[1] if found else 'of unknown version'}"


def assemble(variant: KernelVariant, capabilities: Capabilities, *, lanes: int) -> Assembly:
    """The assembly of a file; warnings count as complaints.

    Raises: OSError, subprocess.SubprocessError.
    """
    with tempfile.TemporaryDirectory(prefix="dflash-clang-") as folder:
        out = Path(folder) / "kernel.s"
        command = (
            *(CLANG, "-x", "hip", "--cuda-device-only", "-S", "-nogpuinc", "-nogpulib"),
            *architecture_options(capabilities),
            *define_options({"LANES": lanes, **variant.defines}),
            *(*_STRICT, "-isystem", str(_HEADERS), *(f"-I{each}" for each in kernel_folders())),
            *("-Xclang", "-mlink-builtin-bitcode", "-Xclang", str(_DEVICE_LIBRARY)),
            *(str(kernel_path(variant.file)), "-o", str(out)),
        )
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, env=child_environment(())
        )
        if result.returncode or result.stderr:
            return Assembly(result.stderr or f"{CLANG} ended with status {result.returncode}")
        return Assembly("", out.read_text(encoding="utf-8"))
