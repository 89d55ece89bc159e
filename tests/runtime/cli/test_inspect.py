"""What `dflash-moe inspect` says of files of every architecture."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from dflash_adapters.gguf import digest as full_digest
from dflash_adapters.registry import ARCHITECTURES
from dflash_protocol.errors import ModelFileError
from dflash_protocol.ids import F32Array
from dflash_runtime.cli.inspect import inspect
from support.architectures import RANDOM
from support.random_gguf import RandomShape, write_model
from support.random_laguna import SHAPES as LAGUNA_SHAPES
from support.random_llama import LlamaShape
from support.random_llama4 import SHAPES as LLAMA4_SHAPES
from support.random_llama4 import Llama4Shape
from support.random_models import ODD_SHAPES
from support.random_olmoe import OlmoeShape
from support.random_qwen2moe import Qwen2MoeShape
from support.random_qwen35moe import Qwen35MoeShape


def lines_of(path: Path, *options: str) -> list[str]:
    result = CliRunner().invoke(inspect, [str(path), *options], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output.splitlines()


def table_of(path: Path) -> list[list[str]]:
    """The rows of the table, cell by cell."""
    lines = lines_of(path)
    return [line.split() for line in lines[lines.index("") + 2 :]]


def fact(path: Path, name: str) -> str:
    return next(
        re.split(r"  +", line, maxsplit=1)[1]
        for line in lines_of(path)
        if line.startswith(f"{name} ")
    )


CASES: list[tuple[RandomShape, str, list[str], str]] = [
    # shape, its layers, the table's layers and sizes, what attention keeps
    (ODD_SHAPES[0], "5, of which 5", ["0-4 11 3 36"], "5 with 2 key/value heads of 10"),
    (OlmoeShape(), "4, of which 4", ["0-3 11 3 20"], "4 with 3 key/value heads of 14"),
    (Qwen2MoeShape(), "4, of which 4", ["0-3 11 3 20"], "4 with 2 key/value heads of 8"),
    (LlamaShape(), "4, of which 4", ["0-3 7 2 20"], "4 with 2 key/value heads of 8"),
    (
        LAGUNA_SHAPES[0],
        "5, of which 4",
        ["1-4 11 3 20"],
        "2 with 2 key/value heads of 12, 3 with 2 key/value heads of 12 in windows of 16",
    ),
    (
        LLAMA4_SHAPES[2],
        "7, of which 2",
        ["2-5/3 11 1 20"],
        "6 with 6 key/value heads of 6 in chunks of 8192, 1 with 6 key/value heads of 6",
    ),
    (
        Qwen35MoeShape(),
        "5, of which 5",
        ["0-4 11 3 20"],
        "1 with 2 key/value heads of 20, 4 recurrent",
    ),
    (
        Llama4Shape(num_layers=2, interleave_step=2, num_kv_heads=1),
        "2, of which 1",
        ["1 11 1 20"],
        "2 with 1 key/value head of 10 in chunks of 8192",
    ),
]


@pytest.mark.parametrize(
    ("shape", "layers", "rows", "attention"), CASES, ids=lambda each: getattr(each, "name", None)
)
def test_tables_say_what_the_file_holds(
    tmp_path: Path, shape: RandomShape, layers: str, rows: list[str], attention: str
) -> None:
    path = write_model(tmp_path / "model.gguf", shape, seed=1)
    assert fact(path, "architecture") == shape.architecture
    assert fact(path, "layers") == f"{layers} with experts"
    assert fact(path, "attention") == attention
    assert [" ".join(row[:4]) for row in table_of(path)] == rows
    for row in table_of(path):
        ffn, expert_bytes = int(row[3]), int(row[7].replace(",", ""))
        assert row[4:7] == ["F32"] * 3
        assert expert_bytes == 3 * 4 * ffn * shape.hidden_size


def refusal(path: Path) -> ModelFileError:
    result = CliRunner().invoke(inspect, [str(path)])
    assert isinstance(result.exception, ModelFileError)
    assert not result.output
    return result.exception


@pytest.mark.parametrize("name", RANDOM)
def test_every_architecture_has_a_table(tmp_path: Path, name: str) -> None:
    shape = RANDOM[name].SHAPES[0]
    path = write_model(tmp_path / "model.gguf", shape, seed=1)
    stacks = [dims for tensor, dims in shape.tensors().items() if "ffn_down_exps.w" in tensor]
    assert fact(path, "architecture") == shape.architecture
    assert fact(path, "layers").endswith(f", of which {len(stacks)} with experts")
    (row,) = table_of(path)
    assert (int(row[1]), int(row[3])) == (stacks[0][0], stacks[0][2])


@pytest.mark.parametrize("shape", [case[0] for case in CASES], ids=lambda each: each.architecture)
@pytest.mark.parametrize("kind", ["attn_norm", "ffn_gate_inp", "ffn_down_exps"])
def test_what_is_missing_or_misshapen_is_named(
    tmp_path: Path, shape: RandomShape, kind: str
) -> None:
    name = [each for each in shape.tensors() if each.endswith(f".{kind}.weight")][-1]

    def missing(tensors: dict[str, F32Array]) -> dict[str, F32Array]:
        return {each: tensors[each] for each in tensors if each != name}

    def longer(tensors: dict[str, F32Array]) -> dict[str, F32Array]:
        return {**tensors, name: np.repeat(tensors[name], 2, axis=0)}

    for change, reason in ((missing, "missing"), (longer, "expected")):
        error = refusal(write_model(tmp_path / "model.gguf", shape, seed=1, change=change))
        assert error.field == name
        assert reason in str(error)


@pytest.mark.parametrize(
    ("shape", "expert_count", "reason"),
    [
        (LlamaShape(), None, r"'llama'.*\bdense\b"),
        (OlmoeShape(architecture="gemma3"), 0, r"'gemma3'.*\bdense\b"),
        (OlmoeShape(architecture="mixtral"), 8, "'mixtral'"),
    ],
)
def test_other_models_are_told_which_are_supported(
    tmp_path: Path, shape: RandomShape, expert_count: int | None, reason: str
) -> None:
    keys = {f"{shape.architecture}.expert_count": expert_count}
    error = refusal(write_model(tmp_path / "model.gguf", shape, seed=1, keys=keys))
    assert error.field == "general.architecture"
    assert re.search(reason, str(error))
    assert f"supported: {', '.join(ARCHITECTURES)}" in str(error)


def test_layers_of_other_types_are_rows_of_their_own(tmp_path: Path) -> None:
    shape = replace(Llama4Shape(), num_layers=8, interleave_step=2)
    path = write_model(
        tmp_path / "model.gguf",
        shape,
        seed=1,
        tensor_type=lambda name: "F16" if "blk.5.ffn_down_exps" in name else "F32",
    )
    assert [[row[0], row[6]] for row in table_of(path)] == [
        ["1-3/2", "F32"],
        ["5", "F16"],
        ["7", "F32"],
    ]


def test_json_says_the_same(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", LAGUNA_SHAPES[0], seed=1)
    record: dict[str, Any] = json.loads("\n".join(lines_of(path, "--json")))
    assert record["arch"] == "laguna"
    assert [layer["layer"] for layer in record["moe_layers"]] == [1, 2, 3, 4]
    assert record["kv_layers"] == [
        {"layers": 2, "heads": 2, "key": 12, "value": 12, "window": 0, "chunk": 0},
        {"layers": 3, "heads": 2, "key": 12, "value": 12, "window": 16, "chunk": 0},
    ]


def test_the_digest_is_that_of_sha256sum_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_digest, "_SETTLED_S", 0.0)
    monkeypatch.setenv("DFLASH_MOE_EXPERT_COMPUTE_CACHE_DIR", str(tmp_path / "cache"))
    path = write_model(tmp_path / "m.gguf", OlmoeShape(), seed=1)
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert not any(line.startswith("sha256") for line in lines_of(path))
    lines = lines_of(path, "--digest")
    assert f"sha256        {expected}  m.gguf" in lines
    record = json.loads(lines_of(path, "--digest", "--json")[0])
    assert record["sha256"] == [expected]
    assert f"digest        {record['digest']}" in lines
    (kept,) = (tmp_path / "cache" / "digests").iterdir()
    assert kept.read_text() == f"{expected}\n"


def test_a_digest_that_cannot_be_kept_is_shown_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("in the way")
    monkeypatch.setenv("DFLASH_MOE_EXPERT_COMPUTE_CACHE_DIR", str(tmp_path / "cache"))
    path = write_model(tmp_path / "m.gguf", OlmoeShape(), seed=1)
    lines = lines_of(path, "--digest")
    assert f"sha256        {hashlib.sha256(path.read_bytes()).hexdigest()}  m.gguf" in lines
    assert any(str(tmp_path / "cache") in line for line in lines)
