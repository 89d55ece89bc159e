"""System calls of compiled code: clocks, core affinity, sleep and wake-up, reads of files.

Calls functions of the C library by name. Where there is no Linux, sleep is a timeout, cores are
unknown, and reads are refused.
"""

from __future__ import annotations

from typing import Any

from dflash_runtime.compute.cpu.simd.types import I32, I64, i64, primitive, void
from dflash_runtime.compute.cpu.simd.untyped import cgutils, ir

_CLOCK_MONOTONIC = 1
_CLOCK_OF_THREAD = 6  # in the lowest three bits, below the complement of its id

_FUTEX_SYSCALL = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_ALL_WAITERS = (1 << 31) - 1
READ_SYSCALLS = {
    "x86_64": {"setup": 206, "destroy": 207, "getevents": 208, "submit": 209},
    "aarch64": {"setup": 0, "destroy": 1, "submit": 2, "getevents": 4},
}
"""Linux's asynchronous reads (io_setup(2) and those beside it), by machine."""
_NAP_US = 100

_TIME = ir.ArrayType(I64, 2)  # seconds, nanoseconds
_CORES = ir.ArrayType(I64, 16)  # one bit for each core, as many as cpu_set_t has


def emit_pause(builder: Any) -> None:
    """Tell the CPU that this is a spinning loop."""
    if _machine(builder) == "aarch64":
        # ARM's yield does nothing on most cores; isb, which empties the pipeline, takes about as
        # long as x86's pause. 15: the whole system, its only operand.
        kind = ir.FunctionType(ir.VoidType(), [I32])
        builder.call(_external(builder, kind, "llvm.aarch64.isb"), [I32(15)])
    else:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(_external(builder, kind, "llvm.x86.sse2.pause"), [])


def emit_monotonic_ns(builder: Any) -> Any:
    return _emit_clock(builder, I32(_CLOCK_MONOTONIC))


def emit_cpu_ns(builder: Any, thread_id: Any) -> Any:
    """CPU time of a thread of this process."""
    if not _is_linux(builder):
        return _emit_clock(builder, I32(_CLOCK_MONOTONIC))
    complement = builder.shl(builder.not_(builder.trunc(thread_id, I32)), I32(3))
    return _emit_clock(builder, builder.or_(complement, I32(_CLOCK_OF_THREAD)))


def _emit_clock(builder: Any, clock: Any) -> Any:
    time = cgutils.alloca_once(builder, _TIME)
    builder.store(ir.Constant(_TIME, None), time)
    kind = ir.FunctionType(I32, [I32, time.type])
    builder.call(_external(builder, kind, "clock_gettime"), [clock, time])
    seconds, nanoseconds = (builder.load(_item(builder, time, I32(i))) for i in range(2))
    return builder.add(builder.mul(seconds, I64(10**9)), nanoseconds)


def emit_current_core(builder: Any) -> Any:
    """The core this thread runs on, or ran on a moment ago; negative if unknown."""
    if not _is_linux(builder):
        return I64(-1)
    kind = ir.FunctionType(I32, [])
    return builder.sext(builder.call(_external(builder, kind, "sched_getcpu"), []), I64)


def emit_leave_core(builder: Any, core: Any) -> None:
    """Move this thread to another core, unless it is bound to this one. It may come back."""
    _emit_move(builder, I64(0), core, has_core=False)


def emit_fetch_thread(builder: Any, thread_id: Any, core: Any) -> None:
    """Move a thread to this core, unless it is bound to others. It may leave again."""
    _emit_move(builder, thread_id, core, has_core=True)


def _emit_move(builder: Any, thread_id: Any, core: Any, *, has_core: bool) -> None:
    if not _is_linux(builder):
        return
    allowed, wanted = (cgutils.alloca_once(builder, _CORES) for _ in range(2))
    kind = ir.FunctionType(I32, [I32, I64, allowed.type])
    arguments = [builder.trunc(thread_id, I32), I64(8 * _CORES.count)]
    builder.store(ir.Constant(_CORES, None), allowed)
    builder.call(_external(builder, kind, "sched_getaffinity"), [*arguments, allowed])
    builder.store(ir.Constant(_CORES, None) if has_core else builder.load(allowed), wanted)
    index = builder.trunc(builder.and_(builder.lshr(core, I64(6)), I64(_CORES.count - 1)), I32)
    bit = builder.shl(I64(1), builder.and_(core, I64(63)))
    bits = bit if has_core else builder.not_(bit)
    word = builder.and_(builder.load(_item(builder, allowed, index)), bits)
    builder.store(word, _item(builder, wanted, index))
    for cores in (wanted, allowed):  # the first is refused if it is empty
        builder.call(_external(builder, kind, "sched_setaffinity"), [*arguments, cores])


def emit_sleep_while(builder: Any, address: Any, value: Any, timeout_us: Any) -> None:
    """Sleep if the low half of the word at `address` equals that of `value`, until woken or the
    timeout (< 1 s).

    May also return spuriously.
    """
    number = _futex_syscall(builder)
    if number is None:
        kind = ir.FunctionType(I32, [I32])
        builder.call(_external(builder, kind, "usleep"), [I32(_NAP_US)])
        return
    time = cgutils.alloca_once(builder, _TIME)
    builder.store(I64(0), _item(builder, time, I32(0)))
    builder.store(builder.mul(timeout_us, I64(1000)), _item(builder, time, I32(1)))
    # The kernel compares four bytes. Both machines are little-endian.
    low = builder.and_(value, I64(0xFFFFFFFF))
    until = builder.ptrtoint(time, I64)
    arguments = [address, I64(_FUTEX_WAIT_PRIVATE), low, until, I64(0), I64(0)]
    builder.call(_syscall(builder), [I64(number), *arguments])


def emit_wake(builder: Any, address: Any) -> None:
    """Wake all threads that sleep on the word."""
    number = _futex_syscall(builder)
    if number is not None:
        all_waiters = I64(_ALL_WAITERS)
        arguments = [address, I64(_FUTEX_WAKE_PRIVATE), all_waiters, I64(0), I64(0), I64(0)]
        builder.call(_syscall(builder), [I64(number), *arguments])


def emit_submit_read(builder: Any, context: Any, pointer: Any) -> Any:
    """Begin the read that the control block at `*pointer` says; 1, or what refused it."""
    number = _read_syscall(builder, "submit")
    if number is None:
        return I64(-1)
    return builder.call(_syscall(builder), [I64(number), context, I64(1), pointer])


def emit_ended_reads(builder: Any, context: Any, most: Any, events: Any, timeout_ms: Any) -> Any:
    """Wait for a read that has ended, and write up to `most` of these to `events`; their number, 0
    after a timeout (< 1 s), negative for what refused it."""
    number = _read_syscall(builder, "getevents")
    if number is None:
        return I64(-1)
    time = cgutils.alloca_once(builder, _TIME)
    builder.store(I64(0), _item(builder, time, I32(0)))
    builder.store(builder.mul(timeout_ms, I64(10**6)), _item(builder, time, I32(1)))
    until = builder.ptrtoint(time, I64)
    arguments = [context, I64(1), most, events, until]
    return builder.call(_syscall(builder), [I64(number), *arguments])


pause = primitive(void)(emit_pause)
monotonic_ns = primitive(i64)(emit_monotonic_ns)
cpu_ns = primitive(i64, i64)(emit_cpu_ns)
current_core = primitive(i64)(emit_current_core)
leave_core = primitive(void, i64)(emit_leave_core)
fetch_thread = primitive(void, i64, i64)(emit_fetch_thread)
sleep_while = primitive(void, i64, i64, i64)(emit_sleep_while)
wake = primitive(void, i64)(emit_wake)
submit_read = primitive(i64, i64, i64)(emit_submit_read)
ended_reads = primitive(i64, i64, i64, i64, i64)(emit_ended_reads)


def _machine(builder: Any) -> str:
    machine: str = builder.module.triple.split("-")[0]
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(machine, machine)


def _is_linux(builder: Any) -> bool:
    return "linux" in builder.module.triple


def _futex_syscall(builder: Any) -> int | None:
    return _FUTEX_SYSCALL.get(_machine(builder)) if _is_linux(builder) else None


def _read_syscall(builder: Any, name: str) -> int | None:
    return READ_SYSCALLS.get(_machine(builder), {}).get(name) if _is_linux(builder) else None


def _syscall(builder: Any) -> Any:
    return _external(builder, ir.FunctionType(I64, [I64], var_arg=True), "syscall")


def _external(builder: Any, kind: Any, name: str) -> Any:
    return cgutils.get_or_insert_function(builder.module, kind, name)


def _item(builder: Any, array: Any, index: Any) -> Any:
    return builder.gep(array, [I32(0), index])
