"""A parent and a daemon on GPUs, emulated here: their devices move chunks through shared memory."""

from __future__ import annotations

import ctypes
import gc
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest

from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import F32Array, Phase
from dflash_protocol.settings import load_settings
from dflash_protocol.transports.device_copies import DeviceCopies
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.transfers.payload import SegmentWindow
from support.emulated_gpu import MAX_CHUNK, TINY, EmulatedGpus
from support.random_models import write_qwen3moe

pytestmark = pytest.mark.e2e

CHUNKS = [12, 1, 9]
IDS = [int(i) for i in np.random.default_rng(1).integers(0, TINY.vocab_size, sum(CHUNKS))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


class Moves:
    """Counts what goes through windows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = self.sums = 0
        write_rows, read_sums = SegmentWindow.write_rows, SegmentWindow.read_sums

        def written(window: SegmentWindow, offset: int, rows: Any) -> Any:
            self.rows += rows.shape[0]
            return write_rows(window, offset, rows)

        def read(window: SegmentWindow, offset: int, expected: Any) -> Any:
            self.sums += expected.sums.shape[0]
            return read_sums(window, offset, expected)

        monkeypatch.setattr(SegmentWindow, "write_rows", written)
        monkeypatch.setattr(SegmentWindow, "read_sums", read)


def logits(path: Path, **options: Any) -> F32Array:
    with Engine.open(path, device="cuda:0", context=24, **options) as engine:
        return engine.logits(IDS, CHUNKS)


def test_chunks_of_devices_have_the_bits_of_a_resident_run(
    model: Path,
    gpus: EmulatedGpus,
    daemon: subprocess.Popen[str],
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = logits(model)
    moves = Moves(monkeypatch)
    options: dict[str, Any] = {"connect": [endpoint], "require_daemons": True}
    for num_local in (0, 2):
        assert (logits(model, local_experts=num_local, **options) == expected).all()
        if not num_local:
            assert moves.rows == moves.sums == TINY.num_layers * (len(IDS) - 1)
    num_rows = moves.rows
    # Cut into requests of what fits, which may be twice what was agreed on.
    small = replace(load_settings(), batch_capacity=4)
    assert (logits(model, local_experts=0, settings=small, **options) == expected).all()
    assert moves.rows - num_rows == TINY.num_layers * (len(IDS) - 1)
    # Rounded, or without shared memory, they go by the host.
    num_rows = moves.rows
    stream = replace(load_settings(), ipc_transport="stream")
    assert (logits(model, local_experts=0, settings=stream, **options) == expected).all()
    rounded = replace(load_settings(), ipc_dtype="bf16")
    found = logits(model, local_experts=0, settings=rounded, **options)
    assert 0 < np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
    assert moves.rows == num_rows
    assert max(CHUNKS) <= MAX_CHUNK
    assert all(not device.num_bytes for device in gpus.opened)


def test_trees_are_sent_whole(
    model: Path, gpus: EmulatedGpus, daemon: subprocess.Popen[str], endpoint: str
) -> None:
    """Many tokens at once, of which the daemon's kernels take some at a time."""
    tokens, parents = IDS[:9], [-1, 0, 0, 1, -1, 3, 2, 5, 7]

    def told(**options: Any) -> list[Any]:
        with Engine.open(model, device="cuda:0", context=32, **options) as engine:
            engine.prefill(IDS[:12])
            found = []
            for path in ([0, 1, 3, 5], [0]):
                verified = engine.verify(tokens, parents, feature_layers=[1])
                found += [verified.next_token_ids, verified.features[1]]
                engine.accept(path)
            for owner in engine.stats().owners.values():
                if owner.kind.value == "daemon":
                    assert owner.phases[Phase.VERIFY].requests == 2 * TINY.num_layers
            return found

    shared = replace(load_settings(), ipc_transport="shared")
    options: dict[str, Any] = {"connect": [endpoint], "require_daemons": True, "settings": shared}
    for one, other in zip(told(local_experts=1, **options), told(), strict=True):
        assert (one == other).all()


def test_steps_ask_a_daemon_without_a_mailbox_by_compiled_code(
    model: Path, gpus: EmulatedGpus, daemon: subprocess.Popen[str], endpoint: str
) -> None:
    """Also where devices move the rows of prompts through the same ring: before and after, in both
    texts."""
    shared = replace(load_settings(), ipc_transport="shared", check_replies=0)
    connected: dict[str, Any] = {"connect": [endpoint], "require_daemons": True, "settings": shared}
    found = []
    for options in ({}, {"local_experts": 2, **connected}):
        with Engine.open(model, device="cuda:0", context=48, **options) as engine:
            for prompt in (IDS[:12], IDS[5:20]):
                tokens = engine.generate(prompt, 8, ignore_eos=True)
                found.append([each.token_id for each in tokens])
            for owner in engine.stats().owners.values():
                if owner.kind.value == "daemon":
                    decode = owner.phases[Phase.DECODE]
                    assert decode.requests > 0
                    assert decode.pack_s == 0
                    assert owner.phases[Phase.PREFILL].pack_s > 0
    assert found[:2] == found[2:]


def damaged(segment_address: int, offset: int) -> None:
    """Change a byte of what lies in shared memory."""
    ctypes.c_ubyte.from_address(segment_address + offset).value ^= 1


@pytest.mark.slow
def test_whatever_happens_to_a_chunk_it_is_computed(
    model: Path,
    gpus: EmulatedGpus,
    daemon: subprocess.Popen[str],
    endpoint: str,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Damaged rows, damaged sums, a device that cannot lock memory, and a daemon that is killed
    when it has got its rows: each is computed by the CPU then, or by the host's copies."""
    expected = logits(model)
    bound = 0.02 * np.abs(expected).max()
    opened, write_rows, read_sums = (
        SegmentWindow.__init__,
        SegmentWindow.write_rows,
        SegmentWindow.read_sums,
    )
    address_of: WeakKeyDictionary[SegmentWindow, int] = WeakKeyDictionary()
    begin = DeviceCopies.begin
    faults: list[str] = []

    def noted(window: SegmentWindow, mover: Any, address: int, num_bytes: int) -> None:
        if faults[:1] == ["lock"]:
            faults.pop(0)
            raise DeviceUnavailable("no more memory can be locked")
        opened(window, mover, address, num_bytes)
        address_of[window] = address

    def written(window: SegmentWindow, offset: int, rows: Any) -> Any:
        crossing = write_rows(window, offset, rows)
        if faults[:1] == ["rows"]:
            faults.pop(0)
            crossing.digest()
            damaged(address_of[window], offset + 5)
            # The same digest, of what is damaged by now.
        return crossing

    def read(window: SegmentWindow, offset: int, expected: Any) -> Any:
        if faults[:1] == ["sums"]:
            faults.pop(0)
            damaged(address_of[window], offset + 8 * TINY.hidden_size - 1)
        return read_sums(window, offset, expected)

    def begun(copies: DeviceCopies, *args: Any, **named: Any) -> None:
        begin(copies, *args, **named)
        if faults[:1] == ["kill"]:
            faults.pop(0)
            daemon.kill()

    monkeypatch.setattr(SegmentWindow, "__init__", noted)
    monkeypatch.setattr(SegmentWindow, "write_rows", written)
    monkeypatch.setattr(SegmentWindow, "read_sums", read)
    monkeypatch.setattr(DeviceCopies, "begin", begun)
    options: dict[str, Any] = {"connect": [endpoint], "local_experts": 0, "context": 24}
    faults = ["lock"]
    with Engine.open(model, device="cuda:0", **options) as engine:
        assert (engine.logits(IDS, CHUNKS) == expected).all()  # which the host has copied
    assert not faults
    assert not address_of
    with Engine.open(model, device="cuda:0", **options) as engine:
        assert (engine.logits(IDS, CHUNKS) == expected).all()
        for fault in ("rows", "sums"):
            faults.append(fault)
            found = engine.logits(IDS, CHUNKS)
            assert not faults
            assert 0 < np.abs(found - expected).max() < bound
            assert (engine.logits(IDS, CHUNKS) == expected).all()
        stats = engine.stats()
        assert stats.owners["link0"].checksum_failures == 2
        assert stats.owners["fallback"].requests == 2
        faults.append("kill")
        found = engine.logits(IDS, CHUNKS)
        assert not faults
        assert 0 < np.abs(found - expected).max() < bound
        assert engine.stats().owners["link0"].is_lost
    for left in run_dir.glob("gpu.sock*"):  # what is killed cannot clean up
        left.unlink()
    assert len(gpus.opened) == 3
    gc.collect()  # the error of the daemon that was killed refers to frames, and these to it
    for device in gpus.opened:
        assert not device.num_bytes
        assert not device._range_bytes  # nothing is mapped any more
