"""The state of a running server, shared by its routes and by what starts and stops it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from dflash_protocol.settings import Settings
from dflash_runtime.engine.engine import Engine
from dflash_runtime.serving.access import ApiKeys
from dflash_runtime.serving.bodies import Bodies
from dflash_runtime.serving.errors import unavailable
from dflash_runtime.serving.metrics import Metrics
from dflash_runtime.serving.worker import EngineWorker


@dataclass(slots=True)
class ServerState:
    """Used in the event loop's thread alone. `keys` None: no client needs a key."""

    settings: Settings
    keys: ApiKeys | None
    worker: EngineWorker
    metrics: Metrics
    chat_template: str | None = None
    """Replaces the model's."""
    engine: Engine | None = None
    """None until it is open."""
    is_draining: bool = False
    num_active: int = 0
    """Generations whose answers are not yet sent completely."""
    became_idle: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: Bodies = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.settings.max_body_bytes)

    def ready_engine(self) -> Engine:
        """The engine. Raises: ApiError while it is opened, or the server is ending."""
        if self.is_draining:
            raise unavailable("the server is shutting down", "shutting_down", retry_after_s=5)
        if self.engine is None:
            raise unavailable("the model is being loaded", "loading", retry_after_s=1)
        return self.engine

    def begin(self) -> None:
        """Count an answer that begins."""
        self.num_active += 1
        self.became_idle.clear()

    def end(self) -> None:
        """Count an answer that is sent, or whose client has disconnected."""
        self.num_active -= 1
        if not self.num_active:
            self.became_idle.set()
