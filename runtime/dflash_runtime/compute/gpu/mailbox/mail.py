"""A device's mailboxes, as a parent's device or as a daemon's; and trials of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import DaemonUnavailable, DeviceUnavailable, SettingsError
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import MailTerms, Segment
from dflash_runtime.compute.backend import ExpertBank
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.experts.experts import CupyExpertBank
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.mailbox.parent import MailLink
from dflash_runtime.compute.gpu.mailbox.peer_memory import MemoryKeeper
from dflash_runtime.compute.gpu.mailbox.probe import MOST_ROUNDS, ProbePlan
from dflash_runtime.compute.gpu.mailbox.server import DeviceEnd
from dflash_runtime.compute.mail_server import MailServer
from dflash_runtime.compute.mail_trial import Medium, TrialBatch
from dflash_runtime.compute.mailbox_layout import (
    DEVICE_BYTES,
    LAYOUT_NUMBER,
    MailLayout,
    MailState,
    MailWord,
    MailWords,
    mail_layout,
)

_HIDDEN, _EXPERTS_USED = 2048, 8

TRIAL_LAYOUT = MailLayout(
    num_layers=1,
    request_lines=_EXPERTS_USED + _HIDDEN // 8 + _HIDDEN // 16,
    reply_lines=_HIDDEN // 2,
)
"""Lines of a layer of Qwen3-30B-A3B for one token. A line has two words; a request has 8 expert
ids with weights, int8 and two float32 for 16 elements; a reply is float32, from a single daemon."""

TRIAL_SHAPE = RingShape(1, 1, 64, 1, mail_bytes=TRIAL_LAYOUT.nbytes)
"""Shape of a trial's shared memory, of which only the mailbox is used."""

_POLL_S = 0.01
_EPOCHS_OF_MEDIUM = 1 << 30
"""Most rounds of a trial in one medium."""


class MailboxTrial:
    """Implements mail_trial.MailTrial. Used by one thread.

    Owns: memory of the device, not the segment.
    """

    def __init__(
        self, device: KernelDevice, segment: Segment, *, seed: int, keeper: MemoryKeeper
    ) -> None:
        self._device, self._segment, self._seed = device, segment, seed
        self._is_live: Callable[[], bool] = lambda: True
        self._link = MailLink(
            device,
            TRIAL_LAYOUT,
            segment,
            name="the other device",
            is_live=lambda: self._is_live(),
            keeper=keeper,
        )
        self._num_rounds = dict.fromkeys(Medium, 0)

    def begin(self, timeout_s: float, is_live: Callable[[], bool]) -> None:
        self._is_live = is_live
        words, end_s = MailWords(self._segment), time.monotonic() + timeout_s
        while (state := words.read(MailWord.STATE)) == MailState.PREPARING:
            if not is_live() or time.monotonic() > end_s:
                raise DaemonUnavailable("the other side does not become ready")
            time.sleep(_POLL_S)
        if state == MailState.FAILED:
            raise DaemonUnavailable("the other side cannot serve a mailbox")
        if self._segment.read_mail(MailWord.DAEMON_DEVICE, DEVICE_BYTES) == self._device.uuid:
            raise SettingsError("both are the same device: a mailbox needs two")
        self._link.open_peer()

    @property
    def media(self) -> tuple[Medium, ...]:
        return tuple(Medium) if self._link.peer_lines is not None else (Medium.HOST,)

    @property
    def why_not(self) -> str:
        return self._link.why_no_peer

    def run(self, medium: Medium, num_rounds: int, *, longest_pause_us: float) -> TrialBatch:
        done = self._num_rounds[medium]
        if not 0 < num_rounds <= min(MOST_ROUNDS, _EPOCHS_OF_MEDIUM - done):
            raise ValueError(f"{num_rounds} rounds cannot be run after {done}")
        self._link.use_peers(medium is Medium.DEVICES)
        plan = ProbePlan(
            num_rounds,
            seed=self._seed,
            follows=True,
            longest_pause_ns=round(longest_pause_us * 1e3),
        )
        terms = self._segment.mail_terms
        assert terms is not None
        first = tuple(Medium).index(medium) * _EPOCHS_OF_MEDIUM
        self._num_rounds[medium] += num_rounds
        return self._link.probe(
            plan,
            epoch=first + done,
            first_epoch=first + 1,
            limit_ms=terms.limit_ms,
        )

    def close(self) -> None:
        self._link.close()


class CupyMail:
    """Implements backend.DeviceMail. `lock` is held while the device's own stream is used.

    Owns: `keeper`, with memory that lost peers may still have open.
    """

    def __init__(self, device: KernelDevice, lock: threading.RLock) -> None:
        self._device, self._lock = device, lock
        self.keeper = MemoryKeeper(lock)
        self._servers: list[MailServer] = []
        self._starting = threading.Lock()
        """Held while a served step is started."""

    def num_bytes(self, moe: MoeSpec) -> int:
        return mail_layout(moe).nbytes

    def begin(self, segment: Segment, terms: MailTerms) -> None:
        segment.mail_terms = terms
        words = MailWords(segment)
        words.write(MailWord.LIMIT_MS, terms.limit_ms)
        words.write(MailWord.PARENT_LAYOUT, LAYOUT_NUMBER)
        segment.write_mail(MailWord.PARENT_DEVICE, self._device.uuid)

    def serve(
        self,
        segment: Segment,
        moe: MoeSpec,
        banks: Mapping[int, ExpertBank],
        *,
        check: Callable[[], object],
    ) -> MailServer:
        del check  # weights are in the device's memory
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
        end = DeviceEnd(
            self._device,
            segment,
            layout,
            layers=layers,
            lock=self._lock,
            keeper=self.keeper,
            is_alone=self._serves_one,
            starting=self._starting,
        )
        server = MailServer(segment, end)
        self._servers = [*(each for each in self._servers if each.is_open), server]
        return server

    def _serves_one(self) -> bool:
        """Whether at most one parent is served. Any thread may call it."""
        return sum(each.is_open for each in self._servers) <= 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it no served step runs: the last ones have ended, further ones wait."""
        with self._starting:
            for server in self._servers:
                with suppress(DeviceUnavailable):  # it has ended
                    server.wait()
            yield

    def close(self) -> None:
        """Release kept memory; all servers must be closed."""
        self.keeper.close()
