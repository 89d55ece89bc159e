"""Fuzz target of the handshake: control messages, with the placement and the nonce that come with
one."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, get_type_hints

import msgpack

from dflash_adapters.gguf.weight_blocks import expert_blocks, nonce_from
from dflash_adapters.quant import TensorType
from dflash_adapters.spec import Activation, ExpertProjection, MoeLayer, MoeSpec
from dflash_protocol.errors import ProtocolError
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.wire.messages import (
    AskOffer,
    Bye,
    Hello,
    Message,
    Offer,
    Ping,
    Pong,
    Progress,
    Refused,
    Welcome,
    decode_header,
    encode_header,
)
from dflash_runtime.experts.daemons.offers import check_offer
from fuzz.mutation import Mutator
from fuzz.target import Target
from support.scripted_daemon import good_offer

EXPERTS_PER_LAYER = {0: 8, 1: 8, 3: 5}
_ROWS, _COLUMNS = 50, 60
_MATRIX_BYTES = 4 * _ROWS * _COLUMNS


def _moe_spec() -> MoeSpec:
    """Layers with so many experts, one matrix after another."""

    def projection(index: int) -> ExpertProjection:
        return ExpertProjection(
            f"t{index}",
            TensorType.F32,
            _ROWS,
            _COLUMNS,
            0,
            8 * index * _MATRIX_BYTES,
            _MATRIX_BYTES,
        )

    return MoeSpec(
        tuple(
            MoeLayer(
                layer_id,
                num_experts,
                1,
                _COLUMNS,
                _ROWS,
                Activation.SWIGLU,
                projection(3 * index),
                projection(3 * index + 1),
                projection(3 * index + 2),
            )
            for index, (layer_id, num_experts) in enumerate(EXPERTS_PER_LAYER.items())
        )
    )


_SAMPLES: dict[Any, object] = {
    int: 7,
    float: 1.5,
    bool: True,
    str: "f32",
    tuple[int, ...]: (1, 2),
    tuple[float, ...]: (0.5, 2.0),
}


_NESTS = (b"\x91" * 5000, b"\x81\xa1a" * 2000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff")
"""Lists and maps within such, and some that claim to be long."""


def sample(record: type[Message], **fields: object) -> Message:
    """A sound record: these fields, and any values for the others."""
    hints = get_type_hints(record)
    values = {each.name: _SAMPLES[hints[each.name]] for each in dataclasses.fields(record)}
    return record(**(values | fields))


def damaged_header(mutator: Mutator, headers: list[bytes], header: bytes) -> bytes:
    """A header with wrong bytes, with wrong fields, or with both."""
    kind = mutator.random.random()
    if kind < 0.4:
        return mutator.damage(header, mutator.choose(headers))
    if kind < 0.42:
        return mutator.choose(_NESTS)
    damaged = other_fields(mutator, header, mutator.choose(headers))
    return mutator.damage(damaged) if kind < 0.5 else damaged


def other_fields(mutator: Mutator, header: bytes, other: bytes) -> bytes:
    """A header in sound msgpack, with wrong fields."""
    fields = mutator.damage_fields(msgpack.unpackb(header), msgpack.unpackb(other))
    with contextlib.suppress(OverflowError):  # a number that no header can hold
        packed: bytes = msgpack.packb(fields, unicode_errors="surrogatepass")
        return packed
    return header


class Handshakes(Target):
    """Control messages of both sides, and the placement that comes with a hello."""

    refusals = (ProtocolError,)

    def __init__(self) -> None:
        self._owned = [
            OwnedExperts.from_lists(lists)
            for lists in ({0: [3, 0, 7], 1: range(8), 3: [4]}, {1: [5]}, {})
        ]
        self._placements = [owned.canonical_bytes for owned in self._owned]
        told = (AskOffer, Progress, Welcome, Refused, Ping, Pong, Bye)
        self._good = [good_offer(_moe_spec()), *(sample(record) for record in told)]
        self._hellos = [
            sample(Hello, placement_fingerprint=owned.fingerprint, nonce="5e" * 16)
            for owned in self._owned
        ]
        self._moe = _moe_spec()
        self._headers = [encode_header(message) for message in (*self._hellos, *self._good)]

    def make(self, mutator: Mutator) -> list[bytes]:
        index = mutator.below(len(self._headers) + 6) % len(self._headers)  # hellos more often
        header, is_hello = self._headers[index], index < len(self._hellos)
        frames = [header, self._placements[index]] if is_hello else [header]
        if is_hello and mutator.chance(0.6):
            frames[1] = mutator.damage(frames[1], mutator.choose(self._placements))
            if mutator.chance(0.5):  # a whole number of int32, as nearly all wrong ones will be
                frames[1] = frames[1][: len(frames[1]) // 4 * 4]
        else:
            frames[0] = damaged_header(mutator, self._headers, header)
        return frames

    def feed(self, frames: list[bytes]) -> None:
        message = decode_header(frames[0])
        assert decode_header(encode_header(message)) == message
        if isinstance(message, Offer):
            check_offer(message, self._moe, "cpu0")
            assert len(message.expert_bytes) == len(message.layer_ids)
        if isinstance(message, Hello):
            if len(frames) != 2:
                raise ProtocolError("hello comes with one placement frame")
            owned = OwnedExperts.from_bytes(frames[1], EXPERTS_PER_LAYER)
            assert owned.canonical_bytes == frames[1]
            for layer_id, ids in owned.by_layer.items():
                assert len(set(ids.tolist())) == ids.size
                assert 0 <= ids.min() <= ids.max() < EXPERTS_PER_LAYER[layer_id]
            if message.nonce:
                self._choose_blocks(message.nonce, owned)

    def _choose_blocks(self, nonce: str, owned: OwnedExperts) -> None:
        """Each matrix has a block that lies within it. Raises: ProtocolError."""
        places = iter(expert_blocks(nonce_from(nonce), self._moe, owned, tensors=()).places)
        for layer_id, ids in sorted(owned.by_layer.items()):
            for projection in self._moe.by_layer_id[layer_id].projections:
                for expert in ids.tolist():
                    (shard, offset, num_bytes), (_, first) = (
                        next(places),
                        projection.place_of(expert),
                    )
                    assert (shard, num_bytes) == (0, 4096)
                    assert first <= offset <= first + _MATRIX_BYTES - num_bytes
        assert next(places, None) is None

    def serve_good(self) -> None:
        for message in self._good:
            assert decode_header(encode_header(message)) == message
        for hello, owned in zip(self._hellos, self._owned, strict=True):
            assert decode_header(encode_header(hello)) == hello
            read = OwnedExperts.from_bytes(owned.canonical_bytes, EXPERTS_PER_LAYER)
            assert read.fingerprint == getattr(hello, "placement_fingerprint")  # noqa: B009
