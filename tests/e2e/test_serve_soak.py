"""A server under load for a while: nothing grows, and everybody waits about as long."""

from __future__ import annotations

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
from support.serving import RunningServer, running_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHAPE = Qwen3MoeShape(
    num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300, context_length=1024
)
WARM_UP_S = 10.0
LOAD_S = 40.0
MOST_GROWTH_BYTES = 16 << 20
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
        transport = httpx.HTTPTransport(local_address=address)
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
                "threads": process.num_threads(),
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
                files_before = process.num_fds()
                load.waits_s.clear()
                time.sleep(LOAD_S)
                after, growth = held(), process.memory_info().rss - bytes_before
                files_after = process.num_fds()
            finally:
                load.has_ended.set()
            for client in clients:
                client.result()
        assert after == before
        assert growth < MOST_GROWTH_BYTES
        assert abs(files_after - files_before) <= len(addresses)  # connections come and go
        waits_s = {address: statistics.mean(each) for address, each in load.waits_s.items()}
        assert len(waits_s) == NUM_FEW + 1
        of_few = [wait_s for address, wait_s in waits_s.items() if address != "127.0.0.100"]
        median_s = statistics.median(of_few)
        assert max(of_few) <= 3 * median_s
        # Four at a time take four turns.
        assert waits_s["127.0.0.100"] <= 3 * 4 * median_s
        print(f"waits {waits_s}, grown by {growth} bytes, {after}, {files_after} files")
        assert server.metric("dflash_moe_num_requests_waiting") == 0
