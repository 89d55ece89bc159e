"""Run Mixture-of-Experts models with their experts wherever there is room for them.

``from dflash_runtime import Engine`` is the whole Python interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_runtime.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> object:
    # Late, so that the daemon and `inspect` do not import what only the engine needs.
    if name == "Engine":
        from dflash_runtime.engine.engine import Engine

        return Engine
    raise AttributeError(name)
