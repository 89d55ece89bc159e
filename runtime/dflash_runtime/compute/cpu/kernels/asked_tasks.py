"""A layer of routed experts of one token, whose owners are other processes or this one: posted to
daemons, computed here, collected from daemons and added, without Python.

The sums are added in the order of `experts.runtime`, this process's first and then those of daemons
from the last to the first, so that they have the same bits.

What compiled code cannot decide it leaves to the host, by writing why into the word at
``counter + 8 * STOP``, and returns: WAIT, to be called again, when a reply takes longer than a
slice; HOST, when the host is to compute the layer. The layer is then as if nothing had been
computed, but for requests that may be in flight.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dflash_protocol.ring import compiled as native
from dflash_protocol.ring import compiled_experts as ring
from dflash_runtime.compute.cpu.compile.compiling import RowFunction, compile_task, helper
from dflash_runtime.compute.cpu.kernels import experts_kernel as experts
from dflash_runtime.compute.cpu.kernels.step_tasks import (
    LOCAL_IDS,
    NUM_ROUTED_WORDS,
    NUM_USED,
    ROUNDED,
    SELECTIONS,
    TOPK_IDS,
    TOPK_WEIGHTS,
    fill_sums,
    round_sums,
)
from dflash_runtime.compute.cpu.kernels.words import HOST, STOP, WAIT, get
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.atomics import relaxed_load, relaxed_store
from dflash_runtime.compute.cpu.simd.types import I64, emit_call, i64, primitive
from dflash_runtime.compute.cpu.threads import system
from dflash_runtime.compute.cpu.threads.parallel import IDLE, REGION

# Words of a layer, which follow those of step_tasks; LOCAL_IDS are the owners'.
LAYER_ID, OWNER_OF, NUM_IDS, TABLE, NUM_WORDS = range(NUM_ROUTED_WORDS, NUM_ROUTED_WORDS + 5)
"""OWNER_OF: [E] int32, by global id: index of the owner, or -1: the host must ask; E is NUM_IDS.
TABLE: of all layers, the words below."""

# Words of the table, before those of the owners.
(
    ENABLED,  # 0: the host is to compute all layers
    POST,  # functions of the ring
    COLLECT,
    NUM_OWNERS,
    OWN,  # index of the owner whose experts these threads compute, or -1
    DEVICE,  # index of the owner whose experts this process's device computes, or -1
    PROGRESS,  # of the layer at hand: 1 + the owner that is awaited, or 0 before it is posted
    STATUS,  # what a request has ended with if it failed, and whose it was
    FAILED,
    NUM_LAYERS,  # totals: layers computed
    NUM_HOT_ONLY,  # those without other owners than the device, or else than this process
    FREES_CORES,  # 1: idle threads sleep at once while daemons compute, which need their cores
    FIRST_OWNER,
) = (*range(12), 16)

# Words of an owner, after those of its requests; of the latter this process's owners use their
# batch, the number of replies, and the seconds of computing.
# MAILED: 1: a device asks it, through a mailbox; its pairs are only counted here.
PORT, MOST_SPIN_NS, NUM_PAIRS, MAILED = range(ring.REQUEST_WORDS, ring.REQUEST_WORDS + 4)
OWNER_WORDS = ring.REQUEST_WORDS + 4


@primitive(i64, i64, i64, i64)
def call_ring(builder: Any, function: Any, port: Any, request: Any) -> Any:
    """Call ``(port, request)``, one of the ring's functions."""
    return emit_call(builder, I64, function, [port, request])


@helper
def _owner(table: int, index: int) -> int:
    """Address of an owner's words."""
    return table + 8 * (FIRST_OWNER + OWNER_WORDS * index)


@helper
def _increase(words: int, word: int, amount: int) -> None:
    v.store_i64(words + 8 * word, get(words, word) + amount)


@helper
def _share_out(args: int, table: int) -> bool:
    """Give each owner its pairs, by ascending local id; whether all have an owner."""
    for index in range(get(table, NUM_OWNERS)):
        v.store_i64(_owner(table, index) + 8 * ring.BATCH_PAIRS, 0)
    for pair in range(get(args, NUM_USED)):
        chosen = v.load_i32(get(args, TOPK_IDS) + 4 * pair)
        if chosen < 0 or chosen >= get(args, NUM_IDS):
            return False
        index = v.load_i32(get(args, OWNER_OF) + 4 * chosen)
        if index < 0:
            return False
        words, expert = _owner(table, index), v.load_i32(get(args, LOCAL_IDS) + 4 * chosen)
        ids, weights = get(words, ring.BATCH_EXPERT_IDS), get(words, ring.BATCH_WEIGHTS)
        place = get(words, ring.BATCH_PAIRS)
        v.store_i64(words + 8 * ring.BATCH_PAIRS, place + 1)
        while place > 0 and v.load_i32(ids + 4 * (place - 1)) > expert:
            v.store_i32(ids + 4 * place, v.load_i32(ids + 4 * (place - 1)))
            v.store_float(weights + 4 * place, v.load_float(weights + 4 * (place - 1)))
            place -= 1
        if place > 0 and v.load_i32(ids + 4 * (place - 1)) == expert:
            return False  # two pairs of one expert would be one group
        v.store_i32(ids + 4 * place, expert)
        v.store_float(weights + 4 * place, v.load_float(get(args, TOPK_WEIGHTS) + 4 * pair))
    return True


@helper
def _is_asked(table: int, index: int) -> bool:
    """Whether it is a daemon that has pairs, and that no device asks."""
    words = _owner(table, index)
    num_pairs: int = get(words, ring.BATCH_PAIRS)
    is_here = index == get(table, OWN) or index == get(table, DEVICE)
    return not is_here and num_pairs > 0 and get(words, MAILED) == 0


@helper
def _note_failure(table: int, index: int, status: int) -> None:
    v.store_i64(table + 8 * STATUS, status)
    v.store_i64(table + 8 * FAILED, index)


@helper
def _post_all(args: int, table: int) -> bool:
    for index in range(get(table, NUM_OWNERS)):
        if _is_asked(table, index):
            words = _owner(table, index)
            v.store_i64(words + 8 * ring.BATCH_GROUPS, get(words, ring.BATCH_PAIRS))
            v.store_i64(words + 8 * ring.BATCH_HIDDEN, get(args, experts.HIDDEN))
            v.store_i64(words + 8 * ring.REQUEST_LAYER, get(args, LAYER_ID))
            v.store_i64(words + 8 * ring.REQUEST_OUT, get(args, experts.OUT))
            status = call_ring(get(table, POST), get(words, PORT), words)
            if status < 0:
                _note_failure(table, index, status)
                return False
    return True


@helper
def _compute_own(args: int, table: int, counter: int, pool: int) -> bool:
    """Clear the sums, and add those of the experts that these threads compute."""
    fill_sums(args, 0.0)
    if get(table, OWN) < 0:
        return True
    words = _owner(table, get(table, OWN))
    num_pairs = get(words, ring.BATCH_PAIRS)
    if num_pairs == 0:
        return True
    if get(args, experts.NUM_EXPERTS) == 0:
        return False  # no bank for compiled code
    v.store_i64(args + 8 * experts.NUM_GROUPS, num_pairs)
    started_ns = system.monotonic_ns()
    is_sound = experts.run_experts(args, counter, pool)
    compute_s = words + 8 * ring.REQUEST_COMPUTE_S
    taken_s = 1e-9 * (system.monotonic_ns() - started_ns)
    v.store_double(compute_s, v.load_double(compute_s) + taken_s)
    return is_sound != 0  # type: ignore[no-any-return]


@helper
def _collect(table: int, index: int) -> int:
    words = _owner(table, index)
    before_s = v.load_double(words + 8 * ring.REQUEST_COMPUTE_S)
    status = call_ring(get(table, COLLECT), get(words, PORT), words)
    if status >= 0:
        # As on the host: polling pays only for replies that come soon.
        compute_s = v.load_double(words + 8 * ring.REQUEST_COMPUTE_S) - before_s
        most_ns = get(words, MOST_SPIN_NS)
        spin_ns = most_ns if compute_s * 1e9 < most_ns else 0
        v.store_i64(words + 8 * ring.REQUEST_SPIN_NS, spin_ns)
    return status  # type: ignore[no-any-return]


@helper
def _count(args: int, table: int) -> None:
    # Hot are the experts of the device, or where there is none those of this process.
    hot = get(table, OWN) if get(table, DEVICE) < 0 else get(table, DEVICE)
    is_hot_only = 1
    for index in range(get(table, NUM_OWNERS)):
        words = _owner(table, index)
        num_pairs = get(words, ring.BATCH_PAIRS)
        _increase(words, NUM_PAIRS, num_pairs)
        if num_pairs > 0:
            is_hot_only = is_hot_only if index == hot else 0
            if not _is_asked(table, index):
                _increase(words, ring.REQUEST_NUM_REPLIES, 1)
    _increase(table, NUM_LAYERS, 1)
    _increase(table, NUM_HOT_ONLY, is_hot_only)
    for pair in range(get(args, NUM_USED)):
        chosen = v.load_i32(get(args, TOPK_IDS) + 4 * pair)
        _increase(get(args, SELECTIONS), chosen, 1)


@helper
def _ask(args: int, table: int, counter: int, pool: int) -> int:
    """0, or why it stopped."""
    if get(table, ENABLED) == 0:
        return HOST
    if get(table, PROGRESS) == 0:
        if not _share_out(args, table) or not _post_all(args, table):
            return HOST
        if not _compute_own(args, table, counter, pool):
            return HOST
        if get(table, FREES_CORES) != 0:
            relaxed_store(pool + 8 * IDLE, relaxed_load(pool + 8 * REGION))
        v.store_i64(table + 8 * PROGRESS, get(table, NUM_OWNERS))
    while get(table, PROGRESS) > 0:
        index = get(table, PROGRESS) - 1
        if _is_asked(table, index):
            status = _collect(table, index)
            if status == native.NOTHING:
                return WAIT
            if status < 0:
                _note_failure(table, index, status)
                return HOST
        v.store_i64(table + 8 * PROGRESS, index)
    return 0


def _run_asked(args: int, counter: int, pool: int) -> None:
    table = get(args, TABLE)
    stop = _ask(args, table, counter, pool)
    if stop != 0:
        v.store_i64(counter + 8 * STOP, stop)
        return
    _count(args, table)
    if get(args, ROUNDED) != 0:
        round_sums(args)


@cache
def run_asked() -> RowFunction:
    """The function of calls that ask owners."""
    return compile_task(_run_asked)
