"""Memory layout of a mailbox, through which the kernels of a parent's step ask a daemon's kernels,
or its processor, layer by layer, with no host of the parent's in between.

::

    byte     words of 4 bytes that hosts and devices see               written by
    0        state of the daemon: MailState                            daemon's host
    64       doorbell: number of requests so far                       parent's host
    128      the last request: Ask                                     parent's host
    192      its argument                                              parent's host
    256      number of requests done so far                            daemon's host
    320      epoch of the step that the parent aborted; 0: none        parent's device
    384      the same of the daemon                                    daemon's device, and host
    448      time limit of a step, milliseconds                        parent's host, once
    512      UUID of the parent's device, 16 bytes                     parent's host, once
    576      the same of the daemon's                                  daemon's host, once
    640      handle of the parent's memory for replies, 64 bytes       parent's host, once
    704      handle of the daemon's memory for requests, 64 bytes      daemon's host, once
    768      whether the parent may have that memory open              parent's host
    832      seed of a probe                                           parent's host
    896      longest pause in it, nanoseconds                          parent's host
    960      faults found in its requests, 44 bytes                    daemon's host
    1024     whether it follows another                                parent's host
    1088     LAYOUT_NUMBER of the parent                               parent's host, once
    1152     the same of the daemon                                    daemon's host, once

    then     for each layer, in the model's order:                     the devices
    4096     requests: lines of 16 bytes
    …        replies: lines of 16 bytes

    a line   data, check, data, check                                  (u32 each)
             a check is epoch ^ data * 0x9e3779b1
    request  [T, K] (local expert id, or a negative number, with bit 30 flipped if the reply may be
             rounded; weight float32), then the rows as the experts of the layer read them: int8 and
             {scale, scale * sum}, or float32, or both, each for all tokens, and in whole lines
    reply    [T, H] float64, one per line, not rounded;
             or [T, H] float32, two per line, with checks made of the epoch's complement

There is room for the largest step; smaller ones use the beginning. Requests and replies lie here if
either device can access only the host's memory; if each can map the other's, they lie in the
memory of the device that reads them (at the same offsets, less that of the first), and only the
words above are here.

A processor answers with the same lines, always in the host's memory (``cpu/kernels/mail_tasks``): a
daemon's (``cpu/mail.py``), for which "the daemon's device" above is a thread of it, and the words
of probes and of devices' memory are not used; or the parent's own, in memory without the words
(``gpu/mailbox/processor_peer.py``).

Why this is correct:

* Either half of a line, 8 bytes and aligned, is stored and loaded as one; two threads may send the
  two halves. A reader that finds the check which belongs to the word beside it and to the step has
  what was sent. Lines and halves are not ordered among each other, and need not be: a reader waits
  for each. An expert's id is sent before its weight is known, and used before that has arrived.
* Every step has an epoch, which each side increments by itself. It is never 0, the content of new
  memory. So a line of an earlier step is never taken for this one's: the same word has another
  check.
* A half damaged in one of its words is not taken, since the factor is odd; nor is one that arrives
  in two pieces, until it is whole. If both words are damaged it is taken once in 2^32 times. A step
  whose lines never become right ends at its time limit and is recomputed.
* A reply may be rounded if the parent has none of a layer's experts and asks this daemon alone: it
  would round that one sum itself before adding it. The parent says so in each request; nothing is
  agreed on before. A reply of the wrong kind has checks of another epoch, so it is not taken, and
  the step ends at its limit. (Epochs end before 2^31, at `LAST_EPOCH`: none is another's
  complement.)
* A line is written again only after it was read: the parent asks for a layer again in the next
  step, which begins when all replies of this one are there, and the daemon replies after it has
  read the request. So one place per layer and direction is enough, and lines are not counted.
* A request in the daemon's own memory is read by every block of gate and up that needs part of it,
  independently (``mailbox_request.cuh``). The kernel that replies waits until all these blocks have
  ended, so a reply implies that all have read the request. None of the blocks waits for another:
  those that do not fit on the device at first begin when others have ended, and find the lines
  there. While they wait they occupy the device; so if the daemon serves several parents, one block
  per token takes the request (``gpu/mailbox/served_steps.py``).
* A request in the host's memory is first copied to such lines in the daemon's memory, by one block
  per token: checks hold for a copied line too, and each layer has its own lines. Gate and up begin
  when that kernel has seen all kernels before it end, and wait for lines only.
* All this holds for steps that end. One that does not ends the use of this mailbox: the side that
  has waited too long writes its abort word (320, 384), every later wait and post of both sides
  returns at once, and the step's results are not used. Steps restart with an unused epoch once both
  hosts have seen their devices idle; a new session has new memory.
* NVIDIA: volatile accesses are relaxed ones of system scope (PTX ISA, memory consistency model).
  AMD: atomic accesses of system scope to fine-grained memory, as hipHostRegister maps it. See
  ``vendor_cuda.cuh`` and ``vendor_hip.cuh``.
* Memory of a device is released when the other process has closed its mapping. The parent says in
  768 whether it has the daemon's open, and asks for LEAVE, which is answered when the daemon has
  closed the parent's. A side whose peer is lost keeps its memory for a while
  (``gpu/mailbox/peer_memory.py``): kernels that still run there find its abort word, and a host
  that resumes starts no step then.
* The parent's host learns from memory of its own whether a step has failed: words that the daemon
  can write too decide when a wait ends, never that a result is right.
* The other process may be broken and write anything. Only data is read: ids are checked against
  the layer's experts, weights and rows are numbers, and no length or address is ever read.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from dflash_adapters.spec import MoeLayer, MoeSpec
from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ring.segment import Segment
from dflash_runtime.compute.step_order import FLOAT_TYPES, GRANULE, MOST_TOKENS, padded_columns


class MailWord:
    """Offsets of words that hosts and devices see, each of the first if there are several. Plain
    numbers: hosts compute with them in each step."""

    STATE = 0
    DOORBELL, ASKED, ARGUMENT, ANSWERS = 64, 128, 192, 256
    PARENT_ABORT, DAEMON_ABORT = 320, 384
    LIMIT_MS = 448
    PARENT_DEVICE, DAEMON_DEVICE = 512, 576
    REPLY_MEMORY, REQUEST_MEMORY = 640, 704
    PARENT_HOLDS = 768
    PROBE_SEED, PROBE_PAUSE, PROBE_FAULTS, PROBE_FOLLOWS = 832, 896, 960, 1024
    PARENT_LAYOUT, DAEMON_LAYOUT = 1088, 1152


LINES_AT = 4096

LINE_BYTES, HALF_BYTES = 16, 8
_LINE_WORDS = 2

CHECK_FACTOR = 0x9E3779B1
"""Odd: different words have different checks within an epoch."""

DEVICE_BYTES = 16
HANDLE_BYTES = 64

LAYOUT_NUMBER = 1
"""Raise it with every change of the layout or its meaning: a mailbox is used only if both sides
have the same number."""

LAST_EPOCH = (1 << 31) - (1 << 24)
"""No sequence of steps begins after it; none is longer than the 2^24 epochs that follow."""

CLOSED = 0xFFFFFFFF
"""In an abort word, in place of a failed step's epoch: the mailbox is closed for good."""

MODULUS = 1 << 32
"""Numbers of requests are counted modulo this."""

_ALIGNMENT = 256
_WORD = struct.Struct("<I")
_POLL_S = 100e-6


class MailState(IntEnum):
    """State of the daemon's end."""

    PREPARING = 0
    READY = 1
    FAILED = 2
    SEES_PEER = 3
    """Ready, with lines in the devices' memory too."""


class Ask(IntEnum):
    """Requests of the parent's host to the daemon's."""

    STEP = 0
    """Run a step of `argument` tokens."""
    EPOCH = 1
    """The next step's epoch is the argument plus one; lines are in the host's memory."""
    PEER_EPOCH = 2
    """The same; lines are in the memory of the device that reads them."""
    ECHO = 3
    """Answer `argument` rounds of a probe; faults are written before the next request's answer."""
    PEERS = 4
    """Map the parent's memory and capture a step that uses it; state SEES_PEER if that worked."""
    LEAVE = 5
    """Unmap the parent's memory, which will be released."""
    SIZE = 6
    """Capture steps of `argument` tokens for the current lines. Those of one token always are."""


_ASKS = frozenset(Ask)


@dataclass(frozen=True, slots=True)
class MailLayout:
    """Sizes of a mailbox."""

    num_layers: int
    request_lines: int
    """For one token of the largest layer; so `reply_lines`."""
    reply_lines: int
    most_tokens: int = 1
    """Largest step."""

    @property
    def request_bytes(self) -> int:
        return _aligned(self.most_tokens * self.request_lines * LINE_BYTES)

    @property
    def reply_bytes(self) -> int:
        return _aligned(self.most_tokens * self.reply_lines * LINE_BYTES)

    @property
    def requests_nbytes(self) -> int:
        return self.num_layers * self.request_bytes

    @property
    def replies_nbytes(self) -> int:
        return self.num_layers * self.reply_bytes

    @property
    def nbytes(self) -> int:
        """Size in the host's memory, lines included."""
        return LINES_AT + self.requests_nbytes + self.replies_nbytes

    @property
    def replies_at(self) -> int:
        """Offset of the first reply in the host's memory."""
        return LINES_AT + self.requests_nbytes


@dataclass(frozen=True, slots=True)
class MailLines:
    """Addresses of a mailbox's lines, for one device."""

    layout: MailLayout
    requests: int
    replies: int

    def request(self, layer_index: int) -> int:
        """Address of a layer's request, by the layer's place in the model."""
        return self.requests + layer_index * self.layout.request_bytes

    def reply(self, layer_index: int) -> int:
        """Address of its reply."""
        return self.replies + layer_index * self.layout.reply_bytes


def host_lines(layout: MailLayout, mailbox: int) -> MailLines:
    """Lines in the host's memory, of the mailbox at this address."""
    return MailLines(layout, mailbox + LINES_AT, mailbox + layout.replies_at)


def mail_layout(moe: MoeSpec) -> MailLayout:
    """Layout of a model's mailbox, for steps of up to MOST_TOKENS."""
    layers = moe.layers
    return MailLayout(
        num_layers=len(layers),
        request_lines=max(num_request_lines(layer, 1) for layer in layers),
        reply_lines=max(layer.hidden_size for layer in layers),
        most_tokens=MOST_TOKENS,
    )


def num_request_lines(layer: MoeLayer, num_tokens: int) -> int:
    """Lines of a request for `num_tokens`."""
    return num_tokens * layer.num_experts_used + sum(part_lines(layer, num_tokens))


def part_lines(layer: MoeLayer, num_tokens: int) -> tuple[int, int, int]:
    """Lines of its parts, which follow the pairs: see `part_words`."""
    quants, meta, floats = (-(-num_tokens * words // _LINE_WORDS) for words in part_words(layer))
    return quants, meta, floats


def part_words(layer: MoeLayer) -> tuple[int, int, int]:
    """Words of a row as the layer's experts read it: int8, its scales and sums, and float32."""
    columns = padded_columns(layer.hidden_size)
    kinds = (layer.gate.tensor_type, layer.up.tensor_type)
    as_bytes = any(kind not in FLOAT_TYPES for kind in kinds)
    as_floats = any(kind in FLOAT_TYPES for kind in kinds)
    return (
        as_bytes * (columns // 4),
        as_bytes * (2 * columns // GRANULE),
        as_floats * layer.hidden_size,
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to the daemon's host."""

    number: int
    """How many requests there were, this one included."""
    ask: Ask
    argument: int


class MailWords:
    """The words, as a side's host reads and writes them. Used by one thread a side."""

    def __init__(self, segment: Segment) -> None:
        """Raises: DaemonUnavailable if the memory is closed."""
        self._segment = segment
        # The daemon may have served requests of an earlier parent.
        self._num_asked = self.read(MailWord.DOORBELL)

    def read(self, offset: int) -> int:
        """Raises: DaemonUnavailable if the memory is closed."""
        word: int = _WORD.unpack(self._segment.read_mail(offset, _WORD.size))[0]
        return word

    def write(self, offset: int, word: int) -> None:
        """Raises: DaemonUnavailable if the memory is closed."""
        self._segment.write_mail(offset, _WORD.pack(word))

    # The parent's side

    def ask(self, ask: Ask, argument: int = 0) -> None:
        """Send a request to the daemon's host. All but STEP must be answered before the next."""
        self.write(MailWord.ASKED, ask)
        self.write(MailWord.ARGUMENT, argument)
        self._num_asked += 1
        self.write(MailWord.DOORBELL, self._num_asked % MODULUS)
        self._segment.ring_mail()

    def await_answer(self, timeout_s: float, is_live: Callable[[], bool]) -> None:
        """Wait until all requests are done. Raises: DaemonUnavailable after `timeout_s`, or when
        the session is over."""
        end_s = time.monotonic() + timeout_s
        while self.read(MailWord.ANSWERS) != self._num_asked % MODULUS:
            if not is_live() or time.monotonic() > end_s:
                raise DaemonUnavailable(f"the mailbox has not answered for {timeout_s:.1f} s")
            time.sleep(_POLL_S)

    # The daemon's side

    def asked(self) -> Asked:
        """The parent's last request; if its number is the last one's there is no new one."""
        number = self.read(MailWord.DOORBELL)
        word = self.read(MailWord.ASKED)
        ask = Ask(word) if word in _ASKS else Ask.STEP
        return Asked(number, ask, self.read(MailWord.ARGUMENT))

    def answer(self, number: int) -> None:
        """Report all requests up to this number as done."""
        self.write(MailWord.ANSWERS, number % MODULUS)


def is_preparing(segment: Segment) -> bool:
    """Whether a daemon is still preparing its end."""
    try:
        return MailWords(segment).read(MailWord.STATE) == MailState.PREPARING
    except DaemonUnavailable:
        return False
