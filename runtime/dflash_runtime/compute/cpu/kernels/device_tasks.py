"""Calls of a step whose other parts a device computes: start a graph there, wait for what it gives.

What takes too long, or fails, is left to the host: it can wait without a core, and ask the driver.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task
from dflash_runtime.compute.cpu.kernels.asked_tasks import run_asked
from dflash_runtime.compute.cpu.kernels.step_tasks import run_place
from dflash_runtime.compute.cpu.kernels.words import HOST, STOP, Call, calls_kernel, get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.atomics import atomic_load, atomic_store
from dflash_runtime.compute.cpu.simd.types import I32, I64, emit_call, i64, primitive
from dflash_runtime.compute.cpu.threads import system

LAUNCH, GRAPH, STREAM, NEXT_SIGNAL = range(4)
SIGNAL, SPIN_NS = range(2)

_NUM_POLLS = 16
"""Polls of the signal between two reads of the clock."""


@primitive(i64, i64, i64, i64)
def _launch(builder: Any, function: Any, graph: Any, stream: Any) -> Any:
    """Call ``int(graph, stream)`` of the driver."""
    return builder.sext(emit_call(builder, I32, function, [graph, stream]), I64)


def _run_launch(args: int, counter: int, pool: int) -> None:
    if get(args, NEXT_SIGNAL) != 0:
        atomic_store(get(args, NEXT_SIGNAL), 0)
    if _launch(get(args, LAUNCH), get(args, GRAPH), get(args, STREAM)) != 0:
        v.store_i64(counter + 8 * STOP, HOST)


def _run_await(args: int, counter: int, pool: int) -> None:
    signal, end_ns = get(args, SIGNAL), system.monotonic_ns() + get(args, SPIN_NS)
    while atomic_load(signal) == 0:
        for _ in range(_NUM_POLLS):
            system.pause()
        if system.monotonic_ns() >= end_ns and atomic_load(signal) == 0:
            v.store_i64(counter + 8 * STOP, HOST)
            return


def launch_call(launcher: tuple[int, int, int], next_signal: int) -> Call:
    """Start a graph; see `Graph.launcher`. `next_signal`: address of the signal that it will set,
    which is cleared before, or 0."""
    return Call(run_launch().address, [*launcher, next_signal])


def await_call(signal: int, spin_ns: int) -> Call:
    """Poll for so long until the signal at this address is not 0; it has eight bytes of its own."""
    return Call(run_await().address, [signal, spin_ns])


def compile_calls() -> None:
    """Compile what such steps are made of, now rather than in the first one."""
    for compiled in (run_launch, run_await, run_asked, run_place, calls_kernel):
        compiled()


@cache
def run_launch() -> RowFunction:
    return compile_task(_run_launch)


@cache
def run_await() -> RowFunction:
    return compile_task(_run_await)
