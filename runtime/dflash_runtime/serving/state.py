"""What a running server is and does: shared by its routes, and by what starts and stops it.

Knows nothing of routes.
"""

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
    """Used in the event loop's thread alone. `keys` None = whoever reaches us may use us."""

    settings: Settings
    keys: ApiKeys | None
    worker: EngineWorker
    metrics: Metrics
    chat_template: str | None = None
    """In place of the model's own."""
    engine: Engine | None = None
    """Once it is ready."""
    is_draining: bool = False
    num_active: int = 0
    """Generations whose answers are not yet sent whole."""
    became_idle: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: Bodies = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.settings.max_body_bytes)

    def ready_engine(self) -> Engine:
        """Raises: ApiError if there is none yet, or no more."""
        if self.is_draining:
            raise unavailable("the server is shutting down", "shutting_down", retry_after_s=5)
        if self.engine is None:
            raise unavailable("the model is being loaded", "loading", retry_after_s=1)
        return self.engine

    def begin(self) -> None:
        """An answer has been begun."""
        self.num_active += 1
        self.became_idle.clear()

    def end(self) -> None:
        """It is sent, or its client is gone."""
        self.num_active -= 1
        if not self.num_active:
            self.became_idle.set()
