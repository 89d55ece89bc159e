"""The ring's compiled code by itself: checksum, copies, conversions, and life without numba."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dflash_protocol.batch import HostHidden, RoutedBatch
from dflash_protocol.ids import AnyArray, F64Array, I64Array, Phase, U8Array
from dflash_protocol.payloads import PayloadType, are_finite, pack
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import create_segment
from dflash_protocol.transports.ports import PAYLOAD_CODES, Ports
from dflash_protocol.wire.transport import LinkLimits
from support.processes import environment


def lines_of(num_words: int) -> I64Array:
    """Zeros that begin a cache line."""
    room = np.zeros(num_words + 8, np.int64)
    first = -room.ctypes.data // 8 % 8
    return room[first : first + num_words]


STATE, HEADER = lines_of(32), lines_of(ring.HEADER_WORDS)


def checksum(data: U8Array) -> tuple[int, U8Array]:
    """Of these bytes and HEADER; and what was copied, with a canary behind."""
    target = np.full(data.size + 64, 0xA5, np.uint8)
    value = ring_native.kernels().checksum(
        STATE.ctypes.data, HEADER.ctypes.data, data.ctypes.data, target.ctypes.data, data.size
    )
    assert (target[data.size :] == 0xA5).all(), "wrote behind the end"
    return value, target[: data.size]


def words_of(data: bytes) -> U8Array:
    return np.frombuffer(data[: len(data) // 4 * 4], np.uint8).copy()


@settings(deadline=None)
@given(st.binary(min_size=4, max_size=1100), st.data())
def test_every_flipped_bit_is_found_and_copies_are_exact(raw: bytes, draw: st.DataObject) -> None:
    data = words_of(raw)
    value, copied = checksum(data)
    np.testing.assert_array_equal(copied, data)
    bit = draw.draw(st.integers(0, 8 * data.size - 1))
    data[bit // 8] ^= 1 << bit % 8
    assert checksum(data)[0] != value


def test_each_single_bit_of_a_block_and_its_tail_matters() -> None:
    data = np.zeros(256 + 12, np.uint8)
    seen = {checksum(data)[0]}
    for bit in range(8 * data.size):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(checksum(data)[0])
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8 * data.size + 1


@settings(deadline=None)
@given(
    st.integers(0, 1 << 32), st.sampled_from([1, 2, 3, 32, 64, 128, 192, 4096]), st.integers(0, 31)
)
def test_words_that_changed_places_are_found(seed: int, distance: int, bit: int) -> None:
    """Also those that differ in one bit, and whatever lies between them."""
    words = np.random.default_rng(seed).integers(0, 1 << 32, 8192, dtype=np.uint32)
    first = seed % (words.size - distance)
    words[first + distance] = words[first] ^ np.uint32(1 << bit)
    before = checksum(words.view(np.uint8))[0]
    words[[first, first + distance]] = words[[first + distance, first]]
    assert checksum(words.view(np.uint8))[0] != before


def test_every_word_of_the_header_matters_but_the_checksum_itself() -> None:
    data = np.arange(64, dtype=np.uint8)
    value = checksum(data)[0]
    for word in range(ring.HEADER_WORDS):
        for bit in (0, 31, 32, 62):
            HEADER[word] ^= 1 << bit
            assert (checksum(data)[0] != value) == (word != ring.CHECKSUM)
            HEADER[word] ^= 1 << bit


FLOATS = st.floats(width=32, allow_nan=False) | st.sampled_from(
    [0.0, -0.0, 65504.0, 65519.0, 65520.0, -65520.0, 2.0**-24, 2.0**-25, 3.4e38, np.inf, -np.inf]
)
DOUBLES = (
    st.floats(allow_nan=False)
    | FLOATS
    | st.sampled_from(
        # On the edge between two float16 for float32, but not for float64.
        [1.0 + 2.0**-11 + 2.0**-40, 1.0 + 2.0**-11 - 2.0**-40, 65520.0 - 2.0**-30, 1e300, -1e-300]
    )
)
NARROW = [PayloadType.F16, PayloadType.BF16]


class Slots:
    """Both sides' ports of one slot, without transports."""

    def __init__(self, folder: Path, num_columns: int, payload: PayloadType) -> None:
        self.segment = create_segment(folder, RingShape(1, 1, num_columns, 1), generation=1)
        limits = LinkLimits(num_columns, 1, 1)
        code = PAYLOAD_CODES[payload]
        self.code = code
        self.client = Ports(self.segment, is_client=True, narrow=code, limits=limits)
        self.server = Ports(self.segment, is_client=False, narrow=code, limits=limits)
        self.private: list[AnyArray] = [
            np.zeros(num_columns, np.float32), *(np.zeros(2, np.int32) for _ in range(4))
        ]  # fmt: skip
        for field, array in enumerate(self.private, ring_native.HIDDEN):
            self.server.words[0, field] = array.ctypes.data
        self.service = np.zeros(ring_native.SERVICE_WORDS, np.int64)
        service = self.service.ctypes.data
        self.table = np.array([1, 0, 0, service, self.server.address(0)], np.int64)


@pytest.mark.parametrize("payload", NARROW)
@settings(deadline=None)
@given(values=hnp.arrays(np.float32, st.integers(1, 300), elements=FLOATS))
def test_narrow_rows_become_what_the_stream_makes_of_them(
    run_dir: Path, payload: PayloadType, values: AnyArray
) -> None:
    slots = Slots(run_dir, values.size, payload)
    kernels, empty = ring_native.kernels(), np.empty(0, np.int32)
    expected, sent_as = pack(values[None], payload)
    batch = RoutedBatch(
        Phase.DECODE,
        HostHidden(values[None]),
        empty,
        np.zeros(1, np.int32),
        empty,
        empty.view(np.float32),
    )
    arrays = batch.hidden, empty, batch.group_starts, empty, batch.weights
    slots.client.words[0, ring_native.SENDS] = slots.code
    sent = kernels.send_request(slots.client.address(0), 1, 0, 1, 1.0, *arrays)
    assert (sent == ring_native.OUT_OF_RANGE) == (sent_as is PayloadType.F32)
    if sent >= 0:
        assert kernels.serve(slots.table.ctypes.data, 0, 0, 0, 0) == 0
        np.testing.assert_array_equal(slots.private[0], _widened(expected[0], payload))
    slots.segment.close()


@pytest.mark.parametrize("payload", NARROW)
@settings(deadline=None)
@given(values=hnp.arrays(np.float64, st.integers(1, 300), elements=DOUBLES))
def test_narrow_sums_become_what_the_stream_makes_of_them(
    run_dir: Path, payload: PayloadType, values: F64Array
) -> None:
    slots = Slots(run_dir, values.size, payload)
    kernels = ring_native.kernels()
    expected, sent_as = pack(values[None], payload)
    sent = kernels.send_reply(slots.server.address(0), 1, slots.code, 0.5, 0.25, values[None])
    assert (sent == ring_native.OUT_OF_RANGE) == (sent_as is PayloadType.F64)
    if sent >= 0:
        out = np.empty((1, values.size))
        flag = 0 if np.isfinite(values).all() else ring_native.IS_NOT_FINITE
        received = kernels.receive_reply(slots.client.address(0), 1, 0, 0, out)
        assert received == 2 * values.size | flag
        np.testing.assert_array_equal(out[0], _widened(expected[0], payload))
    slots.segment.close()


def _widened(bits: AnyArray, payload: PayloadType) -> AnyArray:
    if payload is PayloadType.F16:
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("payload", NARROW)
def test_no_number_stays_none(run_dir: Path, payload: PayloadType) -> None:
    values = np.array([[np.nan, 1.0, -np.nan, np.inf]])
    slots = Slots(run_dir, 4, payload)
    out = np.empty((1, 4))
    kernels = ring_native.kernels()
    assert kernels.send_reply(slots.server.address(0), 1, slots.code, 0.5, 0.25, values) >= 0
    received = kernels.receive_reply(slots.client.address(0), 1, 0, 0, out)
    assert received == 8 | ring_native.IS_NOT_FINITE
    np.testing.assert_array_equal(out, np.abs(values) * [[1, 1, 1, 1]])
    slots.segment.close()


@pytest.mark.parametrize("payload", [PayloadType.F32, *NARROW])
@pytest.mark.parametrize("size", [1, 31, 32, 33, 127, 200])
def test_sums_that_are_not_finite_are_told_from_all_others(
    run_dir: Path, payload: PayloadType, size: int
) -> None:
    """Wherever they stand: in a whole block, or in what is left."""
    slots, kernels = Slots(run_dir, size, payload), ring_native.kernels()
    out = np.empty((1, size))
    largest = np.finfo(np.float64).max if payload is PayloadType.F32 else 6e4
    cases = [(0, 0.0), (0, largest), (size - 1, -largest), (size // 2, 5e-324)]
    cases += [(place, bad) for place in {0, size // 2, size - 1} for bad in (np.nan, np.inf)]
    code = ring.PAYLOAD_F64 if payload is PayloadType.F32 else slots.code
    for sequence, (place, value) in enumerate([*cases, (size - 1, -np.inf), (0, 1.0)], 1):
        values = np.random.default_rng(sequence).standard_normal((1, size))
        values[0, place] = value
        assert kernels.send_reply(slots.server.address(0), sequence, code, 0.5, 0.25, values) > 0
        received = kernels.receive_reply(slots.client.address(0), sequence, 0, 0, out)
        assert received > 0
        assert bool(received & ring_native.IS_NOT_FINITE) == (not np.isfinite(value))
        assert are_finite(values) == np.isfinite(value)
        assert np.isfinite(out[0, place]) == np.isfinite(value)
    slots.segment.close()


def test_arrays_of_another_width_or_size_are_refused_and_not_read(run_dir: Path) -> None:
    slots = Slots(run_dir, 4, PayloadType.F32)
    send = ring_native.kernels().send_reply
    port = slots.server.address(0)
    for wrong in (np.zeros((1, 4), np.float32), np.zeros((1, 8), np.int16), [[0.0] * 4], None):
        with pytest.raises(TypeError):
            send(port, 1, ring.PAYLOAD_F64, 0.0, 0.0, wrong)
    gaps = np.zeros((1, 8))[:, ::2], np.zeros((1, 8))[:, 3::-1]
    for misfit in (np.zeros((1, 5)), np.zeros((1, 3)), np.zeros((2, 4)), *gaps):
        assert send(port, 1, ring.PAYLOAD_F64, 0.0, 0.0, misfit) == ring_native.BAD_ARRAYS
    slots.segment.close()


def test_where_it_cannot_work_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ring_native.is_available()
    assert ring_native.why_unavailable() == ""
    with monkeypatch.context() as older:
        older.setattr(ring_native, "_converts_f16", lambda: False)
        assert "float16" in ring_native.why_unavailable()
    with monkeypatch.context() as remote:
        remote.setattr(sys, "platform", "darwin")
        assert "Linux" in ring_native.why_unavailable()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not ring_native.is_available()
    assert "numba" in ring_native.why_unavailable()


def test_importing_the_transport_does_not_import_numba() -> None:
    code = "import sys, dflash_protocol.transports.shared_client; print('numba' in sys.modules)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert result.stdout == "False\n", result.stderr


def test_compiled_code_is_kept() -> None:
    ring_native.kernels()
    ring_native.client_functions()
    folder = ring_native._kernel_folder(None)
    assert folder is not None
    kept = {path.name.split(".")[1].split("-")[0] for path in folder.glob("*.nbc")}
    assert kept == {*ring_native.Kernels._fields, *ring_native.ClientFunctions._fields}


def test_a_folder_that_cannot_be_used_costs_time_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Open to others, so that what lies there may not be ours."""
    tmp_path.chmod(0o755)
    assert ring_native._kernel_folder(str(tmp_path)) is None
    assert str(tmp_path) in caplog.text
    tmp_path.chmod(0o700)
    folder = ring_native._kernel_folder(str(tmp_path))
    assert folder is not None
    assert folder.parent == tmp_path


def test_folders_of_older_sources_go_away(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for age in range(6):
        old = tmp_path / f"ring-{age}"
        old.mkdir()
        os.utime(old, (age, age))
    folder = ring_native._kernel_folder(str(tmp_path))
    assert folder is not None
    assert {path.name for path in tmp_path.iterdir()} == {
        "ring-3", "ring-4", "ring-5", folder.name,
    }  # fmt: skip
