"""Gate and up that take a mailbox's request by themselves, and down that answers it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_adapters.quant import TensorType
from dflash_adapters.spec import Activation
from dflash_protocol.ids import AnyArray, F64Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice, address
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows
from dflash_runtime.compute.gpu.launch.decode_experts import (
    Choice,
    DecodeExperts,
    ExpertsShape,
    ExpertsUse,
    MailReply,
    MailRequest,
)
from dflash_runtime.compute.gpu.mailbox.kernels import MailKernels, MailPeer, MailSide
from dflash_runtime.compute.mailbox_layout import CHECK_FACTOR
from support.decode_experts_rig import Layer, Step, random_layer, random_step
from support.device_weights import as_int8_rows
from support.emulated_device import EmulatedDevice

ROUNDS_BIT = 1 << 30
"""Of mailbox_lines.cuh."""
EPOCH, ABORTED, BLAMED, ROUNDS = 2, 3, 4, 5
"""Words of MailSide.state."""

Q4_K, Q5_0, Q6_K, Q8_0 = TensorType.Q4_K, TensorType.Q5_0, TensorType.Q6_K, TensorType.Q8_0
F32, F16 = TensorType.F32, TensorType.F16
BASE = ExpertsShape(
    num_tokens=1,
    num_experts_used=3,
    num_experts=70,
    hidden_size=512,
    ffn_size=96,
    gate_type=Q4_K,
    up_type=Q4_K,
    down_type=Q5_0,
    gives_sums=True,
    use=ExpertsUse.TAKES_REQUEST,
)
SHAPES = {
    "bytes": BASE,
    "padded bytes": replace(
        BASE, num_tokens=2, hidden_size=160, gate_type=Q8_0, up_type=Q5_0, has_vectors=True
    ),
    "floats": replace(BASE, hidden_size=100, gate_type=F32, up_type=F16, down_type=F16),
    "bytes and floats": replace(BASE, num_tokens=3, hidden_size=288, gate_type=F16, up_type=Q8_0),
    "several lines a thread": replace(
        BASE, num_tokens=2, num_experts=3, hidden_size=7168, ffn_size=32, num_experts_used=1
    ),
}
MOST_LINES = 4096


@dataclass
class Daemon:
    """The side of a mailbox that is asked, and what it has of a layer."""

    device: KernelDevice
    layer: Layer
    relays: bool = False
    """Requests are far away, and brought here by a kernel before."""
    limit_ms: int = 20_000

    def __post_init__(self) -> None:
        device, shape = self.device, self.layer.shape
        self.relayed = device.zeros((MOST_LINES, 4), np.uint32)
        self.words = device.zeros(2, np.uint32)
        peer = MailPeer(address(self.words), address(self.words, 4))
        self.side = MailSide(device, (peer,), self.limit_ms)
        self.kernels = MailKernels(self.side)
        self.experts = DecodeExperts(device, shape)
        self.resident = self.layer.resident(device, slots_of(shape))
        sizes = shape.num_tokens, shape.num_experts_used
        self.choice = Choice(device.empty(sizes, np.int32), device.empty(sizes, np.float32))
        self.hidden = self.experts.hidden_rows()
        self.reply = device.zeros((shape.num_tokens * shape.hidden_size, 4), np.uint32)

    @property
    def state(self) -> AnyArray:
        return self.device.download(self.side.state)

    def step(self, lines: DeviceArray, *, begins: bool = True) -> AnyArray:
        """A step of one layer; its reply's lines."""
        if begins:
            self.kernels.begin()
        args = self.side.args
        request = MailRequest(args, address(lines), is_relayed=self.relays)
        if self.relays:
            shape, at = self.layer.shape, address(self.relayed)
            self.kernels.relay(moe_layer(shape), shape.num_tokens, request=request.lines, to=at)
            request.lines = at
        self.experts.launch_gate_up(self.resident, self.choice, request, self.hidden)
        to = MailReply(address(self.reply), args.state)
        self.experts.launch_down(self.resident, self.choice, self.hidden, to)
        return self.device.download(self.reply)


def moe_layer(shape: ExpertsShape) -> Any:
    """What kernels of a mailbox must know of such a layer."""
    gate, up = (SimpleNamespace(tensor_type=kind) for kind in (shape.gate_type, shape.up_type))
    sizes = {
        name: getattr(shape, name) for name in ("num_experts", "num_experts_used", "hidden_size")
    }
    return SimpleNamespace(gate=gate, up=up, **sizes)


def slots_of(shape: ExpertsShape) -> list[int]:
    """By expert; every seventh has none."""
    count = shape.num_experts
    return [-1 if expert % 7 == 3 else (expert * 11) % count for expert in range(count)]


@cache
def experts_of(shape: ExpertsShape) -> Layer:
    """Random ones, made once, as that takes longer than most tests."""
    rng = np.random.default_rng(1)
    layer = random_layer(rng, shape)
    if shape.has_vectors:
        rows = shape.ffn_size, shape.ffn_size, shape.hidden_size
        gate, up, down = (
            rng.standard_normal((shape.num_experts, size)).astype(np.float32) for size in rows
        )
        layer = replace(layer, biases=(gate, up, down), activation=Activation.GPT_OSS)
    return layer


def random_case(seed: int, shape: ExpertsShape) -> tuple[Layer, Step]:
    """Experts that are here, that are not, and a choice of none."""
    step = random_step(np.random.default_rng(seed), shape)
    if shape.num_experts_used > 1:
        step.topk_ids[0] = 10, -1, 5  # there is no slot for the first
    return experts_of(shape), step


def checked(words: AnyArray, epoch: int) -> AnyArray:
    """Shapes: words [lines * 2] uint32; result [lines, 4]."""
    lines = np.empty((words.size // 2, 4), np.uint32)
    lines[:, ::2] = words.reshape(-1, 2)
    lines[:, 1::2] = np.uint32(epoch) ^ lines[:, ::2] * np.uint32(CHECK_FACTOR)
    return lines


def request_lines(shape: ExpertsShape, step: Step, epoch: int, *, rounds: bool = False) -> AnyArray:
    """As mailbox_layout.py has them; padding is anything."""
    pairs = np.empty((shape.num_pairs, 2), np.uint32)
    pairs[:, 0] = step.topk_ids.ravel().view(np.uint32) ^ np.uint32(ROUNDS_BIT * rounds)
    pairs[:, 1] = step.topk_weights.ravel().view(np.uint32)
    parts = [pairs.ravel()]
    if shape.x_as_bytes:
        int8 = as_int8_rows(step.x)
        quants, meta = int8.quants.copy(), int8.meta.copy()
        quants[:, shape.hidden_size :] = 0x55
        meta[:, shape.hidden_size // 16 :] = np.nan
        parts += [quants.ravel().view(np.uint32), meta.ravel().view(np.uint32)]
    if shape.x_as_floats:
        parts.append(step.x.ravel().view(np.uint32))
    return checked(np.concatenate(parts), epoch)


def expected_sums(device: KernelDevice, layer: Layer, step: Step) -> F64Array:
    """Of the same kernels, given choice and rows. Shapes: result [T, H]."""
    experts = DecodeExperts(device, replace(layer.shape, use=ExpertsUse.ALONE))
    int8, resident = as_int8_rows(step.x), layer.resident(device, slots_of(layer.shape))
    x = StepRows(device.upload(int8.quants), device.upload(int8.meta), device.upload(step.x))
    choice = Choice(device.upload(step.topk_ids), device.upload(step.topk_weights))
    hidden, out = experts.hidden_rows(), device.empty(step.x.shape, np.float64)
    experts.launch_gate_up(resident, choice, x, hidden)
    experts.launch_down(resident, choice, hidden, out)
    sums: F64Array = device.download(out)
    return sums


@pytest.fixture(params=[False, True], ids=["here", "relayed"])
def relays(request: pytest.FixtureRequest) -> bool:
    is_relayed: bool = request.param
    return is_relayed


@pytest.mark.wide(2)
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_asked_for_has_the_bits_of_rows_and_a_choice(
    device: EmulatedDevice, name: str, relays: bool
) -> None:
    shape = SHAPES[name]
    layer, step = random_case(3, shape)
    expected = expected_sums(device, layer, step)
    assert expected.any(axis=1).all()
    daemon = Daemon(device, layer, relays)
    reply = daemon.step(device.upload(request_lines(shape, step, epoch=1)))
    np.testing.assert_array_equal(reply, checked(expected.view(np.uint32).ravel(), epoch=1))
    np.testing.assert_array_equal(device.download(daemon.choice.topk_ids), step.topk_ids)
    np.testing.assert_array_equal(device.download(daemon.choice.topk_weights), step.topk_weights)
    assert list(daemon.state[EPOCH:]) == [1, 0, 0, 0]


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_every_device_takes_what_it_is_asked_for(
    any_device: KernelDevice, num_tokens: int, relays: bool
) -> None:
    shape = replace(BASE, num_tokens=num_tokens, num_experts=14, hidden_size=1024, ffn_size=512)
    layer, step = random_case(11, shape)
    expected = expected_sums(any_device, layer, step)
    daemon = Daemon(any_device, layer, relays)
    for epoch in range(1, 4):
        reply = daemon.step(any_device.upload(request_lines(shape, step, epoch)))
        assert daemon.state[ABORTED] == 0
        np.testing.assert_array_equal(reply, checked(expected.view(np.uint32).ravel(), epoch))


def test_an_answer_may_be_rounded(device: EmulatedDevice) -> None:
    layer, step = random_case(4, BASE)
    expected = expected_sums(device, layer, step).astype(np.float32)
    daemon = Daemon(device, layer)
    for epoch, rounds in ((1, True), (2, False)):
        reply = daemon.step(device.upload(request_lines(BASE, step, epoch, rounds=rounds)))
        assert daemon.state[ROUNDS] == rounds
        if rounds:
            rounded = checked(expected.view(np.uint32).ravel(), ~epoch & 0xFFFFFFFF)
            np.testing.assert_array_equal(reply[: len(rounded)], rounded)
    np.testing.assert_array_equal(device.download(daemon.choice.topk_ids), step.topk_ids)


def test_ids_and_slots_that_do_not_exist_read_nothing(backward_device: EmulatedDevice) -> None:
    device = backward_device
    layer, step = random_case(5, BASE)
    step.topk_ids[0] = 70, (1 << 29) + 5, -1 << 31
    daemon = Daemon(device, layer)
    reply = daemon.step(device.upload(request_lines(BASE, step, epoch=1)))
    nothing = np.zeros(2 * BASE.hidden_size, np.uint32)
    np.testing.assert_array_equal(reply, checked(nothing, epoch=1))
    step.topk_ids[0] = 0, 1, 2
    table = np.full(70, 71, np.int32)
    daemon.resident = replace(daemon.resident, slot_of_expert=device.upload(table))
    reply = daemon.step(device.upload(request_lines(BASE, step, epoch=2)))
    np.testing.assert_array_equal(reply, checked(nothing, epoch=2))


MISSING = {"a pair": 1, "a quant": 8, "a scale": 3 + 64 + 7, "the last line": -1}


@pytest.mark.wide(2)
@pytest.mark.parametrize("what", MISSING)
@pytest.mark.parametrize("damage", ["of the step before", "half", "a bit"])
def test_what_does_not_come_whole_ends_the_step_unanswered(
    backward_device: EmulatedDevice, what: str, damage: str, relays: bool
) -> None:
    device = backward_device
    layer, step = random_case(6, BASE)
    lines, line = request_lines(BASE, step, epoch=1), MISSING[what]
    if damage == "a bit":
        lines[line, 2] ^= 1 << 9
    else:
        lines[line, 2 * (damage == "half") :] = 0
    daemon = Daemon(device, layer, relays, limit_ms=20)
    uploaded = device.upload(lines)
    assert not daemon.step(uploaded).any()
    assert list(daemon.state[EPOCH:BLAMED]) == [1, 1]
    assert device.download(daemon.words)[0] == 1
    # All that is asked later returns at once, even what could be had.
    device.write(uploaded, request_lines(BASE, step, epoch=2))
    before = daemon.state
    assert not daemon.step(uploaded).any()
    assert list(daemon.state[EPOCH:BLAMED]) == [2, 1]
    assert (daemon.state[BLAMED:] == before[BLAMED:]).all()
    assert (device.download(daemon.choice.topk_ids) == -1).all()
    assert not device.download(daemon.choice.topk_weights).any()


def test_a_trial_waits_for_nothing(device: EmulatedDevice, relays: bool) -> None:
    layer, _ = random_case(7, BASE)
    daemon = Daemon(device, layer, relays, limit_ms=600_000)
    lines = device.zeros((MISSING["a scale"] * 2, 4), np.uint32)
    daemon.side.set_epoch(0, is_trial=True)
    assert not daemon.step(lines).any()
    assert not device.download(daemon.words).any()
    assert (device.download(daemon.choice.topk_ids) == -1).all()


def test_a_parent_that_has_given_up_is_not_waited_for(relays: bool) -> None:
    device = EmulatedDevice()
    layer, step = random_case(8, BASE)
    daemon = Daemon(device, layer, relays, limit_ms=600_000)
    device.write(daemon.words, np.array([0, 5], np.uint32))
    lines = request_lines(BASE, step, epoch=1)
    lines[-1] = 0
    assert not daemon.step(device.upload(lines)).any()
    assert list(daemon.state[EPOCH:ROUNDS]) == [1, 1, 1]


@pytest.mark.parametrize("order", ["any", "backward", "weights last"])
def test_halves_may_come_in_any_order_while_they_are_waited_for(order: str, relays: bool) -> None:
    device = EmulatedDevice()
    shape = SHAPES["bytes and floats"]
    layer, step = random_case(9, shape)
    expected = expected_sums(device, layer, step)
    lines = request_lines(shape, step, epoch=1)
    uploaded = device.zeros(lines.shape, np.uint32)
    halves = np.random.default_rng(1).permutation(2 * len(lines))
    if order == "backward":
        halves = np.sort(halves)[::-1]
    if order == "weights last":
        is_weight = (halves % 2 == 1) & (halves < 2 * shape.num_pairs)
        halves = np.concatenate([halves[~is_weight], halves[is_weight]])

    def send() -> None:
        for half in halves:
            words = slice(half % 2 * 2, half % 2 * 2 + 2)
            uploaded[half // 2, words] = lines[half // 2, words]
            time.sleep(20e-6)

    daemon = Daemon(device, layer, relays)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        reply = daemon.step(uploaded)
    finally:
        thread.join()
    np.testing.assert_array_equal(reply, checked(expected.view(np.uint32).ravel(), epoch=1))
    np.testing.assert_array_equal(device.download(daemon.choice.topk_weights), step.topk_weights)


def test_rows_are_not_taken_for_a_request() -> None:
    device = EmulatedDevice()
    layer, step = random_case(10, BASE)
    daemon, int8 = Daemon(device, layer), as_int8_rows(step.x)
    x = StepRows(device.upload(int8.quants), device.upload(int8.meta))
    with pytest.raises(ValueError, match=r"\brequest\b.*compiled"):
        daemon.experts.launch_gate_up(daemon.resident, daemon.choice, x, daemon.hidden)
    plain = DecodeExperts(device, replace(BASE, use=ExpertsUse.ALONE))
    with pytest.raises(ValueError, match=r"\brequest\b.*compiled"):
        plain.launch_gate_up(daemon.resident, daemon.choice, MailRequest(), daemon.hidden)
    known = replace(daemon.choice, slots=device.zeros((1, 3), np.int32))
    with pytest.raises(ValueError, match="slots"):
        daemon.experts.launch_gate_up(daemon.resident, known, MailRequest(), daemon.hidden)
    with pytest.raises(ValueError, match="mailbox"):
        replace(BASE, gives_sums=False)
