"""The experts that tokens choose in all layers of a pass, kept for traces."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice, address
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import ArrayChecker
from dflash_runtime.compute.gpu.ops.kernels import ExpertChoice

AppendChoicesArgs = kernel_struct("append_choices.cu", "AppendChoicesArgs")
_LayerChoice = kernel_struct("append_choices.cu", "LayerChoice")

_THREADS = 64

MOST_CHOICE_ROWS = 1024
"""Most steps whose choices are kept on the device."""


class ChoiceNotes:
    """Choices of the layers of a pass, between `begin` and `end`: their arrays are not reused
    meanwhile. Used by the thread that runs the model."""

    def __init__(self) -> None:
        self._noted: list[ExpertChoice] | None = None

    def begin(self) -> None:
        self._noted = []

    def add(self, choice: ExpertChoice) -> ExpertChoice:
        """Note a layer's choice, if choices are noted; returns it."""
        if self._noted is not None:
            self._noted.append(choice)
        return choice

    def end(self) -> list[ExpertChoice]:
        """What was noted, layer after layer."""
        noted, self._noted = self._noted, None
        return noted or []


class ChoiceTable:
    """Where a captured pass has the choices of its layers.

    The trial before a capture writes it; the capture has the same arrays.
    """

    def __init__(self, device: KernelDevice, num_layers: int) -> None:
        self.num_layers = num_layers
        self.array = device.zeros((num_layers, ctypes.sizeof(_LayerChoice)), np.uint8)
        self._device = device
        self._known: bytes | None = None

    def write(self, choices: Sequence[ExpertChoice]) -> None:
        """Raises: RuntimeError if they are not those of the trial."""
        column, places = 0, []
        for choice in choices:
            places.append(_LayerChoice(address(choice.ids), column, choice.ids.shape[1]))
            column += choice.ids.shape[1]
        content = b"".join(bytes(each) for each in places)
        if self._known is None:
            self._known = content
            rows = np.frombuffer(content, np.uint8).reshape(self.num_layers, -1)
            self._device.write(self.array, rows.copy())
        elif content != self._known:
            raise RuntimeError("a captured pass has its choices elsewhere than its trial")


class ChoiceRows:
    """Rows of choices on the device: of the last steps by position, and of the last tree.

    Shapes: rows [R, K of all layers] int32. Owns: the rows, and the kernel.
    """

    def __init__(
        self, device: KernelDevice, *, num_layers: int, num_columns: int, num_positions: int
    ) -> None:
        """`num_columns`: K of all layers; `num_positions`: the longest sequence."""
        self.num_columns = num_columns
        self.num_rows = min(num_positions, MOST_CHOICE_ROWS)
        self.last_tree: DeviceArray | None = None
        self._num_layers = num_layers
        self._device, self._arrays = device, ArrayChecker(device)
        self._rows = self.new_rows(self.num_rows)
        module = device.module("append_choices.cu", {"THREADS": _THREADS})
        self._kernel = module.kernel("append_choices", AppendChoicesArgs)

    def new_rows(self, num_rows: int) -> DeviceArray:
        return self._device.zeros((num_rows, self.num_columns), np.int32)

    def new_table(self) -> ChoiceTable:
        return ChoiceTable(self._device, self._num_layers)

    def append(
        self,
        choices: Sequence[ExpertChoice],
        table: ChoiceTable,
        *,
        position: DeviceArray | None = None,
        rows: DeviceArray | None = None,
    ) -> None:
        """Write the choices of a pass's tokens: from the row of its `position` on, or to the first
        of other `rows`. Shapes: position [1] int32; rows [N, K of all layers].
        """
        table.write(choices)
        to, arrays = self._rows if rows is None else rows, self._arrays
        args = AppendChoicesArgs(
            layers=address(table.array),
            position=arrays.optional("position", position, np.int32, T=1),
            rows=arrays.address("rows", to, np.int32, R=to.shape[0], K=self.num_columns),
            num_rows=to.shape[0],
            num_tokens=choices[0].ids.shape[0],
            num_columns=self.num_columns,
        )
        self._device.launch(self._kernel, (table.num_layers, 1, 1), _THREADS, args)

    def of_steps(self, first_position: int, num_tokens: int) -> I32Array:
        """Of steps that have ended, at most `num_rows` of the last ones. Shapes: [T, K of all]."""
        first = first_position % self.num_rows
        parts = [self._rows[first : min(first + num_tokens, self.num_rows)]]
        num_left = first + num_tokens - self.num_rows
        if num_left > 0:
            parts.append(self._rows[:num_left])
        return np.concatenate([self._device.download(part) for part in parts])

    def of_tree(self, num_tokens: int) -> I32Array:
        """Of the last tree. Shapes: [T, K of all layers]."""
        assert self.last_tree is not None
        rows: I32Array = self._device.download(self.last_tree[:num_tokens])
        return rows


def downloaded(device: KernelDevice, choices: Sequence[ExpertChoice]) -> I32Array:
    """Choices of a pass. Shapes: result [T, K of all layers]."""
    return np.concatenate([device.download(choice.ids) for choice in choices], axis=1)
