"""A server under load for a while: nothing grows, and everybody waits about as long."""

from __future__ import annotations

import os
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.random_models import Qwen3MoeShape, write_qwen3moe
from support.serving import NO_TLS, RunningServer, running_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHAPE = Qwen3MoeShape(
    num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300, context_length=1024
)
WARM_UP_S = 10.0
LOAD_S = float(os.environ.get("SERVE_SOAK_S", "40"))
"""Of load: ten minutes with SERVE_SOAK_S=600 and --timeout 900."""
MOST_GROWTH_BYTES = 16 << 20
MOST_POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Of asyncio's pool, which starts them when several are needed at once."""
NUM_FEW = 7
"""Clients with one request at a time; one more has four."""


class Load:
    """Clients that ask until they are told to end; some go away in the middle of an answer."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self.has_ended = threading.Event()
        self.waits_s: dict[str, list[float]] = {}

    def run(self, address: str) -> None:
        """One client, known by its address."""
        transport = httpx.HTTPTransport(local_address=address, verify=NO_TLS)
        with httpx.Client(transport=transport, timeout=60) as client:
            turn = 0
            while not self.has_ended.is_set():
                turn += 1
                started_s = time.perf_counter()
                text = self._ask(client, f"{address} {turn}", is_cut=turn % 5 == 0)
                if not text.startswith("data: "):
                    raise AssertionError(text)
                self.waits_s.setdefault(address, []).append(time.perf_counter() - started_s)

    def _ask(self, client: httpx.Client, prompt: str, *, is_cut: bool) -> str:
        body: dict[str, Any] = {
            "prompt": prompt, "max_tokens": 20, "ignore_eos": True, "stream": True, "logprobs": 1
        }  # fmt: skip
        url = f"{self._server.url}/v1/completions"
        with client.stream("POST", url, json=body) as response:
            if is_cut:
                return next(response.iter_text())
            return response.read().decode()


def test_nothing_grows_and_nobody_waits_much_longer(tmp_path: Path, run_dir: Path) -> None:
    model = write_qwen3moe(tmp_path / "small.gguf", SHAPE, seed=1, tokenizer="bytes")
    with running_server(model, "--backend", "reference", "--daemon", "cpu") as server:
        process = psutil.Process(server.process.pid)

        def held() -> dict[str, int]:
            return {
                "children": len(process.children(recursive=True)),
                "segments": sum("dflash" in m.path or "ring-" in m.path
                                for m in process.memory_maps(grouped=False)),
                "sockets in the folder": sum(1 for _ in run_dir.rglob("*")),
            }  # fmt: skip

        load = Load(server)
        addresses = [f"127.0.0.{2 + index}" for index in range(NUM_FEW)] + ["127.0.0.100"] * 4
        with ThreadPoolExecutor(len(addresses)) as pool:
            clients = [pool.submit(load.run, address) for address in addresses]
            try:
                time.sleep(WARM_UP_S)
                before, bytes_before = held(), process.memory_info().rss
                files_before, threads_before = process.num_fds(), process.num_threads()
                load.waits_s.clear()
                time.sleep(LOAD_S)
                after, growth = held(), process.memory_info().rss - bytes_before
                files_after, threads_after = process.num_fds(), process.num_threads()
            finally:
                load.has_ended.set()
            for client in clients:
                client.result()
        waits_s = {address: statistics.mean(each) for address, each in load.waits_s.items()}
        of_few = [wait_s for address, wait_s in waits_s.items() if address != "127.0.0.100"]
        median_s = statistics.median(of_few)
        longest_s = max(max(each) for each in load.waits_s.values())
        num_requests = sum(len(each) for each in load.waits_s.values())
        print(
            f"{num_requests} requests, mean wait of clients {min(of_few):.3f} to {max(of_few):.3f} "
            f"s, median {median_s:.3f}, longest of all {longest_s:.3f}; grown by {growth} bytes, "
            f"{after}, {files_before} and {files_after} files, "
            f"{threads_before} and {threads_after} threads"
        )
        assert after == before
        assert growth < MOST_GROWTH_BYTES
        assert abs(files_after - files_before) <= len(addresses)  # connections come and go
        assert threads_after <= threads_before + MOST_POOL_THREADS
        assert len(waits_s) == NUM_FEW + 1
        assert max(of_few) <= 3 * median_s
        # Four at a time take four turns.
        assert waits_s["127.0.0.100"] <= 3 * 4 * median_s
        assert server.metric("dflash_moe_num_requests_waiting") == 0
