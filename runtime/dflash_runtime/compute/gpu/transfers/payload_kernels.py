"""Launches of the payload kernels: copies of rows with their digest, and scattered sums."""

from __future__ import annotations

import threading

import numpy as np

from dflash_runtime.compute.gpu.device.device import (
    DeviceArray,
    KernelDevice,
    SideStream,
    address,
    optional_address,
)
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct

_THREADS = 256
_BLOCKS_OF_MULTIPROCESSOR = 8
_MULTIPROCESSORS_OF_BLOCK = 2
"""Blocks of a copy beside other work: enough for PCIe, few enough not to disturb it."""
_PIECE_BYTES = 16

MovePayloadArgs = kernel_struct("move_payload.cu", "MovePayloadArgs")
AddToRowsArgs = kernel_struct("move_payload.cu", "AddToRowsArgs")


class PayloadKernels:
    """Launches them on one device; `lock`: see PayloadMover."""

    def __init__(self, device: KernelDevice, lock: threading.RLock) -> None:
        self.device = device
        self.lock = lock
        self.max_blocks = _BLOCKS_OF_MULTIPROCESSOR * device.num_multiprocessors
        self._blocks_beside = -(-device.num_multiprocessors // _MULTIPROCESSORS_OF_BLOCK)
        module = device.module("move_payload.cu", {"THREADS": _THREADS})
        self._move = module.kernel("move_payload", MovePayloadArgs)
        self._add = module.kernel("add_to_rows", AddToRowsArgs)
        self._unused_shares = device.empty(self.max_blocks, np.int64)

    def move(
        self,
        source: int,
        target: int,
        shape: tuple[int, int],
        *,
        itemsize: int,
        rows: DeviceArray | None = None,
        shares: int | None = None,
        not_finite: int | None = None,
        side: SideStream | None = None,
    ) -> int:
        """Copy rows from one address to another; returns the number of blocks, each of which writes
        a share of the digest.

        `rows` [T] int32: indices of the source's rows. Columns are a multiple of four. For float64
        each block writes to the address `not_finite`, if given, whether it met NaN or infinity.
        With `side` it runs in that stream, with few blocks.
        """
        num_rows, columns = shape
        num_blocks = min(num_rows, self.max_blocks if side is None else self._blocks_beside)
        if num_blocks:
            args = MovePayloadArgs(
                source=source,
                rows=optional_address(rows),
                target=target,
                shares=address(self._unused_shares) if shares is None else shares,
                not_finite=not_finite,
                num_rows=num_rows,
                row_pieces=columns * itemsize // _PIECE_BYTES,
            )
            grid = num_blocks, 1, 1
            # A kernel sees what other processes wrote only if it begins after that.
            if side is None:
                self.device.launch(self._move, grid, _THREADS, args, overlaps_previous=False)
            else:
                side.launch(self._move, grid, _THREADS, args)
        return num_blocks

    def add_to_rows(
        self, out: DeviceArray, sums: DeviceArray, rows: DeviceArray | None = None
    ) -> None:
        """Shapes: out [T, H], sums [T', H] float64; rows [T'] int32, None: the first."""
        num_rows, columns = sums.shape
        if num_rows:
            args = AddToRowsArgs(
                sums=address(sums),
                rows=optional_address(rows),
                out=address(out),
                num_rows=num_rows,
                columns=columns,
            )
            self.device.launch(self._add, (num_rows, 1, 1), _THREADS, args)
