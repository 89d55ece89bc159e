"""Metadata getters: types, ranges, lengths."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.metadata import MAX_ARRAY_LENGTH, MAX_STRING_BYTES
from dflash_protocol.errors import ModelFileError
from support import gguf_builder as raw
from support.gguf_builder import GgufBuilder


def metadata_file(tmp_path: Path, **values: bytes) -> GgufFile:
    builder = GgufBuilder()
    for key, value in values.items():
        builder.add(key, value)
    return GgufFile.open(builder.write(tmp_path / "metadata.gguf"))


def test_a_missing_key_is_an_error_unless_there_is_a_default(tmp_path: Path) -> None:
    with metadata_file(tmp_path) as file:
        assert file.get_uint("no", 3) == 3
        assert file.get_float("no", 0.5) == 0.5
        assert file.get_bool("no", False) is False
        assert file.get_str("no", "") == ""
        assert not file.has("no")
        getters: list[Callable[[str], object]] = [
            *(file.get_uint, file.get_float, file.get_bool, file.get_str, file.array_length),
            *(file.get_uint_array, file.get_float_array, file.strings),
            lambda key: file.get_uint_per_layer(key, 2),
        ]
        for getter in getters:
            with pytest.raises(ModelFileError, match=r": no\b.*missing") as caught:
                getter("no")
            assert caught.value.field == "no"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (raw.scalar(raw.FLOAT32, 1.0), "integer"),
        (raw.scalar(raw.BOOL, 1), "integer"),
        (raw.string("1"), "integer"),
        (raw.array(raw.UINT32, [1]), "integer"),
        (raw.scalar(raw.INT32, -1), "-1 .*0 … 100"),
        (raw.scalar(raw.UINT64, 101), "101 .*0 … 100"),
    ],
)
def test_get_uint_checks_type_and_range(tmp_path: Path, value: bytes, reason: str) -> None:
    with metadata_file(tmp_path, k=value) as file:
        with pytest.raises(ModelFileError, match=reason) as caught:
            file.get_uint("k", 3, maximum=100)
        assert caught.value.offset_bytes is not None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (raw.scalar(raw.UINT32, 1), "float"),
        (raw.array(raw.FLOAT32, [1]), "float"),
        (raw.scalar(raw.FLOAT32, float("nan")), "finite"),
        (raw.scalar(raw.FLOAT64, float("-inf")), "finite"),
    ],
)
def test_get_float_checks_type_and_finiteness(tmp_path: Path, value: bytes, reason: str) -> None:
    with metadata_file(tmp_path, k=value) as file, pytest.raises(ModelFileError, match=reason):
        file.get_float("k")


def test_get_bool_and_get_str_check_their_type(tmp_path: Path) -> None:
    with metadata_file(
        tmp_path, number=raw.scalar(raw.UINT8, 1), bad=raw.string(b"\xff"), ok=raw.string("ab")
    ) as file:
        with pytest.raises(ModelFileError, match=r"number.* bool"):
            file.get_bool("number")
        with pytest.raises(ModelFileError, match=r"number.* string"):
            file.get_str("number")
        with pytest.raises(ModelFileError, match=r"bad .*UTF-8"):
            file.get_str("bad")
        with pytest.raises(ModelFileError, match=r"\b2 bytes\b.* 1\b"):
            file.get_str("ok", max_bytes=1)


def test_array_getters_check_type_range_and_length(tmp_path: Path) -> None:
    with metadata_file(
        tmp_path,
        ints=raw.array(raw.INT32, [0, 5]),
        negative=raw.array(raw.INT8, [0, -1]),
        huge=raw.array(raw.UINT64, [2**64 - 1]),
        floats=raw.array(raw.FLOAT64, [1e300]),
        bools=raw.array(raw.BOOL, [1, 0]),
        empty=raw.array(raw.UINT32, []),
        words=raw.strings(["a"]),
    ) as file:
        assert file.get_uint_array("ints").dtype == np.int64
        assert file.get_uint_array("empty").tolist() == []
        failures: list[tuple[Callable[[], object], str]] = [
            (lambda: file.get_uint_array("negative"), r"\belement\b.* 0 … "),
            (lambda: file.get_uint_array("huge"), r"\belement\b.* 0 … "),
            (lambda: file.get_uint_array("huge", maximum=2**64), r"\belement\b.* 0 … "),
            (lambda: file.get_uint_array("ints", maximum=4), "0 … 4"),
            (lambda: file.get_uint_array("floats"), "array of integers"),
            (lambda: file.get_uint_array("bools"), "array of integers"),
            (lambda: file.get_uint_array("general.architecture"), "array"),
            (lambda: file.get_float_array("ints"), "array of floats"),
            (lambda: file.get_float_array("floats"), "finite"),
            (lambda: file.strings("ints"), "array of strings"),
            (lambda: file.array_length("general.architecture"), "array"),
        ]
        for call, reason in failures:
            with pytest.raises(ModelFileError, match=reason):
                call()


def test_an_array_has_one_entry_a_layer(tmp_path: Path) -> None:
    with metadata_file(
        tmp_path,
        one=raw.scalar(raw.BOOL, True),
        flags=raw.array(raw.BOOL, [True, False]),
        numbers=raw.array(raw.INT32, [0, 1]),
        others=raw.array(raw.UINT8, [0, 2]),
        words=raw.strings(["no", "yes"]),
    ) as file:
        assert file.get_uint_per_layer("others", 2) == (0, 2)
        assert file.get_bool_per_layer("flags", 2) == (True, False)
        assert file.get_bool_per_layer("numbers", 2) == (False, True)
        getters = (file.get_uint_per_layer, file.get_bool_per_layer)
        for key, num_layers, reason in (
            ("one", 2, "array"),
            ("numbers", 1, r"\b2 .*\b1 layers"),
            ("words", 2, "array of integers"),
            ("no", 2, "missing"),
        ):
            for getter in getters:
                with pytest.raises(ModelFileError, match=reason):
                    getter(key, num_layers)
        with pytest.raises(ModelFileError, match="0 … 1"):
            file.get_bool_per_layer("others", 2)
        with pytest.raises(ModelFileError, match="0 … 1"):
            file.get_uint_per_layer("others", 2, maximum=1)


def test_keys_may_be_ignored(tmp_path: Path) -> None:
    with metadata_file(
        tmp_path, one=raw.scalar(raw.UINT32, 8), many=raw.array(raw.UINT32, [8, 4])
    ) as file:
        assert (file.is_array("one"), file.is_array("many"), file.is_array("no")) == (0, 1, 0)
        file.ignore(["many", "no"])
        assert (file.has("one"), file.has("many"), file.is_array("many")) == (1, 0, 0)
        with pytest.raises(ModelFileError, match="missing"):
            file.get_uint_array("many")


@pytest.mark.parametrize("lengths", [[0] * 40_000, [300_000, 0, 262_130, 5, 262_144, 1 << 20]])
def test_strings_of_any_length_are_read_one_after_another(
    tmp_path: Path, lengths: list[int]
) -> None:
    words = [bytes([65 + index % 26]) * length for index, length in enumerate(lengths)]
    with metadata_file(tmp_path, k=raw.strings(words)) as file:
        assert list(file.strings("k")) == words


def test_a_string_too_long_to_be_read_is_refused_when_asked_for(tmp_path: Path) -> None:
    too_long = bytes(MAX_STRING_BYTES + 1)
    with metadata_file(tmp_path, k=raw.strings([too_long]), s=raw.string(too_long)) as file:
        with pytest.raises(ModelFileError, match=r": k\b"):
            list(file.strings("k"))
        with pytest.raises(ModelFileError, match=rf": s\b.*\b{MAX_STRING_BYTES}\b"):
            file.get_str("s")


def test_an_array_too_long_to_be_read_is_refused_when_asked_for(tmp_path: Path) -> None:
    count = MAX_ARRAY_LENGTH + 1
    header = struct.pack("<IIQ", raw.ARRAY, raw.UINT8, count)
    with (
        metadata_file(tmp_path, k=header + bytes(count)) as file,
        pytest.raises(ModelFileError, match=rf"\b{count} elements\b.*\b{MAX_ARRAY_LENGTH}\b"),
    ):
        file.get_uint_array("k")
