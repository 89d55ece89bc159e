"""The processor as a daemon's end of a mailbox: it answers a parent's device, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import DaemonUnavailable, ProtocolError
from dflash_protocol.ring.segment import Segment
from dflash_runtime.compute.backend import ExpertBank
from dflash_runtime.compute.cpu.captured.mail_thread import MailedLayer, MailThread
from dflash_runtime.compute.cpu.compile.kernel_cache import keeping_in
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.kernels import experts_kernel as k
from dflash_runtime.compute.mail_server import MailServer
from dflash_runtime.compute.mailbox_layout import (
    Ask,
    Asked,
    MailWord,
    MailWords,
    host_lines,
    mail_layout,
)
from dflash_runtime.compute.step_order import MOST_TOKENS

_COLUMNS = 4
"""The thread sends so many sums at a time (mail_tasks)."""


class CpuMail:
    """Implements backend.MailAnswering."""

    def __init__(self, cache_dir: str | None) -> None:
        self._cache_dir = cache_dir

    def num_bytes(self, moe: MoeSpec) -> int:
        """See MailAnswering."""
        return mail_layout(moe).nbytes

    def serve(
        self,
        segment: Segment,
        moe: MoeSpec,
        banks: Mapping[int, ExpertBank],
        *,
        check: Callable[[], object],
    ) -> MailServer | None:
        """See MailAnswering. None for experts that come from the disk: they have no place in memory
        that a thread could use beside the one that computes prompts."""
        ours = {
            layer_id: bank
            for layer_id, bank in banks.items()
            if isinstance(bank, CpuExpertBank) and bank.num_experts
        }
        is_mapped = not any(bank.words[k.ARENA] for bank in ours.values())
        is_wide = all(bank.layer.hidden_size % _COLUMNS == 0 for bank in ours.values())
        if not (ours and is_mapped and is_wide):
            return None
        end = ProcessorEnd(segment, moe, ours, check=check, cache_dir=self._cache_dir)
        return MailServer(segment, end)


class ProcessorEnd:
    """Implements mail_server.MailEnd with a MailThread on lines in shared memory.

    `check` is called before steps; what it raises ends the mailbox. Owns: the thread, which uses
    the segment until `close` returns.
    """

    def __init__(
        self,
        segment: Segment,
        moe: MoeSpec,
        banks: Mapping[int, CpuExpertBank],
        *,
        check: Callable[[], object],
        cache_dir: str | None,
    ) -> None:
        """`banks` by layer id, at least one, none without experts."""
        self._segment, self._moe, self._banks = segment, moe, banks
        self._words = MailWords(segment)
        self._check, self._cache_dir = check, cache_dir
        self._thread: MailThread | None = None
        self._sizes = set[int]()
        """Tokens of steps that are prepared."""

    def prepare(self, limit_ms: int) -> None:
        """See MailEnd.prepare."""
        base = self._segment.address + self._segment.shape.mail_at
        lines = host_lines(mail_layout(self._moe), base)
        with keeping_in(self._cache_dir):
            self._thread = MailThread(
                [
                    MailedLayer(
                        self._banks[layer.layer_id].in_step_order(),
                        lines.request(index),
                        lines.reply(index),
                    )
                    for index, layer in enumerate(self._moe.layers)
                    if layer.layer_id in self._banks
                ],
                next(iter(self._banks.values())).workers,
                own_abort=base + MailWord.DAEMON_ABORT,
                other_abort=base + MailWord.PARENT_ABORT,
                limit_s=1e-3 * limit_ms,
                lines=None,  # they last until `close`
                sets_spin=False,  # that is the daemon's own affair
            )
            self._add_size(1)

    def step_of(self, num_tokens: int) -> Callable[[], object]:
        """See MailEnd.step_of. Raises: ModelFileError if the file was written to."""
        if self._thread is None or num_tokens not in self._sizes:
            raise ProtocolError(f"a mailbox step of {num_tokens} tokens was asked for unprepared")
        self._check()
        return partial(self._thread.ask, num_tokens)

    def wait(self) -> None:
        """Does nothing: requests other than a restart may come within a step."""

    def do(self, asked: Asked) -> None:
        """See MailEnd.do. A parent knows that a processor answers no probes, and has no memory of
        a device."""
        if asked.ask is Ask.SIZE:
            self._add_size(asked.argument)
        elif asked.ask is Ask.EPOCH:
            self._restart(asked.argument)
        elif asked.ask is not Ask.LEAVE:
            raise ProtocolError(f"a processor's mailbox was asked for {asked.ask.name}")

    def close(self) -> None:
        """See MailEnd.close."""
        if self._thread is not None:
            self._thread.close(waits=True)

    def _add_size(self, num_tokens: int) -> None:
        if not 1 <= num_tokens <= MOST_TOKENS:
            raise ProtocolError(f"a mailbox was asked for steps of {num_tokens} tokens")
        assert self._thread is not None
        self._thread.prepare(num_tokens)
        self._sizes.add(num_tokens)

    def _restart(self, epoch: int) -> None:
        assert self._thread is not None
        if not self._thread.restart(epoch):
            raise DaemonUnavailable("a step does not end")
        self._words.write(MailWord.DAEMON_ABORT, 0)
