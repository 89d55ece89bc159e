"""Replies that are computed here too: which, how many, and what is told apart."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_adapters.spec import MoeLayer
from dflash_protocol.batch import HostHidden, RoutedBatch, group_by_expert
from dflash_protocol.ids import F32Array, F64Array, I32Array, Phase
from dflash_protocol.payloads import NEGOTIABLE, PayloadType, as_received
from dflash_runtime.compute import ExpertBank
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.reference import ReferenceBackend
from dflash_runtime.experts.remote import reply_checks
from dflash_runtime.experts.remote.reply_checks import (
    CLASS_BOUND,
    EVERY,
    MOST_SHARE,
    CheckSchedule,
    ReplyChecker,
)
from support.emulated_device import EmulatedDevice
from support.expert_files import write_expert_layer

E = 6
LOCAL_TO_GLOBAL: I32Array = np.array([4, 1, 5, 0, 3, 2], np.int32)
"""What the daemon calls its experts, in an order of its own."""
CLASSES = ("reference", "cpu", "gpu")


class Clock:
    """Stands still unless it is told not to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Side:
    """Experts as a numeric class computes them: by global id, and by the daemon's."""

    every: ExpertBank
    owned: ExpertBank


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Side]]:
    path = tmp_path_factory.mktemp("experts") / "q4.gguf"
    layer: MoeLayer = write_expert_layer(
        path, num_experts=E, num_experts_used=3, hidden_size=96, ffn_size=64,
        types=(TensorType.Q4_0,) * 3,
    )  # fmt: skip
    cpu = CpuBackend(num_threads=1)
    backends: dict[str, CpuBackend | CupyBackend | ReferenceBackend] = {
        "reference": ReferenceBackend(),
        "cpu": cpu,
        "gpu": CupyBackend(EmulatedDevice(), max_chunk=64, scratch_bytes=16 << 20),
    }
    with GgufFile.open(path) as file:
        ids = np.arange(E, dtype=np.int32)
        yield {
            name: Side(
                backend.load_experts(file, layer, ids),
                backend.load_experts(file, layer, LOCAL_TO_GLOBAL),
            )
            for name, backend in backends.items()
        }
    cpu.close()


def batch_of(
    num_tokens: int, seed: int, phase: Phase, *, scale: F32Array | None = None
) -> RoutedBatch:
    """Rows with a few large columns, and three experts for each but the last, which has none."""
    random = np.random.default_rng(seed)
    hidden = random.standard_normal((num_tokens + 1, 96)).astype(np.float32)
    hidden[:, random.integers(0, 96, 3)] *= 50
    tokens = np.repeat(np.arange(num_tokens, dtype=np.int32), 3)
    ids = np.concatenate([random.choice(E, 3, replace=False) for _ in range(num_tokens)])
    weights = random.random(tokens.size).astype(np.float32)
    return group_by_expert(hidden, tokens, ids.astype(np.int32), weights=weights, phase=phase)


def answered(bank: ExpertBank, batch: RoutedBatch, payload: PayloadType) -> F64Array:
    """The sums of a daemon that holds these experts, as the parent reads them."""
    sums = np.zeros(batch.hidden.shape)
    bank.accumulate(replace(batch, rows=HostHidden(as_received(batch.hidden, payload))), sums)
    return as_received(sums, payload)


def difference(
    side: Side, batch: RoutedBatch, sums: F64Array, payload: PayloadType, *, is_same: bool
) -> str:
    checker = ReplyChecker({7: side.every}, "any", CheckSchedule(1))
    return checker.difference(
        7, batch, sums, global_ids=LOCAL_TO_GLOBAL, payload=payload, is_same_class=is_same
    )


# -- within a class --------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", NEGOTIABLE)
@pytest.mark.parametrize(("num_tokens", "phase"), [(1, Phase.DECODE), (40, Phase.PREFILL)])
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_an_honest_daemon_of_the_same_class_has_the_same_bits(
    sides: dict[str, Side], name: str, num_tokens: int, phase: Phase, payload: PayloadType
) -> None:
    """Whatever it calls its experts, and whatever rows are looked at."""
    for seed in range(5):
        batch = batch_of(num_tokens, seed, phase)
        sums = answered(sides[name].owned, batch, payload)
        assert difference(sides[name], batch, sums, payload, is_same=True) == ""


@pytest.mark.parametrize("payload", NEGOTIABLE)
def test_one_bit_of_one_sum_is_found(sides: dict[str, Side], payload: PayloadType) -> None:
    batch = batch_of(1, 3, Phase.DECODE)
    sums = answered(sides["cpu"].owned, batch, payload)
    lowest = {PayloadType.F32: 0, PayloadType.F16: 42, PayloadType.BF16: 45}[payload]
    for bit in (lowest, 51, 62, 63):
        wrong = sums.copy()
        wrong.view(np.uint64)[0, 17] ^= np.uint64(1 << bit)
        reason = difference(sides["cpu"], batch, wrong, payload, is_same=True)
        assert re.match(r"1 of 96 sums\b.*\bbits\b", reason)


def test_a_wrong_row_of_many_is_found_when_it_is_looked_at(
    sides: dict[str, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(40, 3, Phase.PREFILL)
    sums = answered(sides["cpu"].owned, batch, PayloadType.F32)
    sums[11, 5] += 1e-6
    found = [
        difference(sides["cpu"], batch, sums, PayloadType.F32, is_same=True) for _ in range(200)
    ]
    assert 0 < sum(map(bool, found)) < 60, "each time four of 40 rows are looked at"
    monkeypatch.setattr(reply_checks, "_MOST_ROWS", 40)
    assert difference(sides["cpu"], batch, sums, PayloadType.F32, is_same=True)


# -- across classes --------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", NEGOTIABLE)
@pytest.mark.parametrize(("ours", "theirs"), [*itertools.permutations(CLASSES, 2)])
def test_an_honest_daemon_of_another_class_stays_below_half_of_the_bound(
    sides: dict[str, Side],
    ours: str,
    theirs: str,
    payload: PayloadType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reply_checks, "CLASS_BOUND", CLASS_BOUND / 2)
    monkeypatch.setattr(reply_checks, "_MOST_ROWS", 12)
    for seed, (num_tokens, phase) in enumerate(((1, Phase.DECODE), (12, Phase.PREFILL))):
        batch = batch_of(num_tokens, seed, phase)
        sums = answered(sides[theirs].owned, batch, payload)
        assert difference(sides[ours], batch, sums, payload, is_same=False) == ""
        assert difference(sides[ours], batch, sums, payload, is_same=True), "not the same bits"


@pytest.mark.parametrize("theirs", ["cpu", "gpu"])
def test_another_expert_or_a_wild_value_is_beyond_the_bound(
    sides: dict[str, Side], theirs: str
) -> None:
    batch = batch_of(1, 3, Phase.DECODE)
    other = replace(batch, expert_ids=np.sort((batch.expert_ids + 1) % E).astype(np.int32))
    wrong = answered(sides[theirs].owned, other, PayloadType.F32)
    reason = difference(sides["reference"], batch, wrong, PayloadType.F32, is_same=False)
    assert re.search(r"\d\b.*\b0\.1\b", reason)
    sums = answered(sides[theirs].owned, batch, PayloadType.F32)
    wrong = sums.copy()
    wrong[0, 17] += np.linalg.norm(sums[0])
    assert difference(sides["reference"], batch, wrong, PayloadType.F32, is_same=False)
    assert difference(sides["reference"], batch, 0 * sums, PayloadType.F32, is_same=False)


@pytest.mark.parametrize("is_same", [True, False])
def test_rows_that_are_not_finite_are_not_compared(sides: dict[str, Side], is_same: bool) -> None:
    """The logits tell: what is wrong is the model."""
    batch = batch_of(1, 3, Phase.DECODE)
    batch.hidden[0, 3] = np.nan
    sums = answered(sides["cpu"].owned, batch, PayloadType.F32)
    assert difference(sides["cpu"], batch, sums, PayloadType.F32, is_same=is_same) == ""


# -- whose turn it is ------------------------------------------------------------------------------


def test_every_request_or_one_of_so_many() -> None:
    assert all(CheckSchedule(1).takes_reply() for _ in range(50))
    schedule = CheckSchedule(50)
    taken = [index for index in range(50_000) if schedule.takes_reply()]
    assert 800 < len(taken) < 1200
    gaps = np.diff(taken)
    # As long since the last one as it may be, the next one is as likely: about a share of 1/e of
    # all gaps is longer than the mean, and nothing repeats.
    assert 0.3 < (gaps > 50).mean() < 0.44
    assert np.unique(gaps).size > 100
    assert taken != [index for index in range(50_000) if CheckSchedule(50).takes_reply()]


@pytest.mark.parametrize("cost_s", [1e-4, 0.02, 1.0])
def test_what_nobody_has_asked_for_takes_a_thousandth_of_the_time(cost_s: float) -> None:
    clock = Clock()
    schedule = CheckSchedule(None, clock=clock)
    spent_s, num_taken, request_s = 0.0, 0, 1e-3
    for _ in range(300_000):
        clock.now_s += request_s
        if schedule.takes_reply():
            num_taken += 1
            spent_s += cost_s
            clock.now_s += cost_s
            schedule.note_reply(cost_s)
            # The very first may take longer than was thought.
            assert spent_s <= MOST_SHARE * (clock.now_s - 1000.0) or num_taken == 1
    expected = min(300_000 / EVERY, max(1.0, 300_000 * request_s * MOST_SHARE / cost_s))
    assert 0 < num_taken <= 1.5 * expected + 1
    if cost_s < 0.01:
        assert num_taken > 0.5 * expected


def test_a_step_that_is_chosen_owes_one_of_its_requests() -> None:
    schedule = CheckSchedule(1000)
    num_steps = num_taken = 0
    for _ in range(4000):
        if schedule.takes_step(96):
            num_steps += 1
            taken = [schedule.takes_reply() for _ in range(96)]
            assert any(taken)
            num_taken += sum(taken)
            schedule.note_step(0.01)
    assert 250 < num_steps < 520
    assert num_steps <= num_taken < 1.3 * num_steps


def test_steps_keep_to_the_time_too() -> None:
    clock = Clock()
    schedule = CheckSchedule(None, clock=clock)
    spent_s = 0.0
    for _ in range(200_000):
        clock.now_s += 2e-3
        if schedule.takes_step(96):
            spent_s += 5e-3
            schedule.note_step(5e-3)
            assert spent_s <= MOST_SHARE * (clock.now_s - 1000.0)
    assert spent_s > 0.5 * MOST_SHARE * (clock.now_s - 1000.0)
