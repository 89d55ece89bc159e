"""Expert FFNs in float64 numpy by their formulas: the reference for every backend.

Reads files of `support.expert_files` with the gguf package, tensor by tensor. Imports nothing of
the packages under test but Activation, MoeLayer and the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np

from dflash_adapters.spec import Activation, MoeLayer
from dflash_protocol.batch import RoutedBatch
from dflash_protocol.ids import F64Array
from support.routed_batches import pairs_of

ExpertValues: TypeAlias = Mapping[str, F64Array]
"""Matrices ``gate`` and ``up`` [E, F, H] and ``down`` [E, H, F]; if the file has them, biases
``gate.bias`` … [E, rows] and scales ``gate.scale`` … [E]."""


def read_experts(path: Path) -> ExpertValues:
    """The values of a file's experts; a merged tensor is split."""
    values: dict[str, F64Array] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        stem, _, suffix = tensor.name.partition("_exps.")
        name = stem.rpartition("ffn_")[2]
        kind = "" if suffix == "weight" else f".{suffix}"
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        if name != "gate_up":
            values[name + kind] = numbers
        elif suffix == "scale":
            values["gate.scale"] = values["up.scale"] = numbers
        else:
            half = numbers.shape[1] // 2
            values["gate" + kind], values["up" + kind] = numbers[:, :half], numbers[:, half:]
    return values


def activated(activation: Activation, gate: F64Array, up: F64Array, limit: float) -> F64Array:
    """The input of the down projection. Shapes: gate, up and result [F].

    Source: Shazeer 2020 (arXiv 2002.05202); llama.cpp for the clamped form; the gpt-oss model card.
    """
    alpha, offset = 1.0, 0.0
    if activation is not Activation.SWIGLU:
        gate = np.where(gate > limit, limit, gate)
        up = np.maximum(np.minimum(up, limit), -limit)
    if activation is Activation.GPT_OSS:
        alpha, offset = 1.702, 1.0
    result: F64Array = gate / (1 + np.exp(-alpha * gate)) * (up + offset)
    return result


def expert_output(
    values: ExpertValues, layer: MoeLayer, global_expert_id: int, x: F64Array
) -> F64Array:
    """One expert's output for one token. Shapes: x and result [H]."""

    def project(name: str, vector: F64Array) -> F64Array:
        result: F64Array = values[name][global_expert_id] @ vector
        if f"{name}.scale" in values:
            result = result * values[f"{name}.scale"][global_expert_id]
        if f"{name}.bias" in values:
            result = result + values[f"{name}.bias"][global_expert_id]
        return result

    inner = activated(
        layer.activation, project("gate", x), project("up", x), layer.activation_limit
    )
    return project("down", inner)


def expert_sums(values: ExpertValues, layer: MoeLayer, batch: RoutedBatch) -> F64Array:
    """Weighted sums of a batch whose ids are global ids. Shapes: result [T, H]."""
    hidden = batch.hidden.astype(np.float64)
    sums = np.zeros(hidden.shape)
    for (token_idx, global_expert_id), weight in pairs_of(batch).items():
        sums[token_idx] += weight * expert_output(
            values, layer, global_expert_id, hidden[token_idx]
        )
    return sums
