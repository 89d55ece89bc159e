"""Descriptions: the tensors that they name, and a part that no adapter uses yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import (
    Attention,
    Description,
    Linear,
    Rope,
    Tensor,
    VectorTensor,
    parts_of,
)
from dflash_adapters.loading import Loader, load_weights, model_spec
from dflash_adapters.ops import KvType
from dflash_adapters.registry import describe
from dflash_protocol.errors import UnsupportedModel
from dflash_protocol.ids import AnyArray, F32Array, Phase
from dflash_runtime.compute.model import Pausable, Step, forward, run_to_end
from dflash_runtime.compute.reference.backend import ReferenceBackend
from dflash_runtime.compute.reference.ops import ReferenceOps
from support.gpu_models import SHAPES
from support.random_gguf import RandomShape, write_model
from support.random_models import Qwen3MoeShape

QWEN3MOE = Qwen3MoeShape(num_layers=2)
SINKS = "blk.0.attn_sinks.weight"


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


def with_sinks(file: GgufFile) -> Description:
    description = describe(file)
    first, *rest = description.layers
    assert isinstance(first.mixer, Attention)
    sinks = VectorTensor(SINKS, (first.mixer.heads.num,))
    first = replace(first, mixer=replace(first.mixer, sinks=sinks))
    return replace(description, layers=(first, *rest))


def hidden_of(file: GgufFile, description: Description) -> F32Array:
    """Hidden states of three tokens without what experts would add."""

    def experts(
        layer_id: int, hidden: AnyArray, topk_ids: AnyArray, topk_weights: AnyArray
    ) -> Pausable[AnyArray]:
        yield None
        return np.zeros_like(hidden)

    backend = ReferenceBackend()
    model = backend.load_model(file, description)
    cache = backend.new_cache(model.spec, 4, KvType.F32)
    step = Step.of_chunk(np.array([1, 2, 3], np.int32), 0, cache, Phase.PREFILL)
    return run_to_end(forward(model, step, experts))


def test_sinks_take_their_share_of_attention(tmp_path: Path) -> None:
    def hidden(value: float) -> F32Array:
        values = np.full(QWEN3MOE.num_heads, value, np.float32)
        path = write_model(
            tmp_path / "sinks.gguf",
            QWEN3MOE,
            seed=1,
            change=lambda tensors: {**tensors, SINKS: values},
        )
        with GgufFile.open(path) as file:
            with pytest.raises(UnsupportedModel, match=SINKS):
                model_spec(file, describe(file))
            return hidden_of(file, with_sinks(file))

    with GgufFile.open(write_model(tmp_path / "plain.gguf", QWEN3MOE, seed=1)) as file:
        plain = hidden_of(file, describe(file))
    np.testing.assert_allclose(hidden(-1e30), plain, rtol=1e-5, atol=1e-6)
    assert np.abs(hidden(2.0) - plain).max() > 1e-3
