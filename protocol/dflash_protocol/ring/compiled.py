"""Compiles the ring's kernels, and defines what they share with Python: ports, tables, statuses.

Kernels publish, take, copy with checksum and conversion, spin and sleep; others sort pairs on their
way into the ring. Numba compiles them once per machine and caches the result on disk if it can. No
call holds the GIL. The code is in `client_kernels`, `server_kernels` and `pair_kernels`, built on
`shared_kernels` and `emit`; only these import numba, when `kernels()` is called. `layout` has the
memory layout and why its order of accesses is correct.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import cache_folder

_LOG = logging.getLogger(__name__)

# A port: this process's private record of a slot, an array of int64 aligned to a cache line.
(
    REQUEST_SLOT, REPLY_SLOT, REQUEST_WORD, REPLY_WORD, SLEEPS, PEER_SLEEPS,  # addresses
    GENERATION, NUM_SLOTS, SLOT_IDX, MAX_TOKENS, HIDDEN_SIZE, MAX_PAIRS, MAX_EXPERTS_USED, NARROW,
    LAST, REFUSED, BUSY,
    HIDDEN, EXPERT_IDS, GROUP_STARTS, TOKEN_INDICES, WEIGHTS, TEXT,  # addresses of private arrays
    LEAST_LAG, REPLIED_NS, RUNG, BELL, ENTRIES, MOVES, SENDS, MOVED_TOKENS,
    LAYERS, NUM_LAYERS, SUMS, REPLIES,
    NEXT_SEQUENCE, IN_FLIGHT,
) = range(37)  # fmt: skip
ROUTING_BOUND, WAITED, HEADER, STATE = 38, 39, 40, 56
PORT_WORDS = 88
"""NARROW: the payload type allowed besides the wide one. LAST: the sequence taken last. REFUSED: a
sequence word that was refused, so that it is counted once. BUSY: 1 from taking a request until it
is answered. BELL: the peer's bell. MOVES: 1 if rows may be moved by a device; these stay in the
slot. ROUTING_BOUND: number of experts for which the taken request's routing is valid, 0 if it is
not. WAITED: float64, how long that request had been waiting. From HEADER on, the copy of the slot's
header; from STATE on, the checksum's lanes.

At a client: ENTRIES, address of its poll entries; SENDS, the payload type of the rows that it
sends; MOVED_TOKENS, how many rows a device has moved into the slot; NEXT_SEQUENCE, of
the next request that `post` sends; IN_FLIGHT, of the one that waits for `collect`, or 0.

In the port of a link's first slot, at the server: LEAST_LAG, float64, the least time from a
request's stamp to its reading; REPLIED_NS, when the last reply was sent; RUNG, not 0 if the bell
was rung and has not been silenced yet; LAYERS and NUM_LAYERS, the link's CompiledExperts
(`compiled_experts`); SUMS, address of an array for the sums of these; REPLIES, the payload type of
sums."""

NUM_LINKS, NEXT_LINK, IS_QUICK, SERVICE, FIRST_LINK = range(5)
"""A server's table: number of links, the link to look at first, 1 if the last request came soon
after the reply before it, the address of the words below, then that of each link's first port."""

(
    CHANGED, BUSY_SINCE_NS, RETURN_NS, LOOK_NS, CHECKED_UNTIL_NS, IS_OTHER_READY, NUM_ANSWERED,
    SAVED,
) = range(8)  # fmt: skip
BATCH, SERVICE_WORDS = 24, 40
"""Words of a server, which outlive its tables. CHANGED: set by any thread, compiled code then
returns to Python before the next request is computed. BUSY_SINCE_NS: when the request that compiled
code computes was begun, or 0. RETURN_NS: after this time it returns to Python when it has answered
a request. LOOK_NS: after this time it looks whether another descriptor is ready, and then returns.
CHECKED_UNTIL_NS: until when replies may be sent. IS_OTHER_READY: whether the last sleep or look
found one of the other descriptors ready. NUM_ANSWERED: requests answered without Python.
SAVED: the header of the request at hand, while its reply is written. BATCH: its words as of
`compiled_experts`."""

LOOK_EVERY_NS = 2_000_000

POLLIN = 1 << 32
FOUND_SHIFT = 48
"""Entries for poll(2): descriptor | POLLIN; the events found start at bit FOUND_SHIFT."""
CLIENT_RUNG = 2
"""Index behind a client's two entries, its bell and the descriptor of a lost link; same meaning as
RUNG at a server."""

NOTHING, FAILURE, OUT_OF_RANGE, BAD_ARRAYS, TOO_LARGE = range(-1, -6, -1)
ABORTED, LATE, LOST, NOT_FINITE = range(-32, -36, -1)
"""Results of `collect` besides NOTHING, FAILURE and FAILURE - violation."""
UNSENT = -36
"""Result of `post` if it has sent nothing, and of `collect` if nothing is in flight."""
(
    STALE, WRONG_SEQUENCE, WRONG_GENERATION, WRONG_KIND, WRONG_COUNTS, WRONG_PHASE, WRONG_PAYLOAD,
    WRONG_BYTES, WRONG_CHECKSUM, WRONG_TIMES, OVER_CAPACITY,
) = range(1, 12)  # fmt: skip
VIOLATIONS = {
    STALE: ("stale", "a slot was published under a sequence that is not its next"),
    WRONG_SEQUENCE: ("stale", "a slot holds another sequence than was published"),
    WRONG_GENERATION: ("stale", "a slot is of another generation of the link"),
    WRONG_KIND: ("malformed", "a slot holds another kind of message than belongs there"),
    WRONG_COUNTS: ("malformed", "a slot's counts do not fit each other or what was asked"),
    WRONG_PHASE: ("malformed", "a slot names no known phase or layer"),
    WRONG_PAYLOAD: ("malformed", "a slot has a payload type that was not negotiated"),
    WRONG_BYTES: ("malformed", "a slot's bytes do not follow from its counts"),
    WRONG_CHECKSUM: ("checksum", "a slot was damaged: its checksum is wrong"),
    WRONG_TIMES: ("malformed", "a slot's times are no numbers"),
    OVER_CAPACITY: ("capacity", "a slot's counts exceed the capacity of the link"),
}
"""By violation: the error code on the wire, and the message."""

ANSWERED, COMPUTED = 254, 255
"""Results of `serve` besides violations: the request has been answered; or its sums were computed,
and Python is to send them."""

IS_NOT_FINITE = 1 << 62
"""Flag added to a reply's payload bytes: some of its sums are NaN or infinite."""

STATUS_BITS = 8
COUNT_BITS = 32
"""Bits of the second count in a packed pair: see `two_counts`."""
NUM_PHASES = 3
QUICK_NS = 100_000
"""A server spins for the next request if the last one came within this time after the reply before
it, or within the spin time if that is longer."""
NUM_POLLS = 16
"""Polls of the words between two readings of the clock."""

_FOLDER_PREFIX = "ring-"
_NUM_FOLDERS_KEPT = 4


class Kernels(NamedTuple):
    """The compiled functions. Arguments are int64, except arrays and times, which are float64."""

    send_request: Callable[..., int]
    """(port, sequence, layer_id, phase, deadline_ms, hidden [T, H] float32, expert_ids [G],
    group_starts [G+1], token_indices [P] int32, weights [P] float32): payload bytes; or BAD_ARRAYS,
    TOO_LARGE, OUT_OF_RANGE of a narrow type, and nothing was published."""
    send_moved_request: Callable[..., int]
    """(port, sequence, layer_id, phase, deadline_ms, digest, expert_ids, group_starts,
    token_indices, weights): like send_request, for rows that a device has moved into the slot."""
    send_reply: Callable[..., int]
    """(port, sequence, payload, compute_s, queue_s, sums [T, H] float64): as send_request."""
    send_moved_reply: Callable[..., int]
    """(port, sequence, compute_s, queue_s, T, digest): like send_reply, for sums that a device has
    moved into the slot."""
    send_failure: Callable[..., int]
    """(port, sequence, text [n] uint8, n a multiple of 4): results of send_request."""
    serve: Callable[..., int]
    """(table, spin_ns, entries address, number of them, timeout_ms): answers the requests that
    compiled experts compute, one after another, and returns with the first other one, or when the
    service's words ask for it: NOTHING, or
    (link_idx · MAX_SLOTS + slot_idx) << STATUS_BITS | violation, ANSWERED, COMPUTED, or 0: the
    request is in the port's private arrays. Spins before each request; then, with a timeout and if
    it has answered none, sleeps. Entries are those of poll(2): each link's bell in the table's
    order, then one that wakes a sleeper for CHANGED, then others; the events found are left in
    them."""
    receive_reply: Callable[..., int]
    """(port, sequence, spin_ns, wait_ns, sums [T, H] float64): payload bytes, possibly with
    IS_NOT_FINITE; or NOTHING; or FAILURE, with its text in the private array; or FAILURE -
    violation. Spins, then sleeps; returns early if the link is lost or a signal arrives."""
    receive_moved_reply: Callable[..., int]
    """(port, sequence, spin_ns, wait_ns, T): like receive_reply, with the sums left in the slot."""
    load_word: Callable[..., int]
    """(address): its int64, loaded with sequential consistency."""
    choose_pairs: Callable[..., int]
    """(expert_ids [T * K] int32, weights [T * K] float32, K, is_wanted [E] uint8, chosen_tokens,
    chosen_ids [T * K] int32, chosen_weights [T * K] float32, counts [E] int64): number of pairs of
    wanted experts << COUNT_BITS | number of tokens all of whose experts are wanted; or BAD_ARRAYS;
    or OUT_OF_RANGE for an id. The pairs are written, in order, to the start of the next three
    arrays; counts is incremented for every expert chosen, wanted or not."""
    group_pairs: Callable[..., int]
    """(token_indices [P] int32, ascending, expert_ids [P] int32, weights [P] float32, whole_from,
    indices [4, P + 1 or more] int32, grouped_weights [P] float32, next_places [N] int32, scratch):
    number R of distinct tokens << COUNT_BITS | number G of groups; or BAD_ARRAYS; or OUT_OF_RANGE
    for an id that is negative or ≥ N, or tokens that do not ascend. The first entries of indices[1]
    to indices[3] and grouped_weights are expert_ids [G], group_starts [G + 1], token_indices [P]
    and weights [P] of a RoutedBatch (`batch`). If R is below whole_from, those tokens are indices
    into indices[0] [R], which are the distinct tokens."""
    checksum: Callable[..., int]
    """(state address, header address, source address, target address, bytes, a multiple of 4):
    copies, and returns the checksum of the copy and 15 words of header. For measuring and tests."""


class ClientFunctions(NamedTuple):
    """Addresses of functions for compiled callers: see `compiled_experts`. Valid for ever."""

    post: int
    collect: int


def why_unavailable() -> str:
    """Why the ring cannot be used on this machine, in one line; empty if it can."""
    if sys.platform != "linux":
        return "shared memory needs Linux"
    if importlib.util.find_spec("numba") is None:
        return "shared memory needs numba, which is not installed"
    if not _converts_f16():
        return "shared memory needs a CPU that converts float16"
    return ""


def is_available() -> bool:
    """Whether the ring can be used on this machine; if not, use the stream transport."""
    return not why_unavailable()


@cache
def _converts_f16() -> bool:
    """Without the instruction, LLVM would call library functions that do not exist."""
    llvm: Any = importlib.import_module("llvmlite.binding")
    if not llvm.get_process_triple().startswith(("x86", "i386", "i686")):
        return True
    return bool(llvm.get_host_cpu_features().get("f16c"))


def kernels(cache_dir: str | None = None) -> Kernels:
    """Load the kernels, or compile them, which takes seconds the first time on a machine.

    Done once a process; `cache_dir` (see `cache_folder`) counts at the first call only.

    Raises: ImportError without numba.
    """
    global _compiled
    if _compiled is None:
        _compiled = _kernels(cache_dir)
    return _compiled


def _kernels(cache_dir: str | None) -> Kernels:
    numba: Any = importlib.import_module("numba")
    types = numba.types
    client, server, pairs, both = (
        importlib.import_module(f"dflash_protocol.ring.{name}")
        for name in ("client_kernels", "server_kernels", "pair_kernels", "shared_kernels")
    )

    def array(element: Any, num_dimensions: int) -> Any:
        """Read-only, so that writable arrays are accepted too."""
        return types.Array(element, num_dimensions, "C", readonly=True)

    def out(element: Any) -> Any:
        return types.Array(element, 1, "C")

    i64, f64 = types.int64, types.float64
    indices, floats = array(types.int32, 1), array(types.float32, 1)
    signatures = {
        client.send_request: (
            *(i64,) * 4, f64, array(types.float32, 2), indices, indices, indices, floats,
        ),
        client.send_moved_request: (
            *(i64,) * 4, f64, i64, indices, indices, indices, floats,
        ),
        server.send_reply: (i64, i64, i64, f64, f64, array(f64, 2)),
        server.send_moved_reply: (i64, i64, f64, f64, i64, i64),
        server.send_failure: (i64, i64, array(types.uint8, 1)),
        server.serve: (i64,) * 5,
        client.receive_reply: (i64, i64, i64, i64, types.Array(f64, 2, "C")),
        client.receive_moved_reply: (i64,) * 5,
        pairs.choose_pairs: (
            indices, floats, i64, array(types.uint8, 1), out(types.int32), out(types.int32),
            out(types.float32), out(i64),
        ),
        pairs.group_pairs: (
            indices, indices, floats, i64, types.Array(types.int32, 2, "C"), out(types.float32),
            out(types.int32),
        ),
        both.load_word: (i64,),
        both.checksum: (i64,) * 5,
    }  # fmt: skip
    folder, compiled = _kernel_folder(cache_dir), {}
    for code, signature in signatures.items():
        kernel = numba.njit(nogil=True, error_model="numpy")(code)
        if folder is not None:
            kernel._cache = _cache_of(kernel.py_func, folder)
        kernel.compile(signature)
        kernel.disable_compile()
        # Bypass the dispatch on types, which costs as much as the call. Element size and contiguity
        # of arrays are still checked; the caller guarantees their number of dimensions.
        compiled[code.__name__] = kernel.overloads[signature].entry_point
    return Kernels(**compiled)


_compiled: Kernels | None = None


def client_functions(cache_dir: str | None = None) -> ClientFunctions:
    """Load or compile them, as `kernels`.

    Raises: ImportError without numba.
    """
    if not _functions:
        _functions.extend(_compiled_functions(cache_dir))
    return ClientFunctions(*(int(function.address) for function in _functions))


def _compiled_functions(cache_dir: str | None) -> list[Any]:
    """`post` and `collect`."""
    functions: list[Any] = []
    numba: Any = importlib.import_module("numba")
    ccallback: Any = importlib.import_module("numba.core.ccallback")
    client = importlib.import_module("dflash_protocol.ring.client_kernels")
    folder, i64 = _kernel_folder(cache_dir), numba.types.int64
    options = {"nopython": True, "error_model": "numpy"}
    for code in (client.post, client.collect):
        function = ccallback.CFunc(code, ((i64, i64), i64), {}, options)
        if folder is not None:
            function._cache = _cache_of(code, folder)
        function.compile()
        functions.append(function)
    return functions


_functions: list[Any] = []
"""Own the code of ClientFunctions."""


def two_counts(found: int) -> tuple[int, int]:
    """Unpack a successful result of `choose_pairs` or `group_pairs`."""
    return found >> COUNT_BITS, found & ((1 << COUNT_BITS) - 1)


def if_compiled() -> Kernels | None:
    """The kernels if `kernels` was called before, else None; never compiles."""
    return _compiled


def _cache_of(function: Callable[..., Any], folder: Path) -> Any:
    """Numba's file cache in `folder`, whose name includes a digest of the sources."""
    caching: Any = importlib.import_module("numba.core.caching")

    class Locator(caching._CacheLocator):  # type: ignore[misc]
        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> Any:
            del py_func, py_file
            return cls()

        def get_cache_path(self) -> str:
            return str(folder)

        def get_source_stamp(self) -> str:
            return ""

        def get_disambiguator(self) -> None:
            return None

    class Implementation(caching.CompileResultCacheImpl):  # type: ignore[misc]
        _locator_classes = [Locator]  # noqa: RUF012 - numba declares it so

    class Cache(caching.FunctionCache):  # type: ignore[misc]
        _impl_class = Implementation

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            try:
                return super().load_overload(sig, target_context)
            except Exception:  # a damaged file can raise whatever unpickling can
                with suppress(OSError):
                    self.flush()
                return None

        def save_overload(self, sig: Any, data: Any) -> None:
            try:
                super().save_overload(sig, data)
            except Exception as error:  # no space, or not writable any more
                _say_not_kept(getattr(error, "strerror", None) or str(error))

    return Cache(function)


def _kernel_folder(cache_dir: str | None) -> Path | None:
    """The cache folder, created and writable; None after a warning."""
    try:
        parent = cache_folder(cache_dir)
        folder = parent / f"{_FOLDER_PREFIX}{_sources_digest()[:16]}"
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.touch()  # marks the last use, by which old folders are removed
        others = [each for each in parent.glob(f"{_FOLDER_PREFIX}*") if each != folder]
        others.sort(key=lambda each: each.stat().st_mtime)
        for other in others[: -(_NUM_FOLDERS_KEPT - 1)]:
            shutil.rmtree(other, ignore_errors=True)
    except (SettingsError, OSError) as error:
        _say_not_kept(str(error))
        return None
    return folder


@cache
def _say_not_kept(reason: str) -> None:
    """Log a warning, once for each reason."""
    # docs: the cache folder cannot be used: `CACHE_DIR`
    _LOG.warning("the ring's code will be compiled at every start: %s", reason)


def _sources_digest() -> str:
    """Digest of the kernels' sources; numba itself distinguishes versions and CPUs."""
    state = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        state.update(path.read_bytes())
    return state.hexdigest()
