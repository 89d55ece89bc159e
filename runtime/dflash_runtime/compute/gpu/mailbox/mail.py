"""A device's mailboxes, as a parent's device or as a daemon's."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from dflash_adapters.spec import MoeSpec
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import MailTerms, Segment
from dflash_runtime.compute.backend import ExpertBank
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.device.kept_memory import MemoryKeeper
from dflash_runtime.compute.gpu.experts.experts import CupyExpertBank
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.mailbox.layout import MailLayout, mail_layout
from dflash_runtime.compute.gpu.mailbox.parent import begin_mailbox
from dflash_runtime.compute.gpu.mailbox.server import MailServer
from dflash_runtime.compute.gpu.mailbox.trial import TRIAL_LAYOUT, TRIAL_SHAPE, MailboxTrial


class CupyMail:
    """Implements backend.DeviceMail. `lock` is held while the device's own stream is used.

    Owns: `keeper`, with memory that lost peers may still have open.
    """

    def __init__(self, device: KernelDevice, lock: threading.RLock) -> None:
        self._device, self._lock = device, lock
        self.keeper = MemoryKeeper(lock)
        self._servers: list[MailServer] = []

    def num_bytes(self, moe: MoeSpec) -> int:
        return mail_layout(moe).nbytes

    def begin(self, segment: Segment, limit_ms: int, *, in_host: bool = False) -> None:
        begin_mailbox(segment, self._device, MailTerms(limit_ms, in_host))

    def serve(self, segment: Segment, moe: MoeSpec, banks: Mapping[int, ExpertBank]) -> MailServer:
        layers = []
        for index, layer in enumerate(moe.layers):
            bank = banks.get(layer.layer_id)
            if bank is not None and bank.num_experts:
                assert isinstance(bank, CupyExpertBank)
                layers.append((index, bank.by_local))
        return self._served(segment, mail_layout(moe), layers)

    @property
    def trial_shape(self) -> RingShape:
        return TRIAL_SHAPE

    def try_out(self, segment: Segment, *, seed: int) -> MailboxTrial:
        return MailboxTrial(self._device, segment, seed=seed, keeper=self.keeper)

    def serve_trial(self, segment: Segment) -> MailServer:
        return self._served(segment, TRIAL_LAYOUT, ())

    def _served(
        self, segment: Segment, layout: MailLayout, layers: Sequence[tuple[int, ResidentLayer]]
    ) -> MailServer:
        server = MailServer(
            self._device,
            segment,
            layout,
            layers=layers,
            lock=self._lock,
            keeper=self.keeper,
            is_alone=self._serves_one,
        )
        self._servers = [*(each for each in self._servers if each.is_open), server]
        return server

    def _serves_one(self) -> bool:
        """Whether at most one parent is served. Any thread may call it."""
        return sum(each.is_open for each in self._servers) <= 1

    def close(self) -> None:
        """Release kept memory; all servers must be closed."""
        self.keeper.close()
