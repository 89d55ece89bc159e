"""A daemon whose replies are not finite, or not right: who computes instead, and what follows."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from dflash_adapters.spec import MoeSpec
from dflash_protocol.batch import RoutedBatch
from dflash_protocol.endpoint import Endpoint
from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ids import F32Array, F64Array, I32Array, Phase
from dflash_protocol.payloads import PayloadType
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.experts.compute import ExpertCompute, LocalExpertCompute
from dflash_runtime.experts.events import EventKind, EventLog
from dflash_runtime.experts.remote.pieces import ExecutionMode
from dflash_runtime.experts.remote.reply_checks import CheckSchedule, ReplyChecker
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.experts.telemetry import OwnerKind
from dflash_runtime.placement.split import make_placement
from support.remote_rig import PAIRS, TIMEOUT_S, ServedRig
from support.routed_batches import (
    HIDDEN_SIZE,
    ScalingBank,
    moe_layer,
    naive_sums,
    numbered_rows,
    routed_sums,
)

SPEC = MoeSpec((moe_layer(),))


def checker(every: int = 1, numeric_class: str = "c") -> ReplyChecker:
    return ReplyChecker({0: ScalingBank(SPEC.layers[0])}, numeric_class, CheckSchedule(every))


class SpoiltBank(ScalingBank):
    """Writes `value` over one sum of each batch, or one more than is right."""

    def __init__(self, *, value: float | None) -> None:
        super().__init__(SPEC.layers[0])
        self.value = value
        self.is_spoilt = True

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        super().accumulate(batch, out)
        if self.is_spoilt and batch.num_pairs:
            place = batch.token_indices[-1], 1
            out[place] = out[place] + 1.0 if self.value is None else self.value


def spoilt_rig(undo: ExitStack, endpoint: Endpoint, bank: SpoiltBank, **options: Any) -> ServedRig:
    rig = ServedRig(undo, endpoint, min_deadline_s=TIMEOUT_S, **options)
    rig.bank = bank  # type: ignore[assignment]
    return rig


def runtime_of(rig: ServedRig, *, is_required: bool = False) -> tuple[MoeExpertComputeRuntime, Any]:
    """All experts with the daemon."""
    placement = make_placement(SPEC, {"cpu0": OwnedExperts.from_lists({0: range(5)})})
    fallback = LocalExpertCompute(OwnerKind.FALLBACK, {0: ScalingBank(SPEC.layers[0])})
    owners: list[ExpertCompute] = [rig.remote]
    kept = None if is_required else fallback
    return MoeExpertComputeRuntime(placement, owners, fallback=kept), fallback


def computed(runtime: MoeExpertComputeRuntime, hidden: F32Array, phase: Phase) -> F32Array:
    ids: I32Array = np.array([[0, 3]] * hidden.shape[0], np.int32)
    weights = np.full(ids.shape, 0.5, np.float32)
    return routed_sums(runtime, 0, hidden, (ids, weights), phase)


def expected(hidden: F32Array) -> F32Array:
    pairs = {(token, expert): 0.5 for token in range(hidden.shape[0]) for expert in (0, 3)}
    return naive_sums(hidden, pairs).astype(np.float32)


PHASES = [(Phase.DECODE, 1), (Phase.PREFILL, 3), (Phase.PREFILL, 60)]
"""Sixty tokens are several requests."""


@pytest.mark.wide(2)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("phase", "num_tokens"), PHASES)
@pytest.mark.parametrize("payload", [PayloadType.F32, PayloadType.BF16])
def test_a_reply_that_is_not_finite_is_computed_elsewhere(
    undo: ExitStack,
    endpoint: Endpoint,
    bad: float,
    phase: Phase,
    num_tokens: int,
    payload: PayloadType,
) -> None:
    rig = spoilt_rig(undo, endpoint, SpoiltBank(value=bad))
    session = rig.open_session(payload=payload)
    runtime, fallback = runtime_of(rig)
    hidden = numbered_rows(num_tokens)
    np.testing.assert_array_equal(computed(runtime, hidden, phase), expected(hidden))
    stats = runtime.stats()["cpu0"]
    assert (stats.not_finite, stats.retries, fallback.stats.requests) == (1, 1, 1)
    assert rig.kinds == ["not_finite"]
    assert "NaN" in rig.losses[0]
    # One request has failed: the daemon is asked again, until it has failed three times.
    assert rig.link.session is session
    for _ in range(4):
        np.testing.assert_array_equal(computed(runtime, hidden, phase), expected(hidden))
    assert rig.remote.stats.breaker == "open"
    assert rig.kinds == ["not_finite"] * 3 + ["breaker_open"]


def test_of_rows_that_are_not_finite_themselves_no_daemon_is_blamed(
    undo: ExitStack, endpoint: Endpoint
) -> None:
    """The model is at fault, which its logits tell; to compute it all again would take long."""
    rig = spoilt_rig(undo, endpoint, SpoiltBank(value=np.nan))
    rig.open_session()
    runtime, fallback = runtime_of(rig)
    hidden = numbered_rows(2)
    hidden[1] = np.inf  # the row whose sum is spoilt
    computed(runtime, hidden, Phase.PREFILL)
    assert (rig.remote.stats.not_finite, fallback.stats.requests, rig.kinds) == (0, 0, [])
    hidden[:] = [[np.nan] * HIDDEN_SIZE, [1.0] * HIDDEN_SIZE]
    computed(runtime, hidden, Phase.PREFILL)
    assert (rig.remote.stats.not_finite, fallback.stats.requests) == (1, 1)


@pytest.mark.parametrize("mode", [ExecutionMode.BATCHED, ExecutionMode.STREAM])
@pytest.mark.parametrize(("phase", "num_tokens"), [*PHASES[:2], (Phase.PREFILL, 60)])
def test_a_daemon_that_answers_wrongly_is_given_up_and_what_it_said_is_not_used(
    undo: ExitStack, endpoint: Endpoint, phase: Phase, num_tokens: int, mode: ExecutionMode
) -> None:
    """Of a request of many rows only some are looked at: it is found sooner or later."""
    bank = SpoiltBank(value=None)
    rig = spoilt_rig(undo, endpoint, bank, checker=checker(), mode=mode)
    rig.open_session()
    runtime, fallback = runtime_of(rig)
    hidden = numbered_rows(num_tokens)
    bank.is_spoilt = False
    for _ in range(3):
        np.testing.assert_array_equal(computed(runtime, hidden, phase), expected(hidden))
    assert rig.remote.stats.checked == 3
    assert (rig.kinds, fallback.stats.requests) == ([], 0)
    bank.is_spoilt = True
    for _ in range(200):
        sums = computed(runtime, hidden, phase)
        if rig.kinds:
            break
    np.testing.assert_array_equal(sums, expected(hidden))
    assert rig.kinds == ["wrong_reply"]
    assert rig.losses[0].startswith("layer 0: ")
    assert "bits" in rig.losses[0]
    stats = runtime.stats()["cpu0"]
    assert (stats.wrong_replies, stats.is_lost, fallback.stats.requests) == (1, True, 1)
    assert "wrong" in stats.troubles
    # Nobody lets it in again, though it may be well now.
    bank.is_spoilt = False
    with pytest.raises(DaemonUnavailable, match="bits"):
        rig.link.mark_ready(rig_welcome(rig))
    assert rig.link.session is None
    np.testing.assert_array_equal(computed(runtime, hidden, phase), expected(hidden))
    assert (fallback.stats.requests, rig.kinds) == (2, ["wrong_reply"])


def rig_welcome(rig: ServedRig) -> Any:
    from dflash_protocol.wire.messages import Welcome
    from support.scripted_daemon import IDLE_MACHINE, LINK_ID

    return Welcome(
        version=2, link_id=LINK_ID, model_identity="m", placement_fingerprint="p",
        numeric_class="c", max_tokens=16, **IDLE_MACHINE,
    )  # fmt: skip


def test_where_daemons_are_required_a_wrong_reply_is_an_error(
    undo: ExitStack, endpoint: Endpoint
) -> None:
    rig = spoilt_rig(undo, endpoint, SpoiltBank(value=None), checker=checker())
    rig.open_session()
    runtime, _ = runtime_of(rig, is_required=True)
    for _ in range(2):
        with pytest.raises(DaemonUnavailable, match=r"\bbits\b.*required"):
            computed(runtime, numbered_rows(1), Phase.DECODE)


def test_a_daemon_of_another_class_is_measured_by_the_bound(
    undo: ExitStack, endpoint: Endpoint
) -> None:
    bank = SpoiltBank(value=None)
    rig = spoilt_rig(undo, endpoint, bank, checker=checker(numeric_class="another"))
    rig.open_session()
    hidden = np.full((1, HIDDEN_SIZE), 1000.0, np.float32)
    runtime, _ = runtime_of(rig)
    computed(runtime, hidden, Phase.DECODE)  # off by a thousandth
    assert rig.kinds == []
    bank.value = -1e6
    np.testing.assert_array_equal(computed(runtime, hidden, Phase.DECODE), expected(hidden))
    assert rig.kinds == ["wrong_reply"]


def test_without_a_checker_or_out_of_turn_nothing_is_computed_here(served: ServedRig) -> None:
    served.open_session()
    served.assert_right()
    assert served.remote.stats.checked == 0
    assert PAIRS


def test_the_operator_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog()
    with caplog.at_level(logging.WARNING):
        events.add(EventKind.WRONG_REPLY, "cpu0", "layer 3: 1 of 96 sums have other bits")
        events.add(EventKind.NOT_FINITE, "cpu0", "layer 3: 1 rows of a reply are NaN or infinite")
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.args == ("cpu0", "layer 3: 1 of 96 sums have other bits")
    assert [event.kind for event in events.latest()] == ["wrong_reply", "not_finite"]
