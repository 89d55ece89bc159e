"""Both ends of a shared-memory link in one process, with access to the segment's bytes."""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from dflash_protocol.device_payload import DeviceMover
from dflash_protocol.ids import AnyArray, U8Array
from dflash_protocol.payloads import PayloadType
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import create_segment, open_segment
from dflash_protocol.transports.shared_client import SharedClient
from dflash_protocol.transports.shared_server import SharedServer
from dflash_protocol.wire.transport import LinkLimits, TransportCounters
from support.transport_checks import (
    HIDDEN_SIZE,
    MAX_EXPERTS_USED,
    MAX_TOKENS,
    TIMEOUT_S,
    example_batch,
)

NUM_SLOTS = 2
SHAPE = RingShape(NUM_SLOTS, MAX_TOKENS, HIDDEN_SIZE, MAX_TOKENS * MAX_EXPERTS_USED)


class Pair:
    """Implements transport_checks.LinkEnds, with access to the segment's bytes."""

    def __init__(
        self,
        folder: Path,
        *,
        shape: RingShape = SHAPE,
        payload: PayloadType = PayloadType.F32,
        spin_s: float = 0.0,
        movers: tuple[DeviceMover | None, DeviceMover | None] = (None, None),
    ) -> None:
        """`movers`: devices of the client and of the server that copy payload."""
        self.shape = shape
        self.client_counters, self.server_counters = TransportCounters(), TransportCounters()
        self._undo = ExitStack()
        self.lost_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._undo.callback(os.close, self.lost_fd)
        self.segment = create_segment(folder, shape, generation=3)
        undo = self._undo.enter_context(ExitStack())
        undo.callback(self.segment.close)
        opened = open_segment(folder, self.segment.name, shape, generation=3)
        undo.callback(opened.close)
        for segment, mover in zip((self.segment, opened), movers, strict=True):
            if mover is not None:
                segment.open_window(mover)
        undo.pop_all()
        self.server = SharedServer(counters=self.server_counters)
        self._undo.callback(self.server.close)
        self.client = SharedClient(
            self.segment,
            lost_fd=self.lost_fd,
            lost_reason=lambda: "daemon cpu0: it was ended",
            payload=payload,
            spin_s=spin_s,
            counters=self.client_counters,
        )
        self._undo.callback(self.client.close)
        limits = LinkLimits(shape.hidden_size, MAX_TOKENS, MAX_EXPERTS_USED, payload=payload)
        self.server.add_link("ab", opened, limits)
        self.segment.unlink()

    @property
    def memory(self) -> U8Array:
        """All bytes of the segment; do not keep the view."""
        kind = ctypes.c_ubyte * self.shape.segment_bytes
        return np.ctypeslib.as_array(kind.from_address(self.segment.address))

    @property
    def words(self) -> AnyArray:
        return self.memory[: self.shape.segment_bytes // 8 * 8].view(np.int64)

    def lose(self) -> None:
        os.eventfd_write(self.lost_fd, 1)

    def close(self) -> None:
        self._undo.close()


BATCH = example_batch(3, seed=5)


def submitted(pair: Pair) -> int:
    """Submit a first request, which goes to slot 0."""
    return pair.client.submit(1, BATCH, deadline_s=TIMEOUT_S)
