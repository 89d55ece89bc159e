"""GGUF files of one layer's random experts, in every form that a layer may have.

The values follow from the seed and the tensor's name: files of one seed and size that differ in
types or merging hold the same experts. `support.float64_experts` computes with their values.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import gguf
import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import ExpertMatrices, Experts, ExpertSizes, F32Tensor, Tensor
from dflash_adapters.quant import TensorType
from dflash_adapters.routed_experts import moe_layer
from dflash_adapters.spec import Activation, MoeLayer
from dflash_protocol.ids import F32Array
from support.llama_oracle import quantise

BITING_LIMIT = 1.5
"""A limit beyond which about half of the gate and up values of these files lie."""
GPT_OSS_ALPHA = 1.702


def write_expert_layer(
    path: Path,
    *,
    num_experts: int,
    hidden_size: int,
    ffn_size: int,
    types: tuple[TensorType, TensorType, TensorType] = (TensorType.F32,) * 3,
    merged: bool = False,
    biases: bool = False,
    scales: bool = False,
    activation: Activation = Activation.SWIGLU,
    activation_limit: float = BITING_LIMIT,
    num_experts_used: int = 1,
    layer_id: int = 0,
    seed: int = 0,
) -> MoeLayer:
    """Write one layer's experts and describe them; the file is then to be opened by `path`.

    `types` are those of gate, up and down. `merged` stacks gate and up in one tensor, with one
    scale for both. `activation_limit` is for activations that clamp.
    Raises: ValueError if rows are not whole blocks, or merged projections differ in type.
    """
    stored_types = dict(zip(("gate", "up", "down"), types, strict=True))
    if merged and types[0] is not types[1]:
        raise ValueError(f"{types[0].name} and {types[1].name} cannot be merged")
    shapes = {
        "gate": (num_experts, ffn_size, hidden_size),
        "up": (num_experts, ffn_size, hidden_size),
        "down": (num_experts, hidden_size, ffn_size),
    }
    matrices = {name: _random_matrix(name, shape, seed) for name, shape in shapes.items()}
    vectors = {name: _random_bias(name, shape[:2], seed) for name, shape in shapes.items()}
    if merged:
        stored_types["gate_up"] = types[0]
        shapes["gate_up"] = (num_experts, 2 * ffn_size, hidden_size)
        matrices["gate_up"] = np.concatenate([matrices.pop("gate"), matrices.pop("up")], axis=1)
        vectors["gate_up"] = np.concatenate([vectors.pop("gate"), vectors.pop("up")], axis=1)

    def tensor_name(name: str, kind: str) -> str:
        return f"blk.{layer_id}.ffn_{name}_exps.{kind}"

    writer = gguf.GGUFWriter(path, "experts-only")
    for name, matrix in matrices.items():
        rows = quantise(matrix.reshape(-1, matrix.shape[2]), stored_types[name].name)
        writer.add_tensor(
            tensor_name(name, "weight"),
            rows.reshape(*matrix.shape[:2], -1),
            raw_dtype=gguf.GGMLQuantizationType(int(stored_types[name])),
        )
        if biases:
            writer.add_tensor(tensor_name(name, "bias"), vectors[name])
        if scales:
            writer.add_tensor(tensor_name(name, "scale"), _random_scale(name, num_experts, seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def projection(name: str) -> ExpertMatrices:
        rows = shapes[name][:2]
        return ExpertMatrices(
            (Tensor(tensor_name(name, "weight"), shapes[name]),),
            bias=F32Tensor(tensor_name(name, "bias"), rows) if biases else None,
            scale=F32Tensor(tensor_name(name, "scale"), rows[:1]) if scales else None,
        )

    names = ("gate_up", "down") if merged else ("gate", "up", "down")
    sizes = ExpertSizes(num_experts, num_experts_used, hidden_size, ffn_size)
    with GgufFile.open(path) as file:
        layer = moe_layer(file, layer_id, Experts(sizes, tuple(map(projection, names))))
    return replace(
        layer,
        activation=activation,
        activation_limit=math.inf if activation is Activation.SWIGLU else activation_limit,
        activation_alpha=GPT_OSS_ALPHA if activation is Activation.GPT_OSS else 1.0,
    )


def _random(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, crc32(name.encode())])


def _random_matrix(name: str, shape: tuple[int, int, int], seed: int) -> F32Array:
    """Gives outputs of about 2 for inputs of about 1. Shapes: result `shape`."""
    deviation = np.float32(2 / math.sqrt(shape[2]))
    return _random(name, seed).standard_normal(shape, dtype=np.float32) * deviation


def _random_bias(name: str, shape: tuple[int, int], seed: int) -> F32Array:
    return _random(f"{name}.bias", seed).standard_normal(shape, dtype=np.float32)


def _random_scale(name: str, num_experts: int, seed: int) -> F32Array:
    return _random(f"{name}.scale", seed).uniform(0.5, 1.5, num_experts).astype(np.float32)
