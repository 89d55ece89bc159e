"""Finds the adapter for a file's ``general.architecture``.

Each adapter is a module of `models` with the architecture's name, imported on demand.
"""

from __future__ import annotations

import importlib
from typing import Protocol, TypeVar, cast

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.ops import Model, Ops
from dflash_adapters.spec import ModelSpec
from dflash_protocol.errors import UnsupportedModel

A = TypeVar("A")

ARCHITECTURES = ("qwen3moe", "qwen35moe", "olmoe", "qwen2moe", "llama", "laguna", "llama4")
"""The architectures that have an adapter."""


class Adapter(Protocol):
    """The interface of an adapter module."""

    def read_spec(self, file: GgufFile) -> ModelSpec:
        """Read the model's dimensions and check every tensor's shape; reads no weight."""

    def load(self, file: GgufFile, ops: Ops[A]) -> Model[A]:
        """Load the model's dense weights to the device of `ops`. Experts are not loaded."""


def adapter_for(file: GgufFile) -> Adapter:
    """The adapter of a file's architecture.

    Raises: UnsupportedModel if there is none; the message says if the model is a dense one.
    """
    architecture = file.architecture
    is_dense = file.get_uint(f"{architecture}.expert_count", 0) == 0
    if architecture in ARCHITECTURES and not is_dense:
        return cast(Adapter, importlib.import_module(f"dflash_adapters.models.{architecture}"))
    if is_dense:
        reason = (
            f"{architecture!r} is a dense model: it has no experts to compute elsewhere; "
            f"use an ordinary runtime for it (supported: {', '.join(ARCHITECTURES)})"
        )
    else:
        reason = f"unknown architecture {architecture!r}; supported: {', '.join(ARCHITECTURES)}"
    raise UnsupportedModel(reason, path=file.path, field="general.architecture")
