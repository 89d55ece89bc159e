"""Split models: any shard opens all; shards that disagree are refused."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.shard_names import MAX_SHARDS
from dflash_adapters.gguf.shards import FileChange
from dflash_adapters.quant import TensorType
from dflash_protocol.errors import ModelFileError
from support import gguf_builder as raw
from support.descriptors import no_descriptor_leak
from support.gguf_builder import GgufBuilder, sound_file
from support.refusal import refusal

F32 = TensorType.F32


def shard_builder(index: int, count: int, num_tensors: int | None = None) -> GgufBuilder:
    builder = GgufBuilder("qwen3moe" if index == 0 else None)
    builder.add("split.no", raw.scalar(raw.UINT16, index))
    builder.add("split.count", raw.scalar(raw.UINT16, count))
    total = count if num_tensors is None else num_tensors
    builder.add("split.tensors.count", raw.scalar(raw.INT32, total))
    return builder.add_tensor(f"t.{index}", [4], TensorType.I8, bytes([index] * 4))


def shard_path(tmp_path: Path, index: int, count: int) -> Path:
    return tmp_path / f"m-{index + 1:05d}-of-{count:05d}.gguf"


def write_split(
    tmp_path: Path, num_shards: int, replaced: dict[int, GgufBuilder] | None = None
) -> list[Path]:
    builders = {i: shard_builder(i, num_shards) for i in range(num_shards)} | (replaced or {})
    return [b.write(shard_path(tmp_path, i, num_shards)) for i, b in sorted(builders.items())]


def test_any_shard_opens_the_whole_model(tmp_path: Path) -> None:
    paths = write_split(tmp_path, 3)
    identities = set()
    for path in paths:
        with GgufFile.open(path) as file:
            assert file.shard_paths == tuple(paths)
            assert list(file.tensors) == ["t.0", "t.1", "t.2"]
            assert [info.shard_index for info in file.tensors.values()] == [0, 1, 2]
            assert [bytes(file.tensor_bytes(f"t.{i}")) for i in range(3)] == [
                bytes([i] * 4) for i in range(3)
            ]
            assert file.architecture == "qwen3moe"
            assert file.size_bytes == sum(p.stat().st_size for p in paths)
            identities.add(file.identity())
    assert len(identities) == 1
    data = bytearray(paths[2].read_bytes())
    data[-1] ^= 1
    paths[2].write_bytes(data)
    with GgufFile.open(paths[0]) as file:
        assert file.identity() not in identities


def test_a_model_split_by_the_gguf_package_opens(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe", split_max_tensors=2)
    tensors = {f"t.{i}": np.full((3, i + 1), i, dtype=np.float32) for i in range(5)}
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file(tmp_path / "m.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile.open(tmp_path / "m-00002-of-00003.gguf") as file:
        assert len(file.shard_paths) == 3
        for name, values in tensors.items():
            found = file.tensor_bytes(name).view(np.float32).reshape(file.tensor(name).shape)
            np.testing.assert_array_equal(found, values)


def test_a_wrong_key_is_looked_for_in_the_first_shard(tmp_path: Path) -> None:
    paths = write_split(tmp_path, 2)
    with GgufFile.open(paths[1]) as file:
        assert file.path == paths[1]
        with pytest.raises(ModelFileError, match=r"qwen3moe\.block_count\b.*missing") as caught:
            file.get_uint("qwen3moe.block_count")
        assert caught.value.path == paths[0]


def other_architecture() -> GgufBuilder:
    return shard_builder(1, 3).add("general.architecture", raw.string("llama"))


SPLIT_ERRORS: dict[str, tuple[dict[int, GgufBuilder], str, str]] = {
    "wrong number": ({1: shard_builder(2, 3)}, "split.no", r"\b2\b.*\b1\b"),
    "wrong count": ({2: shard_builder(2, 4)}, "split.count", r"\b4\b.*\b3\b"),
    "not a shard": ({1: GgufBuilder()}, "split.no", "missing"),
    "wrong total": ({0: shard_builder(0, 3, 4)}, "split.tensors.count", "4 tensors"),
    "another model": ({1: other_architecture()}, "general.architecture", "llama"),
    "tensor in two shards": (
        {
            0: shard_builder(0, 3, 4),
            2: shard_builder(2, 3).add_tensor("t.0", [1], F32, bytes(4)),
        },
        "t.0",
        "two shards",
    ),
}


@pytest.mark.parametrize("case", SPLIT_ERRORS)
def test_shards_that_disagree_are_refused(tmp_path: Path, case: str) -> None:
    replaced, field, reason = SPLIT_ERRORS[case]
    paths = write_split(tmp_path, 3, replaced)
    error = refusal(paths[0])
    assert error.field == field
    assert re.search(reason, error.reason)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path, 3)
    paths[1].unlink()
    for path in (paths[0], paths[2]):
        with pytest.raises(ModelFileError, match=r"m-00002-of-00003\.gguf.*No such file"):
            GgufFile.open(path)


def test_a_shard_under_another_name_is_refused(tmp_path: Path) -> None:
    first = write_split(tmp_path, 3)[0]
    for name, reason in {
        "renamed.gguf": r"\bname",
        "m-00001-of-00002.gguf": r"\b1 of 2\b",
        "m-00004-of-00003.gguf": r"\b4 of 3\b",
        "m-00000-of-00003.gguf": r"\b0 of 3\b",
    }.items():
        assert re.search(reason, refusal(Path(shutil.copy(first, tmp_path / name))).reason)


def test_more_shards_than_descriptors_are_refused(tmp_path: Path) -> None:
    path = shard_path(tmp_path, 0, MAX_SHARDS + 1)
    shard_builder(0, MAX_SHARDS + 1).write(path)
    assert refusal(path).field == "split.count"


def test_a_file_named_like_a_shard_that_says_it_is_whole_opens(tmp_path: Path) -> None:
    for name, builder in {
        "m-00002-of-00003.gguf": sound_file(),
        "whole.gguf": sound_file().add("split.count", raw.scalar(raw.UINT16, 1)),
    }.items():
        with GgufFile.open(builder.write(tmp_path / name)) as file:
            assert len(file.shard_paths) == 1
            assert file.tensor("one").shard_index == 0


def test_refused_shards_leave_no_descriptor(tmp_path: Path) -> None:
    with no_descriptor_leak():
        paths = write_split(tmp_path, 3, {1: other_architecture()})
        refusal(paths[2])
        paths[2].unlink()
        refusal(paths[0])


def test_it_is_noticed_what_becomes_of_any_shard(tmp_path: Path) -> None:
    paths = write_split(tmp_path, 3)
    with GgufFile.open(paths[0]) as file:
        assert file.watch.change() is None
        paths[1].rename(tmp_path / "elsewhere")
        assert file.watch.change() is FileChange.REPLACED
        file.require_unwritten()
        os.utime(paths[2], ns=(0, paths[2].stat().st_mtime_ns + 1))
        assert file.watch.change() is FileChange.WRITTEN
        with pytest.raises(ModelFileError, match=r"00003-of-00003\.gguf.*\bwritten\b"):
            file.require_unwritten()
