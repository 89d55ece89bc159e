"""Random models of every architecture: their experts are used, and their logits are about five."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.architectures import RANDOM, RandomArchitecture
from support.llama_oracle import LlamaOracle
from support.random_gguf import RandomShape, random_tensors, write_model

SHAPES = [shape for module in RANDOM.values() for shape in module.SHAPES]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda each: f"{each.architecture}, {each.name}")
def test_model_uses_its_experts_and_gives_logits_of_about_five(
    tmp_path: Path, shape: RandomShape
) -> None:
    path = write_model(tmp_path / "model.gguf", shape, seed=5)
    ids = np.random.default_rng(5).integers(0, shape.vocab_size, 60)
    keys = shape.keys()
    num_layers = keys["block_count"] - keys.get("nextn_predict_layers", 0)
    choices = [
        f"ffn_moe_topk-{layer_id}"
        for layer_id in range(num_layers)
        if f"blk.{layer_id}.ffn_gate_inp.weight" in shape.tensors()
    ]
    with LlamaOracle(path, context_length=128) as oracle:
        tensors = oracle.layer_tensors(ids, [*choices, "result_output"])
    assert 3 < np.abs(tensors["result_output"]).max() < 12
    for name in choices:
        used = np.unique(tensors[name]).size
        # With one expert a token, or very many experts, not nearly all of them can be.
        assert used > 0.4 * min(shape.num_experts, tensors[name].size / 2)


@pytest.mark.parametrize("module", RANDOM.values(), ids=RANDOM)
def test_shapes_of_an_architecture_differ_and_are_awkward(module: RandomArchitecture) -> None:
    shapes = module.SHAPES
    assert len(shapes) >= 4
    assert len({shape.name for shape in shapes}) == len(shapes)
    for shape in shapes:
        values = random_tensors(shape, seed=1)
        biases = [each for name, each in values.items() if name.endswith(".bias")]
        assert all(np.abs(bias).max() > 0.01 for bias in biases)
        assert shape.vocab_size % 32
