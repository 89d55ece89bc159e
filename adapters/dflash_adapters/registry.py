"""From ``general.architecture`` to the adapter that understands it.

One adapter a file, named as the architecture is named; imported only when a model asks for it.
"""

from __future__ import annotations

import importlib
from typing import Protocol, TypeVar, cast

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.moe_spec import ModelSpec
from dflash_adapters.ops import Model, Ops
from dflash_protocol.errors import UnsupportedModel

A = TypeVar("A")

ARCHITECTURES = ("qwen3moe",)
"""Every architecture that has an adapter here."""


class Adapter(Protocol):
    """What an adapter module offers."""

    def read_spec(self, file: GgufFile) -> ModelSpec:
        """Facts from metadata alone; every tensor's shape is checked, no weight is read."""

    def load(self, file: GgufFile, ops: Ops[A]) -> Model[A]:
        """The model with its dense weights on the device of `ops`. Experts are not loaded."""


def adapter_for(file: GgufFile) -> Adapter:
    """The adapter of a file's architecture.

    Raises: UnsupportedModel if there is none, saying so if the model is a dense one.
    """
    architecture = file.architecture
    if architecture in ARCHITECTURES:
        return cast(Adapter, importlib.import_module(f"dflash_adapters.{architecture}"))
    if file.get_uint(f"{architecture}.expert_count", 0) == 0:
        reason = (
            f"{architecture!r} is a dense model: it has no experts to compute elsewhere; "
            "use an ordinary runtime for it"
        )
    else:
        reason = f"unknown architecture {architecture!r}; supported: {', '.join(ARCHITECTURES)}"
    raise UnsupportedModel(reason, path=file.path, field="general.architecture")
