"""Launches that are made once and started again and again, with other addresses perhaps.

To fill in and check a kernel's arguments takes longer than to start it, and the layers of a chunk
are launched with the same ones, chunk after chunk, but for where their rows are.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from dflash_runtime.compute.cupy.device import Grid, Kernel, KernelDevice


@dataclass(slots=True, eq=False)
class PreparedLaunch:
    """A kernel and all that it is launched with; `args`, which are copied by each launch, may be
    changed in between."""

    kernel: Kernel
    grid: Grid
    block: int
    args: ctypes.Structure
    shared_bytes: int = 0

    def start(self, device: KernelDevice) -> None:
        """As KernelDevice.launch."""
        device.launch(self.kernel, self.grid, self.block, self.args, shared_bytes=self.shared_bytes)
