"""What is refused and how that is said; what opening costs, for good files and hostile ones."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.scanner import MAX_METADATA_BYTES, MAX_STRINGS, MAX_TENSORS, MAX_VALUES
from dflash_adapters.quant import TensorType
from dflash_protocol.errors import ModelFileError, UnsupportedModel
from support import gguf_builder as raw
from support.descriptors import no_descriptor_leak
from support.gguf_builder import GgufBuilder, sound_file
from support.random_models import write_sparse_30b
from support.refusal import refusal

F32, Q8_0 = TensorType.F32, TensorType.Q8_0


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = sound_file().build()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data)
    GgufFile.open(path).close()
    for num_bytes in reversed(range(len(data))):
        os.truncate(path, num_bytes)
        refusal(path)


MALFORMED: dict[str, tuple[GgufBuilder, str, str]] = {
    # name: (file, field, reason)
    "nested array": (
        GgufBuilder().add("k", struct.pack("<IIQ", raw.ARRAY, raw.ARRAY, 0)),
        "k",
        "array of arrays",
    ),
    "unknown value type": (
        GgufBuilder().add("k", struct.pack("<I", 13) + bytes(8)),
        "k",
        "13",
    ),
    "unknown element type": (
        GgufBuilder().add("k", struct.pack("<IIQ", raw.ARRAY, 99, 0)),
        "k",
        "99",
    ),
    "key twice": (sound_file().add("a.uint", raw.scalar(raw.UINT8, 0)), "a.uint", "twice"),
    "empty key": (GgufBuilder().add("", raw.scalar(raw.UINT8, 0)), "metadata value 1", "0 bytes"),
    "long key": (
        GgufBuilder().add("k" * 257, raw.scalar(raw.UINT8, 0)),
        "metadata value 1",
        "257 bytes",
    ),
    "key not UTF-8": (
        GgufBuilder().add(b"\xff\xfe", raw.scalar(raw.UINT8, 0)),
        "metadata value 1",
        "UTF-8",
    ),
    "key with a line break": (
        GgufBuilder().add("a\nb", struct.pack("<I", 77)),
        "a\\nb",
        "77",
    ),
    "bool of two": (GgufBuilder().add("k", raw.scalar(raw.BOOL, 2)), "k", "2"),
    "string past the end": (
        GgufBuilder().add("k", struct.pack("<IQ", raw.STRING, 2**64 - 1)),
        "k",
        " end",
    ),
    "array past the end": (
        GgufBuilder().add("k", raw.array(raw.UINT64, [], count=2**61)),
        "k",
        " end",
    ),
    "strings past the end": (
        GgufBuilder().add("k", raw.strings([], count=1000)),
        "k",
        " end",
    ),
    "last string past the end": (
        GgufBuilder().add("k", raw.strings(["a"], count=2) + struct.pack("<Q", 99)),
        "k",
        " end",
    ),
    "a string inside an array wraps": (
        GgufBuilder().add(
            "k", struct.pack("<IIQQQ", raw.ARRAY, raw.STRING, 2, 2**64 - 8, 0) + bytes(99)
        ),
        "k",
        " end",
    ),
    "too many values": (GgufBuilder(num_values=2**40), "header", "metadata values"),
    "too many tensors": (GgufBuilder(num_tensors=2**63), "header", "tensors"),
    "more values than there are": (GgufBuilder(num_values=2), "metadata value 1", "0 bytes"),
    "more tensors than there are": (GgufBuilder(num_tensors=1), "tensor 0", "0 bytes"),
    "alignment 0": (
        GgufBuilder().add("general.alignment", raw.scalar(raw.UINT32, 0)),
        "general.alignment",
        " two",
    ),
    "alignment 24": (
        GgufBuilder().add("general.alignment", raw.scalar(raw.UINT32, 24)),
        "general.alignment",
        " two",
    ),
    "alignment 2^31": (
        GgufBuilder().add("general.alignment", raw.scalar(raw.UINT32, 2**31)),
        "general.alignment",
        " two",
    ),
    "alignment of another type": (
        GgufBuilder().add("general.alignment", raw.scalar(raw.INT64, 32)),
        "general.alignment",
        "unsigned",
    ),
    "alignment an array": (
        GgufBuilder().add("general.alignment", raw.array(raw.UINT32, [32])),
        "general.alignment",
        "unsigned",
    ),
    "no architecture": (GgufBuilder(None), "general.architecture", "missing"),
    "architecture a number": (
        GgufBuilder(None).add("general.architecture", raw.scalar(raw.UINT32, 1)),
        "general.architecture",
        "string",
    ),
    "tensor twice": (sound_file().add_tensor("one", [1], F32, bytes(4)), "one", "twice"),
    "tensor without a name": (GgufBuilder().add_tensor("", [1], F32, bytes(4)), "tensor 0", "0 b"),
    "long tensor name": (
        GgufBuilder().add_tensor("t" * 65, [1], F32, bytes(4)),
        "tensor 0",
        "65 bytes",
    ),
    "tensor name not UTF-8": (
        GgufBuilder().add_tensor(b"\x80", [1], F32, bytes(4)),
        "tensor 0",
        "UTF-8",
    ),
    "no dimensions": (GgufBuilder().add_tensor("t", [], F32, b""), "t", "0 dimensions"),
    "five dimensions": (GgufBuilder().add_tensor("t", [1] * 5, F32, bytes(4)), "t", "5 dimensions"),
    "a zero dimension": (GgufBuilder().add_tensor("t", [4, 0], F32, b""), "t", "is zero"),
    "a product that wraps to zero": (
        GgufBuilder().add_tensor("t", [2**32, 2**32], F32, b""),
        "t",
        " end",
    ),
    "a product that wraps to four": (
        GgufBuilder().add_tensor("t", [2**62 + 1, 4], TensorType.I8, bytes(4)),
        "t",
        " end",
    ),
    "part of a block": (GgufBuilder().add_tensor("t", [31], Q8_0, bytes(34)), "t", "multiple"),
    "blocks across rows": (
        GgufBuilder().add_tensor("t", [16, 2], Q8_0, bytes(34)),
        "t",
        "Q8_0",
    ),
    "unaligned": (
        GgufBuilder().add_tensor("t", [1], F32, bytes(64), offset=4),
        "t",
        "32",
    ),
    "offset past the end": (
        GgufBuilder().add_tensor("t", [1], F32, bytes(4), offset=2**40),
        "t",
        " end",
    ),
    "offset that wraps": (
        GgufBuilder().add_tensor("t", [1], F32, bytes(4), offset=2**64 - 32),
        "t",
        " end",
    ),
    "one byte short": (GgufBuilder().add_tensor("t", [5], F32, bytes(19)), "t", " end"),
    "overlap": (
        sound_file().add_tensor("three", [1], F32, bytes(4), offset=0),
        "three",
        " one",
    ),
    "overlap by one byte": (
        GgufBuilder()
        .add_tensor("late", [33], TensorType.I8, bytes(64), offset=32)
        .add_tensor("early", [33], TensorType.I8, bytes(64), offset=0),
        "late",
        " early",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_with_field_and_offset(tmp_path: Path, case: str) -> None:
    builder, field, reason = MALFORMED[case]
    path = builder.write(tmp_path / "bad.gguf")
    error = refusal(path)
    assert error.field == field
    assert reason in error.reason
    if reason != "missing":
        assert error.offset_bytes is not None
        assert error.offset_bytes >= 0
    with GgufFile.open(sound_file().write(path)) as file:
        assert file.get_uint("a.uint") == 7


@pytest.mark.parametrize("type_id", [4, 5, 9, 15, 31, 33, 36, 38, 41, 1000, 2**32 - 1])
def test_an_unknown_tensor_type_is_unsupported(tmp_path: Path, type_id: int) -> None:
    path = GgufBuilder().add_tensor("t", [256], type_id, bytes(1024)).write(tmp_path / "m.gguf")
    error = refusal(path)
    assert isinstance(error, UnsupportedModel)
    assert error.field == "t"
    assert str(type_id) in error.reason


@pytest.mark.parametrize(
    ("version", "words"),
    [(1, "version 1"), (4, "version 4"), (0, "version 0"), (0x03000000, "big-endian")],
)
def test_other_versions_and_byte_orders_are_unsupported(
    tmp_path: Path, version: int, words: str
) -> None:
    builder = sound_file()
    builder.version = version
    error = refusal(builder.write(tmp_path / "m.gguf"))
    assert isinstance(error, UnsupportedModel)
    assert words in error.reason


@pytest.mark.parametrize("data", [b"", b"GGU", b"GGML" + bytes(99), b"PK\x03\x04" + bytes(99)])
def test_what_is_no_gguf_file_is_called_that(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert "GGUF" in refusal(path).reason


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.gguf").reason
    assert "irectory" in refusal(tmp_path).reason
    fifo = tmp_path / "fifo.gguf"
    os.mkfifo(fifo)
    assert "regular" in refusal(fifo).reason
    assert "regular" in refusal("/dev/zero").reason
    with pytest.raises(ModelFileError, match="null byte"):
        GgufFile.open("a\0b")
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    assert "symbolic links" in refusal(loop).reason


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    path = sound_file().write(tmp_path / "m.gguf")
    path.chmod(0)
    assert "Permission denied" in refusal(path).reason


def test_refused_files_leave_no_descriptor(tmp_path: Path) -> None:
    with no_descriptor_leak():
        for case, (builder, _, _) in MALFORMED.items():
            refusal(builder.write(tmp_path / f"{case}.gguf"))
        refusal(tmp_path)


# What it costs. CPU time, so that other work on the machine fails no test; the peak of resident
# memory, which counts mapped pages too, above what it was before.

_MEASURE = """
import re, sys, time
from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.errors import ModelFileError
def peak():
    # Not getrusage, whose peak begins with that of the process that started this one.
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
before, best, outcome = peak(), 1e9, ""
limit_s, until = float(sys.argv[2]), time.process_time() + 4.0
while best > limit_s and time.process_time() < until:
    start = time.process_time()
    try:
        file = GgufFile.open(sys.argv[1])
        outcome = "opened"
        file.close()
    except ModelFileError as error:
        outcome = error.reason
    best = min(best, time.process_time() - start)
assert "gguf" not in sys.modules and "tokenizers" not in sys.modules
print(best, peak() - before, outcome)
"""


def measure(path: Path, limit_s: float) -> tuple[float, int, str]:
    """Fewest CPU seconds of opening a file in a new process, peak bytes added, and what came.

    It is opened again while that takes longer than `limit_s`, as others may hold up this machine.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path), str(limit_s)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    seconds, num_bytes, outcome = done.stdout.split(maxsplit=2)
    return float(seconds), int(num_bytes), outcome.strip()


def test_opening_a_30b_model_takes_half_a_second_and_little_memory(tmp_path: Path) -> None:
    path = write_sparse_30b(tmp_path / "30b.gguf")
    seconds, peak_bytes, outcome = measure(path, 0.5)
    assert outcome == "opened"
    assert seconds <= 0.5
    assert peak_bytes <= 64 << 20


def keys_and_tensors() -> GgufBuilder:
    """As many values and tensors as are read at all, with the longest names."""
    builder = GgufBuilder()
    for index in range(MAX_VALUES - 1):
        builder.add(f"{index:0>63}" + "😀" * 48, raw.scalar(raw.UINT8, 1))
    for index in range(MAX_TENSORS):
        builder.add_tensor(f"{index:0>64}", [1, 1, 1, 1], TensorType.I8, b"x")
    return builder


HOSTILE: dict[str, tuple[Callable[[], GgufBuilder], int | None, int, str]] = {
    # name: (file, its size, strings in it, how it ends)
    "as much as is read": (keys_and_tensors, None, MAX_VALUES + MAX_TENSORS, "opened"),
    "2^40 values": (lambda: GgufBuilder(num_values=2**40), 1 << 30, 0, "claims"),
    "2^40 tensors": (lambda: GgufBuilder(num_tensors=2**40), 1 << 30, 0, "claims"),
    "2^40 strings": (
        lambda: GgufBuilder().add("k", raw.strings([], count=2**40)),
        1 << 30,
        0,
        "strings; at most",
    ),
    "as many empty strings as are read": (
        lambda: GgufBuilder().add("k", raw.strings([], count=MAX_STRINGS)),
        1 << 30,
        MAX_STRINGS,
        "opened",
    ),
    "too many strings in two arrays": (
        lambda: (
            GgufBuilder()
            .add("a", raw.strings([b""] * 1000))
            .add("b", raw.strings([], count=MAX_STRINGS - 999))
        ),
        1 << 30,
        1000,
        "strings; at most",
    ),
    "strings as long as a window": (
        lambda: GgufBuilder().add("k", raw.strings([bytes(262_137)] * 450)),
        None,
        450,
        "opened",
    ),
    "2^40 numbers": (
        lambda: GgufBuilder().add("k", raw.array(raw.UINT8, [], count=2**39)),
        1 << 40,
        0,
        "metadata is larger",
    ),
    "a string of 1 GiB": (
        lambda: GgufBuilder().add("k", struct.pack("<IQ", raw.STRING, 1 << 30)),
        1 << 31,
        0,
        "metadata is larger",
    ),
    "strings of 1 GiB": (
        lambda: GgufBuilder().add(
            "k", struct.pack("<IIQ", raw.ARRAY, raw.STRING, 5) + struct.pack("<Q", 1 << 30)
        ),
        1 << 33,
        5,
        "metadata is larger",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_done_with_in_bounded_time_and_memory(tmp_path: Path, case: str) -> None:
    make, size_bytes, num_strings, expected = HOSTILE[case]
    limit_s = 0.050 + 1e-6 * num_strings
    path = make().write(tmp_path / "m.gguf", size_bytes=size_bytes)
    seconds, peak_bytes, outcome = measure(path, limit_s)
    assert expected in outcome
    assert seconds <= limit_s
    assert peak_bytes <= 64 << 20


def test_metadata_may_be_as_long_as_it_is_allowed_to_be(tmp_path: Path) -> None:
    builder = GgufBuilder().add("k", struct.pack("<IQ", raw.STRING, MAX_METADATA_BYTES - 4096))
    with GgufFile.open(builder.write(tmp_path / "m.gguf", size_bytes=MAX_METADATA_BYTES)) as file:
        assert file.has("k")
