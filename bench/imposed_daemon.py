"""An expert-compute daemon with an added handicap: slower compute, a delay of each request, little
memory, or only the older version of the protocol.

All else is the real daemon's: its sockets, its shared memory, its threads. Arguments after ``--``
are passed to it. The added time is slept, as if a slower device computed.

Examples:
  python -m bench.imposed_daemon --compute-factor 10 -- model.gguf --listen ipc:///tmp/x/slow.sock
  python -m bench.imposed_daemon --request-ms 2 -- model.gguf --listen ipc:///tmp/x/far.sock
  python -m bench.imposed_daemon --version-1 -- model.gguf --listen ipc:///tmp/x/old.sock
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from bench.options import bench_parser

from dflash_adapters.spec import MoeLayer
from dflash_daemon import __main__ as daemon
from dflash_protocol.batch import RoutedBatch
from dflash_protocol.ids import F64Array
from dflash_runtime.compute import ComputeBackend, ExpertBank, open_backend
from dflash_runtime.compute.backend import ExpertMemory
from dflash_runtime.compute.host_room import PROCESS_BYTES


class ImposedBank:
    """Implements backend.ExpertBank with another bank, and takes longer."""

    def __init__(self, bank: ExpertBank, *, compute_factor: float, request_s: float) -> None:
        self._bank = bank
        self._compute_factor = compute_factor
        self._request_s = request_s

    @property
    def layer(self) -> MoeLayer:
        return self._bank.layer

    @property
    def num_experts(self) -> int:
        return self._bank.num_experts

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        started_s = time.perf_counter()
        self._bank.accumulate(batch, out)
        elapsed_s = time.perf_counter() - started_s
        time.sleep((self._compute_factor - 1) * elapsed_s + self._request_s)


def impose(backend: ComputeBackend, *, compute_factor: float, request_s: float) -> None:
    """Make all banks that the backend loads from now on take longer."""
    load = backend.load_experts

    def load_imposed(*args: Any) -> ExpertBank:
        return ImposedBank(load(*args), compute_factor=compute_factor, request_s=request_s)

    patch.object(backend, "load_experts", load_imposed).start()


def limit(backend: ComputeBackend, num_bytes: int) -> None:
    """Let the backend have so much memory for experts, beside what else a process takes."""
    told = backend.expert_memory

    def expert_memory(*args: Any) -> ExpertMemory:
        memory, room = told(*args), num_bytes + PROCESS_BYTES
        return replace(
            memory,
            free_bytes=min(memory.free_bytes, room),
            total_bytes=min(memory.total_bytes, room),
        )

    patch.object(backend, "expert_memory", expert_memory).start()


def main() -> int:
    parser = bench_parser(__file__, __doc__)
    parser.add_argument(
        "--compute-factor", type=float, default=1.0, help="computing takes so many times as long"
    )
    parser.add_argument(
        "--request-ms", type=float, default=0.0, help="every request takes so much longer"
    )
    parser.add_argument(
        "--free-mib", type=int, help="the daemon has so much memory for experts, and says so"
    )
    parser.add_argument(
        "--version-1", action="store_true", help="speak only version 1 of the protocol"
    )
    parser.add_argument("daemon", nargs="+", help="arguments of the daemon, behind --")
    options = parser.parse_args()

    def open_imposed(*args: Any, **kwargs: Any) -> ComputeBackend:
        backend = open_backend(*args, **kwargs)
        if options.compute_factor != 1.0 or options.request_ms:
            impose(
                backend, compute_factor=options.compute_factor, request_s=options.request_ms / 1e3
            )
        if options.free_mib is not None:
            limit(backend, options.free_mib << 20)
        return backend

    # Patched from outside, so that the real daemon contains none of this.
    with contextlib.ExitStack() as undo:
        undo.enter_context(patch("dflash_daemon.lifecycle.open_backend", open_imposed))
        if options.version_1:
            undo.enter_context(patch("dflash_daemon.control.PROTOCOL_VERSIONS", (1,)))
        return daemon.main(options.daemon)


if __name__ == "__main__":
    sys.exit(main())
