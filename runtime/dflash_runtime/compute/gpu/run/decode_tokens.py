"""Tokens of decode steps: what a step reads on the device, and what the host reads of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.backend import NOT_FINITE
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.device.mapped_array import MappedBlock

_NONE = -1
"""In place of a token that is not sampled yet."""
_POLL_S = 20e-6
"""Pause between polls for a token: short beside a step, long enough for other threads to take the
interpreter's lock."""
_TIMEOUT_S = 0.5
"""When a step takes longer the driver is asked whether the device has failed."""


class DecodeTokens:
    """Token id and position of the next step, on the device, and the tokens sampled so far.

    A step reads `ids` and `positions` [1], and writes them for the one after it. The token that it
    samples for position p is written to `sampled[p]` too, in mapped memory, which the host polls
    without calling the driver.
    States: steps of the positions `first` to `position` - 1 are started; `place` begins anew.
    Used by one thread. Owns: device memory, and mapped memory of the host.
    """

    def __init__(self, device: KernelDevice, capacity: int) -> None:
        self._device = device
        self.ids, self.positions = (device.zeros(1, np.int32) for _ in range(2))
        # One more: the step of the last position samples a token too.
        self._block = MappedBlock(device, [((capacity + 1,), np.int32)])
        self.sampled: I32Array = self._block.host[0]
        self.sampled[:] = _NONE
        self.history: DeviceArray = self._block.device[0]
        """`sampled` as kernels write it."""
        self.first = self.position = 0
        self._first_id = 0

    def place(self, token_id: int, position: int) -> None:
        """Set what the next step computes; waits for the steps under way."""
        self._device.synchronize()  # surplus steps may still write their tokens
        # With the token of a step, or a trial, that the host was interrupted in.
        self.sampled[self.first + 1 : self.position + 2] = _NONE
        self._first_id = token_id
        self._write(token_id, position)
        self.first = self.position = position

    def advance(self) -> None:
        """A step was started."""
        self.position += 1

    def input_of(self, position: int) -> int:
        """The token that the started step of this position computes; waits for nothing."""
        return self._first_id if position == self.first else int(self.sampled[position])

    def is_finite(self, position: int) -> bool:
        """Whether the logits of the token sampled for this position were."""
        return bool(self.sampled[position] != NOT_FINITE)

    def wait(self, position: int) -> int:
        """Wait for the token sampled for a position: an id, UNDECIDED or NOT_FINITE.

        Raises: DeviceUnavailable if the device has failed.
        """
        assert self.first < position <= self.position
        sampled, timeout_at_s = self.sampled, 0.0
        while (token_id := int(sampled[position])) == _NONE:
            now_s = time.monotonic()
            if not timeout_at_s:
                timeout_at_s = now_s + _TIMEOUT_S
            elif now_s > timeout_at_s:
                self._device.synchronize()
                if sampled[position] == _NONE:
                    raise DeviceUnavailable(
                        # docs: the device failed without its driver saying so; look at the system's
                        # log
                        f"{self._device.name}: a step has ended without a token"
                    )
            time.sleep(_POLL_S)
        return token_id

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context for a step that is only tried: its token is forgotten."""
        before = [int(self._device.download(array)[0]) for array in (self.ids, self.positions)]
        yield
        self._device.synchronize()
        self.sampled[self.position + 1] = _NONE
        self._write(*before)

    def _write(self, token_id: int, position: int) -> None:
        self._device.write(self.ids, np.array([token_id], np.int32))
        self._device.write(self.positions, np.array([position], np.int32))

    def close(self) -> None:
        """Unmap the host's memory; no step may be running."""
        self._block.close()
