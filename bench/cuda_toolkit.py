"""Where CUDA's compiler and libraries are: in a toolkit, or in wheels where that lacks some."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.peer_source import BuildError, run

TOOLKIT = Path("/usr/local/cuda")
"""Where toolkits are installed by default."""

_DRIVER = "libcuda.so.1"
_DRIVER_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/local/nvidia/lib64",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
)
_RUNTIME_LIBRARIES = ("libcudart.so", "libcublasLt.so", "libcublas.so")
"""Ordered so that each finds those it needs."""


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A compiler, and what else CMake must be told."""

    nvcc: Path
    version: str
    flags: tuple[str, ...]


def find_toolkit() -> Toolkit:
    """Raises: BuildError if there is no compiler, or no cuBLAS to link with."""
    found = shutil.which("nvcc") or shutil.which("nvcc", path=str(TOOLKIT / "bin"))
    if found is None:
        raise BuildError("no CUDA compiler: put the folder of nvcc on PATH")
    nvcc = Path(found)
    version = re.search(r"release (\d+\.\d+)", run([found, "--version"], Path.cwd()))
    if version is None:
        raise BuildError(f"{nvcc} does not tell its version")
    folders = list(_toolkit_folders(nvcc))
    flags = [f"-DCMAKE_CUDA_COMPILER={nvcc}"]
    if _first(folders, "include/cublas_v2.h") is None or _first(folders, "*/libcublas.so") is None:
        flags += _cublas_flags(version[1].partition(".")[0])
    if _first(folders, "*/stubs/libcuda.so") is None:
        driver = _first(map(Path, _DRIVER_FOLDERS), _DRIVER)
        # No driver to link with: use another of ggml's allocators; the record says so.
        flags.append(f"-DCUDA_cuda_driver_LIBRARY={driver}" if driver else "-DGGML_CUDA_NO_VMM=ON")
    return Toolkit(nvcc, version[1], tuple(flags))


def device_architecture() -> str:
    """Architecture of the first GPU, as CMake writes it: ``90``. Raises: BuildError if unknown."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        found = re.match(r"(\d+)\.(\d+)", done.stdout)
    except (OSError, subprocess.TimeoutExpired):
        found = None
    if found is None:
        raise BuildError("nvidia-smi does not tell the GPU's architecture: give --architecture")
    return found[1] + found[2]


def load_runtime_libraries(cuda_major: str) -> None:
    """Let the loader find the driver and CUDA's libraries by name, wherever they are.

    The driver is loaded too: a library linked without one does not name it. Libraries that are not
    found are left to the loader, whose error is better than ours.
    """
    _load(_DRIVER, _first(map(Path, _DRIVER_FOLDERS), _DRIVER))
    folders = [TOOLKIT, *wheel_folders(cuda_major)]
    for library in _RUNTIME_LIBRARIES:
        name = f"{library}.{cuda_major}"
        _load(name, _first(folders, f"*/{name}"))


def _load(name: str, path: Path | None) -> None:
    """Load by name, or else from `path`."""
    for candidate in (name, path):
        if candidate is not None:
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(candidate), ctypes.RTLD_GLOBAL)
                return


def wheel_folders(cuda_major: str) -> list[Path]:
    """Folders of NVIDIA's wheels, each with ``include`` and ``lib``."""
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    named = (f"cu{cuda_major}", "cublas", "cuda_runtime")
    return [place / name for place in places for name in named if (place / name).is_dir()]


def _toolkit_folders(nvcc: Path) -> Iterator[Path]:
    """The toolkit's folders as its compiler reports them: nvcc itself may be a script outside."""
    done = subprocess.run(
        [str(nvcc), "--dryrun", "-x", "cu", "-c", "none.cu"], capture_output=True, text=True
    )
    found = re.search(r"^#\$ TOP=(.*)$", done.stdout + done.stderr, re.MULTILINE)
    top = Path(found[1].strip()) if found else nvcc.parent.parent
    yield top
    yield from top.glob("targets/*")


def _cublas_flags(cuda_major: str) -> list[str]:
    folders = wheel_folders(cuda_major)
    header = _first(folders, "include/cublas_v2.h")
    library = _first(folders, f"lib/libcublas.so.{cuda_major}")
    if header is None or library is None:
        raise BuildError(
            f"cuBLAS {cuda_major} is neither in the toolkit nor among the wheels of this Python: "
            "install the toolkit's cuBLAS, or pip install nvidia-cublas"
        )
    lt = library.with_name(f"libcublasLt.so.{cuda_major}")
    return [
        f"-DCMAKE_CUDA_FLAGS=-I{header.parent}",
        f"-DCUDA_cublas_LIBRARY={library}",
        f"-DCUDA_cublasLt_LIBRARY={lt}",
    ]


def _first(folders: Iterator[Path] | list[Path] | map[Path], pattern: str) -> Path | None:
    return next((path for folder in folders for path in sorted(folder.glob(pattern))), None)
