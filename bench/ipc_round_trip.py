"""Round trips between two processes: the shared ring, spinning and blocking, and the stream.

A request of decode size goes to a process that computes nothing and back; then a chunk of prefill
size, whose bytes per second are compared with one thread's memcpy. Both processes are bound to the
same two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import zmq
from bench.machine import ROOT
from bench.options import add_realtime_option, add_save_option, bench_parser
from bench.pairs import SETTLE_S, Spread
from bench.report import table

from bench import report
from dflash_daemon.authentication import Authenticator, let_handshakes_yield
from dflash_protocol.batch import HostSums, RoutedBatch, group_by_expert
from dflash_protocol.endpoint import IpcClaim, parse_endpoint
from dflash_protocol.ids import F64Array, Phase
from dflash_protocol.payloads import PayloadType
from dflash_protocol.ring.compiled_experts import CompiledExperts
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import create_segment, open_segment
from dflash_protocol.transports.curve import (
    AUTHORIZED_FILE,
    AuthorizedClients,
    ClientSecurity,
    generate_keys,
    load_keys,
    public_line,
    secure_server,
)
from dflash_protocol.transports.shared_client import SharedClient
from dflash_protocol.transports.shared_server import SharedServer
from dflash_protocol.transports.zmq_stream import StreamClient, StreamServer
from dflash_protocol.wire.requests import HEADER_BYTES, largest_frame_bytes
from dflash_protocol.wire.transport import ClientTransport, LinkLimits
from dflash_runtime.compute.cpu.compile.compiling import RowFunction
from dflash_runtime.compute.cpu.simd.types import i64

NUM_EXPERTS_USED, NUM_EXPERTS = 8, 128
NUM_SLOTS = 2
SPIN_S = 100e-6
LINK_ID = "ab" * 8
TIMEOUT_S = 60.0
SIDES = ("shared, spinning", "shared, blocking", "stream, ipc", "stream, tcp with keys")
FLOOR = "two bare pipes"
"""One byte there and one back: the cost of waking each other alone."""
BARE = ("bare ZeroMQ, ipc", "bare ZeroMQ, tcp with keys")
"""Frames as long as the stream's, without headers, checks and checksums."""
WARM_UP_TRIPS, CHUNK_TRIPS = 20, 5
EXAMPLES = """examples:
  python -m bench.ipc_round_trip --save               # everything, about a minute; kept
  python -m bench.ipc_round_trip --rounds 3 --trips 500
  python -m bench.ipc_round_trip --cores 2 3 --realtime
"""


@dataclass(frozen=True, slots=True)
class Work:
    """What is sent: up to `max_tokens` rows of `hidden_size`, in type `payload`."""

    hidden_size: int
    max_tokens: int
    payload: PayloadType

    @property
    def shape(self) -> RingShape:
        pairs = self.max_tokens * NUM_EXPERTS_USED
        return RingShape(NUM_SLOTS, self.max_tokens, self.hidden_size, pairs)

    @property
    def limits(self) -> LinkLimits:
        return LinkLimits(
            self.hidden_size, self.max_tokens, NUM_EXPERTS_USED, generation=1, payload=self.payload
        )

    @property
    def max_frame_bytes(self) -> int:
        return largest_frame_bytes(
            max_tokens=self.max_tokens,
            hidden_size=self.hidden_size,
            max_pairs=self.max_tokens * NUM_EXPERTS_USED,
        )

    def batch(self, num_tokens: int) -> RoutedBatch:
        random = np.random.default_rng(0)
        experts = [random.permutation(NUM_EXPERTS)[:NUM_EXPERTS_USED] for _ in range(num_tokens)]
        return group_by_expert(
            random.standard_normal((num_tokens, self.hidden_size), dtype=np.float32),
            np.repeat(np.arange(num_tokens, dtype=np.int32), NUM_EXPERTS_USED),
            np.concatenate(experts).astype(np.int32),
            weights=random.random(num_tokens * NUM_EXPERTS_USED, dtype=np.float32),
            phase=Phase.DECODE if num_tokens == 1 else Phase.PREFILL,
        )


Secure: TypeAlias = Callable[[zmq.Socket[bytes]], object]


# -- the other process ----------------------------------------------------------------------------


def serve_shared(work: Work, folder: Path, name: str, spin_s: float) -> None:
    """Answer until standard input ends; requests of decode size without Python, as a daemon."""
    server = SharedServer()
    segment = open_segment(folder, name, work.shape, generation=1)
    server.add_link(LINK_ID, segment, work.limits, experts=_no_experts(work))
    server.allow_replies(math.inf)
    sums = _sums_by_num_tokens(work)
    print("ready", flush=True)
    while True:
        request = server.receive(TIMEOUT_S, spin_s=spin_s, others=(0,), until_s=math.inf)
        if request is not None:
            server.reply(request, HostSums(sums(request.header.num_tokens)), 0.0)
        elif server.are_others_ready:
            return server.close()


def _no_experts(work: Work) -> CompiledExperts:
    """Experts of layer 0 that compute nothing."""
    function = RowFunction(_compute_nothing, i64, i64, result=i64)
    layer = function.address, 0, NUM_EXPERTS, work.hidden_size, 1, NUM_EXPERTS_USED
    return CompiledExperts(np.array([layer], np.int64), function, max_tokens=1)


def _compute_nothing(experts: int, batch: int) -> int:
    return 1


@contextlib.contextmanager
def _serving_context(keys: Path) -> Iterator[tuple[zmq.Context[zmq.Socket[bytes]], Secure | None]]:
    """A context as a daemon has it: with keys, if there are any in that folder."""
    with contextlib.ExitStack() as undo:
        if not keys.is_dir():
            yield undo.enter_context(zmq.Context()), None
            return
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(3)
        undo.callback(context.destroy, 0)
        undo.callback(Authenticator(context, AuthorizedClients(keys / AUTHORIZED_FILE)).close)
        own_keys = load_keys(keys)
        with context.socket(zmq.ROUTER) as control:
            secure_server(control, own_keys, io_threads=(0,))
            control.bind("tcp://127.0.0.1:*")
            let_handshakes_yield(0)
            yield context, functools.partial(secure_server, keys=own_keys, io_threads=(1, 2))


def serve_stream(work: Work, address: str, keys: Path) -> None:
    """Answer until standard input ends."""
    links = {LINK_ID: work.limits}
    with _serving_context(keys) as (context, secure):
        server = StreamServer(
            context,
            address,
            max_frame_bytes=work.max_frame_bytes,
            limits_of=links.get,
            secure=secure,
        )
        sums = _sums_by_num_tokens(work)
        print("ready", server.port, flush=True)
        while not select.select([0], [], [], 0)[0]:
            while (request := server.receive(0.2)) is not None:
                server.reply(request, HostSums(sums(request.header.num_tokens)), 0.0)
        server.close()


def serve_bare(work: Work, address: str, keys: Path) -> None:
    """Answer until standard input ends."""
    answer = bytes(HEADER_BYTES + 8 * work.hidden_size)
    with _serving_context(keys) as (context, secure), context.socket(zmq.ROUTER) as server:
        if secure is not None:
            secure(server)
        server.bind(address)
        endpoint = server.getsockopt_string(zmq.LAST_ENDPOINT)
        print("ready", endpoint.rpartition(":")[2], flush=True)
        server.setsockopt(zmq.RCVTIMEO, 200)
        while not select.select([0], [], [], 0)[0]:
            with contextlib.suppress(zmq.Again):
                while True:
                    routing_id, _ = server.recv_multipart()
                    server.send_multipart([routing_id, answer])


def serve_pipe() -> None:
    """Answer each byte with one until standard input ends."""
    print("ready", flush=True)
    while byte := os.read(0, 1):
        os.write(1, byte)


def _sums_by_num_tokens(work: Work) -> Callable[[int], F64Array]:
    random = np.random.default_rng(1)
    rows = random.standard_normal((work.max_tokens, work.hidden_size))
    known = {}

    def sums(num_tokens: int) -> F64Array:
        if num_tokens not in known:
            known[num_tokens] = rows[:num_tokens]
        return known[num_tokens]

    return sums


# -- this process ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _other_process(
    work: Work, *arguments: str, realtime: bool
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and its port, if it has one."""
    command = [sys.executable, "-m", "bench.ipc_round_trip", "--serve", *arguments]
    command += ["--hidden", str(work.hidden_size), "--tokens", str(work.max_tokens)]
    command += ["--payload", work.payload.value] + ["--realtime"] * realtime
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as child:
        try:
            assert child.stdout is not None
            word, _, port = child.stdout.readline().partition(" ")
            if word.strip() != "ready":
                raise SystemExit("the other process did not start")
            yield child, port.strip()
        finally:
            assert child.stdin is not None
            child.stdin.close()


@contextlib.contextmanager
def connected(work: Work, side: str, folder: Path, *, realtime: bool) -> Iterator[ClientTransport]:
    """A client of another process that answers every request."""
    with contextlib.ExitStack() as undo:
        lost_fd = os.eventfd(0, os.EFD_CLOEXEC)
        undo.callback(os.close, lost_fd)
        if side.startswith("stream"):
            address, secure = undo.enter_context(_zmq_server(work, side, folder, realtime=realtime))
            context = undo.enter_context(zmq.Context())
            stream = StreamClient(
                context,
                address,
                LINK_ID,
                hidden_size=work.hidden_size,
                max_frame_bytes=work.max_frame_bytes,
                lost_fd=lost_fd,
                lost_reason=lambda: "lost",
                generation=1,
                payload=work.payload,
                secure=secure,
            )
            undo.callback(stream.close)
            yield stream
            return
        spin_s = SPIN_S if side == "shared, spinning" else 0.0
        segment = create_segment(folder, work.shape, generation=1)
        undo.callback(segment.close)
        arguments = ("shared", str(folder), segment.name, str(spin_s))
        undo.enter_context(_other_process(work, *arguments, realtime=realtime))
        segment.unlink()
        client = SharedClient(
            segment,
            lost_fd=lost_fd,
            lost_reason=lambda: "lost",
            payload=work.payload,
            spin_s=spin_s,
        )
        yield client


@contextlib.contextmanager
def _zmq_server(
    work: Work, side: str, folder: Path, *, realtime: bool
) -> Iterator[tuple[str, Secure | None]]:
    """The address where another process serves a ZeroMQ side, and what adds keys to a socket."""
    kind = side.partition(" ")[0].strip(",")
    with contextlib.ExitStack() as undo:
        if "tcp" in side:
            keys = {name: folder / f"{kind}-{name}" for name in ("daemon", "parent")}
            daemon, parent = (generate_keys(each, comment="") for each in keys.values())
            (keys["daemon"] / AUTHORIZED_FILE).write_text(public_line(parent.public))
            arguments = (kind, "tcp://127.0.0.1:*", str(keys["daemon"]))
            server = _other_process(work, *arguments, realtime=realtime)
            _, port = undo.enter_context(server)
            secure = ClientSecurity(parent, daemon.public).apply
            yield f"tcp://127.0.0.1:{port}", secure
            return
        address = f"ipc://{folder}/{kind}-{work.payload.value}-{work.max_tokens}"
        undo.callback(IpcClaim(parse_endpoint(address)).close)
        undo.enter_context(
            _other_process(work, kind, address, str(folder / "none"), realtime=realtime)
        )
        yield address, None


@contextlib.contextmanager
def bare_zmq(
    work: Work, side: str, folder: Path, *, realtime: bool
) -> Iterator[Callable[[int], list[float]]]:
    """Round trips of frames of the same lengths without content."""
    routing_bytes = 4 * (4 * NUM_EXPERTS_USED + 1)
    request = bytes(HEADER_BYTES + routing_bytes + 4 * work.hidden_size)
    with (
        _zmq_server(work, side, folder, realtime=realtime) as (address, secure),
        zmq.Context() as context,
        context.socket(zmq.DEALER) as client,
    ):
        client.setsockopt(zmq.LINGER, 0)
        if secure is not None:
            secure(client)
        client.connect(address)

        def trip() -> None:
            client.send(request)
            client.recv()

        yield lambda num_trips: _times(trip, num_trips)


def round_trips(client: ClientTransport, batch: RoutedBatch, num_trips: int) -> list[float]:
    """Seconds of each of `num_trips` round trips, after a few to warm up."""

    def trip() -> None:
        sequence = client.submit(0, batch, deadline_s=TIMEOUT_S)
        client.wait(sequence, deadline_s=TIMEOUT_S)

    return _times(trip, num_trips)


def _times(trip: Callable[[], object], num_trips: int) -> list[float]:
    times = []
    gc.disable()
    for number in range(-WARM_UP_TRIPS, num_trips):
        started_s = time.perf_counter()
        trip()
        if number >= 0:
            times.append(time.perf_counter() - started_s)
    gc.enable()
    return times


def memcpy_bytes_per_s(num_bytes: int) -> float:
    """Bytes per second that one thread copies, the best of several copies of that size."""
    source, target = (np.ones(num_bytes, np.uint8) for _ in range(2))
    best_s = float("inf")
    for _ in range(5):
        started_s = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - started_s)
    return num_bytes / best_s


@contextlib.contextmanager
def bare_pipes(work: Work, *, realtime: bool) -> Iterator[Callable[[int], list[float]]]:
    """Round trips of a byte through a process that does nothing else."""
    with _other_process(work, "pipe", realtime=realtime) as (child, _):
        assert child.stdin is not None
        assert child.stdout is not None
        there, back = child.stdin.fileno(), child.stdout.fileno()

        def trip() -> None:
            os.write(there, b"!")
            os.read(back, 1)

        yield lambda num_trips: _times(trip, num_trips)


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """All samples: side → quantity → one value a round."""
    decode = Work(options.hidden, 1, PayloadType.F32)
    batch = decode.batch(1)
    samples: dict[str, dict[str, list[float]]] = {}
    with contextlib.ExitStack() as undo:
        shm = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(dir=shm)))
        realtime = options.realtime
        trips: dict[str, Callable[[int], list[float]]] = {}
        for side in SIDES:
            client = undo.enter_context(connected(decode, side, folder, realtime=realtime))
            trips[side] = functools.partial(round_trips, client, batch)
        for side in BARE:
            trips[side] = undo.enter_context(bare_zmq(decode, side, folder, realtime=realtime))
        trips[FLOOR] = undo.enter_context(bare_pipes(decode, realtime=realtime))
        chunks: dict[str, tuple[ClientTransport, RoutedBatch]] = {}
        for payload in (PayloadType.F32, PayloadType.BF16):
            work = Work(options.hidden, options.tokens, payload)
            for side in (SIDES[0], SIDES[2]):
                client = undo.enter_context(connected(work, side, folder, realtime=realtime))
                chunks[f"{side.partition(',')[0]}, {payload}"] = client, work.batch(options.tokens)
        for round_number in range(-1, options.rounds):
            step = 1 if round_number % 2 == 0 else -1
            for side in list(trips)[::step]:
                time.sleep(SETTLE_S)
                times = sorted(1e6 * each for each in trips[side](options.trips))
                values = {"p50": times[len(times) // 2], "p99": times[len(times) * 99 // 100]}
                _note(samples, side, values, round_number)
            for name in list(chunks)[::step]:
                time.sleep(SETTLE_S)
                _note(samples, name, _chunk_values(*chunks[name]), round_number)
    return samples


def _chunk_values(client: ClientTransport, batch: RoutedBatch) -> dict[str, float]:
    counters = client.counters
    before = counters.bytes_sent + counters.bytes_received
    times = round_trips(client, batch, CHUNK_TRIPS)
    num_bytes = counters.bytes_sent + counters.bytes_received - before
    trip_bytes = num_bytes // (CHUNK_TRIPS + WARM_UP_TRIPS)
    rate = trip_bytes / statistics.median(times)
    return {"GB/s": rate / 1e9, "share": rate / memcpy_bytes_per_s(trip_bytes)}


def _note(
    samples: dict[str, dict[str, list[float]]],
    side: str,
    values: dict[str, float],
    round_number: int,
) -> None:
    if round_number >= 0:  # the first one warms up
        for quantity, value in values.items():
            samples.setdefault(side, {}).setdefault(quantity, []).append(value)


def tables(samples: dict[str, dict[str, list[float]]], num_tokens: int) -> str:
    """Medians and ranges of the rounds."""

    def rows(first: str, second: str) -> list[list[str]]:
        return [
            [side, str(Spread.of(values[first])), str(Spread.of(values[second]))]
            for side, values in samples.items()
            if first in values
        ]

    small = table(["1 token, µs a round trip", "p50", "p99"], rows("p50", "p99"))
    columns = [f"{num_tokens} tokens, both ways", "GB/s", "share of one memcpy"]
    return f"{small}\n\n{table(columns, rows('GB/s', 'share'))}"


def main() -> None:
    parser = bench_parser(__file__, __doc__, EXAMPLES)
    parser.add_argument("--rounds", type=int, default=9, help="samples of each side (default 9)")
    parser.add_argument("--trips", type=int, default=2000, help="of a sample (default 2000)")
    parser.add_argument("--hidden", type=int, default=2048, help="width of a row (default 2048)")
    parser.add_argument("--tokens", type=int, default=1024, help="of the chunk (default 1024)")
    parser.add_argument(
        "--cores", type=int, nargs=2, help="both processes keep to these (default: the first two)"
    )
    add_realtime_option(parser)
    add_save_option(parser)
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--payload", default="f32", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    if options.serve:
        work = Work(options.hidden, options.tokens, PayloadType(options.payload))
        kind, *rest = options.serve
        if kind == "pipe":
            return serve_pipe()
        if kind in ("stream", "bare"):
            serve = serve_stream if kind == "stream" else serve_bare
            return serve(work, rest[0], Path(rest[1]))
        return serve_shared(work, Path(rest[0]), rest[1], float(rest[2]))
    cores = options.cores or sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    record = report.head("Round trips between two processes that compute nothing")
    record |= {"cores": cores, "realtime": options.realtime, "samples": measure(options)}
    text = tables(record["samples"], options.tokens)
    report.finish("ipc-round-trip", record, text, options.save)


if __name__ == "__main__":
    main()
