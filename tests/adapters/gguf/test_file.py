"""GgufFile: what it reads, the bytes it gives, and the identity it computes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import FileChange, GgufFile, sample_places
from dflash_adapters.quant import TensorType
from dflash_protocol.errors import ModelFileError
from support import gguf_builder as raw
from support.descriptors import no_descriptor_leak
from support.gguf_builder import GgufBuilder, sound_file

F32, Q8_0, Q4_K = TensorType.F32, TensorType.Q8_0, TensorType.Q4_K


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    stack = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    blocks = np.arange(5 * 2 * 144, dtype=np.uint8).reshape(5, 288)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_uint8("n.uint8", 250)
    writer.add_int8("n.int8", -5)
    writer.add_uint16("n.uint16", 65000)
    writer.add_int16("n.int16", -300)
    writer.add_uint32("n.uint32", 4_000_000_000)
    writer.add_int32("n.int32", 5)
    writer.add_uint64("n.uint64", 2**63)
    writer.add_int64("n.int64", 2**40)
    writer.add_float32("n.float32", 0.5)
    writer.add_float64("n.float64", 0.1)
    writer.add_bool("n.bool", True)
    writer.add_string("n.string", "zwölf")
    writer.add_array("n.strings", ["a", "ß", ""])
    writer.add_array("n.ints", [3, 1, 2])
    writer.add_array("n.floats", [0.5, -2.0])
    writer.add_tensor("blk.0.stack", stack)
    writer.add_tensor("blk.0.blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with GgufFile.open(path) as file:
        assert file.architecture == "qwen3moe"
        assert file.path == path
        assert file.shard_paths == (path,)
        assert file.size_bytes == path.stat().st_size
        assert file.get_uint("n.uint8") == 250
        assert file.get_uint("n.int32") == 5
        assert file.get_uint("n.uint16") == 65000
        assert file.get_uint("n.uint32") == 4_000_000_000
        assert file.get_uint("n.uint64", maximum=2**64) == 2**63
        assert file.get_uint("n.int64", maximum=2**63) == 2**40
        for key, value in (("n.int8", -5), ("n.int16", -300)):
            with pytest.raises(ModelFileError, match=rf"{value}\b.* 0 … "):
                file.get_uint(key)
        assert file.get_float("n.float32") == 0.5
        assert file.get_float("n.float64") == 0.1
        assert file.get_bool("n.bool") is True
        assert file.get_str("n.string") == "zwölf"
        assert list(file.strings("n.strings")) == [b"a", "ß".encode(), b""]
        assert file.array_length("n.strings") == 3
        assert file.get_uint_array("n.ints").tolist() == [3, 1, 2]
        assert file.get_float_array("n.floats").tolist() == [0.5, -2.0]
        assert list(file.tensors) == ["blk.0.stack", "blk.0.blocks"]
        info = file.tensor("blk.0.stack")
        assert (info.file_shape, info.shape) == ((4, 3, 2), (2, 3, 4))
        assert (info.columns, info.num_rows, info.row_bytes, info.num_bytes) == (4, 6, 16, 96)
        assert info.tensor_type is F32
        assert info.shard_index == 0
        values = file.tensor_bytes("blk.0.stack").view(np.float32).reshape(info.shape)
        np.testing.assert_array_equal(values, stack)
        info = file.tensor("blk.0.blocks")
        assert (info.tensor_type, info.columns, info.row_bytes, info.num_rows) == (
            Q4_K,
            512,
            288,
            5,
        )
        np.testing.assert_array_equal(file.tensor_bytes("blk.0.blocks"), blocks.ravel())


def test_reads_version_2(tmp_path: Path) -> None:
    builder = sound_file()
    builder.version = 2
    with GgufFile.open(builder.write(tmp_path / "v2.gguf")) as file:
        assert file.get_uint("a.uint") == 7


def test_reads_a_path_given_as_text_and_a_file_without_tensors(tmp_path: Path) -> None:
    path = GgufBuilder().write(tmp_path / "vocabulary only.gguf")
    with GgufFile.open(str(path)) as file:
        assert len(file.tensors) == 0
        assert file.path == path


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_follows_the_alignment_the_file_asks_for(tmp_path: Path, alignment: int) -> None:
    builder = GgufBuilder(alignment=alignment).add(
        "general.alignment", raw.scalar(raw.UINT32, alignment)
    )
    builder.add_tensor("t", [3], TensorType.I8, b"abc").add_tensor("u", [2], TensorType.I8, b"de")
    with GgufFile.open(builder.write(tmp_path / "m.gguf")) as file:
        assert bytes(file.tensor_bytes("t")) == b"abc"
        assert bytes(file.tensor_bytes("u")) == b"de"
        assert file.tensor("u").offset_bytes % alignment == 0


def test_tensor_bytes_are_a_read_only_view_of_the_mapping(tmp_path: Path) -> None:
    with GgufFile.open(sound_file().write(tmp_path / "m.gguf")) as file:
        view, again = file.tensor_bytes("two"), file.tensor_bytes("two")
        info = file.tensor("two")
        assert np.shares_memory(view, again)
        assert np.shares_memory(view, file.region(0, info.offset_bytes, info.num_bytes))
        assert not view.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


def test_region_gives_one_slab(tmp_path: Path) -> None:
    with GgufFile.open(sound_file().write(tmp_path / "m.gguf")) as file:
        info = file.tensor("one")
        row = file.region(0, info.offset_bytes + info.row_bytes, info.row_bytes)
        assert row.view(np.float32).tolist() == [4.0, 5.0, 6.0, 7.0]
        assert file.region(0, file.size_bytes, 0).size == 0


@pytest.mark.parametrize(
    ("shard_index", "offset_bytes", "num_bytes"),
    [(1, 0, 1), (-1, 0, 1), (0, -1, 2), (0, 0, -1), (0, 0, 1 << 40), (0, 1 << 64, 1)],
)
def test_a_place_outside_the_file_is_the_callers_mistake(
    tmp_path: Path, shard_index: int, offset_bytes: int, num_bytes: int
) -> None:
    with GgufFile.open(sound_file().write(tmp_path / "m.gguf")) as file:
        with pytest.raises(ValueError, match="shard"):
            file.region(shard_index, offset_bytes, num_bytes)
        with pytest.raises(ValueError, match="shard"):
            file.advise_willneed(shard_index, offset_bytes, num_bytes)


def test_advice_may_be_given_for_any_place(tmp_path: Path) -> None:
    path = sound_file().write(tmp_path / "m.gguf", size_bytes=100_000)
    with GgufFile.open(path) as file:
        for offset, num_bytes in [(0, 1), (5000, 10), (99_999, 1), (100_000, 0), (0, 100_000)]:
            file.advise_willneed(0, offset, num_bytes)


def test_views_outlive_the_file_and_a_closed_file_says_so(tmp_path: Path) -> None:
    file = GgufFile.open(sound_file().write(tmp_path / "m.gguf"))
    view = file.tensor_bytes("two")
    file.close()
    file.close()
    assert view.tolist() == list(range(34))
    with pytest.raises(ValueError, match="closed"):
        file.tensor_bytes("two")
    with pytest.raises(ValueError, match="closed"):
        file.identity()
    with pytest.raises(ValueError, match="closed"):
        list(file.strings("a.strings"))
    assert file.get_uint("a.uint") == 7


def test_closing_gives_back_descriptors_and_mappings(tmp_path: Path) -> None:
    path = sound_file().write(tmp_path / "m.gguf")
    with no_descriptor_leak():
        file = GgufFile.open(path)
        file.tensor_bytes("one")
        file.close()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with (
        GgufFile.open(sound_file().write(tmp_path / "m.gguf")) as file,
        pytest.raises(ModelFileError, match=r"blk\.0\.none\b.*missing"),
    ):
        file.tensor("blk.0.none")


def expert_stack(tmp_path: Path, name: str = "m.gguf") -> Path:
    data = np.random.default_rng(0).integers(0, 256, 8 * 64 * 34, dtype=np.uint8).tobytes()
    builder = sound_file().add_tensor("blk.0.ffn_up_exps.weight", [32, 64, 8], Q8_0, data)
    return builder.write(tmp_path / name)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def identity(path: Path) -> str:
    with GgufFile.open(path) as file:
        assert file.identity() == file.identity()
        return file.identity()


def test_identity_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    path = expert_stack(tmp_path)
    copy = Path(shutil.copy(path, tmp_path / "copy.gguf"))
    assert re.fullmatch("[0-9a-f]{64}", identity(path))
    assert identity(path) == identity(copy)


def test_one_sampled_byte_inside_one_expert_makes_another_identity(tmp_path: Path) -> None:
    path = expert_stack(tmp_path)
    before = identity(path)
    with GgufFile.open(path) as file:
        info = file.tensor("blk.0.ffn_up_exps.weight")
    places = sample_places(info.num_bytes)
    sampled = {i for start, length in places for i in range(start, start + length)}
    for place, length in places:
        flip(path, info.offset_bytes + place + length // 2)
        assert identity(path) != before
        flip(path, info.offset_bytes + place + length // 2)
    assert identity(path) == before
    unsampled = next(i for i in range(info.num_bytes) if i not in sampled)
    flip(path, info.offset_bytes + unsampled)
    assert identity(path) == before


def test_identity_covers_metadata_tensor_table_and_size(tmp_path: Path) -> None:
    path = expert_stack(tmp_path)
    with GgufFile.open(path) as file:
        data_start = file.tensor("one").offset_bytes
    before, data = identity(path), path.read_bytes()
    for needle in (b"yz", b"blk.0.ffn_up_exps"):
        flip(path, data.index(needle))
        assert identity(path) != before
        flip(path, data.index(needle))
    assert data_start > data.index(b"blk.0.ffn_up_exps")
    os.truncate(path, len(data) + 1)
    assert identity(path) != before


@given(st.integers(1, 1 << 40))
def test_samples_go_from_the_first_byte_to_the_last(num_bytes: int) -> None:
    places = sample_places(num_bytes)
    assert places[0][0] == 0
    assert places[-1][0] + places[-1][1] == num_bytes
    assert sum(length for _, length in places) == min(num_bytes, 4096)
    for (start, length), (after, _) in pairwise(places):
        assert start + length <= after


# -- what becomes of the file while it is open -----------------------------------------------------


def written(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # a clock may stand still for some ms


def grown(path: Path) -> None:
    before = path.stat()
    with path.open("ab") as file:
        file.write(b"x")
    os.utime(path, ns=(0, before.st_mtime_ns))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    shutil.copyfile(path, other)
    other.rename(path)


def moved(path: Path) -> None:
    path.rename(path.with_name("other"))


@pytest.mark.parametrize(
    ("happens", "change"),
    [
        (lambda path: None, None),
        (lambda path: path.read_bytes(), None),
        (lambda path: path.chmod(0o400), None),
        (written, FileChange.WRITTEN),
        (grown, FileChange.WRITTEN),
        (replaced, FileChange.REPLACED),
        (moved, FileChange.REPLACED),
    ],
    ids=["nothing", "read", "chmod", "written", "grown", "replaced", "moved"],
)
def test_it_is_noticed_what_becomes_of_the_file(
    tmp_path: Path, happens: Callable[[Path], object], change: FileChange | None
) -> None:
    path = sound_file().write(tmp_path / "model.gguf")
    with GgufFile.open(path) as file:
        happens(path)
        assert file.watch.change() is change
        if change is FileChange.WRITTEN:
            with pytest.raises(ModelFileError, match=r"\bwritten\b"):
                file.require_unwritten()
        else:
            file.require_unwritten()
    with pytest.raises(ValueError, match="closed"):
        file.watch.change()
