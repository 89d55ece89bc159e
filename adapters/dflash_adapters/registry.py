"""From a model file to its description, facts and forward pass, by ``general.architecture``.

Each adapter is a module of `models` with the architecture's name, in which ``_`` stands for ``-``,
imported on demand.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, TypeVar, cast

from dflash_adapters import models
from dflash_adapters.forward import LayeredModel
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Description
from dflash_adapters.loading import model_spec
from dflash_adapters.ops import Model, Ops
from dflash_adapters.spec import ModelSpec
from dflash_protocol.errors import UnsupportedModel

A = TypeVar("A")

_MODULES = {
    each.name.replace("_", "-"): each.name for each in pkgutil.iter_modules(models.__path__)
}

ARCHITECTURES = tuple(_MODULES)
"""The architectures that have an adapter, in alphabetical order."""


class Adapter(Protocol):
    """The interface of an adapter module."""

    def describe(self, file: GgufFile) -> Description:
        """The model as metadata says it is; tensors' shapes are not compared yet.

        Raises: ModelFileError for a missing or impossible key, UnsupportedModel for a setting that
        is not computed.
        """


def adapter_for(file: GgufFile) -> Adapter:
    """The adapter of a file's architecture.

    Raises: UnsupportedModel if there is none; the message says if the model is a dense one.
    """
    architecture = file.architecture
    is_dense = file.get_uint(f"{architecture}.expert_count", 0) == 0
    if architecture in ARCHITECTURES and not is_dense:
        module = architecture.replace("-", "_")
        return cast(Adapter, importlib.import_module(f"{models.__name__}.{module}"))
    if is_dense:
        reason = (
            f"{architecture!r} is a dense model: it has no experts to compute elsewhere; "
            f"use an ordinary runtime for it (supported: {', '.join(ARCHITECTURES)})"
        )
    else:
        reason = f"unknown architecture {architecture!r}; supported: {', '.join(ARCHITECTURES)}"
    raise UnsupportedModel(reason, path=file.path, field="general.architecture")


def read_spec(file: GgufFile) -> ModelSpec:
    """Facts from metadata alone: every tensor's name and shape is checked, no weight is read.

    Raises: ModelFileError, UnsupportedModel.
    """
    return model_spec(file, adapter_for(file).describe(file))


def load(file: GgufFile, ops: Ops[A]) -> Model[A]:
    """The model with its dense weights on the device of `ops`; experts are left to their owners.

    Raises: as read_spec; ModelFileError for weights that cannot be.
    """
    return LayeredModel(file, ops, adapter_for(file).describe(file))
