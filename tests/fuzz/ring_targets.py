"""Fuzz target of shared memory: a ring's slots and words, written by a peer that is broken or lies.

Both ends are in this process, each with a mapping of its own. An honest end writes a message, then
memory is changed behind its back, then the other end reads. Knows nothing of the slots' insides
but that headers are words of 8 bytes, arrays of 4, and where both lie.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from dflash_protocol.batch import HostSums, RoutedBatch
from dflash_protocol.errors import DeadlineExceeded, ProtocolError
from dflash_protocol.payloads import PayloadType
from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring import layout as ring
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import create_segment, open_segment
from dflash_protocol.transports.shared_client import SharedClient
from dflash_protocol.transports.shared_server import SharedServer
from dflash_protocol.wire.transport import LinkLimits, ReceivedRequest
from fuzz.data_targets import random_batch, use_batch
from fuzz.mutation import NUMBERS, Mutator
from fuzz.target import Target

_SHAPE = RingShape(num_slots=4, max_tokens=16, hidden_size=12, max_pairs=48)
_EXPERTS_USED, _LAYER_ID = 3, 1
_PAYLOADS = (PayloadType.F32, PayloadType.BF16)
_PATCH = struct.Struct("<BIq")
"""Kind of change, place, value."""
_BIT, _WORD, _ADDED, _NUMBER, _PUBLISHED, _OLDER = range(6)
_INT64 = struct.Struct("<q")


class _Link:
    """Both ends of a link, and its memory laid open. No two have the same generation."""

    _generations = itertools.count(1)

    def __init__(self, folder: Path, payload: PayloadType) -> None:
        generation = next(self._generations)
        segment = create_segment(folder, _SHAPE, generation=generation)
        other = open_segment(folder, segment.name, _SHAPE, generation=generation)
        segment.unlink()
        self.lost_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.memory = memoryview(
            (ctypes.c_ubyte * _SHAPE.segment_bytes).from_address(segment.address)
        ).cast("B")
        self.address = segment.address
        self.client = SharedClient(
            segment, lost_fd=self.lost_fd, lost_reason=str, payload=payload, spin_s=0.0
        )
        self.server = SharedServer()
        limits = LinkLimits(
            hidden_size=_SHAPE.hidden_size,
            max_tokens=_SHAPE.max_tokens,
            max_experts_used=_EXPERTS_USED,
            generation=generation,
            payload=payload,
        )
        self.server.add_link("link", other, limits)
        self.num_lost = 0
        self.older: dict[str, bytes] = {}
        """What lay in a slot of each kind long ago."""
        sequence = self.client.submit(_LAYER_ID, random_batch(3), deadline_s=1.0)
        self._note_slot("request", _SHAPE.request_slot_at(sequence % _SHAPE.num_slots))
        request = self.server.try_receive()
        assert request is not None, "a sound request was not taken"
        self.server.reply(request, HostSums(_sums_of(3)), 0.5)
        self._note_slot("reply", _SHAPE.reply_slot_at(sequence % _SHAPE.num_slots))
        self.client.wait(sequence, deadline_s=0.0)

    def _note_slot(self, kind: str, slot_at: int) -> None:
        self.older[kind] = bytes(self.memory[slot_at : slot_at + _slot_bytes(kind)])

    def close(self) -> None:
        self.memory.release()
        self.server.close()
        self.client.close()
        os.close(self.lost_fd)


class RingSlots(Target):
    """Requests as the daemon takes them from a ring, and replies as the parent does.

    An input: which slot is changed, a number that says what message it holds, then the changes.
    """

    refusals = (ProtocolError, DeadlineExceeded)

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-ring-")
        Path(self._folder.name).chmod(0o700)
        self._batches = [random_batch(num_tokens) for num_tokens in (1, 3, _SHAPE.max_tokens)]
        self._links: dict[PayloadType, _Link] = {}
        ring_native.kernels()
        self._state = np.zeros(64, np.int64)
        self._scratch = np.zeros(_SHAPE.reply_slot_bytes, np.uint8)

    def make(self, mutator: Mutator) -> list[bytes]:
        kind = mutator.choose((b"request", b"request", b"batch", b"reply", b"reply, sealed"))
        choice = mutator.below(256)
        patches = [_patch(mutator)]
        while mutator.chance(0.4):
            patches.append(_patch(mutator))
        return [kind, bytes([choice]), *patches]

    def feed(self, frames: list[bytes]) -> None:
        kind, choice = frames[0].decode(), frames[1][0]
        patches = [_PATCH.unpack(frame) for frame in frames[2:]]
        payload = _PAYLOADS[choice % len(_PAYLOADS)]
        batch = self._batches[choice // len(_PAYLOADS) % len(self._batches)]
        link = self._link(payload)
        try:
            if kind == "request":
                self._feed_request(link, batch, patches)
            elif kind == "batch":
                self._feed_batch(link, batch, patches)
            else:
                self._feed_reply(link, batch, patches, choice, is_sealed=kind != "reply")
        except AssertionError:
            self._close_link(payload)
            raise

    def serve_good(self) -> None:
        for payload in _PAYLOADS:
            link = self._link(payload)
            for batch in self._batches:
                sequence = link.client.submit(_LAYER_ID, batch, deadline_s=1.0)
                request = link.server.try_receive()
                assert request is not None, "a sound request was not taken"
                if payload is PayloadType.F32:
                    _assert_same(request, batch)
                self._answer(link, request)
                reply = link.client.wait(sequence, deadline_s=0.0)
                np.testing.assert_allclose(reply.sums, _sums_of(batch.num_tokens), rtol=0.01)

    def close(self) -> None:
        for payload in list(self._links):
            self._close_link(payload)
        self._folder.cleanup()

    def _link(self, payload: PayloadType) -> _Link:
        """The link of that type; a new one if it has lost a slot too many, as a parent would."""
        link = self._links.get(payload)
        if link is not None and link.num_lost == _SHAPE.num_slots - 1:
            self._close_link(payload)
            link = None
        if link is None:
            link = self._links[payload] = _Link(Path(self._folder.name), payload)
        return link

    def _close_link(self, payload: PayloadType) -> None:
        self._links.pop(payload).close()

    def _feed_request(
        self, link: _Link, batch: RoutedBatch, patches: list[tuple[int, int, int]]
    ) -> None:
        """A request that is changed after it was written."""
        sequence = link.client.submit(_LAYER_ID, batch, deadline_s=1.0)
        slot_idx = sequence % _SHAPE.num_slots
        self._change(
            link,
            patches,
            slot_at=_SHAPE.request_slot_at(slot_idx),
            word_at=ring.REQUEST_WORDS_AT + 8 * slot_idx,
            which="request",
        )
        request = link.server.try_receive()
        if request is not None:
            # Changes behind the arrays or between them do no harm; all else must be seen.
            assert request.header.sequence == sequence
            if link is self._links.get(PayloadType.F32):
                _assert_same(request, batch)
            use_batch(request.batch)
            self._answer(link, request)
        self._wait(link, sequence)

    def _feed_batch(
        self, link: _Link, batch: RoutedBatch, patches: list[tuple[int, int, int]]
    ) -> None:
        """A request that was wrong before it was written, and so has a checksum that fits."""
        names = ("expert_ids", "group_starts", "token_indices")
        arrays = {name: getattr(batch, name).copy() for name in names}
        for _, place, value in patches:
            array = arrays[names[place % 3]]
            array[place // 3 % array.size] = np.int64(value).astype(np.int32)
        layer_id = patches[0][2] if patches[0][0] == _BIT else _LAYER_ID
        sequence = link.client.submit(layer_id, replace(batch, **arrays), deadline_s=1.0)
        request = link.server.try_receive()
        if request is not None:
            try:
                use_batch(request.batch)
            except ProtocolError as error:
                link.server.fail("link", sequence, error)
            else:
                self._answer(link, request)
        self._wait(link, sequence)

    def _feed_reply(
        self,
        link: _Link,
        batch: RoutedBatch,
        patches: list[tuple[int, int, int]],
        choice: int,
        *,
        is_sealed: bool,
    ) -> None:
        """A reply that is changed after it was written; sealed: its checksum is made anew."""
        sequence = link.client.submit(_LAYER_ID, batch, deadline_s=1.0)
        request = link.server.try_receive()
        assert request is not None, "a sound request was not taken"
        if choice < 64:
            link.server.fail("link", sequence, ProtocolError("too late", code="late"))
        else:
            self._answer(link, request)
        slot_idx = sequence % _SHAPE.num_slots
        slot_at = _SHAPE.reply_slot_at(slot_idx)
        self._change(
            link,
            patches,
            slot_at=slot_at,
            word_at=ring.REPLY_WORDS_AT + 8 * slot_idx,
            which="reply",
        )
        if is_sealed:
            self._seal(link, slot_at)
        reply = self._wait(link, sequence)
        if not is_sealed and reply is not None:
            np.testing.assert_allclose(reply, _sums_of(batch.num_tokens), rtol=0.01)

    def _answer(self, link: _Link, request: ReceivedRequest) -> None:
        link.server.reply(request, HostSums(_sums_of(request.batch.num_tokens)), 0.5)

    def _wait(
        self, link: _Link, sequence: int
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """The sums of a reply. Raises: ProtocolError, DeadlineExceeded."""
        try:
            return link.client.wait(sequence, deadline_s=0.0).sums
        except DeadlineExceeded:
            # Its reply may come yet, so the slot is lost with it.
            link.client.forget(sequence)
            link.num_lost += 1
            raise
        except ProtocolError as error:
            link.num_lost += "published under" in str(error)
            reason = str(error)
        assert reason.isprintable(), "a reason from outside goes into our log"
        raise ProtocolError(f"not computed: {reason}")

    def _change(
        self,
        link: _Link,
        patches: list[tuple[int, int, int]],
        *,
        slot_at: int,
        word_at: int,
        which: str,
    ) -> None:
        """Write into a slot, and into its word, as the patches say."""
        memory, slot_bytes = link.memory, _slot_bytes(which)
        (num_bytes,) = _INT64.unpack_from(memory, slot_at + 8 * ring.PAYLOAD_BYTES)
        used_bytes = min(slot_bytes - ring.HEADER_BYTES, num_bytes + ring.HEADER_BYTES)
        for kind, place, value in patches:
            if kind == _BIT:
                memory[slot_at + place % (ring.HEADER_BYTES + used_bytes)] ^= 1 << (value & 7)
            elif kind in (_WORD, _ADDED):
                at = slot_at + 8 * (place % ring.HEADER_WORDS)
                before = _INT64.unpack_from(memory, at)[0] if kind == _ADDED else 0
                _INT64.pack_into(memory, at, _wrapped(before + value))
            elif kind == _NUMBER:
                at = slot_at + ring.HEADER_BYTES + 4 * (place % (used_bytes // 4))
                struct.pack_into("<I", memory, at, value % 2**32)
            elif kind == _PUBLISHED:
                word = _INT64.unpack_from(memory, word_at)[0]
                _INT64.pack_into(memory, word_at, _wrapped(word + value))
            else:
                memory[slot_at : slot_at + slot_bytes] = link.older[which]

    def _seal(self, link: _Link, slot_at: int) -> None:
        """Give a reply the checksum that fits what it is now."""
        (num_bytes,) = _INT64.unpack_from(link.memory, slot_at + 8 * ring.PAYLOAD_BYTES)
        if 0 <= num_bytes <= _SHAPE.reply_slot_bytes - ring.HEADER_BYTES:
            found = ring_native.kernels().checksum(
                -(-self._state.ctypes.data // ring.LINE_BYTES) * ring.LINE_BYTES,
                link.address + slot_at,
                link.address + slot_at + ring.HEADER_BYTES,
                self._scratch.ctypes.data,
                num_bytes & ~3,
            )
            _INT64.pack_into(link.memory, slot_at + 8 * ring.CHECKSUM, _wrapped(found))


def _slot_bytes(which: str) -> int:
    return _SHAPE.request_slot_bytes if which == "request" else _SHAPE.reply_slot_bytes


def _patch(mutator: Mutator) -> bytes:
    kind = mutator.choose((_BIT, _BIT, _WORD, _WORD, _ADDED, _NUMBER, _NUMBER, _PUBLISHED, _OLDER))
    if kind == _PUBLISHED and mutator.chance(0.7):
        kind = _ADDED  # a wrong word ruins a link; one in some is enough
    place = mutator.below(16) if mutator.chance(0.3) else mutator.random.getrandbits(16)
    if mutator.chance(0.6) or kind in (_ADDED, _PUBLISHED):
        value = mutator.below(24) - 4
    else:
        value = _wrapped(mutator.choose(NUMBERS))
    return _PATCH.pack(kind, place, value)


def _wrapped(value: int) -> int:
    """As the bits of an int64."""
    return (value + 2**63) % 2**64 - 2**63


def _sums_of(num_tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.arange(1.0, 1.0 + num_tokens * _SHAPE.hidden_size).reshape(num_tokens, -1)


def _assert_same(request: ReceivedRequest, batch: RoutedBatch) -> None:
    assert request.header.layer_id == _LAYER_ID
    assert request.batch.phase is batch.phase
    for name in ("hidden", "expert_ids", "group_starts", "token_indices", "weights"):
        taken, sent = getattr(request.batch, name), getattr(batch, name)
        assert taken.tobytes() == sent.tobytes(), f"{name} were changed, and nobody saw it"
