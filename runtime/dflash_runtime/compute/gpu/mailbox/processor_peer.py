"""This process's processor as a peer of its device's mailbox: it computes the experts that lie in
the host's memory, while a captured step goes on, with no host code between layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import numpy as np

from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import DaemonUnavailable, DeviceUnavailable, one_line
from dflash_protocol.ids import I32Array, Phase
from dflash_runtime.compute.asking import AskedLayers, OwnerTotals
from dflash_runtime.compute.backend import MailedExperts, MailRoute
from dflash_runtime.compute.cpu.captured.mail_thread import MailedLayer, MailThread
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import experts_kernel as k
from dflash_runtime.compute.gpu.device.device import KernelDevice, address
from dflash_runtime.compute.gpu.device.mapped_array import MappedBlock
from dflash_runtime.compute.gpu.mailbox.fetched_memory import FetchedMemory
from dflash_runtime.compute.gpu.mailbox.kernels import MailPeer
from dflash_runtime.compute.mailbox_layout import MailLines, mail_layout
from dflash_runtime.compute.slot_pins import NO_PINS, SlotPins, WarmPins

_LOG = logging.getLogger(__name__)

LIMIT_MS = 60_000
"""Time limit of a step in which no other process is asked: a large model's may take a second."""
_WORDS = 16
"""Of each abort word's line."""


class ProcessorPeer:
    """The lines in mapped memory, and the thread that answers them.

    After a step that has failed, the route is another object. Used by the thread that runs the
    model. Owns: mapped memory of the host, and the thread, until `close`.
    """

    def __init__(
        self,
        device: KernelDevice,
        moe: MoeSpec,
        remote: MailedExperts,
        *,
        cache_slots: int = 0,
        slot_pins: WarmPins = NO_PINS,
    ) -> None:
        """`remote` has `own_banks`. `cache_slots`: experts of each layer that steps fetch and keep
        (run/step_slots.py); `slot_pins`: for good.

        Raises: DeviceUnavailable if memory cannot be mapped."""
        layout = mail_layout(moe)
        self._remote = remote
        self._block = MappedBlock(
            device,
            [
                ((_WORDS,), np.uint32),
                ((_WORDS,), np.uint32),
                ((layout.requests_nbytes,), np.uint8),
                ((layout.replies_nbytes,), np.uint8),
            ],
        )
        self._abort, self._own_abort, requests, replies = self._block.host
        here = MailLines(layout, int(requests.ctypes.data), int(replies.ctypes.data))
        abort, own_abort, *lines = (address(each) for each in self._block.device)
        self.peer, self.lines = MailPeer(abort, own_abort), MailLines(layout, *lines)
        banks = own_banks(remote)
        self.pins = SlotPins(slot_pins)
        self.fetched: FetchedMemory | None = None
        """Where steps fetch experts from; None if they do not."""
        if cache_slots:
            self.fetched = _fetched_memory(device, self._banks_to_fetch(banks), cache_slots)
        fetched_layers = () if self.fetched is None else self.fetched.banks.keys()
        try:
            self._thread = MailThread(
                [
                    MailedLayer(
                        banks[layer.layer_id],
                        here.request(index),
                        here.reply(index),
                        leaves_second=layer.layer_id in fetched_layers,
                    )
                    for index, layer in enumerate(moe.layers)
                    if layer.layer_id in banks
                ],
                next(iter(banks.values())).workers,
                own_abort=int(self._own_abort.ctypes.data),
                other_abort=int(self._abort.ctypes.data),
                limit_s=1e-3 * (LIMIT_MS + LIMIT_MS // 2),
                lines=self._block.host,
            )
        except BaseException:
            self._unmap()
            raise
        self._layer_ids = tuple(banks)
        self._route: MailRoute | None = None
        self.is_only_peer = True
        """Whether layers of which it is not asked for anything are computed by the device alone."""

    @property
    def route(self) -> MailRoute:
        """The route to it; the same object until a step fails."""
        if self._route is None:
            route = MailRoute(
                "this process",
                self._remote.own_index,
                None,
                {layer_id: self._local_ids(layer_id) for layer_id in self._layer_ids},
                is_live=lambda: self._route is route,
                fail=partial(self._forget_route),
            )
            self._route = route
        return self._route

    def _forget_route(self, reason: str) -> None:
        self._route = None

    def follow_owners(self) -> None:
        """Experts have moved within this process; no step is running."""
        for layer_id, local_ids in self.route.local_ids.items():
            local_ids[:] = self._local_ids(layer_id)

    def _local_ids(self, layer_id: int) -> I32Array:
        routing = self._remote.routing(layer_id)
        is_own = routing.owner_index == self._remote.own_index
        return np.where(is_own, routing.local_expert_id, -1).astype(np.int32)

    def prepare(self, num_tokens: int) -> None:
        """See MailLink.prepare."""
        self._thread.prepare(num_tokens)

    def restart(self, epoch: int) -> None:
        """See MailLink.restart."""
        if not self._thread.restart(epoch):
            raise DaemonUnavailable("this process's experts are still being computed")
        self._own_abort[0] = self._abort[0] = 0

    def ring(self, num_tokens: int) -> None:
        """See MailLink.ring."""
        self._thread.ask(num_tokens)

    def cut(self, epoch: int) -> None:
        """See MailLink.cut."""
        self._abort[0] = epoch

    def count(self, phase: Phase = Phase.DECODE) -> None:
        """Report what was computed since the last call, in steps of this phase."""
        num_layers, totals = self._thread.take_totals()
        if not num_layers:
            return
        # Hot are the device's experts; where it has none, this process's.
        has_device = self._remote.device_index >= 0
        num_hot_only = num_layers - totals.num_requests if has_device else num_layers
        owners = [OwnerTotals(0, 0, 0.0)] * self._remote.num_owners
        owners[self._remote.own_index] = totals
        layers = (num_layers, num_hot_only) if self.is_only_peer else (0, 0)
        self._remote.count_asked(AskedLayers(*layers, owners, {}), phase)

    def close(self) -> None:
        """End the thread, and unmap the memory; no step may be running. Idempotent."""
        self._route = None
        self._thread.close()
        self._unmap()

    def _banks_to_fetch(self, banks: Mapping[int, CpuExpertBank]) -> Mapping[int, CpuExpertBank]:
        """Of layers of which the device has experts too, and a token more than one; none that come
        from the disk."""
        device_index = self._remote.device_index
        return {
            layer_id: bank
            for layer_id, bank in banks.items()
            if bank.layer.num_experts_used > 1
            and not bank.words[k.ARENA]
            and (self._remote.routing(layer_id).owner_index == device_index).any()
        }

    def _unmap(self) -> None:
        if self.fetched is not None:
            self.fetched.close()
        self._block.close()


def _fetched_memory(
    device: KernelDevice, banks: Mapping[int, CpuExpertBank], num_slots: int
) -> FetchedMemory | None:
    """None if there is nothing to fetch, or the memory cannot be locked."""
    try:
        return FetchedMemory(device, banks, num_slots) if banks else None
    except DeviceUnavailable as error:
        # docs (parent): the system permits too little locked memory: experts that are missed are
        # all computed by the processor
        _LOG.warning("no experts are fetched over the bus: %s", one_line(str(error)))
        return None


def own_banks(remote: MailedExperts) -> Mapping[int, CpuExpertBank]:
    """The experts that this process's processor computes with a GPU's bits, by layer id; none if
    any of them has others."""
    banks = {
        layer_id: bank
        for layer_id, bank in remote.own_banks.items()
        if isinstance(bank, CpuExpertBank) and bank.num_experts
    }
    return banks if all(bank.words[k.QUANTISE_STEP] for bank in banks.values()) else {}
