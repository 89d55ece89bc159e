"""Finds the adapter of a model file by ``general.architecture``; reads specs and loads models.

An adapter is a module of `models` with the architecture's name, imported when it is needed.
"""

from __future__ import annotations

import importlib
from typing import Protocol, TypeVar, cast

from dflash_adapters.forward import LayeredModel
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Description
from dflash_adapters.loading import model_spec
from dflash_adapters.ops import Model, Ops
from dflash_adapters.spec import ModelSpec
from dflash_protocol.errors import UnsupportedModel

A = TypeVar("A")

ARCHITECTURES = ("qwen3moe", "qwen35moe", "olmoe", "qwen2moe", "llama", "laguna", "llama4")
"""The architectures that have an adapter."""


class Adapter(Protocol):
    """The interface of an adapter module."""

    def describe(self, file: GgufFile) -> Description:
        """Describe the model from its metadata; shapes of tensors are checked later.

        Raises: ModelFileError for a missing or impossible key, UnsupportedModel for a setting that
        is not computed.
        """


def adapter_for(file: GgufFile) -> Adapter:
    """Return the adapter of a file's architecture.

    Raises: UnsupportedModel if there is none, or if the model is dense.
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


def read_spec(file: GgufFile) -> ModelSpec:
    """Read a model's spec from its metadata; checks all tensors, reads no weights.

    Raises: ModelFileError, UnsupportedModel.
    """
    return model_spec(file, adapter_for(file).describe(file))


def load(file: GgufFile, ops: Ops[A]) -> Model[A]:
    """Load a model's dense weights on the device of `ops`; owners of experts load the experts.

    Raises: as read_spec; ModelFileError for impossible weights.
    """
    return LayeredModel(file, ops, adapter_for(file).describe(file))
