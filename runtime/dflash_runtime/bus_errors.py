"""An error line for processes that SIGBUS ends.

Reading a mapped page whose file was cut short, or whose disk failed, raises SIGBUS inside compiled
code, where Python cannot run: the handler is a few compiled instructions that write the line.
"""

from __future__ import annotations

import ctypes
import faulthandler
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

_STDERR_FD = 2
_kept: list[object] = []
"""Keeps the handler's code and text alive until the process ends."""


def explain_bus_errors(program: str, model_path: Path) -> None:
    """Write one line to stderr at SIGBUS, before that signal ends the process. For programs.

    Does nothing without llvmlite, or if Python's faulthandler is enabled.
    """
    if faulthandler.is_enabled():
        return
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(model_path))
    line = (
        # docs: the process ends: put the file back as a whole, look at the system's log for errors
        # of the disk, start again
        f"{program}: error: {shown}, or memory shared with another process, was cut short while it "
        "was in use, or its disk failed (SIGBUS)\n"
    )
    text = ctypes.create_string_buffer(line.encode(errors="backslashreplace"))
    try:
        engine, address = _compiled(ctypes.addressof(text), len(text.value))
    except (ImportError, RuntimeError):  # then without the line
        return
    _kept[:] = [engine, text]
    library = ctypes.CDLL(None)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal(signal.SIGBUS, address)


def _compiled(text_address: int, text_bytes: int) -> tuple[Any, int]:
    """The owner of the handler's code, and its address. Raises: ImportError, RuntimeError."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    module = ir.Module("bus_error")
    module.triple = llvm.get_process_triple()
    i32, i64 = ir.IntType(32), ir.IntType(64)
    write = ir.Function(module, ir.FunctionType(i64, [i32, i64, i64]), "write")
    set_handler = ir.Function(module, ir.FunctionType(i64, [i32, i64]), "signal")
    handler = ir.Function(module, ir.FunctionType(ir.VoidType(), [i32]), "explain")
    wait = ir.Function(module, ir.FunctionType(i32, []), "pause")
    was_said = ir.GlobalVariable(module, i32, "was_said")
    was_said.initializer = i32(0)
    was_said.linkage = "internal"
    builder = ir.IRBuilder(handler.append_basic_block())
    # Several threads may fault: the first writes the line, the others wait for the end.
    found = builder.atomic_rmw("xchg", was_said, i32(1), "seq_cst")
    with builder.if_then(builder.icmp_unsigned("!=", found, i32(0))):
        builder.call(wait, [])
        builder.ret_void()
    builder.call(write, [i32(_STDERR_FD), i64(text_address), i64(text_bytes)])
    # On return the instruction faults again, with the default handler, which ends the process.
    builder.call(set_handler, [handler.args[0], i64(0)])
    builder.ret_void()

    with suppress(RuntimeError):  # newer llvmlite does this by itself, and raises
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
    engine.finalize_object()
    return engine, engine.get_function_address("explain")
