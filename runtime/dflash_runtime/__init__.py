"""Run Mixture-of-Experts models with their experts wherever there is room for them.

`Engine` opens a model, `AsyncEngine` does for asyncio; `errors` has the classes of what they raise.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_adapters.text.answers import Content, Reasoning, ToolCall
    from dflash_adapters.text.grammar import Grammar
    from dflash_protocol import __version__, errors
    from dflash_protocol.settings import Settings, load_settings
    from dflash_runtime.engine.async_engine import AsyncEngine, AsyncGeneration
    from dflash_runtime.engine.engine import Engine, EngineStats, Verified
    from dflash_runtime.engine.generation import GeneratedToken, GenerationStats
    from dflash_runtime.engine.penalties import Penalties

_ENGINE = "dflash_runtime.engine"
_HOMES = {
    "AsyncEngine": f"{_ENGINE}.async_engine",
    "AsyncGeneration": f"{_ENGINE}.async_engine",
    "Content": "dflash_adapters.text.answers",
    "Engine": f"{_ENGINE}.engine",
    "EngineStats": f"{_ENGINE}.engine",
    "GeneratedToken": f"{_ENGINE}.generation",
    "GenerationStats": f"{_ENGINE}.generation",
    "Grammar": "dflash_adapters.text.grammar",
    "Penalties": f"{_ENGINE}.penalties",
    "Reasoning": "dflash_adapters.text.answers",
    "Settings": "dflash_protocol.settings",
    "ToolCall": "dflash_adapters.text.answers",
    "Verified": f"{_ENGINE}.engine",
    "__version__": "dflash_protocol",
    "errors": "dflash_protocol",
    "load_settings": "dflash_protocol.settings",
}
"""The module of each name. They are imported when they are first used, so that the daemon and
`inspect` do not import what only the engine needs."""

__all__ = [
    "AsyncEngine",
    "AsyncGeneration",
    "Content",
    "Engine",
    "EngineStats",
    "GeneratedToken",
    "GenerationStats",
    "Grammar",
    "Penalties",
    "Reasoning",
    "Settings",
    "ToolCall",
    "Verified",
    "__version__",
    "errors",
    "load_settings",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "errors":
        return importlib.import_module(f"{home}.{name}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
