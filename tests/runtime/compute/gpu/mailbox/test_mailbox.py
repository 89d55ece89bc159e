"""Kernels of the mailbox, both of whose sides are the same device here: one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.routing import Gating, RoutingRule
from dflash_adapters.spec import MoeLayer
from dflash_protocol.ids import AnyArray, F64Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice, address
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows, meta_shape
from dflash_runtime.compute.gpu.launch.decode_experts import (
    MOST_PEERS,
    Choice,
    DecodeExperts,
    ExpertsUse,
    experts_shape,
)
from dflash_runtime.compute.gpu.layers.matrix import Uploader
from dflash_runtime.compute.gpu.layers.resident import load_resident
from dflash_runtime.compute.gpu.mailbox.kernels import MailKernels, MailPeer, MailSide
from dflash_runtime.compute.gpu.mailbox.probe import (
    FAULT_BYTES,
    ProbePlan,
    new_faults,
    probe_args,
    read_faults,
)
from dflash_runtime.compute.mail_trial import FaultKind, Faults
from dflash_runtime.compute.mailbox_layout import (
    CHECK_FACTOR,
    LINE_BYTES,
    MailLayout,
    MailLines,
    part_words,
)
from dflash_runtime.compute.step_order import padded_columns
from support.device_weights import as_int8_rows
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import TINY
from support.random_models import write_qwen3moe

EPOCH, ABORTED, BLAMED, ROUNDS = 2, 3, 4, 5
"""Words of MailSide.state."""

_TIMEOUT_S = 20.0
"""With what happens every other time, if another thread runs meanwhile."""
NONE = dict.fromkeys(FaultKind, 0)
MANY_COLUMNS, MANY_LINES = 5120, 2600
"""So that threads have several lines each, more than they look at together."""


@dataclass
class Side:
    """One side with three peers, and the words that they tell each other."""

    mail: MailSide
    kernels: MailKernels
    own: DeviceArray
    other: DeviceArray
    failed: DeviceArray

    @property
    def state(self) -> AnyArray:
        return self.mail.device.download(self.mail.state)


def side_of(device: KernelDevice, *, limit_ms: int = 20_000) -> Side:
    own, other = device.zeros(3, np.uint32), device.zeros(3, np.uint32)
    peers = [MailPeer(address(own, 4 * peer), address(other, 4 * peer)) for peer in range(3)]
    failed = device.zeros(1, np.uint32)
    mail = MailSide(device, peers, limit_ms, failed=address(failed))
    return Side(mail, MailKernels(mail), own, other, failed)


@pytest.fixture(scope="module", params=["F32", "Q8_0"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_qwen3moe(folder / "m.gguf", TINY, seed=1, tensor_type=request.param)


@pytest.fixture
def layer(file: Path) -> Iterator[MoeLayer]:
    with GgufFile.open(file) as opened:
        yield read_spec(opened).moe.layers[0]


def new_rows(device: KernelDevice, columns: int, *, seed: int | None = None) -> StepRows:
    """Rows as experts read them, with numbers or without."""
    rng = np.random.default_rng(seed)
    shapes = ((1, padded_columns(columns)), np.int8), (meta_shape(1, columns), np.float32)
    arrays = [
        device.empty(shape, dtype)
        if seed is None
        else device.upload(rng.integers(-99, 99, shape).astype(dtype))
        for shape, dtype in (*shapes, ((1, columns), np.float32))
    ]
    return StepRows(*arrays)


@pytest.mark.wide(2)
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("is_chosen", [False, True])
@pytest.mark.parametrize("columns", [TINY.hidden_size, MANY_COLUMNS])
def test_what_is_posted_is_taken(
    device: EmulatedDevice, layer: MoeLayer, is_chosen: bool, rounds: bool, columns: int
) -> None:
    layer = replace(layer, hidden_size=columns)
    used, num_experts = layer.num_experts_used, layer.num_experts
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((1, num_experts)).astype(np.float32)
    rule = RoutingRule(num_experts_used=used, gating=Gating.SOFTMAX, normalise=True)
    chosen = np.argsort(-logits[0])[:used].astype(np.int32)
    weights = np.exp(logits[0, chosen].astype(np.float64))
    weights /= weights.sum()
    choice = Choice(
        device.upload(chosen[None]) if is_chosen else device.empty((1, used), np.int32),
        device.upload(weights[None].astype(np.float32))
        if is_chosen
        else device.empty((1, used), np.float32),
        logits=None if is_chosen else device.upload(logits),
        selections=device.zeros(num_experts, np.uint32),
    )
    num_peers = 1 if rounds else 2
    tables = [rng.integers(-1, num_experts, num_experts).astype(np.int32) for _ in range(num_peers)]
    tables[0][chosen[:2]] = 1, -1
    tables_there = [device.upload(table) for table in tables]
    num_lines = used + sum(-(-words // 2) for words in part_words(layer))
    requests = device.zeros((2, num_lines * LINE_BYTES), np.uint8)
    places = [address(requests, peer * num_lines * LINE_BYTES) for peer in range(num_peers)]
    parent, rows = side_of(device), new_rows(device, layer.hidden_size, seed=4)
    asked_peers = device.zeros(MOST_PEERS, np.uint32)
    parent.kernels.begin()
    asks = parent.kernels.asks(
        layer,
        rows,
        choice=choice,
        local_ids=tables_there,
        requests=places,
        asked=asked_peers,
        always=[1],
        rounds=rounds,
    )
    parent.kernels.post(layer, None if is_chosen else rule, asks, num_tokens=1)
    has_pairs = [bool((table[chosen] >= 0).any()) for table in tables]
    waits = [*has_pairs, *[False] * MOST_PEERS]
    waits[1] = num_peers > 1
    np.testing.assert_array_equal(device.download(asked_peers), waits[:MOST_PEERS])
    counts = np.bincount(chosen, minlength=num_experts)
    assert choice.selections is not None
    np.testing.assert_array_equal(device.download(choice.selections), counts)
    np.testing.assert_array_equal(device.download(choice.topk_ids)[0], chosen)
    for table, request in zip(tables, places, strict=True):
        daemon, taken = side_of(device), new_rows(device, layer.hidden_size)
        slots = device.empty((1, used), np.int32)
        asked = Choice(
            device.empty((1, used), np.int32), device.empty((1, used), np.float32), slots=slots
        )
        slot_of_expert = rng.permutation(num_experts).astype(np.int32)
        slot_of_expert[0] = -1
        daemon.kernels.begin()
        daemon.kernels.take(
            layer, taken, asked, slot_of_expert=device.upload(slot_of_expert), request=request
        )
        np.testing.assert_array_equal(device.download(asked.topk_ids)[0], table[chosen])
        expected = np.where(table[chosen] < 0, -1, slot_of_expert[table[chosen]])
        np.testing.assert_array_equal(device.download(slots)[0], expected)
        found = device.download(asked.topk_weights)[0]
        np.testing.assert_allclose(found, weights, rtol=1e-6)
        given = ((rows.quants, taken.quants), (rows.meta, taken.meta), (rows.values, taken.values))
        for num_words, (sent, arrived) in zip(part_words(layer), given, strict=True):
            if num_words:
                assert sent is not None
                assert arrived is not None
                np.testing.assert_array_equal(device.download(arrived), device.download(sent))
        assert daemon.state[EPOCH] == 1
        assert not daemon.state[ABORTED]
        assert daemon.state[ROUNDS] == rounds


def reply_lines(values: F64Array, epoch: int) -> AnyArray:
    """Shapes: values [H]; result [H, 4] uint32."""
    lines = np.empty((values.size, 4), np.uint32)
    lines[:, ::2] = values.view(np.uint32).reshape(-1, 2)
    lines[:, 1::2] = epoch ^ lines[:, ::2] * np.uint32(CHECK_FACTOR)
    return lines


def test_replies_are_added_in_order_and_rounded_once(
    device: EmulatedDevice, layer: MoeLayer
) -> None:
    rng = np.random.default_rng(5)
    sums = rng.standard_normal((3, layer.hidden_size)) * [[1.0], [1e9], [1.0]]
    before = rng.standard_normal((1, layer.hidden_size)).astype(np.float32)
    side, residual = side_of(device), device.upload(before)
    arrays = [device.upload(reply_lines(each, epoch=1)) for each in sums]
    side.kernels.begin()
    replies = side.kernels.replies({peer: address(lines) for peer, lines in enumerate(arrays)})
    side.kernels.add(layer, None, residual, replies=replies)
    expected = before + (((0.0 + sums[0]) + sums[1]) + sums[2]).astype(np.float32)
    np.testing.assert_array_equal(device.download(residual), expected)


@pytest.mark.wide(2)
@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("slow", [(), (1,), (0, 1, 2)])
def test_a_reply_of_a_peer_that_was_not_asked_is_not_waited_for(
    device: EmulatedDevice, layer: MoeLayer, is_rounded: bool, slow: tuple[int, ...]
) -> None:
    sums, before = np.full(layer.hidden_size, 3.0), np.ones((1, layer.hidden_size), np.float32)
    side, residual = side_of(device, limit_ms=20), device.upload(before)
    there = device.upload(reply_lines(sums, epoch=1))
    missing = device.upload(reply_lines(sums, epoch=2))
    asked = device.upload(np.array([0, 1] + [0] * (MOST_PEERS - 2), np.uint32))
    side.kernels.begin()
    lines = [missing] if is_rounded else [missing, there, missing]
    numbered = {peer: address(each) for peer, each in enumerate(lines)}
    replies = side.kernels.replies(numbered, asked, slow=slow)
    side.kernels.add(layer, None, residual, replies=replies, rounded=is_rounded)
    assert not side.state[ABORTED]
    expected = before if is_rounded else before + np.float32(3)
    np.testing.assert_array_equal(device.download(residual), expected)


def rounded_lines(values: F64Array, epoch: int) -> AnyArray:
    """Shapes: values [H]; result [H / 2, 4] uint32."""
    lines = np.empty((values.size // 2, 4), np.uint32)
    lines[:, ::2] = values.astype(np.float32).view(np.uint32).reshape(-1, 2)
    lines[:, 1::2] = ~np.uint32(epoch) ^ lines[:, ::2] * np.uint32(CHECK_FACTOR)
    return lines


@pytest.mark.wide(2)
@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("slow", [(), (0,)])
def test_a_rounded_reply_is_taken_for_nothing_else(
    device: EmulatedDevice, layer: MoeLayer, is_right: bool, slow: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(6)
    sums = rng.standard_normal(layer.hidden_size)
    before = rng.standard_normal((1, layer.hidden_size)).astype(np.float32)
    rounded, exact = rounded_lines(sums, epoch=1), reply_lines(sums, epoch=1)
    exact[: len(rounded)] = exact[: len(rounded)] if is_right else rounded
    for lines, is_rounded in ((rounded if is_right else exact[::2], True), (exact, False)):
        side = side_of(device, limit_ms=20_000 if is_right else 20)
        residual = device.upload(before)
        array = device.upload(np.ascontiguousarray(lines))
        side.kernels.begin()
        replies = side.kernels.replies({0: address(array)}, slow=slow)
        side.kernels.add(layer, None, residual, replies=replies, rounded=is_rounded)
        assert side.state[ABORTED] == (not is_right)
        if is_right:
            expected = before + sums.astype(np.float32)
            np.testing.assert_array_equal(device.download(residual), expected)


@pytest.mark.wide(2)
@pytest.mark.parametrize("is_chosen", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_experts_that_ask_peers_do_what_two_kernels_do(
    device: EmulatedDevice, file: Path, layer: MoeLayer, num_tokens: int, is_chosen: bool
) -> None:
    used, num_experts, rng = layer.num_experts_used, layer.num_experts, np.random.default_rng(5)
    here = np.arange(0, num_experts, 2, dtype=np.int32)
    with GgufFile.open(file) as opened:
        resident, _ = load_resident(
            device, Uploader(device), opened, layer=layer, global_expert_ids=here
        )
    rule = None if is_chosen else RoutingRule(used, Gating.SOFTMAX, normalise=True)
    logits = rng.standard_normal((num_tokens, num_experts)).astype(np.float32)
    chosen = np.argsort(-logits)[:, :used].astype(np.int32)
    tables = [np.where(np.arange(num_experts) % 2 == 1, 7, -1), np.full(num_experts, -1)]
    tables_there = [device.upload(table.astype(np.int32)) for table in tables]
    columns = layer.hidden_size
    values = rng.standard_normal((num_tokens, columns)).astype(np.float32)
    int8 = as_int8_rows(values)
    rows = StepRows(device.upload(int8.quants), device.upload(int8.meta), device.upload(values))
    num_lines = num_tokens * (used + sum(-(-words // 2) for words in part_words(layer)))
    side, found = side_of(device), list[list[AnyArray]]()
    side.kernels.begin()
    for at_once in (False, True):
        ids, weights = np.zeros_like(chosen), np.ones(chosen.shape, np.float32)
        choice = Choice(
            device.upload(chosen if is_chosen else ids),
            device.upload(weights),
            logits=None if is_chosen else device.upload(logits),
            selections=device.zeros(num_experts, np.uint32),
        )
        requests = device.zeros((2, num_lines * LINE_BYTES), np.uint8)
        asked = device.zeros(MOST_PEERS, np.uint32)
        asks = side.kernels.asks(
            layer,
            rows,
            choice=replace(choice, selections=None) if at_once else choice,
            local_ids=tables_there,
            requests=[address(requests, peer * num_lines * LINE_BYTES) for peer in range(2)],
            asked=asked,
        )
        if at_once:
            experts = DecodeExperts(
                device, experts_shape(layer, num_tokens, rule=rule, use=ExpertsUse.ASKS_PEERS)
            )
            hidden = experts.hidden_rows()
            experts.launch_gate_up(resident.experts, choice, rows, hidden, post=asks)
        else:
            side.kernels.post(layer, rule, asks, num_tokens=num_tokens)
            experts = DecodeExperts(device, experts_shape(layer, num_tokens))
            hidden = experts.hidden_rows()
            known = Choice(choice.topk_ids, choice.topk_weights)
            experts.launch_gate_up(resident.experts, known, rows, hidden)
        assert choice.selections is not None
        parts = [hidden.quants, hidden.meta, hidden.values, choice.topk_ids, choice.topk_weights]
        there = [*(part for part in parts if part is not None), choice.selections, requests, asked]
        found.append([device.download(each).copy() for each in there])
    for separate, together in zip(*found, strict=True):
        np.testing.assert_array_equal(separate, together)
    np.testing.assert_array_equal(found[1][-1][:2], [(chosen % 2 == 1).any(), False])
    assert found[1][0].any()
    assert found[1][-2].any()


def test_only_a_single_reply_may_be_rounded(device: EmulatedDevice, layer: MoeLayer) -> None:
    used = layer.num_experts_used
    choice = Choice(device.empty((1, used), np.int32), device.empty((1, used), np.float32))
    table = device.zeros(layer.num_experts, np.int32)
    rows = new_rows(device, layer.hidden_size, seed=4)
    with pytest.raises(ValueError, match="rounds"):
        side_of(device).kernels.asks(
            layer,
            rows,
            choice=choice,
            local_ids=[table, table],
            requests=[0, 0],
            asked=device.zeros(MOST_PEERS, np.uint32),
            rounds=True,
        )


@pytest.mark.wide(2)
@pytest.mark.parametrize("what", ["another step's", "a damaged word", "a damaged check"])
def test_who_does_not_answer_ends_the_step_and_all_after_it(
    device: EmulatedDevice, layer: MoeLayer, what: str
) -> None:
    answered = device.upload(reply_lines(np.ones(layer.hidden_size), epoch=1))
    lines = reply_lines(np.ones(layer.hidden_size), epoch=7 if what == "another step's" else 1)
    if what.startswith("a damaged"):
        lines[5, 2 if what == "a damaged word" else 3] ^= 1 << 30
    late = device.upload(lines)
    side = side_of(device, limit_ms=50)
    before = np.ones((1, layer.hidden_size), np.float32)
    residual = device.upload(before)
    lines_of = {0: address(answered), 1: address(answered), 2: address(late)}
    replies = side.kernels.replies(lines_of)
    side.kernels.begin()
    side.kernels.add(layer, None, residual, replies=replies)
    assert side.state[ABORTED] == 1
    assert side.state[BLAMED] == 3
    np.testing.assert_array_equal(device.download(side.own), [1, 1, 1])
    assert device.download(side.failed)[0] == 1
    after = before.copy()
    if what != "another step's":  # what was right of it has been added, to what nobody will use
        after += 3
        after[0, 5] = 1
    np.testing.assert_array_equal(device.download(residual), after)
    side.mail.limit_ms = 600_000  # nothing is waited for any more
    side.kernels.begin()
    side.kernels.add(layer, None, residual, replies=side.kernels.replies(lines_of))
    assert list(side.state[EPOCH : ABORTED + 1]) == [2, 1]
    np.testing.assert_array_equal(device.download(residual), after)


def test_a_peer_that_has_given_up_is_not_waited_for(
    device: EmulatedDevice, layer: MoeLayer
) -> None:
    side = side_of(device, limit_ms=600_000)
    device.write(side.other, np.array([0, 5, 0], np.uint32))
    lines = device.zeros((layer.hidden_size, 4), np.uint32)
    residual = device.zeros((1, layer.hidden_size), np.float32)
    side.kernels.begin()
    side.kernels.add(layer, None, residual, replies=side.kernels.replies({0: address(lines)}))
    assert side.state[ABORTED] == 1
    assert side.state[BLAMED] == 2


class ProbeRig:
    """Both sides of a probe on one device, one after the other, in the same memory."""

    def __init__(self, device: EmulatedDevice, layout: MailLayout) -> None:
        self.device = device
        self.requests = device.zeros((layout.request_lines, 4), np.uint32)
        self.replies = device.zeros((layout.reply_lines, 4), np.uint32)
        self.lines = MailLines(layout, address(self.requests), address(self.replies))
        self.ticks = device.zeros(1, np.int64)

    def run(self, *, is_echo: bool, epoch: int, limit_ms: int = 20_000) -> Faults:
        """One round that has this epoch; what its side found."""
        device, side = self.device, side_of(self.device, limit_ms=limit_ms)
        faults, plan = new_faults(device), ProbePlan(1, seed=9, follows=True, longest_pause_ns=1000)
        side.mail.set_epoch(epoch - 1)
        args = probe_args(device, self.lines, plan, faults=faults, ticks=self.ticks)
        side.kernels.probe(args, is_echo=is_echo)
        assert side.state[EPOCH] == epoch
        return read_faults(device.download(faults).tobytes(), first_epoch=epoch)

    def damage(self, lines: DeviceArray, line: int, *, column: int = 0, by: int = 1) -> None:
        """Change a word (columns 0, 2) or an epoch (1, 3) of a line."""
        damaged = self.device.download(lines)
        damaged[line, column] += by
        self.device.write(lines, damaged)


@pytest.fixture(params=[8, MANY_LINES])
def rig(device: EmulatedDevice, request: pytest.FixtureRequest) -> ProbeRig:
    return ProbeRig(device, MailLayout(1, request_lines=request.param, reply_lines=request.param))


def test_a_probe_finds_what_did_not_arrive_as_sent(rig: ProbeRig) -> None:
    # What the ping asks is in its place when the echo looks, and the other way round.
    unanswered = rig.run(is_echo=False, epoch=1, limit_ms=20)
    num_lines = rig.lines.layout.reply_lines
    assert unanswered.counts == {**NONE, FaultKind.MISSING: num_lines}
    assert unanswered.first is not None
    assert (unanswered.first.expected, unanswered.first.found) == (1, 0)
    for epoch in (1, 2):
        if epoch == 2:
            rig.run(is_echo=False, epoch=2, limit_ms=20)
        assert rig.run(is_echo=True, epoch=epoch).counts == NONE
        assert rig.run(is_echo=False, epoch=epoch).counts == NONE
        assert rig.device.download(rig.ticks)[0] > 0


@pytest.mark.wide(2)
@pytest.mark.parametrize("is_echo", [False, True])
def test_what_a_probe_finds_is_named(rig: ProbeRig, is_echo: bool) -> None:
    rig.run(is_echo=False, epoch=1, limit_ms=20)
    rig.run(is_echo=True, epoch=1)
    before = {name: rig.device.download(getattr(rig, name)) for name in ("requests", "replies")}
    rig.run(is_echo=False, epoch=2, limit_ms=20)
    rig.run(is_echo=True, epoch=2)
    name = "requests" if is_echo else "replies"
    lines, old = getattr(rig, name), before[name]
    clean = rig.device.download(lines)
    rig.damage(lines, 3, column=2)
    rig.damage(lines, 5)
    found = rig.run(is_echo=is_echo, epoch=2)
    assert found.counts == {**NONE, FaultKind.WRONG: 2}
    assert found.first is not None
    word = (found.first.line, found.first.word)
    assert word in ((3, 1), (5, 0))
    expected = int(clean[word[0], 2 * word[1]])
    assert (found.first.expected, found.first.found) == (expected, expected + 1)
    rig.device.write(lines, clean)
    rig.damage(lines, 6, column=3)  # of a word that is right
    found = rig.run(is_echo=is_echo, epoch=2)
    assert found.counts == {**NONE, FaultKind.WRONG: 1}
    assert found.first is not None
    assert (found.first.line, found.first.found - found.first.expected) == (6, 1)
    # A word of the round before with the new check, and the other way round.
    for column in (0, 1):
        torn = clean.copy()
        torn[4, column] = old[4, column]
        rig.device.write(lines, torn)
        assert rig.run(is_echo=is_echo, epoch=2).counts == {**NONE, FaultKind.TORN: 1}
    # One half of a line is still of the round before: nobody takes it for this one.
    late = clean.copy()
    at = len(late) - 4  # others of its thread's lines have come
    late[at, 2:] = old[at, 2:]
    rig.device.write(lines, late)
    missing = rig.run(is_echo=is_echo, epoch=2, limit_ms=20)
    assert missing.counts == {**NONE, FaultKind.MISSING: 1}
    assert missing.first is not None
    assert (missing.first.line, missing.first.word) == (at, 1)
    assert (missing.first.expected, missing.first.found) == (2, 1)


@pytest.mark.wide(2)
@pytest.mark.parametrize("kind", [FaultKind.STALE, FaultKind.TORN])
def test_lines_that_change_while_they_are_looked_at(rig: ProbeRig, kind: FaultKind) -> None:
    """A line that is now this round's and now the last one's, or neither's."""
    for epoch in (1, 2):
        rig.run(is_echo=False, epoch=epoch, limit_ms=20)
        rig.run(is_echo=True, epoch=epoch)
        if epoch == 1:
            other = rig.device.download(rig.replies)[4]
    right = rig.device.download(rig.replies)[4]
    if kind is FaultKind.TORN:
        other = right ^ np.array([0, 0, 1, 0], np.uint32)
    stop = threading.Event()

    def toggle() -> None:
        while not stop.is_set():
            for line in (other, right):
                rig.replies[4] = line
                time.sleep(50e-6)

    thread = threading.Thread(target=toggle, daemon=True)
    thread.start()
    try:
        end_s = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < end_s:
            found = dict(rig.run(is_echo=False, epoch=2).counts)
            if kind is FaultKind.TORN:
                found[FaultKind.WRONG] = 0  # when it was looked at again, or for too long
            assert found == {**NONE, kind: found[kind]}
            if found[kind]:
                break
        else:
            pytest.fail("a line that changed was never noticed")
    finally:
        stop.set()
        thread.join()


def test_what_the_other_process_tells_of_faults_may_be_anything() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        told = read_faults(rng.bytes(FAULT_BYTES), first_epoch=7)
        assert told.total >= 0
    assert read_faults(bytes(FAULT_BYTES), first_epoch=1).first is None
