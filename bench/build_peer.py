"""Builds llama.cpp, the program that benches compare with, from the xllamacpp sdist.

Downloads the sdist through pip and compiles shared libraries into build/peer/<variant>/. CMake and
Ninja come from pip where the system has none; a C++ compiler must be there, for CUDA nvcc too.

Variants:
  native      for this machine (-march=native), as a user's own build
  native-rpc  the same with RPC: for the test of experts in an RPC server
  avx2        AVX2, FMA, F16C and no AVX512
  avx512      AVX512 with VNNI, no AMX
  amx         AVX512 with VNNI, VBMI and BF16, and AMX: for carrying to a machine that has it
  cuda        native, with CUDA for one architecture, and with RPC
  cuda-amx    amx, with CUDA and RPC: for carrying to a machine that has both

A machine with a GPU may have no network. Either carry sources to it, some 3 MB, and build there
(two to four minutes on 16 cores), or carry the finished folder build/peer/cuda-amx. The archive
holds only those of llama.cpp's CUDA kernels that a Q4_K_M model with heads of 128 uses; a build
from the sdist has them all.

Examples:
  python -m bench.build_peer                  the native variant, if it is not there already
  python -m bench.build_peer native avx2      two variants
  python -m bench.build_peer amx --force      again, from the start
  python -m bench.build_peer --pack build/carry/llama-cuda.tar.xz
  python -m bench.build_peer cuda --archive build/carry/llama-cuda.tar.xz --work /dev/shm/peer
  python -m bench.build_peer cuda-amx --architecture 90 --archive build/carry/llama-cuda.tar.xz
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.cuda_toolkit import TOOLKIT, device_architecture, find_toolkit
from bench.machine import processor
from bench.options import bench_parser
from bench.peer_fit import FIT_LIBRARY, build_fit
from bench.peer_source import (
    PEER,
    SDIST,
    BuildError,
    downloaded_source,
    pack,
    run,
    source_facts,
    unpacked_archive,
)

_SETS = ["AVX", "AVX2", "FMA", "F16C", "BMI2", "SSE42"]
_SETS_512 = [*_SETS, "AVX512", "AVX512_VNNI"]
_SETS_AMX = [*_SETS_512, "AVX512_VBMI", "AVX512_BF16", "AMX_TILE", "AMX_INT8", "AMX_BF16"]
VARIANTS: dict[str, list[str] | None] = {
    "native": None,
    "native-rpc": None,
    "avx2": _SETS,
    "avx512": _SETS_512,
    "amx": _SETS_AMX,
    "cuda": None,
    "cuda-amx": _SETS_AMX,
}
"""Instruction sets by variant; None = those of this machine."""
WITH_CUDA = frozenset({"cuda", "cuda-amx"})
WITH_RPC = WITH_CUDA | {"native-rpc"}


def libraries_of(variant: str) -> tuple[str, ...]:
    """Files of a variant's folder, ordered so that each finds those it needs."""
    cuda = ("libggml-cuda.so.0",) if variant in WITH_CUDA else ()
    rpc = ("libggml-rpc.so.0",) if variant in WITH_RPC else ()
    ggml = ("libggml-base.so.0", "libggml-cpu.so.0", *cuda, *rpc, "libggml.so.0")
    return (*ggml, "libllama.so.0", FIT_LIBRARY)


def build(
    variant: str,
    *,
    force: bool = False,
    jobs: int | None = None,
    architecture: str | None = None,
    archive: Path | None = None,
    work: Path | None = None,
) -> Path:
    """The folder of a variant's libraries, built if it is not there.

    `architecture` is CUDA's, None for that of the first GPU; sources come from the `archive`, or
    are downloaded; they are unpacked and compiled in the folder `work`.
    Raises: BuildError.
    """
    folder = PEER / variant
    if not force and _is_ready(folder, variant, architecture):
        return folder
    if shutil.which("c++") is None:
        raise BuildError("no C++ compiler: install g++ (Debian: apt-get install g++)")
    objects = (work or PEER) / f"{variant}-objects"
    shutil.rmtree(objects, ignore_errors=True)
    objects.mkdir(parents=True)
    source = downloaded_source() if archive is None else unpacked_archive(archive, objects)
    cmake, ninja = _tool("cmake"), _tool("ninja")
    flags = [
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
        "-DBUILD_SHARED_LIBS=ON",
        "-DGGML_OPENMP=ON",
        "-DLLAMA_BUILD_COMMON=OFF",
        "-DLLAMA_BUILD_APP=OFF",
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        *_compiler_flags(),
        *_set_flags(variant),
        *(["-DGGML_RPC=ON"] if variant in WITH_RPC else []),
    ]
    cuda: dict[str, str] = {}
    if variant in WITH_CUDA:
        toolkit = find_toolkit()
        architecture = architecture or device_architecture()
        cuda = {"cuda": toolkit.version, "architecture": architecture}
        flags += [*toolkit.flags, *_cuda_flags(architecture)]
        flags.append(f"-DCMAKE_CUDA_HOST_COMPILER={shutil.which('c++')}")
    flags.append(f"-DCMAKE_INSTALL_RPATH=$ORIGIN{f';{TOOLKIT}/lib64' if cuda else ''}")
    started_s = time.monotonic()
    run([cmake, "-G", "Ninja", "-S", str(source), "-B", str(objects), *flags], objects)
    _build_with_progress(cmake, objects, jobs or os.cpu_count() or 1, variant)
    build_fit(source, objects / "bin", objects / "fit")
    _collect(objects, folder, libraries_of(variant))
    record = {
        "variant": variant,
        **source_facts(source),
        **cuda,
        "compiler": run(["c++", "--version"], objects).splitlines()[0],
        "processor": processor() if VARIANTS[variant] is None else "",
        "flags": [flag for flag in flags if flag.startswith("-DGGML")],
        "build_s": round(time.monotonic() - started_s),
    }
    shutil.rmtree(objects)
    (folder / "build.json").write_text(json.dumps(record, indent=1) + "\n")
    return folder


def build_record(folder: Path) -> dict[str, Any]:
    """What `build` recorded of a variant: versions, compiler, flags.

    Raises: BuildError if the folder has no finished build.
    """
    try:
        record: dict[str, Any] = json.loads((folder / "build.json").read_text())
    except FileNotFoundError:
        raise BuildError(
            f"{folder} holds no peer; run: python -m bench.build_peer {folder.name}"
        ) from None
    return record


def _is_ready(folder: Path, variant: str, architecture: str | None) -> bool:
    if not all((folder / name).exists() for name in (*libraries_of(variant), "build.json")):
        return False
    record = build_record(folder)
    is_of_this_machine = VARIANTS[variant] is not None or record["processor"] == processor()
    is_for_it = architecture is None or record.get("architecture") == architecture
    return record.get("sdist") == SDIST and is_of_this_machine and is_for_it


def _compiler_flags() -> list[str]:
    """The compilers that the record names and `build_fit` uses, whatever CMake would find: one
    process must not mix the C++ libraries of two."""
    found = {"C": shutil.which("cc"), "CXX": shutil.which("c++")}
    return [f"-DCMAKE_{name}_COMPILER={path}" for name, path in found.items() if path]


def _set_flags(variant: str) -> list[str]:
    sets = VARIANTS[variant]
    if sets is None:
        return ["-DGGML_NATIVE=ON"]
    if platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(f"variant {variant} is for x86-64; this machine is {platform.machine()}")
    states = {each: each in sets for each in _SETS_AMX}
    return [
        "-DGGML_NATIVE=OFF",
        *(f"-DGGML_{each}={'ON' if on else 'OFF'}" for each, on in states.items()),
    ]


def _cuda_flags(architecture: str) -> list[str]:
    """Compile as few kernels as the pinned version allows."""
    return [
        "-DGGML_CUDA=ON",
        "-DGGML_CUDA_NCCL=OFF",
        "-DGGML_CUDA_FA_QUANTS=f16-f16",
        f"-DCMAKE_CUDA_ARCHITECTURES={architecture}-real",
    ]


def _tool(name: str) -> str:
    """Path of cmake or ninja, installed with pip into a separate folder if needed."""
    tools = PEER / "tools"
    found = shutil.which(name) or shutil.which(name, path=str(tools / "bin"))
    if found:
        return found
    print(f"{name} is not installed; getting it through pip", flush=True)
    tools.parent.mkdir(parents=True, exist_ok=True)
    if not (tools / "bin" / "python").exists():
        run([sys.executable, "-m", "venv", str(tools)], PEER)
    run([str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", name], PEER)
    return str(tools / "bin" / name)


def _build_with_progress(cmake: str, objects: Path, jobs: int, variant: str) -> None:
    command = [cmake, "--build", str(objects), "--target", "llama", "--parallel", str(jobs)]
    log = objects / "build.log"
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode(errors="replace")
            sink.write(line)
            if found := re.match(r"\[(\d+)/(\d+)\]", line):
                done, total = found.groups()
                print(f"\rcompiling llama.cpp, {variant}: {done} of {total}", end="", flush=True)
        print()
    if process.wait():
        tail = "\n".join(log.read_text().splitlines()[-15:])
        raise BuildError(f"compiling {variant} failed; the end of {log}:\n{tail}")


def _collect(objects: Path, folder: Path, libraries: tuple[str, ...]) -> None:
    """Copy the libraries under the names that the loader looks for, stripped."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in libraries:
        shutil.copyfile((objects / "bin" / name).resolve(), folder / name)
        subprocess.run(["strip", "--strip-unneeded", str(folder / name)], check=True)
    # Included, so that another machine runs the same OpenMP.
    openmp = Path(run(["c++", "-print-file-name=libgomp.so.1"], objects).strip())
    if openmp.is_file():
        shutil.copyfile(openmp.resolve(), folder / "libgomp.so.1")


def main() -> None:
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("variant", nargs="*", default=["native"], help="default: native")
    parser.add_argument("--force", action="store_true", help="build again what is there")
    parser.add_argument("--jobs", type=int, help="compilers at once (default: the cores)")
    parser.add_argument("--architecture", help="CUDA's, as 90 (default: of the first GPU)")
    parser.add_argument("--archive", type=Path, help="take the sources out of it")
    parser.add_argument("--work", type=Path, help="compile in this folder (default: build/peer)")
    parser.add_argument("--pack", type=Path, metavar="ARCHIVE", help="only write the archive")
    options = parser.parse_args()
    if options.pack:
        pack(downloaded_source(), options.pack)
        print(f"{options.pack}: {options.pack.stat().st_size / 1e6:.1f} MB")
        return
    if unknown := set(options.variant) - set(VARIANTS):
        parser.error(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    for variant in options.variant:
        try:
            folder = build(
                variant,
                force=options.force,
                jobs=options.jobs,
                architecture=options.architecture,
                archive=options.archive,
                work=options.work,
            )
        except BuildError as error:
            raise SystemExit(f"error: {error}") from None
        record = build_record(folder)
        print(
            f"{variant}: llama.cpp {record['llama_cpp']}, ggml {record['ggml']} "
            f"({record['sdist']}), {record['compiler']}, in {folder}"
        )


if __name__ == "__main__":
    main()
