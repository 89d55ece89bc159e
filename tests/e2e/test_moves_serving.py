"""Experts that move between daemons while a server answers many clients: no request fails, and each
gets its text."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_runtime import Engine
from dflash_runtime.engine import replacing
from dflash_runtime.engine.generation import GeneratedToken
from dflash_runtime.engine.steps import Steps
from dflash_runtime.experts.replacing import Prepared
from dflash_runtime.serving.metrics import Metrics
from dflash_runtime.serving.worker import Channel, EngineWorker, Finished, Job, TokenOptions
from support import undisturbed as rig
from support.faults import greedy
from support.moved_experts import DAEMONS, daemon_called, num_moved, opened
from support.processes import wait_until
from support.random_models import write_qwen3moe
from support.scripted_moves import move_between_daemons
from support.serving import RunningServer, running_server
from support.undisturbed import FAULT_AFTER, NUM_TOKENS, PROMPT, settings_with

pytestmark = pytest.mark.e2e

model = rig.model
undisturbed = rig.undisturbed
CLIENTS = 32


@pytest.mark.slow
def test_experts_move_within_requests_of_many_clients(
    model: Path, undisturbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 of them, between owners of one class: no failure, and the text of each client."""
    move_between_daemons(monkeypatch)
    replace_all = Steps.replace
    moved_within: list[int] = []

    def counted(steps: Steps, prepared: Prepared, *args: Any, ends_run: bool = True) -> None:
        before = steps.placement
        replace_all(steps, prepared, *args, ends_run=ends_run)
        assert not ends_run
        moved_within.append(num_moved(before, steps.placement))

    monkeypatch.setattr(Steps, "replace", counted)
    settings = settings_with(check_replies=0, ipc_required=True)
    texts: list[list[int]] = []

    def opened_here(report: object) -> Engine:
        engine = Engine.open(model, daemons=["cpu", "cpu"], settings=settings)
        generate = engine.generate

        def noted(*args: Any, **options: Any) -> Iterator[GeneratedToken]:
            texts.append([])
            for token in generate(*args, **options):
                texts[-1].append(token.token_id)
                yield token

        monkeypatch.setattr(engine, "generate", noted)
        return engine

    async def serve(worker: EngineWorker) -> list[str]:
        loop = asyncio.get_running_loop()
        jobs = [
            Job(f"client {number}", PROMPT, NUM_TOKENS, TokenOptions(), Channel(loop))
            for number in range(CLIENTS)
        ]
        for job in jobs:
            worker.submit(job)
        ends = []
        for job in jobs:
            await job.channel.ended()
            last = (await job.channel.take())[-1]
            ends.append(last.finish_reason if isinstance(last, Finished) else str(last))
        return ends

    worker = EngineWorker(opened_here, queue_capacity=CLIENTS, metrics=Metrics())
    with worker:
        worker.opened.result(60)
        while sum(moved_within) < 512:
            assert asyncio.run(serve(worker)) == ["length"] * CLIENTS
        stats = worker.stats
    assert texts == [undisturbed] * len(texts)
    assert stats.events == []
    assert stats.moves.rounds == len(moved_within)
    assert stats.moves.rounds_not_applied == 0
    assert 2 * stats.moves.experts_moved == sum(moved_within)


@pytest.mark.slow
def test_a_daemon_that_is_killed_while_experts_move_fails_no_request(
    model: Path, undisturbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds fail meanwhile, and go on once it is back."""
    move_between_daemons(monkeypatch)
    monkeypatch.setattr(replacing, "RESTING", 5)
    with opened(model, ipc_required=False, heat="off") as engine:
        for number, name in enumerate((*DAEMONS, *DAEMONS)):
            tokens = []
            for token in engine.generate(PROMPT, NUM_TOKENS):
                tokens.append(token.token_id)
                if len(tokens) == FAULT_AFTER + number:
                    daemon_called(name).kill()
            assert tokens == undisturbed
            before = engine.stats().moves

            def is_going_on(num_before: int = before.rounds) -> bool:
                assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
                return engine.stats().moves.rounds > num_before + 2

            wait_until(is_going_on, "more rounds")
        assert engine.stats().moves.last_pause_s > 0.0


@pytest.mark.slow
def test_a_server_moves_experts_while_many_clients_ask(tmp_path: Path) -> None:
    """As a user would: 1,024 experts in two daemons, 32 connections."""
    shape = replace(rig.SHAPE, num_layers=16, num_experts=64, num_experts_used=4)
    path = write_qwen3moe(tmp_path / "m.gguf", shape, seed=3, tensor_type="Q8_0", tokenizer="bytes")

    def text_of(server: RunningServer) -> str:
        with server.client() as client:
            found = client.completions.create(
                model="m", prompt="some text", max_tokens=24, temperature=0
            )
        return str(found.choices[0].text)

    with running_server(path) as server:
        expected = text_of(server)
    assert expected
    program = [sys.executable, "-m", "support.scripted_moves"]
    with (
        running_server(path, "--daemon", "cpu", "--daemon", "cpu", program=program) as server,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):
        num_asked = 0
        while server.metric("dflash_moe_experts_moved_total") < 256 or num_asked < 4 * CLIENTS:
            texts = list(clients.map(text_of, [server] * CLIENTS))
            assert texts == [expected] * CLIENTS
            num_asked += CLIENTS
        owners = server.get("/status").json()["owners"]
        assert {owner["name"] for owner in owners} >= {*DAEMONS}
        assert "fallback" not in {owner["name"] for owner in owners}
        moves = server.get("/status").json()["moves"]
        assert moves["rounds_not_applied"] == 0
        assert moves["last_pause_s"] > 0.0
