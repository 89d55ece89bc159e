"""Memory of the emulated device that other processes can map."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime.compute.gpu.device.driver_table import HANDLE_BYTES

if TYPE_CHECKING:
    from support.emulated_device.emulated_device import EmulatedDevice

_LOG = logging.getLogger(__name__)

FREED_WHILE_OPEN = "memory is freed that another process has open"


class EmulatedPeerMemory:
    """Implements device.PeerMemory: a file that both processes map.

    Its handle is the path of the creator's open descriptor, so that nothing is left if the creator
    is killed. A process that opens it holds a lock, which shows if the creator frees it too early.
    """

    freed_while_open: ClassVar[list[int]] = []
    """Sizes of memory that was freed while another process had it open."""

    def __init__(self, device: EmulatedDevice, *, num_bytes: int, handle: bytes = b"") -> None:
        self._device = device
        self._is_ours = not handle
        if self._is_ours:
            self._fd = os.memfd_create("dflash-peer", os.MFD_CLOEXEC)
            os.truncate(self._fd, num_bytes)
            handle = f"/proc/{os.getpid()}/fd/{self._fd}".encode().ljust(HANDLE_BYTES, b"\0")
        else:
            try:
                self._fd = os.open(handle.rstrip(b"\0"), os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise DeviceUnavailable(f"no memory is shown: {error.strerror}") from error
            num_there = os.fstat(self._fd).st_size
            if num_there < num_bytes:
                os.close(self._fd)
                raise DeviceUnavailable(f"memory of {num_there} bytes is shown, not {num_bytes}")
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        self.handle = handle
        self._memory = mmap.mmap(self._fd, 0)
        self.device_address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        device.add_range(self.device_address, len(self._memory))

    def write(self, offset: int, data: bytes) -> None:
        """Overwrite the memory, for tests of damage."""
        self._memory[offset : offset + len(data)] = data

    def close(self) -> None:
        """As PeerMemory.close."""
        if self.device_address:
            self._device.drop_range(self.device_address)
            self.device_address = 0
            if self._is_ours:
                self._note_if_open()
            self._memory.close()
            os.close(self._fd)

    def _note_if_open(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            _LOG.warning(FREED_WHILE_OPEN)
            self.freed_while_open.append(len(self._memory))
