"""llama.cpp for the benches: the archive of its sources, CUDA's libraries, models and contexts."""

from __future__ import annotations

import ctypes
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.build_peer import VARIANTS, WITH_CUDA, libraries_of
from bench.cuda_toolkit import find_toolkit
from bench.gpu_peer import built_peer
from bench.llama_api import DEVICE_CALLS, REGISTRY_CALLS, TensorPlace, declare, open_wheel
from bench.peer import PeerError
from bench.peer_model import PeerContext, Placement, load_model
from bench.peer_source import (
    XLLAMACPP,
    BuildError,
    pack,
    source_facts,
    trimmed_instances,
    unpacked_archive,
)

from bench import build_peer, cuda_toolkit, peer_model
from dflash_protocol.ids import F32Array
from support.llama_oracle import relative_error
from support.random_models import BLOCK_32_SHAPE, write_qwen3moe

CUDA = "ggml/src/ggml-cuda/"
FILES = {
    "CMakeLists.txt": "project(llama)\n",
    "LICENSE": "MIT\n",
    "README.md": "not needed\n",
    "cmake/common.cmake": "\n",
    "common/common.cpp": "not needed\n",
    "common/fit.cpp": "\n",
    "common/fit.h": "\n",
    "include/llama.h": "\n",
    "src/llama.cpp": "\n",
    "src/convert.py": "not needed\n",
    "tests/test.cpp": "not needed\n",
    "vendor/big/big.h": "not needed\n",
    "vendor/CMakeLists.txt": "add_subdirectory(big)\n",
    "ggml/CMakeLists.txt": "set(GGML_VERSION_MAJOR 1)\nset(GGML_VERSION_MINOR 2)\n",
    "ggml/include/ggml.h": "\n",
    "ggml/src/ggml.c": "\n",
    "ggml/src/ggml-cpu/ops.cpp": "\n",
    "ggml/src/ggml-rpc/rpc.cpp": "\n",
    "ggml/src/ggml-vulkan/vulkan.cpp": "not needed\n",
    CUDA + "mmvq.cu": "\n",
    CUDA + "template-instances/mmq-instance-q4_k.cu": "DECL_MMQ_CASE(GGML_TYPE_Q4_K);\n",
    CUDA + "template-instances/mmq-instance-mxfp4.cu": (
        "DECL_MMQ_CASE(GGML_TYPE_MXFP4);\n\nDECL_MMQ_CASE_W4A4(GGML_TYPE_MXFP4);\n"
    ),
    CUDA + "template-instances/mmf-instance-ncols_3.cu": "DECL_MMF_CASE(3);\n",
    CUDA + "template-instances/fattn-vec-instance-f16-f16.cu": "\n",
    CUDA + "template-instances/fattn-vec-instance-bf16-f16.cu": "not needed\n",
    CUDA + "template-instances/fattn-vec-instance-f16-q8_0.cu": "not needed\n",
}
WANTED = {name for name, text in FILES.items() if text != "not needed\n"} - {
    CUDA + "template-instances/mmq-instance-mxfp4.cu"
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Sources as laid out in the sdist."""
    top = tmp_path / "thirdparty" / "llama.cpp"
    for name, text in FILES.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    return top


def test_an_archive_holds_what_the_build_needs(source: Path, tmp_path: Path) -> None:
    archive = tmp_path / "carry" / "sources.tar.xz"
    pack(source, archive)
    unpacked = unpacked_archive(archive, tmp_path / "there")
    found = {
        path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()
    }
    assert found == {*WANTED, "bench-source.json", CUDA + "left-out.cu"}
    assert (unpacked / "include/llama.h").read_text() == FILES["include/llama.h"]
    assert "big" not in (unpacked / "vendor/CMakeLists.txt").read_text()
    stubs = (unpacked / CUDA / "left-out.cu").read_text().splitlines()
    assert "LEFT_OUT_MMQ(GGML_TYPE_MXFP4, GGML_PREC_Q8)" in stubs
    assert "LEFT_OUT_MMQ(GGML_TYPE_MXFP4, GGML_PREC_Q4)" in stubs
    facts = source_facts(unpacked)
    assert (facts["llama_cpp"], facts["ggml"]) == ("b" + XLLAMACPP.split(".")[-1], "1.2")
    assert facts["llama_cpp"] == source_facts(source)["llama_cpp"]
    assert "MMQ GGML_TYPE_Q4_K" in facts["kernels"]


def test_an_archive_is_the_same_whenever_it_is_packed(source: Path, tmp_path: Path) -> None:
    archives = [tmp_path / "a.tar.xz", tmp_path / "b.tar.xz"]
    for archive in archives:
        pack(source, archive)
        (source / "include/llama.h").touch()
    assert archives[0].read_bytes() == archives[1].read_bytes()
    assert sorted(tmp_path.glob(".*")) == []


def test_what_is_no_archive_of_ours_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "other.tar.xz"
    with tarfile.open(archive, "w:xz"):
        pass
    with pytest.raises(BuildError, match="was not written by"):
        unpacked_archive(archive, tmp_path / "there")
    archive.write_bytes(b"no archive")
    with pytest.raises(BuildError, match=r"other\.tar\.xz"):
        unpacked_archive(archive, tmp_path / "there")


def test_of_an_instance_file_only_the_kept_cases_stay() -> None:
    text = (
        '#include "../fattn-mma-f16.cuh"\n\n'
        "DECL_FATTN_MMA_F16_CASE(64, 64, 8, 8);\n"
        "DECL_FATTN_MMA_F16_CASE(128, 128, 8, 8);\n"
        "DECL_FATTN_MMA_F16_CASE(192, 128, 8, 8);\n"
    )
    trimmed = trimmed_instances(text)
    assert "".join(trimmed.kept) == text.replace(
        "DECL_FATTN_MMA_F16_CASE(64, 64, 8, 8);\n", ""
    ).replace("DECL_FATTN_MMA_F16_CASE(192, 128, 8, 8);\n", "")
    assert trimmed.stubs == [
        "LEFT_OUT_FATTN_MMA_F16(64, 64, 8, 8)\n",
        "LEFT_OUT_FATTN_MMA_F16(192, 128, 8, 8)\n",
    ]
    assert trimmed_instances("DECL_FATTN_TILE_CASE(64, 64);\n").kept == []
    assert trimmed_instances("DECL_FATTN_TILE_CASE(128, 128);\n").stubs == []
    of_256 = trimmed_instances(
        "DECL_FATTN_MMA_F16_CASE(256, 256, 2, 8);\nDECL_FATTN_MMA_F16_CASE(256, 256, 2, 4);\n"
    )
    assert of_256.kept == ["DECL_FATTN_MMA_F16_CASE(256, 256, 2, 8);\n"]
    assert of_256.stubs == ["LEFT_OUT_FATTN_MMA_F16(256, 256, 2, 4)\n"]


def test_a_variant_with_cuda_has_its_libraries_before_those_that_need_them() -> None:
    assert set(VARIANTS) >= WITH_CUDA
    plain, cuda = libraries_of("native"), libraries_of("cuda")
    assert set(cuda) - set(plain) == {"libggml-cuda.so.0", "libggml-rpc.so.0"}
    assert set(libraries_of("native-rpc")) - set(plain) == {"libggml-rpc.so.0"}
    assert cuda.index("libggml-cuda.so.0") < cuda.index("libggml.so.0") < len(cuda) - 1


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit with a compiler only, called by a script in another folder."""
    toolkit = tmp_path / "toolkit"
    (toolkit / "bin").mkdir(parents=True)
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    nvcc = scripts / "nvcc"
    nvcc.write_text(f'#!/bin/sh\necho "Cuda, release 13.0, V13.0.88"\necho "#$ TOP={toolkit}"\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scripts}:/usr/bin:/bin")
    monkeypatch.setattr(cuda_toolkit, "_DRIVER_FOLDERS", ())
    monkeypatch.setattr(cuda_toolkit, "wheel_folders", lambda major: [tmp_path / f"cu{major}"])
    return toolkit


def made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_a_toolkit_with_cublas_needs_no_flags(compiler: Path) -> None:
    for name in ("include/cublas_v2.h", "lib64/libcublas.so", "lib64/stubs/libcuda.so"):
        made(compiler / name)
    found = find_toolkit()
    assert found.version == "13.0"
    assert [flag.partition("=")[0] for flag in found.flags] == ["-DCMAKE_CUDA_COMPILER"]


def test_what_a_toolkit_lacks_is_taken_from_wheels(compiler: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="cuBLAS 13"):
        find_toolkit()
    wheel = tmp_path / "cu13"
    made(wheel / "include/cublas_v2.h")
    library = made(wheel / "lib/libcublas.so.13")
    flags = find_toolkit().flags
    assert f"-DCUDA_cublas_LIBRARY={library}" in flags
    assert f"-DCMAKE_CUDA_FLAGS=-I{wheel / 'include'}" in flags
    assert "-DGGML_CUDA_NO_VMM=ON" in flags


def test_without_a_compiler_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cuda_toolkit, "TOOLKIT", tmp_path)
    with pytest.raises(BuildError, match="nvcc"):
        find_toolkit()


def test_a_peer_that_is_not_built_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu_peer.PEER", tmp_path)
    monkeypatch.setattr("bench.gpu_peer.has_amx", lambda: True)
    with pytest.raises(BuildError, match=r"bench\.build_peer cuda$"):
        built_peer("auto")
    folder = tmp_path / "cuda-amx"
    folder.mkdir()
    (folder / "build.json").write_text(json.dumps({"variant": "cuda-amx"}))
    assert built_peer("auto") == built_peer("cuda-amx") == folder
    with pytest.raises(BuildError, match=r"bench\.build_peer native$"):
        built_peer("native")
    monkeypatch.setattr("bench.gpu_peer.has_amx", lambda: False)
    with pytest.raises(BuildError):
        built_peer("auto")


@pytest.fixture(scope="module")
def library() -> Any:
    """llama.cpp from the wheel, with the same functions as our builds."""
    opened = open_wheel()
    declare(opened, DEVICE_CALLS)
    declare(opened, REGISTRY_CALLS)
    return opened


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peer") / "model.gguf"
    return write_qwen3moe(path, BLOCK_32_SHAPE, seed=3, tensor_type="Q8_0")


def logits_of(library: Any, model: int, ids: list[int], *, micro_batch: int = 512) -> F32Array:
    context = PeerContext(
        library, model, num_threads=2, context=256, kv_type="f32", micro_batch=micro_batch
    )
    return context.logits(ids, BLOCK_32_SHAPE.vocab_size)


IDS = [(7 * position) % 101 for position in range(40)]


def test_decode_goes_on_where_the_prompt_ended_and_may_be_repeated(
    library: Any, model_path: Path
) -> None:
    model = load_model(library, model_path)
    context = PeerContext(library, model, num_threads=2, context=256, kv_type="f32")
    assert context.fill(IDS[:30]) > 0
    rows: list[F32Array] = []
    for _ in range(2):
        assert context.decode(30, IDS[30:]) > 0
        row = library.llama_get_logits_ith(context._context, -1)
        rows.append(np.ctypeslib.as_array(row, (BLOCK_32_SHAPE.vocab_size,)).copy())
    np.testing.assert_array_equal(rows[0], rows[1])
    assert relative_error(rows[0], logits_of(library, model, IDS)) < 1e-2


def test_a_prompt_longer_than_a_batch_is_one_sequence(
    library: Any, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(library, model_path)
    whole = logits_of(library, model, IDS)
    monkeypatch.setattr(peer_model, "_BATCH", 16)
    in_batches = logits_of(library, model, IDS, micro_batch=16)
    assert relative_error(in_batches, whole) < 1e-2


def test_experts_go_where_they_are_sent(
    library: Any, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ctypes.sizeof(TensorPlace) == 2 * ctypes.sizeof(ctypes.c_void_p)
    expected = logits_of(library, load_model(library, model_path), IDS)
    for placement in (Placement(experts_on="CPU"), Placement(layers_on=("CPU",))):
        model = load_model(library, model_path, placement)
        assert relative_error(logits_of(library, model, IDS), expected) < 1e-2
    for placement in (Placement(experts_on="CUDA7"), Placement(layers_on=("CPU", "CUDA7"))):
        with pytest.raises(PeerError, match="no device CUDA7"):
            load_model(library, model_path, placement)
    # llama.cpp compiles the pattern: with an invalid one the file does not load.
    monkeypatch.setattr(peer_model, "_EXPERT_TENSORS", b"(")
    with pytest.raises(PeerError, match="does not load"):
        load_model(library, model_path, Placement(experts_on="CPU"))


def test_cmake_is_told_the_compilers_that_the_record_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", {"cc": "/a/cc", "c++": "/a/c++"}.get)
    assert build_peer._compiler_flags() == [
        "-DCMAKE_C_COMPILER=/a/cc",
        "-DCMAKE_CXX_COMPILER=/a/c++",
    ]
