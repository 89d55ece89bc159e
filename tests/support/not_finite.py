"""Models with a NaN in one of their tensors."""

from __future__ import annotations

import numpy as np

from dflash_protocol.ids import F32Array
from support.random_gguf import Change

OUTPUT_NORM, EMBEDDINGS = "output_norm.weight", "token_embd.weight"


def with_nan(name: str, place: tuple[int, ...]) -> Change:
    """One value of the tensor of that name is NaN."""

    def change(tensors: dict[str, F32Array]) -> dict[str, F32Array]:
        values = tensors[name].copy()
        values[place] = np.nan
        return {**tensors, name: values}

    return change
