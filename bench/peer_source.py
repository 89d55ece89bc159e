"""llama.cpp's sources: from the xllamacpp sdist, or from an archive made for one build.

The archive has only what a build with CUDA needs, a few megabytes to be carried to a machine with a
GPU and without a network. Of the many kernels compiled for each head size and tensor type, it has
those that models of `random_moe`'s Q4_K_M mixes use; calling one that is left out ends the process.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.machine import BUILD

XLLAMACPP = "2026.10.11549"
"""The pinned version: its sdist holds the sources of one llama.cpp release, whose number is the
last part."""
SDIST = f"xllamacpp {XLLAMACPP}"
"""As records name it."""

PEER = BUILD / "peer"

# GCC 12 drops the stores into the tile configuration that nothing but `ldtilecfg` reads, and the
# instruction faults: https://github.com/ggml-org/llama.cpp/issues/20824
_BARRIER_FILE = "ggml/src/ggml-cpu/amx/mmq.cpp"
_BARRIER_BEFORE = "    _tile_loadconfig(&tc);\n"
_BARRIER = '    __asm__ __volatile__("" : : "r"(&tc) : "memory");\n'

FIT_FILES = ("common/fit.cpp", "common/fit.h")
"""llama.cpp's choice of a placement that fits (``--fit``), which is in no library's C interface."""

_FACTS = "bench-source.json"
"""File next to an archive's CMakeLists.txt: versions, and what was left out."""
_PACKED = ("CMakeLists.txt", "LICENSE", "cmake", "include", "src", "ggml", *FIT_FILES)
_BACKENDS = frozenset({"ggml-cpu", "ggml-cuda", "ggml-rpc"})
_CUDA = "ggml/src/ggml-cuda/"
_INSTANCES = _CUDA + "template-instances/"
_LEFT_OUT_FILE = _CUDA + "left-out.cu"

_KEPT = frozenset(
    {
        *("FATTN_MMA_F16 128,128", "FATTN_TILE 128,128", "FATTN_VEC f16-f16"),
        *(f"FATTN_MMA_F16 256,256,{tokens},8" for tokens in (1, 2, 4, 8)),
        *("MMQ GGML_TYPE_Q4_K", "MMQ GGML_TYPE_Q6_K"),
    }
)
"""Kernels of the mix, by their first arguments: heads of 128, heads of 256 of which eight share
keys and values (both on tensor cores), keys and values in f16, matrices in Q4_K and Q6_K."""

_CASE = re.compile(r"^DECL_(FATTN_MMA_F16|FATTN_TILE|MMQ)_CASE(_W4A4)?\((.*)\);$")

_LEFT_OUT_HEAD = """// Kernels that this archive leaves out: calling one needs another build.
#include "common.cuh"

struct mmq_args;

template <int DKQ, int DV, int ncols1, int ncols2>
void ggml_cuda_flash_attn_ext_mma_f16_case(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
template <int DKQ, int DV>
void ggml_cuda_flash_attn_ext_tile_case(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
template <ggml_type type, ggml_prec prec>
void mul_mat_q_case(ggml_backend_cuda_context & ctx, const mmq_args & args, cudaStream_t stream);

#define LEFT_OUT_FATTN_MMA_F16(...) \\
    template <> void ggml_cuda_flash_attn_ext_mma_f16_case<__VA_ARGS__>( \\
        ggml_backend_cuda_context &, ggml_tensor *) { GGML_ABORT("left out"); }
#define LEFT_OUT_FATTN_TILE(...) \\
    template <> void ggml_cuda_flash_attn_ext_tile_case<__VA_ARGS__>( \\
        ggml_backend_cuda_context &, ggml_tensor *) { GGML_ABORT("left out"); }
#define LEFT_OUT_MMQ(...) \\
    template <> void mul_mat_q_case<__VA_ARGS__>( \\
        ggml_backend_cuda_context &, const mmq_args &, cudaStream_t) { GGML_ABORT("left out"); }

"""


class BuildError(RuntimeError):
    """The peer could not be built; the text says what to do."""


@dataclass
class Trimmed:
    """The text of an instance file after trimming, and stubs for what was left out."""

    kept: list[str] = field(default_factory=list)
    stubs: list[str] = field(default_factory=list)


def run(command: list[str], folder: Path) -> str:
    """Output of a command. Raises: BuildError with the end of it if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise BuildError(f"{' '.join(command[:4])} … failed:\n{tail}")
    return done.stdout


def downloaded_source() -> Path:
    """llama.cpp's sources, downloaded and patched once. Raises: BuildError."""
    top = PEER / "source"
    source = top / f"xllamacpp-{XLLAMACPP}" / "thirdparty" / "llama.cpp"
    if (top / "patched").exists() and source.is_dir():
        return source
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir(parents=True)
    print(f"downloading the sources of xllamacpp {XLLAMACPP} (38 MB), two minutes", flush=True)
    requirement = f"xllamacpp=={XLLAMACPP}"
    options = ["--no-deps", "--no-binary", "xllamacpp", "--dest", str(top)]
    quiet = ["--quiet", "--disable-pip-version-check"]
    run([sys.executable, "-m", "pip", "download", *quiet, *options, requirement], top)
    archives = list(top.glob("*.tar.gz"))
    if len(archives) != 1:
        raise BuildError(f"pip left {[path.name for path in archives]} in {top}, not one sdist")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(top, filter="data")
    archives[0].unlink()
    _add_barrier(source / _BARRIER_FILE)
    (top / "patched").touch()
    return source


def unpacked_archive(archive: Path, folder: Path) -> Path:
    """The sources of an archive that `pack` wrote. Raises: BuildError if it is none."""
    try:
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise BuildError(f"{archive}: {error}") from None
    source = folder / "llama.cpp"
    if not (source / _FACTS).is_file():
        raise BuildError(f"{archive} was not written by python -m bench.build_peer --pack")
    return source


def source_facts(source: Path) -> dict[str, Any]:
    """Versions of sources, and what was left out of an archive."""
    packed = source / _FACTS
    if packed.is_file():
        facts: dict[str, Any] = json.loads(packed.read_text())
        return facts
    cmake = (source / "ggml" / "CMakeLists.txt").read_text()
    parts = re.findall(r"set\(GGML_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\)", cmake)
    return {
        "sdist": SDIST,
        "llama_cpp": f"b{XLLAMACPP.rpartition('.')[2]}",
        "ggml": ".".join(parts),
    }


def pack(source: Path, archive: Path) -> None:
    """Write the archive: what a build with CUDA needs of `source`, trimmed."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    facts = source_facts(source) | {"kernels": sorted(_KEPT)}
    stubs: list[str] = []
    unfinished = archive.with_name(f".{archive.name}")
    try:
        with tarfile.open(unfinished, "w:xz", preset=6) as out:
            for name in _packed_names(source):
                content = (source / name).read_bytes()
                if name.startswith(_INSTANCES):
                    trimmed = trimmed_instances(content.decode())
                    stubs += trimmed.stubs
                    if not trimmed.kept:
                        continue
                    content = "".join(trimmed.kept).encode()
                _add(out, name, content)
            _add(out, "vendor/CMakeLists.txt", b"# Nothing here is needed by the library.\n")
            _add(out, _LEFT_OUT_FILE, (_LEFT_OUT_HEAD + "".join(stubs)).encode())
            _add(out, _FACTS, json.dumps(facts, indent=1).encode())
        unfinished.rename(archive)
    finally:
        unfinished.unlink(missing_ok=True)


def trimmed_instances(text: str) -> Trimmed:
    """Trim a file of ``template-instances`` to the cases in `_KEPT`.

    A file without any case is unchanged.
    """
    result, is_needed, has_cases = Trimmed(), False, False
    for line in text.splitlines(keepends=True):
        found = _CASE.match(line.strip())
        if found is None:
            result.kept.append(line)
            continue
        has_cases = True
        family, is_fp4, arguments = found.groups()
        if not is_fp4 and _is_kept(family, arguments):
            result.kept.append(line)
            is_needed = True
            continue
        if family == "MMQ":
            arguments += ", GGML_PREC_Q4" if is_fp4 else ", GGML_PREC_Q8"
        result.stubs.append(f"LEFT_OUT_{family}({arguments})\n")
    if has_cases and not is_needed:
        result.kept.clear()
    return result


def _is_kept(family: str, arguments: str) -> bool:
    """Whether the case, or all cases with this prefix, are in `_KEPT`."""
    names = [each.strip() for each in arguments.split(",")]
    begins = (",".join(names[:count]) for count in range(1, len(names) + 1))
    return any(f"{family} {begin}" in _KEPT for begin in begins)


def _packed_names(source: Path) -> Iterator[str]:
    """Files of the archive, in order."""
    for top in _PACKED:
        start = source / top
        for path in [start] if start.is_file() else sorted(start.rglob("*")):
            name = path.relative_to(source).as_posix()
            if path.is_file() and not _is_left_out(name):
                yield name


def _is_left_out(name: str) -> bool:
    folders = name.split("/")[2:-1]  # of ggml/src/<backend>/…
    if name.startswith("ggml/src/") and folders and folders[0] not in _BACKENDS:
        return True
    if name.startswith(_INSTANCES + "fattn-vec-instance-"):
        return not name.endswith("f16-f16.cu") or "bf16" in name
    return name.endswith(".py")


def _add(out: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file reproducibly: without owner and time."""
    info = tarfile.TarInfo(f"llama.cpp/{name}")
    info.size, info.mode = len(content), 0o644
    out.addfile(info, io.BytesIO(content))


def _add_barrier(path: Path) -> None:
    text = path.read_text()
    if text.count(_BARRIER_BEFORE) != 1:
        raise BuildError(f"{path}: no such load of the tile configuration; see _BARRIER")
    path.write_text(text.replace(_BARRIER_BEFORE, _BARRIER + _BARRIER_BEFORE))
