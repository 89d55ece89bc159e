"""An expert that a step fetches: what is decided, what its slot gets, and what tables then say."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from dflash_adapters.quant import TensorType
from dflash_adapters.routing import Gating, RoutingRule
from dflash_adapters.spec import Activation, ExpertProjection, MoeLayer
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, address
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows, meta_shape
from dflash_runtime.compute.gpu.launch.decode_experts import (
    FETCH_COUNTS,
    FETCH_WORDS,
    MOST_PEERS,
    Choice,
    MailFetch,
)
from dflash_runtime.compute.gpu.launch.decode_tokens import Repack
from dflash_runtime.compute.gpu.launch.fetch_expert import FetchExpert, FetchTables
from dflash_runtime.compute.gpu.launch.layouts import ResidentExperts, ResidentMatrices, row_bytes
from dflash_runtime.compute.gpu.mailbox.kernels import MailKernels, MailPeer, MailSide
from dflash_runtime.compute.mailbox_layout import LINE_BYTES, part_words
from dflash_runtime.compute.step_order import padded_columns
from support.emulated_device import EmulatedDevice
from support.plain_slots import PlainSlots

E, K, SLOTS = 20, 4, 3
DECAY, MARGIN = 0.75, 0.25
Q4_K, Q5_0, Q6_K, Q8_0 = TensorType.Q4_K, TensorType.Q5_0, TensorType.Q6_K, TensorType.Q8_0
F32, MXFP4 = TensorType.F32, TensorType.MXFP4
TYPES = {
    "as in the file": (Q4_K, Q4_K, Q4_K),
    "in fields": (Q5_0, Q8_0, Q6_K),
    "odd bytes": (MXFP4, MXFP4, F32),
}


def layer_of(
    types: tuple[TensorType, ...], hidden_size: int = 512, ffn_size: int = 256
) -> MoeLayer:
    def projection(kind: TensorType, rows: int, columns: int) -> ExpertProjection:
        return ExpertProjection("", kind, rows, columns, 0, 0, 0)

    gate, up, down = types
    return MoeLayer(
        layer_id=0,
        num_experts=E,
        num_experts_used=K,
        hidden_size=hidden_size,
        ffn_size=ffn_size,
        activation=Activation.SWIGLU,
        gate=projection(gate, ffn_size, hidden_size),
        up=projection(up, ffn_size, hidden_size),
        down=projection(down, hidden_size, ffn_size),
    )


@pytest.mark.wide(2)
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("shift", [0, 2, 6])
def test_a_slot_gets_the_experts_bytes(
    device: EmulatedDevice, types: tuple[TensorType, ...], shift: int
) -> None:
    """Whatever the alignment of the file's matrices."""
    layer, rng, first_slot, slot = layer_of(types), np.random.default_rng(3), 2, 1
    sizes = [each.num_bytes for each in layer.projections]
    memory = rng.integers(0, 256, 4096 + 2 * sum(sizes) + 64, dtype=np.uint8)
    begin = -memory.ctypes.data % 16 + shift
    offsets = np.cumsum([begin, *(each + 48 for each in (*sizes, *sizes))])[:6].reshape(2, 3)
    mapping = device.map_host(memory)
    places = (offsets + mapping.device_address).astype(np.uint64)
    matrices, before = [], []
    for each in layer.projections:
        num_bytes = each.rows * row_bytes(each.tensor_type, each.columns)
        before.append(rng.integers(0, 256, (first_slot + SLOTS + 1) * num_bytes, dtype=np.uint8))
        matrices.append(ResidentMatrices(each.tensor_type, device.upload(before[-1])))
    gate, up, down = matrices
    experts = ResidentExperts(gate, up, down, device.upload(np.full(E, -1, np.int32)))
    own_ids = np.full(E, -1, np.int32)
    own_ids[[7, 11]] = 0, 1
    tables = FetchTables(
        decision=device.upload(np.array([2, slot, 11, -1], np.int32)),
        places=device.upload(places),
        own_ids=device.upload(own_ids),
        local_ids=device.upload(own_ids),
        first_slot=first_slot,
    )
    pair_slots = device.upload(np.full((1, K), -1, np.int32))
    FetchExpert(device, layer).launch(experts, tables, pair_slots=pair_slots)
    for index, each in enumerate(layer.projections):
        raw = memory[offsets[1, index] :][: each.num_bytes]
        num_bytes = each.rows * row_bytes(each.tensor_type, each.columns)
        out = device.zeros(num_bytes, np.uint8)
        Repack(device, each.tensor_type, columns=each.columns).launch(device.upload(raw), out)
        expected = before[index].reshape(-1, num_bytes)
        expected[first_slot + slot] = device.download(out)
        found = device.download(matrices[index].weights).reshape(-1, num_bytes)
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(device.download(pair_slots)[0], [-1, -1, first_slot + slot, -1])
    asked = own_ids.copy()
    asked[11] = -1
    np.testing.assert_array_equal(device.download(tables.local_ids), asked)
    assert device.download(experts.slot_of_expert)[11] == first_slot + slot
    mapping.close()


@dataclass
class Rig:
    """A layer's tables, and a plain version of what is decided. The peer has experts from 8 on."""

    device: EmulatedDevice
    layer: MoeLayer = field(default_factory=lambda: layer_of((Q8_0, Q8_0, Q8_0), 64, 32))

    def __post_init__(self) -> None:
        device = self.device
        ids = np.arange(E, dtype=np.int32)
        self.own_ids = np.where(ids >= 8, ids - 8, -1).astype(np.int32)
        self.plain = PlainSlots(self.own_ids, SLOTS, DECAY, MARGIN)
        self.local_ids: DeviceArray = device.upload(self.own_ids)
        self.slot_experts = device.upload(np.array(self.plain.slots, np.int32))
        self.scores_there = device.zeros(E, np.float32)
        self.decision = device.zeros(FETCH_WORDS, np.int32)
        self.counts = device.zeros(FETCH_COUNTS, np.uint32)
        own, other = device.zeros(1, np.uint32), device.zeros(1, np.uint32)
        self.words = own, other
        side = MailSide(device, [MailPeer(address(own), address(other))], 20_000)
        self.kernels = MailKernels(side)
        self.side = side

    def decide(self, chosen: I32Array, *, routes: bool) -> None:
        """Shapes: chosen [K], or [T, K]."""
        device, layer, columns = self.device, self.layer, self.layer.hidden_size
        chosen = chosen.reshape(-1, K)
        num_tokens = chosen.shape[0]
        rows = StepRows(
            device.zeros((num_tokens, padded_columns(columns)), np.int8),
            device.zeros(meta_shape(num_tokens, columns), np.float32),
            device.zeros((num_tokens, columns), np.float32),
        )
        logits = np.full((num_tokens, E), -50.0, np.float32)
        np.put_along_axis(logits, chosen, -np.arange(K, dtype=np.float32)[None], axis=1)
        choice = Choice(
            device.upload(chosen),
            device.upload(np.ones((num_tokens, K), np.float32)),
            logits=device.upload(logits) if routes else None,
        )
        num_lines = num_tokens * K + sum(-(-num_tokens * words // 2) for words in part_words(layer))
        request = device.zeros(num_lines * LINE_BYTES, np.uint8)
        fetch = MailFetch(
            scores=address(self.scores_there),
            slot_experts=address(self.slot_experts),
            decision=address(self.decision),
            counts=address(self.counts),
            decay=DECAY,
            margin=MARGIN,
            peer=0,
            num_slots=SLOTS,
        )
        asked_peers = device.zeros(MOST_PEERS, np.uint32)
        asks = self.kernels.asks(
            layer,
            rows,
            choice=choice,
            local_ids=[self.local_ids],
            requests=[address(request)],
            asked=asked_peers,
            fetch=fetch,
        )
        rule = RoutingRule(K, Gating.SOFTMAX, normalise=True) if routes else None
        self.kernels.begin()
        self.kernels.post(layer, rule, asks, num_tokens=num_tokens)


@pytest.mark.wide(2)
@pytest.mark.parametrize("num_tokens", [1, 2, 8])
@pytest.mark.parametrize("routes", [False, True])
def test_the_second_expert_that_is_asked_for_is_fetched(
    device: EmulatedDevice, routes: bool, num_tokens: int
) -> None:
    """Of all tokens of a step, which count as one use."""
    rig, rng = Rig(device), np.random.default_rng(1)
    seen = dict.fromkeys(("kept", "not kept", "left", "none", "several pairs"), 0)
    popularity = rng.dirichlet(np.full(E, 0.5)) + 0.01
    popularity[8:] /= num_tokens
    popularity /= popularity.sum()
    for _ in range(120 if num_tokens == 1 else 60):
        tokens = [rng.choice(E, K, replace=False, p=popularity) for _ in range(num_tokens)]
        chosen = np.array(tokens, np.int32)
        rig.decide(chosen, routes=routes)
        expected = rig.plain.step(chosen.reshape(-1).tolist())
        found = device.download(rig.decision).tolist()
        if expected is None:
            assert found[0] == -1
            seen["none"] += 1
        else:
            assert found == expected
            seen["not kept" if found[3] == -2 else "kept"] += 1
            seen["left"] += found[3] >= 0
            seen["several pairs"] += (chosen == found[2]).sum() > 1
        plain = rig.plain
        np.testing.assert_array_equal(device.download(rig.slot_experts), plain.slots)
        np.testing.assert_allclose(device.download(rig.scores_there), plain.scores, rtol=1e-5)
        counted = [plain.found, plain.fetched, plain.kept]
        assert device.download(rig.counts).tolist() == counted
        device.write(rig.local_ids, plain.local_ids)  # as fetch_expert does
    for what, number in seen.items():
        assert bool(number) == (num_tokens > 1 or what != "several pairs"), what
    assert all(counted)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_an_expert_that_was_used_infinitely_often_does_not_leave(
    device: EmulatedDevice, num_tokens: int
) -> None:
    """It is pinned; it comes when it is asked for as others are."""
    rig, rng, pinned = Rig(device), np.random.default_rng(5), 11
    rig.plain.scores[pinned] = np.inf
    device.write(rig.scores_there, rig.plain.scores)
    was_there, num_left = False, 0
    for _ in range(60):
        tokens = [rng.choice(E, K, replace=False) for _ in range(num_tokens)]
        chosen = np.array(tokens, np.int32)
        rig.decide(chosen, routes=True)
        expected = rig.plain.step(chosen.reshape(-1).tolist())
        found = device.download(rig.decision).tolist()
        assert found[0] == -1 if expected is None else found == expected
        device.write(rig.local_ids, rig.plain.local_ids)
        kept = device.download(rig.slot_experts)
        assert pinned in kept or not was_there
        was_there = pinned in kept
        num_left += expected is not None and expected[3] >= 0
    assert was_there
    assert num_left > 5
    assert np.isinf(device.download(rig.scores_there)[pinned])


def test_a_step_that_has_failed_fetches_nothing(device: EmulatedDevice) -> None:
    rig = Rig(device)
    rig.side.set_epoch(5, is_trial=True)
    rig.decide(np.array([9, 10, 11, 12], np.int32), routes=True)
    assert device.download(rig.decision)[0] == -1
    assert not device.download(rig.scores_there).any()
    assert not device.download(rig.counts).any()
    assert (device.download(rig.slot_experts) == -1).all()
