"""Expert layers in float64, on values from gguf's own dequantiser."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from bench.workload import Work

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import ExpertProjection
from dflash_protocol.ids import AnyArray, F64Array


def expert_reference(path: Path, work: Work, num_tokens: int) -> F64Array:
    """The first tokens' results. Shapes: result [num_tokens, H] float64."""
    with GgufFile.open(path) as file:
        layer = read_spec(file).moe.layers[work.layer_index]
        out = np.zeros((num_tokens, layer.hidden_size))
        for token in range(num_tokens):
            x = work.hidden[token].astype(np.float64)
            for expert_id, weight in zip(work.expert_ids[token], work.weights[token], strict=True):
                gate, up, down = (_matrix(file, each, int(expert_id)) for each in layer.projections)
                gated = gate @ x
                out[token] += weight * (down @ (gated / (1 + np.exp(-gated)) * (up @ x)))
        return out


def relative_error(values: AnyArray, reference: F64Array) -> float:
    """L2 norm of the difference over that of the reference; `values` may have more rows."""
    difference = values[: len(reference)].astype(np.float64) - reference
    return float(np.linalg.norm(difference) / np.linalg.norm(reference))


def _matrix(file: GgufFile, projection: ExpertProjection, expert_id: int) -> F64Array:
    data = file.region(
        projection.shard_index,
        projection.offset_bytes + expert_id * projection.stride_bytes,
        projection.num_bytes,
    ).reshape(projection.rows, projection.row_bytes)
    tensor_type = gguf.GGMLQuantizationType(int(projection.tensor_type))
    values: F64Array = gguf.quants.dequantize(data, tensor_type).astype(np.float64)
    return values
