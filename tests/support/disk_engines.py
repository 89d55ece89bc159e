"""Engines on the processor that have memory for some of a model's experts: the others are read from
the disk when they are used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_runtime import Engine
from dflash_runtime.compute.cpu.host_arena import HostArena
from dflash_runtime.compute.expert_arena import ArenaStats
from dflash_runtime.engine import opening
from dflash_runtime.engine.demo_model import demo_model_path
from dflash_runtime.placement.host_context import parent_bytes
from support.arena_rig import SHAPE, check_whole, empty_some, slot_bytes_of
from support.undisturbed import settings_with

TRAINED = tuple(
    demo_model_path().with_name(f"{name}.gguf")
    for name in ("dflash-demo", "dflash-demo-laguna", "dflash-demo-qwen35moe")
)

MANY_LAYERS = replace(
    SHAPE, name="a layer's experts are a twelfth of all", num_layers=12, context_length=1024
)


@contextlib.contextmanager
def opened(path: Path, num_slots: int | None, **wishes: Any) -> Iterator[Engine]:
    """`num_slots`: experts that there is room for; None: all are in memory as the file is. Without
    heat, unless `wishes` say otherwise."""
    num_bytes = None
    if num_slots is not None:
        with GgufFile.open(path) as file:
            num_bytes = int((num_slots + 0.9) * slot_bytes_of(file))
            if wishes.get("moe_predict_prefetch", True):
                layers = read_spec(file).moe.layers[1:]
                num_bytes += sum(2 * each.num_experts * each.hidden_size for each in layers)
    settings = settings_with(**{"heat": "off"} | wishes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "_arena_bytes", lambda *_: num_bytes)
        engine = Engine.open(path, backend="cpu", threads=1, settings=settings)
    with engine:
        if num_slots is not None:
            assert stats_of(engine).num_slots == num_slots
        yield engine


def needed_mib_of(path: Path, *, context: int) -> int:
    """What an engine on the processor needs beside experts."""
    found: list[int] = []

    def noted(*arguments: Any) -> int:
        found.append(parent_bytes(*arguments))
        return found[-1]

    settings = settings_with(context=context, heat="off")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "parent_bytes", noted)
        Engine.open(path, device="cpu", settings=settings).close()
    return -(-found[-1] >> 20)


def arena_of(engine: Engine) -> HostArena:
    arena = engine._owners.arena
    assert isinstance(arena, HostArena)
    return arena


def stats_of(engine: Engine) -> ArenaStats:
    disk = engine.stats().disk
    assert disk is not None
    return disk


class Adversary:
    """Has experts leave at random, whenever it is called, and spoils memory that holds none.
    Without an arena it does nothing."""

    def __init__(self, engine: Engine, share: float, seed: int = 0) -> None:
        self._arena = engine._owners.arena
        self._share, self._rng = share, np.random.default_rng(seed)
        self.num_calls = self.num_left = 0

    def __call__(self) -> bool:
        """Never cancels, as an engine may ask this."""
        self.num_calls += 1
        if isinstance(self._arena, HostArena):
            check_whole(self._arena)
            self.num_left += empty_some(self._arena, self._rng, self._share)
        return False
