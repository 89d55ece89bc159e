"""Memory that others may have open: who gives it back, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime.compute.gpu.mailbox import peer_memory
from dflash_runtime.compute.gpu.mailbox.peer_memory import MemoryKeeper
from support.emulated_device import EmulatedDevice
from support.emulated_device.peer_memory import EmulatedPeerMemory


class FailedMemory:
    """Of a device that has failed."""

    device_address = 1
    handle = b""
    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1
        raise DeviceUnavailable("the device has failed")


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryKeeper]:
    monkeypatch.setattr(peer_memory, "KEPT_S", 0.2)
    keeper = MemoryKeeper(threading.RLock())
    yield keeper
    keeper.close()


def test_memory_is_kept_for_a_while_and_then_given_back(keeper: MemoryKeeper) -> None:
    memory = EmulatedDevice().export_memory(64)
    began_s = time.monotonic()
    keeper.keep(memory)
    assert memory.device_address
    keeper.close()
    assert time.monotonic() - began_s >= 0.2
    assert not memory.device_address
    keeper.close()


def test_a_device_that_has_failed_gives_nothing_back(keeper: MemoryKeeper) -> None:
    memory = FailedMemory()
    keeper.keep(memory)
    keeper.close()
    assert memory.num_closed == 1


def test_memory_of_fewer_bytes_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedPeerMemory, "freed_while_open", [])
    device, other = EmulatedDevice(), EmulatedDevice()
    memory = device.export_memory(64)
    with pytest.raises(DeviceUnavailable, match=r"\b64 bytes\b.*\b65\b"):
        other.import_memory(memory.handle, 65)
    with pytest.raises(DeviceUnavailable, match=r"no memory\b"):
        other.import_memory(b"/proc/self/fd/no".ljust(64, b"\0"), 1)
    opened = other.import_memory(memory.handle, 64)
    memory.close()  # the emulation finds out
    assert EmulatedPeerMemory.freed_while_open == [64]
    opened.close()
