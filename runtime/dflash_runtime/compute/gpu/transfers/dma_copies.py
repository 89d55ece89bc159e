"""DMA copies of payload beside what the device computes, in one direction of a window."""

from __future__ import annotations

from typing import Any, NamedTuple

from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.device import SideStream
from dflash_runtime.compute.gpu.transfers.payload_kernels import PayloadKernels

COPY_DEADLINE_S = 60.0
"""A copy waits for earlier kernels of the device only, so longer means a failure."""


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
