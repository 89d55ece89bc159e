"""Positions of stacked and merged experts, their biases and scales."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import ExpertMatrices, Experts, ExpertSizes, F32Tensor, Tensor
from dflash_adapters.quant import TensorType, dequantise
from dflash_adapters.routed_experts import moe_layer
from dflash_adapters.spec import ExpertProjection, ExpertVector, MoeLayer
from dflash_protocol.ids import F32Array

E, ROWS, COLUMNS = 3, 5, 32
WEIGHT = np.arange(E * 2 * ROWS * COLUMNS, dtype=np.float32).reshape(E, 2 * ROWS, COLUMNS)
BIAS = np.arange(E * 2 * ROWS, dtype=np.float32).reshape(E, 2 * ROWS)
SCALE = np.array([0.5, 2.0, 3.0], np.float32)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[GgufFile]:
    writer = gguf.GGUFWriter(tmp_path / "experts.gguf", "some")
    writer.add_tensor("exps.weight", WEIGHT)
    writer.add_tensor("exps.bias", BIAS)
    writer.add_tensor("exps.scale", SCALE)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("q8_0.weight", gguf.quants.quantize(WEIGHT, q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile.open(tmp_path / "experts.gguf") as opened:
        yield opened


def layer_of(file: GgufFile, *names: str) -> MoeLayer:
    """A layer with these stacks, all of one shape, with bias and scale."""
    stacks = tuple(
        ExpertMatrices(
            (Tensor(name, (E, 2 * ROWS, COLUMNS)),),
            bias=F32Tensor("exps.bias", (E, 2 * ROWS)),
            scale=F32Tensor("exps.scale", (E,)),
        )
        for name in names
    )
    return moe_layer(file, 0, Experts(ExpertSizes(E, 1, COLUMNS, ROWS), stacks))


def values(file: GgufFile, part: ExpertProjection | ExpertVector, expert: int) -> F32Array:
    stored = file.region(*part.place_of(expert), part.num_bytes)
    if isinstance(part, ExpertVector):
        return dequantise(stored, TensorType.F32, (part.length,))
    return dequantise(stored, part.tensor_type, (part.rows, part.columns))


def vector_values(file: GgufFile, part: ExpertVector | None, expert: int) -> F32Array:
    assert part is not None
    return values(file, part, expert)


def test_a_stack_is_one_projection_of_every_expert(file: GgufFile) -> None:
    for stack in layer_of(file, *["exps.weight"] * 3).projections:
        assert stack.tensor_names == {"exps.weight", "exps.bias", "exps.scale"}
        for expert in range(E):
            np.testing.assert_array_equal(values(file, stack, expert), WEIGHT[expert])
            np.testing.assert_array_equal(vector_values(file, stack.bias, expert), BIAS[expert])
            np.testing.assert_array_equal(vector_values(file, stack.scale, expert), SCALE[[expert]])


@pytest.mark.parametrize("name", ["exps.weight", "q8_0.weight"])
def test_a_merged_stack_holds_gate_rows_first(file: GgufFile, name: str) -> None:
    gate, up, _ = layer_of(file, name, name).projections
    info = file.tensor(name)
    whole = dequantise(file.tensor_bytes(name), info.tensor_type, info.shape)
    for expert in range(E):
        for part, rows in ((gate, slice(0, ROWS)), (up, slice(ROWS, None))):
            np.testing.assert_array_equal(values(file, part, expert), whole[expert, rows])
            np.testing.assert_array_equal(
                vector_values(file, part.bias, expert), BIAS[expert, rows]
            )
            np.testing.assert_array_equal(vector_values(file, part.scale, expert), SCALE[[expert]])
