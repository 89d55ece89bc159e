"""Build llama.cpp, the program that the CPU benches compare with, from the llama-cpp-python sdist.

Downloads the sdist through pip and compiles shared libraries into build/peer/<variant>/. CMake and
Ninja come from pip where the system has none; a C++ compiler must be there.

Variants:
  native   for this machine (-march=native), as a user's own build
  avx2     AVX2, FMA, F16C and no AVX512
  avx512   AVX512 with VNNI, no AMX
  amx      AVX512 with VNNI, VBMI and BF16, and AMX: for carrying to a machine that has it

Examples:
  python -m bench.build_peer                  the native variant, if it is not there already
  python -m bench.build_peer native avx2      two variants
  python -m bench.build_peer amx --force      again, from the start
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from bench.machine import BUILD, processor

LLAMA_CPP_PYTHON = "0.3.36"
"""The pinned version: its sdist holds the sources of one llama.cpp commit."""

PEER = BUILD / "peer"

_SETS = ["AVX", "AVX2", "FMA", "F16C", "BMI2", "SSE42"]
_SETS_512 = [*_SETS, "AVX512", "AVX512_VNNI"]
_SETS_AMX = [*_SETS_512, "AVX512_VBMI", "AVX512_BF16", "AMX_TILE", "AMX_INT8", "AMX_BF16"]
VARIANTS: dict[str, list[str] | None] = {
    "native": None,
    "avx2": _SETS,
    "avx512": _SETS_512,
    "amx": _SETS_AMX,
}
"""Instruction sets by variant; None = what this machine has."""

LIBRARIES = ("libggml-base.so.0", "libggml-cpu.so.0", "libggml.so.0", "libllama.so.0")
"""In an order in which each finds those it needs."""

# GCC 12 drops the stores into the tile configuration that nothing but `ldtilecfg` reads, and the
# instruction faults: https://github.com/ggml-org/llama.cpp/issues/20824
_BARRIER_FILE = "ggml/src/ggml-cpu/amx/mmq.cpp"
_BARRIER_BEFORE = "    _tile_loadconfig(&tc);\n"
_BARRIER = '    __asm__ __volatile__("" : : "r"(&tc) : "memory");\n'


class BuildError(RuntimeError):
    """The peer could not be built; the text says what to do."""


def build(variant: str, *, force: bool = False, jobs: int | None = None) -> Path:
    """The folder of a variant's libraries, made if it is not there.

    Raises: BuildError.
    """
    folder = PEER / variant
    if not force and _is_ready(folder, variant):
        return folder
    if shutil.which("c++") is None:
        raise BuildError("no C++ compiler: install g++ (Debian: apt-get install g++)")
    source = _unpacked_source()
    cmake, ninja = _tool("cmake"), _tool("ninja")
    objects = PEER / f"{variant}-objects"
    shutil.rmtree(objects, ignore_errors=True)
    objects.mkdir(parents=True)
    flags = [
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
        "-DBUILD_SHARED_LIBS=ON",
        "-DGGML_OPENMP=ON",
        "-DLLAMA_BUILD_COMMON=OFF",
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        "-DCMAKE_INSTALL_RPATH=$ORIGIN",
        *_set_flags(variant),
    ]
    started_s = time.monotonic()
    _run([cmake, "-G", "Ninja", "-S", str(source), "-B", str(objects), *flags], objects)
    _build_with_progress(cmake, objects, jobs or os.cpu_count() or 1, variant)
    _collect(objects, folder)
    record = {
        "variant": variant,
        "llama_cpp_python": LLAMA_CPP_PYTHON,
        **_source_versions(source),
        "compiler": _run(["c++", "--version"], objects).splitlines()[0],
        "processor": processor() if VARIANTS[variant] is None else "",
        "flags": [flag for flag in flags if flag.startswith("-DGGML")],
        "build_s": round(time.monotonic() - started_s),
    }
    shutil.rmtree(objects)
    (folder / "build.json").write_text(json.dumps(record, indent=1) + "\n")
    return folder


def build_record(folder: Path) -> dict[str, object]:
    """What `build` wrote about a variant: versions, compiler, flags.

    Raises: BuildError if the folder holds no finished build.
    """
    try:
        record: dict[str, object] = json.loads((folder / "build.json").read_text())
    except FileNotFoundError:
        raise BuildError(
            f"{folder} holds no peer; run: python -m bench.build_peer {folder.name}"
        ) from None
    return record


def _is_ready(folder: Path, variant: str) -> bool:
    if not all((folder / name).exists() for name in (*LIBRARIES, "build.json")):
        return False
    record = build_record(folder)
    is_of_this_machine = VARIANTS[variant] is not None or record["processor"] == processor()
    return record["llama_cpp_python"] == LLAMA_CPP_PYTHON and is_of_this_machine


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


def _unpacked_source() -> Path:
    """llama.cpp's sources, downloaded and patched once."""
    top = PEER / "source"
    source = top / f"llama_cpp_python-{LLAMA_CPP_PYTHON}" / "vendor" / "llama.cpp"
    if (top / "patched").exists() and source.is_dir():
        return source
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir(parents=True)
    print(f"downloading the sources of llama-cpp-python {LLAMA_CPP_PYTHON} (77 MB)", flush=True)
    requirement = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
    options = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(top)]
    quiet = ["--quiet", "--disable-pip-version-check"]
    _run([sys.executable, "-m", "pip", "download", *quiet, *options, requirement], top)
    archives = list(top.glob("*.tar.gz"))
    if len(archives) != 1:
        raise BuildError(f"pip left {[path.name for path in archives]} in {top}, not one sdist")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(top, filter="data")
    archives[0].unlink()
    _add_barrier(source / _BARRIER_FILE)
    (top / "patched").touch()
    return source


def _add_barrier(path: Path) -> None:
    text = path.read_text()
    if text.count(_BARRIER_BEFORE) != 1:
        raise BuildError(f"{path}: the tile configuration is loaded elsewhere; see _BARRIER")
    path.write_text(text.replace(_BARRIER_BEFORE, _BARRIER + _BARRIER_BEFORE))


def _source_versions(source: Path) -> dict[str, str]:
    """Versions as the sources tell them: llama.cpp's commit stands in the binding's changelog."""
    changelog = (source.parent.parent / "CHANGELOG.md").read_text()
    release = changelog.partition(f"## [{LLAMA_CPP_PYTHON}]")[2]
    found = re.search(r"ggml-org/llama\.cpp@([0-9a-f]+)", release)
    cmake = (source / "ggml" / "CMakeLists.txt").read_text()
    parts = re.findall(r"set\(GGML_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\)", cmake)
    return {"llama_cpp": found.group(1) if found else "unknown", "ggml": ".".join(parts)}


def _tool(name: str) -> str:
    """Path of cmake or ninja, installed with pip into a folder of its own if need be."""
    tools = PEER / "tools"
    found = shutil.which(name) or shutil.which(name, path=str(tools / "bin"))
    if found:
        return found
    print(f"{name} is not installed; getting it through pip", flush=True)
    tools.parent.mkdir(parents=True, exist_ok=True)
    if not (tools / "bin" / "python").exists():
        _run([sys.executable, "-m", "venv", str(tools)], PEER)
    _run([str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", name], PEER)
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


def _collect(objects: Path, folder: Path) -> None:
    """The libraries under the names that the loader looks for, stripped, and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in LIBRARIES:
        shutil.copyfile((objects / "bin" / name).resolve(), folder / name)
        subprocess.run(["strip", "--strip-unneeded", str(folder / name)], check=True)
    # Carried along, so that another machine runs the same OpenMP.
    openmp = Path(_run(["c++", "-print-file-name=libgomp.so.1"], objects).strip())
    if openmp.is_file():
        shutil.copyfile(openmp.resolve(), folder / "libgomp.so.1")


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise BuildError(f"{' '.join(command[:4])} … failed:\n{tail}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.build_peer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("variant", nargs="*", default=["native"], help="default: native")
    parser.add_argument("--force", action="store_true", help="build again what is there")
    parser.add_argument("--jobs", type=int, help="compilers at once (default: the cores)")
    options = parser.parse_args()
    if unknown := set(options.variant) - set(VARIANTS):
        parser.error(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    for variant in options.variant:
        try:
            folder = build(variant, force=options.force, jobs=options.jobs)
        except BuildError as error:
            raise SystemExit(f"error: {error}") from None
        record = build_record(folder)
        print(
            f"{variant}: llama.cpp {record['llama_cpp']}, ggml {record['ggml']} "
            f"(llama-cpp-python {record['llama_cpp_python']}), {record['compiler']}, in {folder}"
        )


if __name__ == "__main__":
    main()
