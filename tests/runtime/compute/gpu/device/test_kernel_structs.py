"""Structs of kernels, read from C++ and as compilers lay them out."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.gpu.device.kernel_sources import KERNELS_FOLDER
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct

HEADER = """
// There may be MOST 5 of them.
/* Or MOST = 7,
   or MOST 8. */
constexpr int MOST = 3;
struct Inner {
    u8 *place;
    int size;  // of what is there
};
struct Refused {
    int values[MOST], (*call)(int);
};
"""
SOURCE = """
#include "inner.cuh"
struct Args {
    const float *x, *y;  // [T], and
                         // (more of the same)
    int num_tokens, capacities[MOST];
    const Inner *others[PEERS];
    Inner inner, both[2];
    u64 bytes;
    float eps;

    int method() const { return num_tokens; }
};
"""
TYPES = """
#include <cstddef>
#include <cstdio>
using u8 = unsigned char; using u64 = unsigned long long;
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel file in a folder of its own, instead of all others."""
    (tmp_path / "inner.cuh").write_text(HEADER)
    (tmp_path / "args.cu").write_text(SOURCE)
    sources = "dflash_runtime.compute.gpu.device.kernel_sources"
    monkeypatch.setattr(f"{sources}.KERNELS_FOLDER", tmp_path)
    return str(tmp_path / "args.cu")


def test_fields_lie_where_a_compiler_puts_them(file: str, tmp_path: Path) -> None:
    args = kernel_struct(file, "Args", PEERS=7)
    names = ["x", "y", "num_tokens", "capacities", "others", "inner", "both", "bytes", "eps"]
    assert [name for name, *_ in args._fields_] == names
    offsets = "".join(f'    std::printf("%zu ", offsetof(Args, {name}));\n' for name in names)
    program = f'{TYPES}#define PEERS 7\n{SOURCE}\nint main() {{\n{offsets}    std::printf("%zu",'
    (tmp_path / "main.cpp").write_text(f"{program} sizeof(Args));\n}}\n")
    binary = tmp_path / "main"
    subprocess.run(["g++", "-std=c++17", tmp_path / "main.cpp", "-o", binary], check=True)
    printed = subprocess.run([binary], check=True, capture_output=True, text=True).stdout
    found = [getattr(args, name).offset for name in names]
    assert printed.split() == [str(number) for number in (*found, ctypes.sizeof(args))]


def test_a_struct_of_a_header_is_one_type(file: str) -> None:
    inner = kernel_struct("inner.cuh", "Inner")
    args = kernel_struct(file, "Args", PEERS=1)(inner=inner(place=5, size=2))
    assert (args.inner.place, args.inner.size) == (5, 2)
    assert kernel_struct(file, "Inner") is inner


@pytest.mark.parametrize(("name", "what"), [("Missing", "Missing"), ("Refused", r"call")])
def test_what_cannot_be_read_is_named(file: str, name: str, what: str) -> None:
    with pytest.raises(SettingsError, match=what):
        kernel_struct(file, name)


def test_a_size_that_is_not_known_is_named(file: str) -> None:
    with pytest.raises(SettingsError, match="PEERS"):
        kernel_struct(file, "Args")


def test_no_two_files_declare_the_same_arguments() -> None:
    names = [
        name
        for path in KERNELS_FOLDER.rglob("*.cu*")
        for name in re.findall(r"^struct (\w+Args) {", path.read_text(), re.MULTILINE)
    ]
    assert len(names) > 40
    assert len(names) == len(set(names))
