"""Where everything of a mailbox lies: the memory through which the kernels of a parent's step ask a
daemon's, layer by layer, with no host in between.

::

    byte     words of 4 bytes that hosts and devices see               written by
    0        state of the daemon: MAIL_…                               daemon's host
    64       doorbell: what was asked for so far, in number            parent's host
    128      what was asked for last: ASK_…                            parent's host
    192      its argument                                              parent's host
    256      answers: what was done of that so far, in number          daemon's host
    320      the step in which the parent has given up; 0: none        parent's device
    384      the same of the daemon                                    daemon's device, and host
    448      milliseconds that a step may take                         parent's host, once
    512      which device the parent's is, 16 bytes                    parent's host, once
    576      the same of the daemon's                                  daemon's host, once
    640      handle of the parent's memory for replies, 64 bytes       parent's host, once
    704      handle of the daemon's memory for requests, 64 bytes      daemon's host, once
    768      whether the parent may have that memory open              parent's host
    832      seed of a probe                                           parent's host
    896      longest pause in it, nanoseconds                          parent's host
    960      what was found in its requests, 44 bytes                  daemon's host
    1024     whether it follows another                                parent's host
    1088     number of this layout, as the parent knows it             parent's host, once
    1152     the same of the daemon                                    daemon's host, once

    then     of each layer, in the model's order:                      the devices
    4096     requests: lines of 16 bytes
    …        replies: lines of 16 bytes

    a line   data, check, data, check                                  (u32 each)
             a check is epoch ^ data * 0x9e3779b1
    request  [T, K] (local expert id, or a negative number, with bit 30 flipped if the reply may be
             rounded; weight float32), then the rows as the experts of the layer read them: int8 and
             {scale, scale * sum}, or float32, or both, each of all tokens, and in whole lines
    reply    [T, H] float64, one a line, rounded nowhere;
             or [T, H] float32, two a line, where the check is of the epoch's complement

There is room for as many tokens as a step can have; one of fewer uses what comes first. Requests
and replies are written and read here if both devices see the host's memory only; where
they see each other's, either is in the memory of the device that reads it (at the same offsets,
less those of the first), and only the words above are here.

Why this is right:

* Either half of a line, 8 bytes and aligned, is stored and loaded as one; two threads may send the
  two. A reader that finds the check which belongs to the word beside it and to the step has what
  was sent. Nothing is ordered among lines or halves, and nothing needs to be: a reader waits for
  each. An expert's id is sent before its weight is known, and taken before that has come.
* An epoch is a step's. It grows by one with every step, on each side by itself, and is never 0,
  which new memory is. So no line of an earlier step can be taken for this one's: with the same word
  it has another check.
* A half that was damaged, in either of its words, is not taken, for the factor is odd; nor is one
  that came in two pieces, until it is whole. Where both words are damaged, one time in 2^32 it
  would be. What is never right lets the step end at its limit, and it is computed anew.
* A reply may be rounded where the parent has none of a layer's experts and asks this daemon alone:
  it would round that one sum itself, and add it. Only the parent knows, so that it says so with
  each request, and the daemon's kernels look there: nothing is agreed on before. As the checks of
  either kind are of other epochs a reply of the wrong kind is none, and the step ends at its limit.
  (Epochs end before 2^31, at `LAST_EPOCH`, so that none is another's complement.)
* A line is written again only when it has been read: the parent asks a layer again in the next
  step, which it begins when it has all answers of this one; and the daemon answered when it had
  read the request. So one place a layer and direction is enough, and nobody counts them.
* A request in the daemon's own memory is read by every block of gate and up that needs some of it,
  each for itself (``mailbox_request.cuh``). The kernel that answers waits until all of them have
  ended, so that whoever has an answer knows that all have read the request. None of these blocks
  waits for another: those that find no room yet begin when others have ended, and find lines that
  are there already. As they leave no room for what else the device has to do while they wait, one
  block a token takes the request where there are other parents (``mail_server.py``).
* A request in the host's memory is brought to such lines of the daemon's own first, by one block a
  token: they are right by their checks too, whoever writes them, and each layer has its own. Gate
  and up begin when that kernel has seen all before it end, and wait for nothing but lines.
* That holds for steps that end. One that does not ends all that goes through this mailbox: whoever
  has waited too long says so (320, 384), every later wait and post of both sides returns at once,
  and nothing of the step is used. Steps begin anew with an epoch that none has had, once both hosts
  have seen their devices at rest; a new session brings new memory.
* NVIDIA: volatile accesses are relaxed ones of system scope (PTX ISA, memory consistency model).
  AMD: atomic accesses of system scope to fine-grained memory, as hipHostRegister maps it. See
  ``vendor_cuda.cuh`` and ``vendor_hip.cuh``.
* Memory of a device is given back when nobody else has it open. Who opens it closes it first: the
  parent says so in 768, and asks for LEAVE, which is answered when the daemon has closed the
  parent's. A side whose other side is lost keeps its memory for a while (`kept_memory`): kernels
  that still run there find its abort word, and a host that comes back to life starts no step then.
* Whether a step has failed the parent's host learns from memory that is its own alone: words that
  others can write too decide when a wait ends, and nothing that is taken for right.
* The other process may be broken and write anything. What is read is data: ids are checked against
  the layer's experts, weights and rows are numbers, and no length or address is ever read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dflash_adapters.spec import MoeLayer, MoeSpec
from dflash_runtime.compute.gpu.launch.decode_arrays import GRANULE, MOST_TOKENS, padded_columns
from dflash_runtime.compute.gpu.launch.layouts import FLOAT_TYPES

STATE_AT = 0
DOORBELL_AT, ASKED_AT, ARGUMENT_AT, ANSWERS_AT = 64, 128, 192, 256
PARENT_ABORT_AT, DAEMON_ABORT_AT = 320, 384
LIMIT_MS_AT = 448
PARENT_DEVICE_AT, DAEMON_DEVICE_AT = 512, 576
REPLY_MEMORY_AT, REQUEST_MEMORY_AT = 640, 704
PARENT_HOLDS_AT = 768
PROBE_SEED_AT, PROBE_PAUSE_AT, PROBE_FAULTS_AT, PROBE_FOLLOWS_AT = 832, 896, 960, 1024
PARENT_LAYOUT_AT, DAEMON_LAYOUT_AT = 1088, 1152
LINES_AT = 4096

LINE_BYTES = 16
_LINE_WORDS = 2
DEVICE_BYTES = 16
HANDLE_BYTES = 64

LAYOUT_NUMBER = 1
"""To be raised with every change of what lies where, or means what: a mailbox is used only if both
sides have the same."""

LAST_EPOCH = (1 << 31) - (1 << 24)
"""No sequence of steps begins after it, none of which is as long as what is left."""

_ALIGNMENT = 256


class MailState(IntEnum):
    """What a daemon says of its side."""

    PREPARING = 0
    READY = 1
    FAILED = 2
    SEES_PEER = 3
    """Ready, and lines may be in the devices' memory."""


class Ask(IntEnum):
    """What a parent's host asks of a daemon's."""

    STEP = 0
    """Run a step of so many tokens, as the argument says."""
    EPOCH = 1
    """The next step's epoch is the argument plus one; lines are in the host's memory."""
    PEER_EPOCH = 2
    """The same; lines are in the memory of the device that reads them."""
    ECHO = 3
    """Answer so many rounds of a probe; what was found is told before the next is answered."""
    PEERS = 4
    """Open the parent's memory, have a step made that goes through it, and say in the state whether
    that could be done."""
    LEAVE = 5
    """Close the parent's memory: it will be given back."""
    SIZE = 6
    """Be ready for steps of so many tokens, where lines are now. For one everybody is."""


@dataclass(frozen=True, slots=True)
class MailLayout:
    """Sizes of a mailbox."""

    num_layers: int
    request_lines: int
    """For a token, of the layer that has most."""
    reply_lines: int
    most_tokens: int = 1
    """Of a step."""

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
        """Of all of it in the host's memory."""
        return LINES_AT + self.requests_nbytes + self.replies_nbytes

    @property
    def replies_at(self) -> int:
        """Offset of the first reply, if it is in the host's memory."""
        return LINES_AT + self.requests_nbytes


@dataclass(frozen=True, slots=True)
class MailLines:
    """Where the lines of a mailbox are, as one device sees them."""

    layout: MailLayout
    requests: int
    replies: int

    def request(self, layer_index: int) -> int:
        """Of a layer, by its place in the model."""
        return self.requests + layer_index * self.layout.request_bytes

    def reply(self, layer_index: int) -> int:
        return self.replies + layer_index * self.layout.reply_bytes


def host_lines(layout: MailLayout, mailbox: int) -> MailLines:
    """In the host's memory, in a mailbox at that address."""
    return MailLines(layout, mailbox + LINES_AT, mailbox + layout.replies_at)


def mail_layout(moe: MoeSpec) -> MailLayout:
    """Of a model's mailbox, for steps of up to MOST_TOKENS."""
    layers = moe.layers
    return MailLayout(
        num_layers=len(layers),
        request_lines=max(num_request_lines(layer, 1) for layer in layers),
        reply_lines=max(layer.hidden_size for layer in layers),
        most_tokens=MOST_TOKENS,
    )


def num_request_lines(layer: MoeLayer, num_tokens: int) -> int:
    """Lines of a request for so many tokens."""
    parts = (-(-num_tokens * words // _LINE_WORDS) for words in part_words(layer))
    return num_tokens * layer.num_experts_used + sum(parts)


def part_words(layer: MoeLayer) -> tuple[int, int, int]:
    """Words of a row as the layer's experts read it: int8, what belongs to that, and float32."""
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
