"""Fuzz target of the data path: requests as a daemon reads them, replies as a parent does.

Messages of version 2 carry a checksum, which finds nearly all damage. So most of it is done below
the checksum, and then nothing but the reader's own checks can find it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import xxhash

from dflash_protocol.batch import RoutedBatch, group_by_expert
from dflash_protocol.errors import ProtocolError
from dflash_protocol.ids import Phase
from dflash_protocol.payloads import NEGOTIABLE, PayloadType
from dflash_protocol.wire import requests, version1
from dflash_protocol.wire.transport import LinkLimits, Reply, TransportCounters
from fuzz.message_targets import damaged_header
from fuzz.mutation import NUMBERS, Mutator
from fuzz.target import Target

_HIDDEN_SIZE, _MAX_TOKENS, _EXPERTS_USED, _NUM_LOCAL = 12, 16, 3, 5
_LAYER_ID, _GENERATION, _SEQUENCE, _REPLY_TOKENS = 1, 77, 41, 3
_CHECKSUM_BYTES = 8
_FAILURE = ProtocolError("too late", code="late")
_GLOBAL_IDS = {_LAYER_ID: np.array([6, 0, 3, 7, 1], dtype=np.int32)}
_LOCAL_IDS = {_LAYER_ID: np.array([1, 4, -1, 2, -1, -1, 0, 3], dtype=np.int32)}


class DataFrames(Target):
    """Both directions, both versions, every payload type, arrays behind the header and apart.

    The first frame of an input names its reader, the second says whether its checksum was made
    anew after the damage.
    """

    refusals = (ProtocolError,)

    def __init__(self) -> None:
        self._readers: dict[bytes, Callable[[list[bytes]], None]] = {
            b"request f32": lambda frames: _read_request(frames, PayloadType.F32),
            b"request f16": lambda frames: _read_request(frames, PayloadType.F16),
            b"request bf16": lambda frames: _read_request(frames, PayloadType.BF16),
            b"reply f32": lambda frames: _read_reply(frames, PayloadType.F32),
            b"reply f16": lambda frames: _read_reply(frames, PayloadType.F16),
            b"reply bf16": lambda frames: _read_reply(frames, PayloadType.BF16),
            b"old request": _read_old_request,
            b"old reply": _read_old_reply,
        }
        self._batches = [random_batch(num_tokens) for num_tokens in (1, 3, _MAX_TOKENS)]
        self._sound: list[tuple[bytes, list[bytes]]] = []
        with mock.patch.object(time, "monotonic", return_value=1.5):  # stamped into requests
            self._make_sound()
            with mock.patch.object(requests, "INLINE_LIMIT_BYTES", 0):
                self._make_sound()
        self._make_old()
        self._all_sound = {tuple(frames) for _, frames in self._sound}
        self._old_headers = [
            frames[0] for reader, frames in self._sound if reader.startswith(b"old")
        ]

    def make(self, mutator: Mutator) -> list[bytes]:
        reader, sound = mutator.choose(self._sound)
        frames, donor = list(sound), mutator.choose(self._sound)[1]
        checksum = b"as it was"
        if reader.startswith(b"old"):
            if mutator.chance(0.5):
                frames[0] = damaged_header(mutator, self._old_headers, frames[0])
            else:
                frames[-1] = _damaged_numbers(mutator, frames[-1])
        elif mutator.chance(0.2):
            place = mutator.below(len(frames))
            frames[place] = mutator.damage(frames[place], donor[0])
        else:
            checksum = b"made anew"
            frames[0] = frames[0][_CHECKSUM_BYTES:]
            if mutator.chance(0.2):
                place = mutator.below(len(frames))
                frames[place] = mutator.damage(frames[place], donor[0][_CHECKSUM_BYTES:])
            elif mutator.chance(0.5):
                frames[0] = _damaged_fields(mutator, frames[0], donor[0][_CHECKSUM_BYTES:])
            else:
                frames[-1] = _damaged_numbers(mutator, frames[-1], requests.HEADER_BYTES)
        step = mutator.below(24)
        if step == 0:
            frames.append(frames[mutator.below(len(frames))])
        elif step == 1:
            del frames[mutator.below(len(frames))]
        if checksum == b"made anew" and frames:
            frames = with_checksum(frames)
        return [reader, checksum, *frames]

    def feed(self, frames: list[bytes]) -> None:
        reader, checksum, *message = frames
        self._readers[reader](message)
        if checksum == b"as it was" and not reader.startswith(b"old"):
            assert tuple(message) in self._all_sound, "damage that the checksum did not show"

    def serve_good(self) -> None:
        for payload in NEGOTIABLE:
            for batch in self._batches:
                header, read = requests.decode_request(_request(batch, payload), _limits(payload))
                assert header.sequence == _SEQUENCE
                for name in ("expert_ids", "group_starts", "token_indices", "weights"):
                    np.testing.assert_array_equal(getattr(read, name), getattr(batch, name))
                if payload is PayloadType.F32:
                    np.testing.assert_array_equal(read.hidden, batch.hidden)
        for reader, message in self._sound:
            try:
                self._readers[reader](message)
            except ProtocolError as error:
                failure = str(error)
                assert failure == "not computed: too late", failure

    def _make_sound(self) -> None:
        """Messages of version 2: three requests, a reply and a failure of each payload type."""
        sums = np.random.default_rng(5).standard_normal((_REPLY_TOKENS, _HIDDEN_SIZE))
        for payload in NEGOTIABLE:
            kind = payload.value.encode()
            for batch in self._batches:
                self._sound.append((b"request " + kind, _request(batch, payload)))
            header, _ = requests.decode_request(_request(self._batches[1]), _limits())
            reply = requests.encode_reply(header, sums, compute_s=0.1, payload=payload)
            failed = requests.encode_failure(_SEQUENCE, _FAILURE, generation=_GENERATION)
            for frames in (reply, failed):
                self._sound.append((b"reply " + kind, _bytes_of(frames)))

    def _make_old(self) -> None:
        """Messages of version 1."""
        sums = np.random.default_rng(5).standard_normal((_REPLY_TOKENS, _HIDDEN_SIZE))
        request = _old_codec().encode(
            self._batches[0], sequence=_SEQUENCE, layer_id=_LAYER_ID, deadline_s=1.0
        )
        self._sound.append((b"old request", _bytes_of(request)))
        header, _ = version1.decode_request(_bytes_of(request), _limits())
        reply = version1.encode_reply(header, sums)
        failed = version1.encode_failure(_SEQUENCE, _FAILURE)
        for frames in (reply, failed):
            self._sound.append((b"old reply", _bytes_of(frames)))


def _damaged_fields(mutator: Mutator, frame: bytes, donor: bytes) -> bytes:
    """A few numbers of the header that begins this frame, of any width, or those of another."""
    numbers = bytearray(frame)
    for _ in range(1 + mutator.below(2)):
        width = mutator.choose((1, 1, 4, 8))
        place = mutator.below((requests.HEADER_BYTES - _CHECKSUM_BYTES) // width) * width
        kind = mutator.random.random()
        if kind < 0.4:
            value = (mutator.below(24) - 2).to_bytes(8, "little", signed=True)
        elif kind < 0.8:
            value = mutator.choose(NUMBERS).to_bytes(8, "little")
        else:
            value = donor[place : place + width]
        numbers[place : place + width] = value[:width]
    return bytes(numbers)


def _damaged_numbers(mutator: Mutator, array: bytes, first: int = 0) -> bytes:
    """A few of an array's int32, those behind the first bytes; or any damage at all."""
    count = (len(array) - first) // 4
    if count < 1 or mutator.chance(0.3):
        return mutator.damage(array)
    numbers = bytearray(array)
    for _ in range(1 + mutator.below(3)):
        number = mutator.below(20) - 2 if mutator.chance(0.7) else mutator.choose(NUMBERS)
        place = len(array) - 4 * (1 + mutator.below(count))
        struct.pack_into("<I", numbers, place, number % 2**32)
    return bytes(numbers)


def _read_request(frames: list[bytes], payload: PayloadType) -> None:
    try:
        _, batch = requests.decode_request(frames, _limits(payload))
        use_batch(batch)
    except ProtocolError:
        # Whoever sent it is told, under a number that a header can hold.
        assert 0 <= requests.sequence_of(frames) < 1 << 64
        raise


def _read_old_request(frames: list[bytes]) -> None:
    _, batch = version1.decode_request(frames, _limits())
    use_batch(batch)


def use_batch(batch: RoutedBatch) -> None:
    """Do with a batch what makes a kernel read or write out of bounds if its check has a hole."""
    batch.check(hidden_size=_HIDDEN_SIZE, num_experts=_NUM_LOCAL)
    assert 0 <= batch.num_tokens <= _MAX_TOKENS
    assert batch.hidden.shape == (batch.num_tokens, _HIDDEN_SIZE)
    assert batch.hidden.dtype == np.float32
    assert batch.num_pairs <= batch.num_tokens * _EXPERTS_USED
    sizes = np.diff(batch.group_starts)
    assert int(sizes.sum()) == batch.num_pairs
    experts = np.repeat(batch.expert_ids, sizes)
    pairs = set(zip(batch.token_indices.tolist(), experts.tolist(), strict=True))
    assert len(pairs) == batch.num_pairs
    assert all(0 <= token < batch.num_tokens and 0 <= e < _NUM_LOCAL for token, e in pairs)


def _read_reply(frames: list[bytes], payload: PayloadType) -> None:
    codec = requests.ParentCodec(
        hidden_size=_HIDDEN_SIZE,
        generation=_GENERATION,
        payload=payload,
        counters=TransportCounters(),
    )
    _use_answer(codec.decode(frames, {_SEQUENCE: _REPLY_TOKENS}))


def _read_old_reply(frames: list[bytes]) -> None:
    _use_answer(_old_codec().decode(frames, {_SEQUENCE: _REPLY_TOKENS}))


def _use_answer(answer: tuple[int, Reply | ProtocolError] | None) -> None:
    """Raises: ProtocolError if it is no computed reply."""
    if answer is None:
        raise ProtocolError("nobody waits for this")
    sequence, reply = answer
    assert sequence == _SEQUENCE
    if isinstance(reply, ProtocolError):
        assert str(reply).isprintable(), "a reason from outside goes into our log"
        raise ProtocolError(f"not computed: {reply}")
    assert reply.sums.shape == (_REPLY_TOKENS, _HIDDEN_SIZE)
    assert reply.sums.dtype == np.float64


def _limits(payload: PayloadType = PayloadType.F32) -> LinkLimits:
    return LinkLimits(
        hidden_size=_HIDDEN_SIZE,
        max_tokens=_MAX_TOKENS,
        max_experts_used=_EXPERTS_USED,
        generation=_GENERATION,
        payload=payload,
        local_ids=_LOCAL_IDS,
    )


def _old_codec() -> version1.Version1ParentCodec:
    return version1.Version1ParentCodec(
        hidden_size=_HIDDEN_SIZE, global_ids=_GLOBAL_IDS, counters=TransportCounters()
    )


def random_batch(num_tokens: int) -> RoutedBatch:
    random = np.random.default_rng(num_tokens)
    pairs = [
        (token_idx, expert_id)
        for token_idx in range(num_tokens)
        for expert_id in random.permutation(_NUM_LOCAL)[:_EXPERTS_USED]
    ]
    return group_by_expert(
        random.standard_normal((num_tokens, _HIDDEN_SIZE), dtype=np.float32),
        np.array([token_idx for token_idx, _ in pairs], dtype=np.int32),
        np.array([expert_id for _, expert_id in pairs], dtype=np.int32),
        weights=random.random(len(pairs), dtype=np.float32) + np.float32(0.5),
        phase=Phase.DECODE if num_tokens == 1 else Phase.PREFILL,
    )


def _request(batch: RoutedBatch, payload: PayloadType = PayloadType.F32) -> list[bytes]:
    frames = requests.encode_request(
        batch,
        sequence=_SEQUENCE,
        layer_id=_LAYER_ID,
        deadline_s=1.0,
        generation=_GENERATION,
        payload=payload,
    )
    return _bytes_of(frames)


def with_checksum(frames: list[bytes]) -> list[bytes]:
    """These frames, the first without its checksum, with one that fits."""
    checksum = xxhash.xxh3_64_intdigest(b"".join(frames))
    return [checksum.to_bytes(_CHECKSUM_BYTES, "little") + frames[0], *frames[1:]]


def _bytes_of(frames: Sequence[bytes | bytearray | memoryview]) -> list[bytes]:
    return [bytes(frame) for frame in frames]
