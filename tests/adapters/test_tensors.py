"""Describing stacked and merged experts, their biases and scales."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType, dequantise
from dflash_adapters.spec import ExpertProjection, ExpertVector
from dflash_adapters.tensors import halves, stacked_experts
from dflash_protocol.errors import ModelFileError, UnsupportedModel
from dflash_protocol.ids import F32Array

E, ROWS, COLUMNS = 3, 5, 32
WEIGHT = np.arange(E * 2 * ROWS * COLUMNS, dtype=np.float32).reshape(E, 2 * ROWS, COLUMNS)
BIAS = np.arange(E * 2 * ROWS, dtype=np.float32).reshape(E, 2 * ROWS)
SCALE = np.array([0.5, 2.0, 3.0], np.float32)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[GgufFile]:
    writer = gguf.GGUFWriter(tmp_path / "experts.gguf", "some")
    writer.add_tensor("odd", np.ones(7, np.float32))
    writer.add_tensor("exps.weight", WEIGHT)
    writer.add_tensor("exps.bias", BIAS)
    writer.add_tensor("exps.scale", SCALE)
    writer.add_tensor("half.scale", SCALE.astype(np.float16))
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("q8_0.weight", gguf.quants.quantize(WEIGHT, q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile.open(tmp_path / "experts.gguf") as opened:
        yield opened


def values(file: GgufFile, part: ExpertProjection | ExpertVector, expert: int) -> F32Array:
    stored = file.region(
        part.shard_index, part.offset_bytes + expert * part.stride_bytes, part.num_bytes
    )
    if isinstance(part, ExpertVector):
        return dequantise(stored, TensorType.F32, (part.length,))
    return dequantise(stored, part.tensor_type, (part.rows, part.columns))


def vector_values(file: GgufFile, part: ExpertVector | None, expert: int) -> F32Array:
    assert part is not None
    return values(file, part, expert)


def test_a_stack_is_one_projection_of_every_expert(file: GgufFile) -> None:
    stack = stacked_experts(
        file,
        "exps.weight",
        num_experts=E,
        rows=2 * ROWS,
        columns=COLUMNS,
        bias="exps.bias",
        scale="exps.scale",
    )
    assert stack.tensor_names == {"exps.weight", "exps.bias", "exps.scale"}
    for expert in range(E):
        np.testing.assert_array_equal(values(file, stack, expert), WEIGHT[expert])
        np.testing.assert_array_equal(vector_values(file, stack.bias, expert), BIAS[expert])
        np.testing.assert_array_equal(vector_values(file, stack.scale, expert), SCALE[[expert]])


def test_a_bias_or_scale_is_only_taken_when_named(file: GgufFile) -> None:
    """An adapter that does not name them refuses the file for tensors it leaves out."""
    stack = stacked_experts(file, "exps.weight", num_experts=E, rows=2 * ROWS, columns=COLUMNS)
    assert stack.bias is None
    assert stack.scale is None
    assert stack.tensor_names == {"exps.weight"}


@pytest.mark.parametrize("name", ["exps.weight", "q8_0.weight"])
def test_a_merged_stack_holds_gate_rows_first(file: GgufFile, name: str) -> None:
    both = stacked_experts(
        file,
        name,
        num_experts=E,
        rows=2 * ROWS,
        columns=COLUMNS,
        bias="exps.bias",
        scale="exps.scale",
    )
    gate, up = halves(both)
    info = file.tensor(name)
    whole = dequantise(file.tensor_bytes(name), info.tensor_type, info.shape)
    for expert in range(E):
        for part, rows in ((gate, slice(0, ROWS)), (up, slice(ROWS, None))):
            np.testing.assert_array_equal(values(file, part, expert), whole[expert, rows])
            np.testing.assert_array_equal(
                vector_values(file, part.bias, expert), BIAS[expert, rows]
            )
            np.testing.assert_array_equal(vector_values(file, part.scale, expert), SCALE[[expert]])


def test_what_does_not_fit_is_refused(file: GgufFile) -> None:
    def stack(rows: int = 2 * ROWS, **names: str) -> ExpertProjection:
        return stacked_experts(
            file, "exps.weight", num_experts=E, rows=rows, columns=COLUMNS, **names
        )

    with pytest.raises(ModelFileError, match=r"exps.weight.* \(3, 9, 32\)"):
        stack(rows=9)
    with pytest.raises(ModelFileError, match=r"exps.scale.* \(3, 10\)"):
        stack(bias="exps.scale")
    with pytest.raises(ModelFileError, match=r"exps.bias.* \(3,\)"):
        stack(scale="exps.bias")
    with pytest.raises(ModelFileError, match="missing"):
        stack(bias="none")
    with pytest.raises(UnsupportedModel, match=r"half.scale.* F16\b.* F32\b"):
        stack(scale="half.scale")
