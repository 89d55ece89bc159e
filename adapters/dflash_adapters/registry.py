"""Finds the adapter of a model file by ``general.architecture``; reads descriptions and specs.

An adapter is a module of `models` with the architecture's name, in which ``_`` stands for ``-``; it
is imported when it is needed.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, cast

from dflash_adapters import models
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Description
from dflash_adapters.loading import model_spec
from dflash_adapters.spec import ModelSpec
from dflash_protocol.errors import UnsupportedModel

_MODULES = {
    each.name.replace("_", "-"): each.name for each in pkgutil.iter_modules(models.__path__)
}

ARCHITECTURES = tuple(_MODULES)
"""The architectures that have an adapter, in alphabetical order."""


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
    """Read a model's spec from its metadata; checks all tensors, reads no weights.

    Raises: ModelFileError, UnsupportedModel.
    """
    return model_spec(file, describe(file))


def describe(file: GgufFile) -> Description:
    """The model's description by its architecture's adapter; tensors are not compared yet.

    Raises: ModelFileError, UnsupportedModel.
    """
    return adapter_for(file).describe(file)
