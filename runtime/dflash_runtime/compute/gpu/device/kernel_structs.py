"""Structs of kernels for ctypes, read from the kernels' files: their only definition.

A kernel takes one struct. Its fields are declared line by line, before an empty line if there is
more in it: numbers, pointers, other structs, and arrays of them. The compiler's layout and that of
ctypes are the same for these; `check_args` compares sizes when a kernel is loaded.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from dflash_protocol.errors import SettingsError
from dflash_runtime.compute.gpu.device.kernel_sources import kernel_source

_NUMBERS: dict[str, Any] = {
    "int": ctypes.c_int32,
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DECLARATION = re.compile(r"(?:const )?(\w+) (.+);")
_DECLARED = re.compile(r"(\*?)(\w+)(?:\[(\w+)\])?")


@cache
def kernel_struct(file: str, name: str, **defines: int) -> type[ctypes.Structure]:
    """A struct that a kernel file, or a header that it includes, declares. Pointers are addresses.

    `defines`: sizes of arrays that the file is compiled with.
    Raises: SettingsError if it is not there, or has other members than the above.
    """
    source = kernel_source(file)
    declared = re.compile(rf"^struct {name} {{\n(.*?)^}};", re.MULTILINE | re.DOTALL)
    if found := declared.search(source.text):
        texts = (source.text, *(text for _, text in source.headers))
        texts = tuple(_COMMENT.sub("", text) for text in texts)
        return _struct(file, name, tuple(_fields(file, texts, found[1], defines)))
    for header, text in source.headers:
        if declared.search(text):
            return kernel_struct(header, name, **defines)
    raise SettingsError(f"{file} has no struct {name}")


@cache
def _struct(file: str, name: str, fields: tuple[tuple[str, Any], ...]) -> type[ctypes.Structure]:
    """The same type for all files that include this one, whatever else they define."""
    del file
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _fields(
    file: str, texts: tuple[str, ...], body: str, defines: dict[str, int]
) -> Iterator[tuple[str, Any]]:
    for line in body.splitlines():
        if not line:
            return
        declaration = line.partition("//")[0].strip()
        if not declaration:
            continue
        match = _DECLARATION.fullmatch(declaration)
        if match is None:
            raise SettingsError(f"{file}: {declaration!r} declares no fields")
        for each in match[2].split(", "):
            declared = _DECLARED.fullmatch(each)
            if declared is None:
                raise SettingsError(f"{file}: {declaration!r} declares no fields")
            pointer, name, size = declared.groups()
            kind: Any = ctypes.c_void_p if pointer else _NUMBERS.get(match[1])
            if kind is None:
                kind = kernel_struct(file, match[1], **defines)
            if size is not None:
                kind *= defines[size] if size in defines else _number(file, texts, size)
            yield name, kind


def _number(file: str, texts: tuple[str, ...], size: str) -> int:
    """A number, or the value of a constant."""
    if size.isdigit():
        return int(size)
    for text in texts:
        if found := re.search(rf"\b{size}(?: =)? (\d+)\b", text):
            return int(found[1])
    raise SettingsError(f"{file} has no constant {size}")
