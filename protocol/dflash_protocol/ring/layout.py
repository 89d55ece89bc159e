"""The layout of a ring: the shared memory that carries a link's requests and replies.

All offsets are defined here, for Python and for compiled code. `segment` makes the memory,
`compiled` compiles the code.

::

    byte      what                                                       written by
    0         header: magic, layout version, generation, N, request      the creator, once
              slot bytes, reply slot bytes, T, H, P                      (int64 each)
    128       client's nonce, 16 bytes                                   client, once
    192       server's nonce, 16 bytes                                   server, once
    256       request words [N] int64                                    client
    384       client sleeps, int64                                       client sets, server clears
    512       reply words [N] int64                                      server
    640       server sleeps, int64                                       server sets, client clears
    4096      request slots 0 … N-1, whole pages each                    client
    …         reply slots 0 … N-1, whole pages each                      server
    …         optional mailbox between devices, with its own layout      both sides' devices

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

    moved: hidden, or sums, were written by a device and are read by one, by DMA. The checksum does
    not cover them; the digest (device_payload.digest_of) does. It is 0 otherwise. They are float32
    and float64, and a reply is moved if and only if its request was.

Slot i of the requests and slot i of the replies belong together: writing a request reserves the
slot of its reply. Sequences of slot i are congruent to i modulo N and increase, so none is used
twice in a link, and a sequence in the wrong slot is detected.

Why this is correct, also on weakly ordered memory:

* A writer fills the slot, then stores its sequence in the slot's word with release order. A reader
  that has loaded this sequence with acquire order sees the whole slot. The client rewrites a
  request slot only after it has read the reply: that load of the reply's word orders the server's
  reads before the client's writes. The server writes a reply slot only after it has taken the
  request.
* A side that is about to sleep sets its flag, then checks the words once more; a writer stores a
  word, then checks the flag. All four accesses are sequentially consistent, so at least one side
  sees the other's store: either the sleeper finds the word, or the writer rings the bell. The
  writer clears the flag by exchange, so a sleeper is rung once.
* The other process may be broken or hostile and write anything at any time. So each header is
  copied out once, and only the copy is checked and used; how much is read follows from the copy and
  from negotiated limits outside the segment; the checksum is computed from the bytes that were
  copied, not from the segment.
* A host waits for its device to finish writing a slot before it writes the header, and to finish
  reading one before it answers or reuses the slot: to the other side the device is part of its
  host. A device's read starts only after the copy of the header was checked, its size follows from
  that copy, and the digest is computed from the words read, in the same pass. Whether both sides
  use DMA is negotiated at attach.
* The slot of an abandoned request is reused only after its reply was published, which is the last
  access of a correct server. Until then the slot is lost; when all are lost the link gets a new
  segment of another generation.
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
"""The number of words that fit two cache lines."""

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
"""Maximum size of a failure's text."""

SEQUENCE_LIMIT = 1 << 62

MOVED_FACTOR = 2
"""A link whose payload is moved by DMA takes requests of this many times the negotiated tokens:
experts on a GPU run faster with more tokens each, and no CPU copies them."""

_LARGEST_SEGMENT_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class RingShape:
    """The negotiated sizes of a ring; every offset follows from them.

    ``max_pairs`` bounds the pairs of one request, ``max_tokens`` its tokens.
    Raises: ValueError if a count is out of range; callers check counts from the wire first.
    """

    num_slots: int
    max_tokens: int
    hidden_size: int
    max_pairs: int
    mail_bytes: int = 0
    """Size of the mailbox behind the slots, through which devices exchange messages."""

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
        """The header that the creator writes at FACTS_AT and the opener checks."""
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
