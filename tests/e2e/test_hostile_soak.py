"""A thousand times what happens now and then: nothing grows with it, and what follows is right.

Descriptors, threads, memory and shared memory of both sides are read after a tenth of the rounds,
when everything that is made once is there, and at the end.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from dflash_runtime.experts.daemons import link_task
from dflash_runtime.experts.daemons.link import DaemonLink, Session
from support.asked_parent import PROMPT
from support.faults import greedy, shared_memory_of
from support.processes import MOST_POOL_THREADS, START_S, running_daemon, wait_until
from support.random_models import BLOCK_32_SHAPE, Qwen3MoeShape, write_qwen3moe
from support.scripted_daemon import ScriptedDaemon
from support.serving import NO_TLS, RunningServer, running_server
from support.supervised import started

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_RECONNECTS = 1000
NUM_CANCELLED = int(os.environ.get("CANCELLED_STREAMS", "10000"))
AT_ONCE = 8
MOST_GROWTH_BYTES = 4 << 20
NUM_TOKENS = 20


def held(pid: int) -> dict[str, int]:
    process = psutil.Process(pid)
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "shared memory": len(shared_memory_of(pid)),
        "children": len(process.children(recursive=True)),
    }


def resident_bytes(pid: int) -> int:
    gc.collect()
    return int(psutil.Process(pid).memory_info().rss)


class Growth:
    """What processes hold, between two points of time."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._held = [held(pid) for pid in pids]
        self._bytes = [resident_bytes(pid) for pid in pids]

    def assert_none(self, **allowed: int) -> None:
        def is_flat() -> bool:
            return all(
                now[name] <= before[name] + allowed.get(name, 0)
                for before, now in zip(self._held, map(held, self._pids), strict=True)
                for name in now
            )

        with suppress(AssertionError):
            wait_until(is_flat, "", pause_s=0.1)
        now = [held(pid) for pid in self._pids]
        assert is_flat(), (self._held, now)
        grown = [
            resident_bytes(pid) - before
            for pid, before in zip(self._pids, self._bytes, strict=True)
        ]
        print(f"grown by {grown} bytes; {now}")
        assert max(grown) < MOST_GROWTH_BYTES


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tries to connect."""
    monkeypatch.setattr(link_task, "_BACKOFF_FIRST_S", 0.0)
    monkeypatch.setattr(link_task, "_BACKOFF_LAST_S", 0.0)


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_thousand_reconnects_of_a_parent_to_one_daemon(
    tmp_path: Path,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_pauses: None,
    transport: str,
) -> None:
    model = write_qwen3moe(tmp_path / "m.gguf", BLOCK_32_SHAPE, seed=3, tensor_type="Q8_0")
    endpoint = f"ipc://{run_dir}/daemon.sock"
    settings = replace(load_settings(), ipc_transport=transport)
    links: list[DaemonLink] = []
    mark_ready = DaemonLink.mark_ready

    def noted(link: DaemonLink, *arguments: Any, **options: Any) -> Session:
        links[:] = [link]
        return mark_ready(link, *arguments, **options)

    monkeypatch.setattr(DaemonLink, "mark_ready", noted)
    with (
        running_daemon(model, endpoint) as daemon,
        Engine.open(model, connect=[endpoint], settings=settings) as engine,
    ):
        expected = greedy(engine, PROMPT, NUM_TOKENS)
        [link] = links

        def reconnect(num_times: int) -> None:
            for count in range(num_times):
                wait_until(lambda: link.session is not None, "the link", pause_s=0.001)
                session = link.session
                assert session is not None
                link.mark_lost(session.generation, "the test says so")
                if count % 20 == 0:  # with the daemon or without, as it comes
                    assert greedy(engine, PROMPT, NUM_TOKENS) == expected
            wait_until(lambda: link.session is not None, "the link", pause_s=0.001)
            assert greedy(engine, PROMPT, NUM_TOKENS) == expected

        reconnect(NUM_RECONNECTS // 10)
        growth = Growth(os.getpid(), daemon.pid)
        reconnect(NUM_RECONNECTS - NUM_RECONNECTS // 10)
        growth.assert_none(threads=MOST_POOL_THREADS)
        stats = engine.stats()
        assert stats.owners["link0"].restarts == NUM_RECONNECTS
        before = stats.owners["link0"].requests
        assert greedy(engine, PROMPT, NUM_TOKENS) == expected
        assert engine.stats().owners["link0"].requests > before


def test_a_thousand_restarts_of_a_daemon_under_one_parent(run_dir: Path, no_pauses: None) -> None:
    address = f"ipc://{run_dir}/d"
    with ExitStack() as undo:
        daemon = ScriptedDaemon(address)
        parent = started(undo, daemon)

        def restart(num_times: int) -> None:
            nonlocal daemon
            for _ in range(num_times):
                session = parent.link.session
                assert session is not None
                daemon.close()
                parent.next_loss()
                daemon = ScriptedDaemon(address)
                daemon.let_in()
                parent.wait_for_session(session.generation + 1)

        try:
            restart(NUM_RECONNECTS // 10)
            growth = Growth(os.getpid())
            restart(NUM_RECONNECTS - NUM_RECONNECTS // 10)
            growth.assert_none()
            assert parent.link.restarts == NUM_RECONNECTS
        finally:
            daemon.close()


async def _cancel(port: int, body: bytes, num_times: int, at: int) -> None:
    """Ask for a stream and hang up: at once, after its head, or within its text."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
        "content-type: application/json\r\n\r\n"
    )
    for count in range(num_times):
        kind = (count + at) % 4
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head.encode() + (body[:-5] if kind == 0 else body))
            await writer.drain()
            if kind >= 2:
                assert (await reader.readuntil(b"\r\n")).split()[1] in (b"200", b"429", b"503")
            if kind == 3:
                await reader.readuntil(b"data: ")
        finally:
            writer.transport.abort() if count % 2 else writer.close()


def cancel_streams(server: RunningServer, num_times: int) -> None:
    body = json.dumps(
        {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    ).encode()

    async def all_of_them() -> None:
        shares = [_cancel(server.port, body, num_times // AT_ONCE, at) for at in range(AT_ONCE)]
        await asyncio.gather(*shares)

    asyncio.run(asyncio.wait_for(all_of_them(), 240))


def is_idle(server: RunningServer) -> Callable[[], bool]:
    def check() -> bool:
        return not any(
            server.metric(f"dflash_moe_num_requests_{what}") for what in ("running", "waiting")
        )

    return check


def test_ten_thousand_cancelled_streams(tmp_path: Path) -> None:
    shape = Qwen3MoeShape(
        num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300, context_length=1024
    )
    model = write_qwen3moe(tmp_path / "small.gguf", shape, seed=1, tokenizer="bytes")
    with running_server(model, "--daemon", "cpu") as server:

        def completed() -> str:
            body = {"prompt": "Once", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
            url = f"{server.url}/v1/completions"
            answer = httpx.post(url, json=body, verify=NO_TLS, timeout=START_S)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        expected = completed()
        cancel_streams(server, NUM_CANCELLED // 10)
        wait_until(is_idle(server), "all to be ended", pause_s=0.1)
        assert completed() == expected
        [daemon] = psutil.Process(server.process.pid).children()
        growth = Growth(server.process.pid, daemon.pid)
        cancel_streams(server, NUM_CANCELLED - NUM_CANCELLED // 10)
        wait_until(is_idle(server), "all to be ended", pause_s=0.1)
        assert completed() == expected
        growth.assert_none(threads=MOST_POOL_THREADS)
        assert len(server.lines) < 10, server.lines
