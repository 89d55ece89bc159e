"""Random models of every architecture with an adapter, for tests of all of them.

A new architecture is a module `random_NAME` beside this one with what `RandomArchitecture` lists.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from dflash_adapters.registry import ARCHITECTURES
from support.random_gguf import RandomShape


class RandomArchitecture(Protocol):
    """What a module of random models of one architecture has."""

    SHAPES: tuple[RandomShape, ...]
    """At least four in which no size is round, for F32 files."""
    SMALL: RandomShape
    """Two layers with all that they may have; for what only metadata says."""
    SHAPE_ON_GPU: RandomShape
    """Rows as the GPU's kernels of quantised and float matrices take them."""
    BLOCK_256_SHAPE: RandomShape
    """Rows of whole blocks of 256 values, all experts used."""
    REQUIRED_KEYS: tuple[str, ...]
    """Beside those that every architecture needs."""


RANDOM: dict[str, RandomArchitecture] = {
    name: cast(RandomArchitecture, importlib.import_module(f"support.random_{name}"))
    for name in (each.replace("-", "_") for each in ARCHITECTURES)
    if name != "qwen3moe"  # has tests and random models of its own
}
"""By name of the module that describes the architecture."""
