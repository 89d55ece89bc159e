"""A device's part in mailboxes, as a parent's or as a daemon's."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from dflash_adapters.moe_spec import MoeSpec
from dflash_protocol.ring_segment import Segment
from dflash_runtime.compute.backend import ExpertBank
from dflash_runtime.compute.cupy.device import KernelDevice
from dflash_runtime.compute.cupy.experts import CupyExpertBank
from dflash_runtime.compute.cupy.mail_server import MailServer
from dflash_runtime.compute.cupy.mailbox_layout import mail_layout
from dflash_runtime.compute.cupy.parent_mail import begin_mailbox


class CupyMail:
    """Implements backend.DeviceMail. `lock` is held while the device's own stream is used."""

    def __init__(self, device: KernelDevice, lock: threading.RLock) -> None:
        self._device, self._lock = device, lock

    def num_bytes(self, moe: MoeSpec) -> int:
        """As DeviceMail.num_bytes."""
        return mail_layout(moe).nbytes

    def begin(self, segment: Segment, limit_ms: int) -> None:
        """As DeviceMail.begin."""
        begin_mailbox(segment, self._device, limit_ms)

    def serve(self, segment: Segment, moe: MoeSpec, banks: Mapping[int, ExpertBank]) -> MailServer:
        """As DeviceMail.serve."""
        layers = {}
        for layer_id, bank in banks.items():
            assert isinstance(bank, CupyExpertBank)
            if bank.num_experts:
                layers[layer_id] = bank.by_local
        return MailServer(self._device, segment, moe, layers, lock=self._lock)
