"""Compiles and runs the program that tier_test sends to its standard input, then exits.

A separate file that starts quickly: it needs llvmlite and none of our packages.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from contextlib import suppress
from typing import Any

import llvmlite.binding

llvm: Any = llvmlite.binding

_MISSING = re.compile(r"\bllvm\.[a-z0-9_.]+")
_ROOM_BYTES = 4096


def main() -> None:
    """Exits with 0 if the program's output is as expected; else the last line says why."""
    job = json.load(sys.stdin)
    with suppress(RuntimeError):  # newer llvmlite does this by itself, and raises
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    try:
        module = llvm.parse_assembly(job["program"])
        module.verify()
    except RuntimeError as error:
        sys.exit(" ".join(str(error).split()))
    target = llvm.Target.from_triple(module.triple)
    machine = target.create_target_machine(cpu=job["cpu"], features=job["features"], opt=2)
    # LLVM takes an unknown intrinsic for an external function.
    missing = _MISSING.search(machine.emit_assembly(module))
    if missing:
        sys.exit(f"no intrinsic {missing[0]}")
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    address = engine.get_function_address("program")
    weights, x = (ctypes.create_string_buffer(bytes.fromhex(job[key])) for key in ("weights", "x"))
    out = ctypes.create_string_buffer(_ROOM_BYTES)
    numbers = [ctypes.c_int64(ctypes.addressof(each)) for each in (weights, x, out)]
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(address)(*numbers)
    expected = bytes.fromhex(job["expected"])
    if out.raw[: len(expected)] != expected:
        sys.exit("wrong results")


if __name__ == "__main__":
    main()
