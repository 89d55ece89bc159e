"""A small model behind the whole application, in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dflash_protocol.settings import Settings
from dflash_runtime import Engine
from dflash_runtime.serving import generation
from dflash_runtime.serving.access import ApiKeys
from dflash_runtime.serving.app import create_app
from dflash_runtime.serving.metrics import Metrics
from dflash_runtime.serving.state import ServerState
from dflash_runtime.serving.worker import EngineWorker
from support.random_models import Qwen3MoeShape, write_qwen3moe
from support.serving import CHAT_TEMPLATE

SHAPE = Qwen3MoeShape(
    num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300, context_length=512
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    return write_qwen3moe(path, SHAPE, seed=1, tokenizer="bytes")


class Served:
    """The application, its state, and a client of it."""

    def __init__(self, state: ServerState, client: httpx.AsyncClient) -> None:
        self.state = state
        self.client = client

    async def post(self, path: str, **body: object) -> httpx.Response:
        return await self.client.post(path, json=body)


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve(model: Path) -> Serve:
    """``serve(settings=…, keys=…)``: everything but sockets and signals."""

    @asynccontextmanager
    async def served(
        *,
        settings: Settings | None = None,
        keys: ApiKeys | None = None,
        template: str | None = CHAT_TEMPLATE,
        is_opened: bool = True,
    ) -> AsyncIterator[Served]:
        settings = settings or Settings()
        metrics = Metrics()
        worker = EngineWorker(
            lambda report: Engine.open(model, backend="reference", on_progress=report),
            queue_capacity=settings.queue_capacity,
            metrics=metrics,
        )
        with worker:
            state = ServerState(settings, keys, worker, metrics, template)
            if is_opened:
                state.engine = await asyncio.wrap_future(worker.opened)
            transport = httpx.ASGITransport(create_app(state))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1:8080", timeout=30
            ) as client:
                yield Served(state, client)

    return served


@pytest.fixture
def slow_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation begins later than a stream says that it is still there."""
    monkeypatch.setattr(generation, "KEEP_ALIVE_S", 0.01)
    generate = Engine.generate

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.1)
        yield from generate(*arguments, **options)

    monkeypatch.setattr(Engine, "generate", slow)
