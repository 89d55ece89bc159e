"""Expert traces: what is written is read, and nothing else is."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import Phase
from dflash_runtime.placement.cache import traces
from dflash_runtime.placement.cache.traces import (
    PHASES,
    ExpertTrace,
    TraceHeader,
    TraceLayer,
    TraceWriter,
    read_trace,
)
from support.examples import examples

HEADER = TraceHeader(
    "ab" * 32, "a model", "cd" * 32, (TraceLayer(0, 7, 2, 1000), TraceLayer(3, 300, 3, 2000))
)


def random_ids(num_tokens: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    rng = np.random.default_rng(seed)
    columns = [rng.integers(0, 7, (num_tokens, 2)), rng.integers(0, 300, (num_tokens, 3))]
    return np.concatenate(columns, axis=1).astype(np.int32)


def written(path: Path, *parts: tuple[Phase, int], most_bytes: int = 1 << 20) -> ExpertTrace:
    writer = TraceWriter(path, HEADER, most_bytes=most_bytes)
    for index, (phase, num_tokens) in enumerate(parts):
        writer.add(phase, random_ids(num_tokens, index))
    writer.close()
    writer.close()
    return read_trace(path)


@examples(40)
@given(
    st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 40)), max_size=30),
    st.sampled_from([1, 100, 1 << 16]),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[Phase, int]], block_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("trace") / "run.trace"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "_BLOCK_BYTES", block_bytes)
        patch.setattr(traces, "_MOST_TOKENS_A_BLOCK", 25)
        trace = written(path, *parts)
    assert trace.header == HEADER
    assert [PHASES[each] for each in trace.phases] == [
        phase for phase, num_tokens in parts for _ in range(num_tokens)
    ]
    ids = [random_ids(num_tokens, index) for index, (_, num_tokens) in enumerate(parts)]
    np.testing.assert_array_equal(trace.ids, np.concatenate([random_ids(0), *ids]))
    layers = dict(trace.by_layer())
    assert [*layers] == [*HEADER.layers]
    np.testing.assert_array_equal(layers[HEADER.layers[1]], trace.ids[:, 2:])


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    path.touch(0o644)
    written(path, (Phase.DECODE, 1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_older_trace_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    written(path, (Phase.DECODE, 100))
    assert written(path, (Phase.DECODE, 1)).num_tokens == 1
    other = tmp_path / "letter.txt"
    other.write_text("Dear all,")
    with pytest.raises(SettingsError, match=r"letter\.txt: is there, and no trace"):
        TraceWriter(other, HEADER, most_bytes=1 << 20)
    assert other.read_text() == "Dear all,"
    with pytest.raises(SettingsError, match="directory"):
        TraceWriter(tmp_path, HEADER, most_bytes=1 << 20)
    with pytest.raises(SettingsError, match="No such file"):
        TraceWriter(tmp_path / "no" / "where", HEADER, most_bytes=1 << 20)


def test_a_full_trace_is_whole_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "_BLOCK_BYTES", 1)
    with caplog.at_level(logging.INFO):
        trace = written(tmp_path / "run.trace", *[(Phase.DECODE, 10)] * 200, most_bytes=10_000)
    assert 0 < trace.num_tokens < 2000
    assert (tmp_path / "run.trace").stat().st_size <= 10_000
    assert [record.getMessage().endswith("run.trace: full") for record in caplog.records] == [True]


def test_a_disk_that_fails_ends_the_trace_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TraceWriter(tmp_path / "run.trace", HEADER, most_bytes=1 << 20)

    def failing(fd: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", failing)
    monkeypatch.setattr(traces, "_BLOCK_BYTES", 1)
    for _ in range(3):
        writer.add(Phase.DECODE, random_ids(1))
    assert not writer.is_open
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    writer.close()


def test_ids_of_another_shape_are_refused(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "run.trace", HEADER, most_bytes=1 << 20)
    with pytest.raises(ValueError, match=r"expected \[T, 5\]"):
        writer.add(Phase.DECODE, random_ids(1)[:, :4])
    writer.close()


def block(num_tokens: int, data: bytes) -> bytes:
    return struct.pack("<II", num_tokens, zlib.crc32(data)) + data


def header_with(**changes: object) -> bytes:
    first, record, _ = HEADER.as_bytes().split(b"\n")
    return first + b"\n" + json.dumps(json.loads(record) | changes).encode() + b"\n"


TOKEN = bytes([1]) + struct.pack("<5H", 1, 2, 3, 4, 5)

BAD = {
    "no trace": b"GGUF" * 20,
    "no trace, nothing": b"",
    "cut short or too long": HEADER.as_bytes()[:40],
    "cut short at byte": HEADER.as_bytes() + block(1, TOKEN)[:6],
    "cut short at byte, within a token": HEADER.as_bytes() + block(1, TOKEN)[:-1],
    "cut short at byte, of many": HEADER.as_bytes() + block(60_000, TOKEN),
    "a block of 4294967295": HEADER.as_bytes() + block((1 << 32) - 1, TOKEN),
    "a block of 0": HEADER.as_bytes() + block(0, b""),
    "damaged": HEADER.as_bytes() + block(1, TOKEN)[:-1] + b"\xff",
    "of phase 9": HEADER.as_bytes() + block(1, bytes([9]) + TOKEN[1:]),
    "layer 0 has 7 experts": HEADER.as_bytes()
    + block(1, bytes([1]) + struct.pack("<5H", 1, 7, 3, 4, 5)),
    "not JSON": b"dflash-moe trace 1\n{\n",
    "lacks layers": b'dflash-moe trace 1\n{"identity": "", "model": "", "moe_digest": ""}\n',
    "four sizes": header_with(layers=[[0, 7, 2]]),
    "four sizes, one negative": header_with(layers=[[0, 7, 2, -1]]),
    "four sizes, one true": header_with(layers=[[0, 7, True, 1]]),
    "sizes that cannot be": header_with(layers=[[0, 7, 8, 1]]),
    "must ascend": header_with(layers=[[3, 7, 2, 1], [0, 7, 2, 1]]),
    "must ascend, none": header_with(layers=[]),
    "identity must be": header_with(identity="AB" * 32),
    "short text": header_with(model="x" * 300),
}


@pytest.mark.parametrize("reason", BAD)
def test_what_is_no_trace_is_refused(tmp_path: Path, reason: str) -> None:
    path = tmp_path / "bad.trace"
    path.write_bytes(BAD[reason])
    with pytest.raises(SettingsError, match=rf"bad\.trace: .*{reason.partition(',')[0]}"):
        read_trace(path)


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "run.trace", (Phase.DECODE, 100_000))
    monkeypatch.setattr(traces, "MOST_TRACE_BYTES", 1 << 10)
    with pytest.raises(SettingsError, match="larger than"):
        read_trace(tmp_path / "run.trace")


@examples(200)
@given(data=st.data())
def test_damage_is_found_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("trace") / "run.trace"
    trace = written(path, (Phase.PREFILL, 20), (Phase.DECODE, 5))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(len(HEADER.as_bytes()), len(content) - 1), "place")
    if data.draw(st.booleans(), "cut"):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255), "bits")
    path.write_bytes(content)
    try:
        found = read_trace(path)
    except SettingsError:
        return
    assert found.num_tokens in (0, 25)  # cut where a block begins
    np.testing.assert_array_equal(found.ids, trace.ids[: found.num_tokens])


@contextlib.contextmanager
def traced_memory() -> Iterator[Callable[[], int]]:
    """The most that was allocated at once."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


LIES: list[object] = [-1, 0, 257, 1 << 12, 1 << 16, 65_537, 1 << 40, 1 << 70, True, 1.0, "7", None]


@examples(300)
@given(data=st.data())
def test_sizes_that_lie_are_found_before_memory_is_taken(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """One of a layer, or of a block whose checksum is right, at most; phases and ids may be out of
    range."""
    layers: list[list[Any]] = []
    for layer_id in range(data.draw(st.integers(1, 3), "layers")):
        num_experts = data.draw(st.integers(1, 4), "experts")
        num_used = data.draw(st.integers(1, num_experts), "used")
        layers.append([layer_id, num_experts, num_used, 1000])
    token = st.tuples(
        st.sampled_from([0, 1, 2, len(PHASES)]),
        *(st.integers(0, 4) for _ in range(sum(each[2] for each in layers))),
    )
    tokens = data.draw(st.lists(token, min_size=1, max_size=4), "tokens")
    content = bytes(each[0] for each in tokens)
    content += np.array([each[1:] for each in tokens], "<u2").tobytes()
    num_tokens = len(tokens)
    match data.draw(st.sampled_from(["nothing", "a layer", "a block"]), "lies"):
        case "a layer":
            layer = data.draw(st.sampled_from(layers), "layer")
            layer[data.draw(st.integers(0, 3), "size")] = data.draw(st.sampled_from(LIES), "lie")
        case "a block":
            of_block = st.sampled_from([0, num_tokens + 1, 1 << 16, 65_537, (1 << 32) - 1])
            num_tokens = data.draw(of_block, "lie")
    path = tmp_path_factory.mktemp("trace") / "run.trace"
    path.write_bytes(header_with(layers=layers) + block(num_tokens, content))
    with pytest.MonkeyPatch.context() as patch, traced_memory() as most_bytes:
        patch.setattr(traces, "MOST_TRACE_BYTES", 1 << 18)  # a file is read with room for so many
        try:
            trace = read_trace(path)
        except SettingsError:
            return
        finally:
            assert most_bytes() < 1 << 19
    assert trace.num_tokens == num_tokens == len(tokens)
    assert (trace.phases < len(PHASES)).all()
    for of_layer, ids in trace.by_layer():
        assert ids.shape == (num_tokens, of_layer.num_experts_used)
        assert (ids < of_layer.num_experts).all()
