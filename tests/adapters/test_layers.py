"""Descriptions: the tensors that they name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import (
    Description,
    Linear,
    Rope,
    Tensor,
    parts_of,
)
from dflash_adapters.loading import Loader, load_weights
from dflash_adapters.registry import describe
from dflash_protocol.ids import AnyArray, F32Array
from dflash_runtime.compute.reference.ops import ReferenceOps
from support.gpu_models import SHAPES
from support.random_gguf import RandomShape, write_model
from support.random_models import Qwen3MoeShape

QWEN3MOE = Qwen3MoeShape(num_layers=2)


def tensors_of(description: Description) -> list[Tensor]:
    return [part for part in parts_of(description) if isinstance(part, Tensor)]


@pytest.mark.parametrize("shape", [QWEN3MOE, *SHAPES.values()], ids=lambda s: s.architecture)
def test_a_description_names_every_tensor_of_the_file(tmp_path: Path, shape: RandomShape) -> None:
    with GgufFile.open(write_model(tmp_path / "model.gguf", shape, seed=1)) as file:
        tensors = tensors_of(describe(file))
        assert {tensor.name for tensor in tensors} == set(file.tensors)


@pytest.mark.parametrize("shape", [QWEN3MOE, *SHAPES.values()], ids=lambda s: s.architecture)
def test_layers_share_the_tables_of_their_rotary_embeddings(
    tmp_path: Path, shape: RandomShape
) -> None:
    with GgufFile.open(write_model(tmp_path / "model.gguf", shape, seed=1)) as file:
        description = describe(file)
        ropes = {part for part in parts_of(description) if isinstance(part, Rope)}
        loader: Loader[AnyArray] = ReferenceOps()
        assert set(load_weights(file, loader, description).rope_tables) == ropes
        assert 1 <= len(ropes) <= 2


def test_a_linear_has_the_optional_tensors_that_the_file_has(tmp_path: Path) -> None:
    def change(tensors: dict[str, F32Array]) -> dict[str, F32Array]:
        return {**tensors, "blk.1.attn_output.scale": np.ones(1, np.float32)}

    path = write_model(tmp_path / "model.gguf", QWEN3MOE, seed=1, change=change)
    with GgufFile.open(path) as file:
        outputs = [
            part
            for part in parts_of(describe(file))
            if isinstance(part, Linear) and "attn_output" in part.weight.name
        ]
        assert [part.scale is not None for part in outputs] == [False, True]
        assert all(part.bias is None for part in outputs)
