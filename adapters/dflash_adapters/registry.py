"""Finds the adapter of a model file by ``general.architecture``; reads descriptions and specs.

An adapter is a module of `models` with the architecture's name, in which ``_`` stands for ``-``,
with a function ``describe(file)``; it is imported when it is needed.
"""

from __future__ import annotations

import importlib
import pkgutil

from dflash_adapters import models
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Description
from dflash_adapters.loading import model_spec
from dflash_adapters.spec import ModelSpec
from dflash_protocol.errors import UnsupportedModel

ARCHITECTURES = tuple(
    module.name.replace("_", "-") for module in pkgutil.iter_modules(models.__path__)
)
"""The architectures that have an adapter, in alphabetical order."""


def describe(file: GgufFile) -> Description:
    """The model's description by its architecture's adapter; tensors are not compared yet.

    Raises: ModelFileError for a missing or impossible key; UnsupportedModel for a setting that is
    not computed, for an architecture without an adapter, and for a dense model.
    """
    architecture = file.architecture
    is_dense = file.get_uint(f"{architecture}.expert_count", 0) == 0
    if architecture in ARCHITECTURES and not is_dense:
        name = f"{models.__name__}.{architecture.replace('-', '_')}"
        description: Description = importlib.import_module(name).describe(file)
        return description
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
    return model_spec(file, describe(file))
