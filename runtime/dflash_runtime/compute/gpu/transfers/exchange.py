"""One layer's rows, choice and sums in mapped memory, for steps of a few tokens.

No copies are asked of the driver, and the host polls a word to know that data has arrived. A
parent's device writes rows and choice and reads sums; a daemon's reads rows and choice and writes
sums.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import F32Array, F64Array, I32Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.device.mapped_array import MappedBlock
from dflash_runtime.compute.gpu.launch.decode_arrays import ArrayChecker
from dflash_runtime.compute.gpu.launch.decode_experts import Choice
from dflash_runtime.compute.gpu.transfers.payload_kernels import COPY_DEADLINE_S

_THREADS = 512
_POLLS_PER_CLOCK = 64
"""Polls of the word between two reads of the clock."""
BUSY_S = 0.5e-3
"""A piece of a step takes less; until then the host spins."""
_PAUSE_S = 20e-6
_TIMEOUT_S = 0.5
"""When a piece takes longer the driver is asked whether the device has failed."""

ExchangeArgs = kernel_struct("exchange.cu", "ExchangeArgs")


class Exchanger:
    """Launches the kernel that copies arrays between boxes and a device."""

    def __init__(self, device: KernelDevice) -> None:
        self._device, self._arrays = device, ArrayChecker(device)
        module = device.module("exchange.cu", {"THREADS": _THREADS})
        self._kernel = module.kernel("exchange", ExchangeArgs)

    def give(self, box: StepBox, rows: DeviceArray, choice: Choice) -> None:
        """Copy rows and choice to the box and signal the host.

        Shapes: the box's. Raises: ValueError for others.
        """
        inputs = rows, choice.topk_ids, choice.topk_weights
        self._launch(box, zip(inputs, box.mapped_inputs, strict=True), signals=True)

    def take(self, box: StepBox, rows: DeviceArray, choice: Choice) -> None:
        """Copy rows and choice that the host has written to the device."""
        inputs = rows, choice.topk_ids, choice.topk_weights
        self._launch(box, zip(box.mapped_inputs, inputs, strict=True), signals=False)

    def give_sums(self, box: StepBox, sums: DeviceArray) -> None:
        """Copy sums to the box and signal the host."""
        self._launch(box, ((sums, box.mapped_sums),), signals=True)

    def _launch(
        self,
        box: StepBox,
        copies: Iterable[tuple[DeviceArray, DeviceArray]],
        *,
        signals: bool,
    ) -> None:
        args = ExchangeArgs()
        for index, (source, target) in enumerate(copies):
            shape, dtype = target.shape, target.dtype
            sizes = {f"dimension_{axis}": size for axis, size in enumerate(shape)}
            args.sources[index] = self._arrays.address("source", source, dtype, **sizes)
            args.targets[index] = self._arrays.address("target", target, dtype, **sizes)
            args.num_words[index] = target.size * dtype.itemsize // 4
        if signals:
            args.signal = self._arrays.address("signal", box.mapped_signal, np.int32, one=1)
        self._device.launch(self._kernel, (1, 1, 1), _THREADS, args)


class StepBox:
    """Mapped memory for the rows, choice and sums of one layer of a step.

    Shapes: rows [T, H] float32, ids [T, K] int32, weights [T, K] float32, sums [T, H] float64.
    Owns: mapped memory.
    """

    def __init__(
        self, device: KernelDevice, *, num_tokens: int, hidden_size: int, num_used: int
    ) -> None:
        wide, chosen = (num_tokens, hidden_size), (num_tokens, num_used)
        self._device = device
        self._block = MappedBlock(
            device,
            [
                (wide, np.float32),
                (chosen, np.int32),
                (chosen, np.float32),
                (wide, np.float64),
                ((1,), np.int32),
            ],
        )
        rows, ids, weights, sums, signal = self._block.host
        self.rows: F32Array = rows
        self.ids: I32Array = ids
        self.weights: F32Array = weights
        self.sums: F64Array = sums
        self.flat_ids, self.flat_weights = self.ids.reshape(-1), self.weights.reshape(-1)
        """The same arrays."""
        self._signal = memoryview(signal)
        mapped: list[DeviceArray] = self._block.device
        self.mapped_inputs = mapped[:3]
        """Rows, ids and weights."""
        self.mapped_sums, self.mapped_signal = mapped[3:]

    @property
    def signal_address(self) -> int:
        """For compiled code of the host; the signal has eight bytes of its own."""
        return int(np.asarray(self._signal).ctypes.data)

    def expect(self) -> None:
        """Clear the signal; call it before the kernels that will set it are started."""
        self._signal[0] = 0

    def wait(self) -> None:
        """Wait for the signal. Raises: DeviceUnavailable if the device has failed."""
        signal = self._signal
        if signal[0]:
            return
        busy_until_s = time.monotonic() + BUSY_S
        while time.monotonic() < busy_until_s:
            for _ in range(_POLLS_PER_CLOCK):
                if signal[0]:
                    return
        patient_until_s = busy_until_s + _TIMEOUT_S
        while not signal[0]:
            if time.monotonic() > patient_until_s:
                self._device.synchronize(COPY_DEADLINE_S)
                if not signal[0]:
                    raise DeviceUnavailable(f"{self._device.name}: work has ended without a result")
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Unmap it; no kernel that uses it may be running. Idempotent."""
        self._block.close()
