"""What a flood of bad connections costs a good client of a daemon's tcp sockets with keys.

A server with both sockets as a daemon has them, a good client that asks in a closed loop for
replies of a decode-sized request, and a flooder, each a process. Phases with and without the flood
alternate. Nothing is computed, so that all that is seen is the boundary; a client that computes is
slowed down by less. The flooder runs at the lowest priority: strangers bring CPUs of their own.

    python -m bench.curve_flood --save               7 phases of 4.3 s = 30 s of each flood
    python -m bench.curve_flood --seconds 30 --kinds stranger --target data
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import socket
import statistics
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq
from bench.machine import REALTIME_PRIORITY, be_realtime
from bench.options import add_realtime_option, add_save_option, bench_parser

from bench import report
from dflash_daemon.authentication import Authenticator, let_handshakes_yield
from dflash_protocol.transports.curve import (
    AUTHORIZED_FILE,
    AuthorizedClients,
    ClientSecurity,
    CurveKeys,
    generate_keys,
    load_keys,
    public_line,
    secure_server,
)

KINDS = ("silent", "garbage", "null", "hello", "stranger")
"""Sends nothing; sends nonsense; uses no keys; has a wrong key of the daemon; has the right one but
no allowed key of its own, which costs the daemon most: a whole handshake."""
TARGETS = ("control", "data")
_HOLD_S = 1.5
_STRANGER_S = 0.3
_SETTLE_S = 0.3
_HIDDEN_SIZE = 2048
_REQUEST = [bytes(300 + 4 * _HIDDEN_SIZE)]
"""One frame, like small messages: header, routing of one token, its hidden row in f32."""
_REPLY = [bytes(100 + 8 * _HIDDEN_SIZE)]
_PATIENCE_MS = 20_000


@dataclass(frozen=True, slots=True)
class Result:
    """One kind of flood against one socket. Slow-downs are medians over pairs of phases."""

    kind: str
    target: str
    connections_per_s: float
    quiet_p50_us: float
    flood_p50_us: float
    slow_down_p50: float
    slow_down_rate: float
    """Slow-down of requests per second, so of the mean."""
    rounds: list[dict[str, float]]


def serve(ports: Connection, folder: Path) -> None:
    """Both sockets of a daemon with the keys of a folder; the data socket answers alike."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(3)
    keys = load_keys(folder)
    Authenticator(context, AuthorizedClients(folder / AUTHORIZED_FILE))
    bound = []
    for io_threads in ((0,), (1, 2)):
        router = context.socket(zmq.ROUTER)
        secure_server(router, keys, io_threads=io_threads)
        bound.append((router, router.bind_to_random_port("tcp://127.0.0.1")))
    let_handshakes_yield(0)
    ports.send([port for _, port in bound])
    data = bound[1][0]
    while True:
        routing_id, *_ = data.recv_multipart()
        data.send_multipart([routing_id, *_REPLY])


class Client:
    """Sends a request, waits for the reply, repeats. Owns its ZeroMQ context."""

    def __init__(self, port: int, keys: CurveKeys, server_public_key: bytes) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
        ClientSecurity(keys, server_public_key).apply(self._socket)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)

    def measure(self, *, seconds: float) -> list[float]:
        """Times of consecutive round trips, in microseconds, for `seconds`."""
        times_us = []
        started_s = now_s = time.perf_counter()
        while now_s < started_s + seconds:
            self._socket.send_multipart(_REQUEST)
            self._socket.recv_multipart()
            previous_s, now_s = now_s, time.perf_counter()
            times_us.append((now_s - previous_s) * 1e6)
        return times_us


def greeting(mechanism: bytes) -> bytes:
    """The 64 bytes that start a ZMTP 3.1 connection."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def opening(kind: str) -> bytes:
    """What a connection of that kind sends first."""
    if kind == "garbage":
        return os.urandom(64)
    if kind == "null":
        return greeting(b"NULL") + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    if kind == "hello":
        # Its box cannot be decrypted; which key it was encrypted for does not matter.
        hello = b"\x05HELLO\x01\x00" + bytes(72) + os.urandom(32) + bytes(7) + b"\1"
        return greeting(b"CURVE") + b"\x04\xc8" + hello + os.urandom(80)
    return b""


class RawFlood:
    """Connections without ZeroMQ, which is cheaper for the flooder."""

    def __init__(self, port: int, kind: str) -> None:
        self._address = ("127.0.0.1", port)
        self._payload = opening(kind)
        self._epoll = select.epoll()
        self._open: dict[int, tuple[socket.socket, float]] = {}

    def connect(self) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(self._address)
        fd = connection.fileno()
        self._open[fd] = connection, time.monotonic()
        self._epoll.register(fd, select.EPOLLIN | (select.EPOLLOUT if self._payload else 0))

    def work(self) -> None:
        for fd, events in self._epoll.poll(0.001):
            connection, _ = self._open[fd]
            try:
                if events & select.EPOLLOUT:
                    connection.send(self._payload)
                    self._epoll.modify(fd, select.EPOLLIN)
                elif not connection.recv(4096):
                    self._close(fd)
            except BlockingIOError:
                pass
            except OSError:
                self._close(fd)
        oldest_s = time.monotonic() - _HOLD_S
        while self._open and next(iter(self._open.values()))[1] < oldest_s:
            self._close(next(iter(self._open)))

    def stop(self) -> None:
        for fd in list(self._open):
            self._close(fd)

    def _close(self, fd: int) -> None:
        self._open.pop(fd)[0].close()


class StrangerFlood:
    """Complete handshakes with a key that the daemon does not allow."""

    def __init__(self, port: int, server_public_key: bytes, keys: CurveKeys) -> None:
        self._address = f"tcp://127.0.0.1:{port}"
        self._server_public_key = server_public_key
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 8192)
        self._open: deque[tuple[zmq.Socket[bytes], float]] = deque()

    def connect(self) -> None:
        stranger = self._context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.RECONNECT_IVL, -1)
        ClientSecurity(self._keys, self._server_public_key).apply(stranger)
        stranger.connect(self._address)
        self._open.append((stranger, time.monotonic()))

    def work(self) -> None:
        oldest_s = time.monotonic() - _STRANGER_S
        while self._open and self._open[0][1] < oldest_s:
            self._open.popleft()[0].close()
        time.sleep(0.001)

    def stop(self) -> None:
        while self._open:
            self._open.popleft()[0].close()


def flood(
    port: int, kind: str, rate: float, *, folder: Path, go: Event, end: Event, report: Connection
) -> None:
    """Make connections at `rate` while `go` is set; then report how many, and in what time."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    if os.sched_getscheduler(0) == os.SCHED_RR:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REALTIME_PRIORITY - 1))
    daemon_keys, keys = load_keys(folder / "daemon"), load_keys(folder / "stranger")
    while not end.is_set():
        if not go.wait(0.05):
            continue
        flooder: RawFlood | StrangerFlood
        if kind == "stranger":
            flooder = StrangerFlood(port, daemon_keys.public, keys)
        else:
            flooder = RawFlood(port, kind)
        started_s, num_made = time.monotonic(), 0
        while go.is_set():
            due = (time.monotonic() - started_s) * rate
            while num_made < due:
                flooder.connect()
                num_made += 1
            flooder.work()
        report.send((num_made, time.monotonic() - started_s))
        flooder.stop()


def run(kind: str, target: str, *, rate: float, seconds: float, rounds: int) -> Result:
    """Measure one kind of flood against one of the daemon's sockets."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for who in ("daemon", "parent", "stranger"):
            generate_keys(folder / who, comment=who)
        parent = load_keys(folder / "parent")
        (folder / "daemon" / AUTHORIZED_FILE).write_text(public_line(parent.public))
        ports, ports_of_server = spawn.Pipe()
        report, report_of_flooder = spawn.Pipe()
        go, end = spawn.Event(), spawn.Event()
        server = spawn.Process(target=serve, args=(ports_of_server, folder / "daemon"), daemon=True)
        server.start()
        control_port, data_port = ports.recv()
        flooder = spawn.Process(
            target=flood,
            args=({"control": control_port, "data": data_port}[target], kind, rate),
            kwargs={"folder": folder, "go": go, "end": end, "report": report_of_flooder},
            daemon=True,
        )
        flooder.start()
        try:
            daemon_key = load_keys(folder / "daemon").public
            with Client(data_port, parent, daemon_key) as client:
                client.measure(seconds=1.0)
                pairs = [
                    _pair(client, go, report, seconds, is_flood_first=bool(index % 2))
                    for index in range(rounds)
                ]
        finally:
            end.set()
            for process in (flooder, server):
                process.terminate()
                process.join()

    def median(key: str) -> float:
        return statistics.median(pair[key] for pair in pairs)

    return Result(
        kind=kind,
        target=target,
        connections_per_s=median("connections_per_s"),
        quiet_p50_us=median("quiet_p50_us"),
        flood_p50_us=median("flood_p50_us"),
        slow_down_p50=statistics.median(p["flood_p50_us"] / p["quiet_p50_us"] for p in pairs) - 1,
        slow_down_rate=statistics.median(p["flood_us"] / p["quiet_us"] for p in pairs) - 1,
        rounds=pairs,
    )


def _pair(
    client: Client, go: Event, report: Connection, seconds: float, *, is_flood_first: bool
) -> dict[str, float]:
    values: dict[str, float] = {}
    for name in ("flood", "quiet") if is_flood_first else ("quiet", "flood"):
        if name == "flood":
            go.set()
        time.sleep(_SETTLE_S)
        times_us = client.measure(seconds=seconds)
        values[f"{name}_p50_us"] = statistics.median(times_us)
        values[f"{name}_us"] = statistics.mean(times_us)
        if name == "flood":
            go.clear()
            num_made, wall_s = report.recv()
            values["connections_per_s"] = num_made / wall_s
    return values


def main() -> None:
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--rate", type=float, default=1000, help="connections/s (default 1000)")
    parser.add_argument("--seconds", type=float, default=4.3, help="a phase (default 4.3)")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of phases (default 7)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    add_realtime_option(parser)
    add_save_option(parser)
    options = parser.parse_args()
    if options.realtime:
        be_realtime()
    record = report.head("Floods of bad connections, with keys")
    if not options.json:
        print(record["machine"])
    results: list[Result] = []
    for target in options.target:
        for kind in options.kinds:
            result = run(
                kind, target, rate=options.rate, seconds=options.seconds, rounds=options.rounds
            )
            results.append(result)
            print(json.dumps(asdict(result)) if options.json else _line(result), flush=True)
    text = report.table(COLUMNS, [_cells(result) for result in results])
    if not options.json:
        print(text)
    record["results"] = [asdict(result) for result in results]
    report.save("curve-flood", record, text, options.save)


COLUMNS = (
    "flood, socket",
    "connections/s",
    "p50 quiet, µs",
    "p50 in the flood, µs",
    "slower, p50",
    "slower, mean",
)


def _cells(result: Result) -> list[str]:
    return [
        f"{result.kind}, {result.target}",
        f"{result.connections_per_s:.0f}",
        f"{result.quiet_p50_us:.1f}",
        f"{result.flood_p50_us:.1f}",
        f"{result.slow_down_p50:.1%}",
        f"{result.slow_down_rate:.1%}",
    ]


def _line(result: Result) -> str:
    parts = [f"{name} {cell}" for name, cell in zip(COLUMNS, _cells(result), strict=True)]
    return "; ".join(parts)


if __name__ == "__main__":
    main()
