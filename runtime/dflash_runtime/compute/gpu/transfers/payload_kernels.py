"""Launches of the payload kernels: copies of rows with their digest, and scattered sums.

DmaCopies runs copies beside what the device computes.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np

from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.device import (
    DeviceArray,
    KernelDevice,
    SideStream,
    address,
    optional_address,
)
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct

COPY_DEADLINE_S = 60.0
"""A copy waits for earlier kernels of the device only, so longer means a failure."""

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
        self,
        out: DeviceArray,
        sums: DeviceArray,
        rows: DeviceArray | None = None,
        *,
        clears: bool = False,
    ) -> None:
        """With `clears` sums are zero afterwards.

        Shapes: out [T, H], sums [T', H] float64; rows [T'] int32, None: the first."""
        num_rows, columns = sums.shape
        if num_rows:
            args = AddToRowsArgs(
                sums=address(sums),
                rows=optional_address(rows),
                out=address(out),
                num_rows=num_rows,
                columns=columns,
                clears=clears,
            )
            # It begins after the host has written sums and rows.
            grid = num_rows, 1, 1
            self.device.launch(self._add, grid, _THREADS, args, overlaps_previous=False)


class Shares(NamedTuple):
    """What as many blocks as a launch may have find: shares of a digest, or whether there is
    something that is not finite. Shapes: host [blocks] int64, or uint32."""

    host: AnyArray
    device_address: int


class DmaCopies:
    """Copies in one direction of a window: a side stream and the digests of its last copy."""

    def __init__(
        self,
        kernels: PayloadKernels,
        name: str,
        shares: Shares,
        *,
        not_finite: Shares | None = None,
    ) -> None:
        """`not_finite`: for directions that move sums, in float64."""
        self.kernels = kernels
        self.shares = shares
        self.not_finite = not_finite
        self._name = name
        self._held: tuple[object, ...] = ()
        """Objects that copies under way may be using."""

    @property
    def stream(self) -> SideStream:
        return self.kernels.device.side_stream(self._name)

    def hold(self, *used: object) -> None:
        """Keep references to these until all copies have ended."""
        self._held = *self._held, *used

    def begin(self, source: int, target: int, shape: tuple[int, int], **how: Any) -> StreamCopy:
        """PayloadKernels.move in the stream."""
        address = self.shares.device_address
        if self.not_finite is not None:
            how["not_finite"] = self.not_finite.device_address
        num_blocks = self.kernels.move(
            source, target, shape, shares=address, side=self.stream, **how
        )
        return StreamCopy(self, num_blocks)

    def settle(self) -> None:
        """Wait for all copies. Raises: DeviceUnavailable."""
        self.stream.synchronize(COPY_DEADLINE_S)
        self._held = ()


class StreamCopy:
    """Implements device_payload.DmaCopy for the last copy of its direction."""

    def __init__(self, dma_copies: DmaCopies, num_blocks: int) -> None:
        self._dma_copies = dma_copies
        self._num_blocks = num_blocks

    def has_ended(self) -> bool:
        with self._dma_copies.kernels.lock:
            return self._dma_copies.stream.is_empty()

    def digest(self) -> int:
        with self._dma_copies.kernels.lock:
            self._dma_copies.settle()
            return int(self._dma_copies.shares.host[: self._num_blocks].sum())

    def is_finite(self) -> bool:
        not_finite = self._dma_copies.not_finite
        assert not_finite is not None
        return not not_finite.host[: self._num_blocks].any()
