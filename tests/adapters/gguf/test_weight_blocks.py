"""Blocks of weights: within their tensors, of every matrix in use, the same on both sides."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.scanner import TensorInfo
from dflash_adapters.gguf.weight_blocks import (
    BLOCK_BYTES,
    BLOCKS_OF_TENSOR,
    Blocks,
    Place,
    expert_blocks,
    model_blocks,
    nonce_from,
)
from dflash_adapters.quant import TensorType
from dflash_adapters.spec import (
    Activation,
    ExpertProjection,
    ExpertVector,
    MoeLayer,
    MoeSpec,
)
from dflash_protocol.errors import ProtocolError
from dflash_protocol.placement import OwnedExperts

NONCES = st.binary(min_size=16, max_size=16)
BIASES = "biases"


def spec_of(
    num_experts: int, rows: int, columns: int, *, is_separate: bool, has_bias: bool
) -> tuple[MoeSpec, list[TensorInfo]]:
    """Two layers of F32 experts, with a bias of the down projection, and a tensor beside them."""
    tensors: list[TensorInfo] = []
    place = 256

    def add(name: str, *shape: int) -> TensorInfo:
        nonlocal place
        num_bytes = 4
        for size in shape:
            num_bytes *= size
        tensors.append(TensorInfo(name, shape[::-1], TensorType.F32, 0, place, num_bytes))
        place += num_bytes + 32
        return tensors[-1]

    add("other.weight", 300, 300)
    layers = []
    for layer_id in range(2):
        projections = []
        for kind in ("gate", "up", "down"):
            name = f"blk.{layer_id}.{kind}"
            bias = None
            if has_bias and kind == "down":
                info = add(f"{name}.{BIASES}", num_experts, rows)
                bias = ExpertVector(info.name, 0, info.offset_bytes, 4 * rows, rows)
            places: tuple[tuple[int, int], ...] | None = None
            if is_separate:
                infos = [add(f"{name}.{each}", rows, columns) for each in range(num_experts)]
                places = tuple((0, each.offset_bytes) for each in infos)
            else:
                infos = [add(name, num_experts, rows, columns)]
            projections.append(
                ExpertProjection(
                    infos[0].name,
                    TensorType.F32,
                    rows,
                    columns,
                    0,
                    infos[0].offset_bytes,
                    0 if is_separate else 4 * rows * columns,
                    bias=bias,
                    places=places,
                )
            )
        gate, up, down = projections
        layers.append(
            MoeLayer(layer_id, num_experts, 1, columns, rows, Activation.SWIGLU, gate, up, down)
        )
    return MoeSpec(tuple(layers)), tensors


def within(places: Sequence[Place], first: int, num_bytes: int) -> list[Place]:
    return [each for each in places if first <= each[1] and each[1] + each[2] <= first + num_bytes]


@given(
    NONCES,
    st.integers(1, 9),
    st.integers(1, 70),
    st.integers(1, 70),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_every_matrix_in_use_has_a_block_and_every_block_lies_within_one(
    nonce: bytes,
    num_experts: int,
    rows: int,
    columns: int,
    is_separate: bool,
    has_bias: bool,
    data: st.DataObject,
) -> None:
    spec, tensors = spec_of(num_experts, rows, columns, is_separate=is_separate, has_bias=has_bias)
    ids = st.lists(st.integers(0, num_experts - 1), min_size=1, unique=True)
    owned = OwnedExperts.from_lists({layer_id: data.draw(ids) for layer_id in (0, 1)})
    blocks = expert_blocks(nonce, spec, owned, tensors=tensors)
    left = Counter(blocks.places)
    for layer in spec.layers:
        for projection in layer.projections:
            for expert in owned.by_layer[layer.layer_id].tolist():
                _, start = projection.place_of(expert)
                (block,) = within(blocks.places, start, projection.num_bytes)
                assert block[2] == min(BLOCK_BYTES, projection.num_bytes)
                left[block] -= 1
    for tensor in tensors:
        if BIASES in tensor.name:  # small: whole
            found = within(blocks.places, tensor.offset_bytes, tensor.num_bytes)
            assert sum(size for _, _, size in found) == tensor.num_bytes
            left.subtract(found)
    assert not +left, "blocks of what is not in use"
    # What an expert is asked about does not hang on who else is there.
    alone = OwnedExperts.from_lists({0: [owned.by_layer[0].tolist()[-1]]})
    assert {*expert_blocks(nonce, spec, alone, tensors=()).places} <= {*blocks.places}


@given(NONCES, st.booleans())
def test_of_a_whole_model_every_tensor_has_blocks(nonce: bytes, is_separate: bool) -> None:
    spec, tensors = spec_of(5, 40, 40, is_separate=is_separate, has_bias=True)
    blocks = model_blocks(nonce, spec, tensors)
    covered = 0
    for tensor in tensors:
        found = within(blocks.places, tensor.offset_bytes, tensor.num_bytes)
        covered += len(found)
        if tensor.name == "other.weight":
            assert len(found) == BLOCKS_OF_TENSOR
            assert {size for _, _, size in found} == {BLOCK_BYTES}
        elif BIASES not in tensor.name:
            assert len(found) == (1 if is_separate else 5)
    assert covered == len(blocks.places)


def test_places_are_others_for_another_nonce_and_reach_every_part_of_a_matrix() -> None:
    spec, tensors = spec_of(2, 100, 100, is_separate=False, has_bias=False)
    owned = OwnedExperts.from_lists({0: [1]})
    gate = spec.layers[0].gate
    _, start = gate.place_of(1)
    seen = set()
    for number in range(200):
        blocks = expert_blocks(number.to_bytes(16, "little"), spec, owned, tensors=tensors)
        assert blocks.places == expert_blocks(blocks.nonce, spec, owned, tensors=tensors).places
        seen.add(blocks.places[0][1] - start)
    assert len(seen) > 190
    assert min(seen) < 0.03 * gate.num_bytes
    assert max(seen) + BLOCK_BYTES > 0.97 * gate.num_bytes


def test_the_digest_is_that_of_the_bytes_in_order_however_it_is_made() -> None:
    data = bytes(range(256)) * 40
    places = [(0, (37 * each) % 5000, 1 + each % 4096) for each in range(700)]

    def digest(content: bytes, *, nonce: bytes = b"n" * 16, chosen: list[Place] = places) -> str:
        def read(some: Sequence[Place]) -> bytes:
            return b"".join(content[first : first + size] for _, first, size in some)

        blocks, told = Blocks(nonce, chosen), list[tuple[int, int]]()
        found = blocks.digest(read, lambda num_done, num_total: told.append((num_done, num_total)))
        assert told == [(1, 3), (2, 3), (3, 3)]
        assert found == blocks.digest(read, alone=True)
        return found

    right = digest(data)
    assert re.fullmatch("[0-9a-f]{64}", right)
    assert right == digest(bytes(data))
    changed = bytearray(data)
    changed[4242] ^= 1
    assert digest(bytes(changed)) != right
    assert digest(data, nonce=b"m" * 16) != right
    assert digest(data, chosen=places[::-1]) != right


def test_what_ends_the_hashing_is_raised() -> None:
    def stop(num_done: int, num_total: int) -> None:
        raise KeyError("enough")

    blocks = Blocks(b"n" * 16, [(0, 0, 16)] * 1000)
    with pytest.raises(KeyError, match="enough"):
        blocks.digest(lambda places: b"", stop)


@pytest.mark.parametrize(
    "text", ["", "5e" * 15, "5e" * 17, "5E" * 16, "xy" * 16, " " * 32, "é" * 32]
)
def test_what_is_no_nonce_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match=r"nonce\b.*\b16 bytes"):
        nonce_from(text)
    assert nonce_from("5e" * 16) == b"\x5e" * 16
