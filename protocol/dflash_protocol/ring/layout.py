"""The layout of a ring: the one segment of memory through which a link's requests and replies go.

Knows nothing of files (ring_segment), of compiled code (ring_native), or of what is computed.
Offsets are written here once; Python and compiled code take them from here.

::

    byte      what                                                       written by
    0         facts: magic, layout version, generation, N, request       the creator, once
              slot bytes, reply slot bytes, T, H, P                      (int64 each)
    128       client's nonce, 16 bytes                                   client, once
    192       server's nonce, 16 bytes                                   server, once
    256       request words [N] int64                                    client
    384       client sleeps, int64                                       client sets, server clears
    512       reply words [N] int64                                      server
    640       server sleeps, int64                                       server sets, client clears
    4096      request slots 0 … N-1, whole pages each                    client
    …         reply slots 0 … N-1, whole pages each                      server
    …         a mailbox, if devices have one here: its own layout        both sides' devices

    a slot: 16 int64 of header, then the arrays, each beginning a line of 64 bytes

    word  request              reply                failure
    0     sequence             sequence             sequence
    1     generation           generation           generation
    2     KIND_REQUEST         KIND_REPLY           KIND_FAILURE
    3     layer_id             0                    0
    4     T                    T                    0
    5     G                    0                    0
    6     P                    0                    0
    7     phase                0                    0
    8     payload type         payload type         0
    9     deadline_ms float64  compute_s float64    0
    10    sent_s float64       queue_s float64      0
    11    payload bytes        payload bytes        bytes of text
    12    moved: 0 or 1        moved: 0 or 1        0
    13    digest of hidden     digest of sums       0
    15    checksum of words 0 … 14 and the arrays, in all three

    request arrays: hidden [T, H] in the payload type, expert_ids [G] int32, group_starts [G+1]
                    int32, token_indices [P] int32, weights [P] float32
    reply arrays:   sums [T, H] in the payload type
    failure:        the error's code, a zero byte, its reason, zero bytes to a multiple of 4; UTF-8

    moved: hidden, or sums, were written by a device and are read by one, both of which have mapped
    the segment. The checksum leaves them out and the digest is theirs (device_payload.digest_of),
    else 0. They are float32, or float64, and a reply is moved if and only if its request was.

Slot i of the requests and slot i of the replies belong together: writing a request reserves the
slot of its reply. Sequences of slot i are congruent to i modulo N and grow, so one is never used
twice in a link, and a word that does not fit its place is known to be wrong.

Why this is right, also where memory is weakly ordered:

* A writer fills the slot, then stores its sequence in the slot's word with release order. A reader
  that has loaded this sequence with acquire order sees the whole slot. Nobody writes a request slot
  before its reply was read: that load, the reply's word, orders the old reading before the new
  writing. Nor does the server write a reply slot before it has taken the request.
* A side that is going to sleep sets its flag, then looks at the words once more; a writer stores a
  word, then looks at the flag. All four are sequentially consistent, so at least one of the two
  sees what the other did: either the sleeper finds the word, or the writer rings the bell. The
  writer clears the flag by exchange, so a sleeper is rung for once.
* The other process may be broken or hostile and write anything at any time. So every header is
  copied out once, and only the copy is checked and used; how much is read follows from the copy and
  from negotiated limits that lie outside the segment; the checksum is taken of the bytes that were
  copied, not of the segment.
* What a device writes into a slot has been waited for before the header is written, and its reading
  of one before the slot is answered or used again: to the other side it is part of what the host
  of that device does. How much a device reads follows, like all reading, from the copy of the
  header that was checked; it is started only then, and the digest is taken of the words that it
  read, in the pass that reads them. Whether both sides move payload so is agreed on at attach.
* The slot of a request that nobody waits for any more is used again only after its reply was
  published, which is the last that an honest server does with it. Until then it is lost, and with
  the last slot the link: it gets a new segment of another generation.
"""

from __future__ import annotations

from dataclasses import dataclass

MAGIC = 0x31_47_4E_49_52_46_44  # "DFRING1", little-endian
LAYOUT_VERSION = 1

FACTS_AT = 0
CLIENT_NONCE_AT, SERVER_NONCE_AT = 128, 192
REQUEST_WORDS_AT, CLIENT_SLEEPS_AT = 256, 384
REPLY_WORDS_AT, SERVER_SLEEPS_AT = 512, 640
SLOTS_AT = 4096

FACTS_FORMAT = "<9q"
NONCE_BYTES = 16
MAX_SLOTS = 16
"""As many words as fit two cache lines."""

LINE_BYTES = 64
PAGE_BYTES = 4096

HEADER_WORDS = 16
HEADER_BYTES = 8 * HEADER_WORDS
(
    SEQUENCE, GENERATION, KIND, LAYER, TOKENS, GROUPS, PAIRS, PHASE, PAYLOAD, TIME, OTHER_TIME,
    PAYLOAD_BYTES,
) = range(12)  # fmt: skip
MOVED, DIGEST, CHECKSUM = 12, 13, 15

KIND_REQUEST, KIND_REPLY, KIND_FAILURE = 1, 2, 3
PAYLOAD_F32, PAYLOAD_F16, PAYLOAD_BF16, PAYLOAD_F64 = range(4)

FAILURE_LIMIT_BYTES = 1536
"""Longest text of a failure."""

SEQUENCE_LIMIT = 1 << 62

MOVED_FACTOR = 2
"""A link whose payload is moved by devices carries requests of so many times the tokens that were
agreed on: experts of a GPU are the faster the more tokens each has, and nobody copies them."""

_LARGEST_SEGMENT_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class RingShape:
    """What both sides agree on before there is a segment; every size follows from it.

    ``max_pairs`` bounds the pairs of one request, ``max_tokens`` its tokens.
    Raises: ValueError if a count is out of range; check what comes over the wire before.
    """

    num_slots: int
    max_tokens: int
    hidden_size: int
    max_pairs: int
    mail_bytes: int = 0
    """Behind the slots, for what devices tell each other by themselves."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_slots <= MAX_SLOTS:
            raise ValueError(f"{self.num_slots} slots, expected 1 to {MAX_SLOTS}")
        if min(self.max_tokens, self.hidden_size, self.max_pairs) < 1:
            raise ValueError("a ring for no tokens, no pairs or rows of no width")
        if self.mail_bytes < 0:
            raise ValueError(f"a mailbox of {self.mail_bytes} bytes")
        if self.segment_bytes > _LARGEST_SEGMENT_BYTES:
            raise ValueError(f"a segment of {self.segment_bytes} bytes")

    @property
    def request_slot_bytes(self) -> int:
        arrays = (4 * self.max_tokens * self.hidden_size, *(4 * self.max_pairs + 4,) * 4)
        return _pages(HEADER_BYTES + sum(map(_lines, arrays)))

    @property
    def reply_slot_bytes(self) -> int:
        sums_bytes = 8 * self.max_tokens * self.hidden_size
        return _pages(HEADER_BYTES + _lines(max(sums_bytes, FAILURE_LIMIT_BYTES)))

    @property
    def segment_bytes(self) -> int:
        return self.mail_at + _pages(self.mail_bytes)

    @property
    def mail_at(self) -> int:
        """Offset of the mailbox in the segment."""
        return SLOTS_AT + self.num_slots * (self.request_slot_bytes + self.reply_slot_bytes)

    def request_slot_at(self, slot_idx: int) -> int:
        """Offset of a request slot in the segment."""
        return SLOTS_AT + slot_idx * self.request_slot_bytes

    def reply_slot_at(self, slot_idx: int) -> int:
        """Offset of a reply slot in the segment."""
        first = SLOTS_AT + self.num_slots * self.request_slot_bytes
        return first + slot_idx * self.reply_slot_bytes

    def facts(self, generation: int) -> tuple[int, ...]:
        """What the creator writes at FACTS_AT and the opener must find there."""
        return (
            MAGIC,
            LAYOUT_VERSION,
            generation,
            self.num_slots,
            self.request_slot_bytes,
            self.reply_slot_bytes,
            self.max_tokens,
            self.hidden_size,
            self.max_pairs,
        )


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
