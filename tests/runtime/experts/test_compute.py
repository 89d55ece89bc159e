"""Experts in this process."""

from __future__ import annotations

import re

import numpy as np

from dflash_runtime.experts.compute import LocalExpertCompute
from dflash_runtime.experts.telemetry import OwnerKind, OwnerStats
from support.routed_batches import (
    ScalingBank,
    batch_of,
    begin,
    finish,
    moe_layer,
    naive_sums,
    numbered_rows,
)

PAIRS = {(0, 1): 0.5, (2, 1): 0.25, (2, 4): -1.0}


def local() -> LocalExpertCompute:
    banks = {layer_id: ScalingBank(moe_layer(layer_id=layer_id)) for layer_id in (0, 3)}
    return LocalExpertCompute(OwnerKind.LOCAL, dict(banks))


def test_sums_are_added_to_what_is_there() -> None:
    compute = local()
    out = np.full((3, 3), 100.0)
    finish(compute, begin(compute, batch_of(3, PAIRS), layer_id=3), out)
    np.testing.assert_array_equal(out, 100.0 + naive_sums(numbered_rows(3), PAIRS))


def test_nothing_is_computed_before_it_is_collected() -> None:
    compute = local()
    begin(compute, batch_of(3, PAIRS))
    assert compute.stats == OwnerStats(OwnerKind.LOCAL, num_experts=10)


def test_tickets_may_be_collected_in_any_order() -> None:
    compute = local()
    first, second = (begin(compute, batch_of(3, pairs)) for pairs in (PAIRS, {(1, 2): 1.0}))
    out = np.zeros((3, 3))
    finish(compute, second, out)
    finish(compute, first, out)
    np.testing.assert_array_equal(out, naive_sums(numbered_rows(3), {**PAIRS, (1, 2): 1.0}))


def test_requests_tokens_and_pairs_are_counted() -> None:
    compute = local()
    for _ in range(2):
        finish(compute, begin(compute, batch_of(3, PAIRS)), np.zeros((3, 3)))
    finish(compute, begin(compute, batch_of(0, {})), np.zeros((0, 3)))
    stats = compute.stats
    assert (stats.requests, stats.tokens, stats.pairs) == (3, 6, 6)
    assert (stats.bytes_sent, stats.bytes_received, stats.restarts) == (0, 0, 0)
    compute.close()


def test_what_a_daemon_dropped_is_in_the_record_and_told_to_people() -> None:
    stats = OwnerStats(OwnerKind.DAEMON, num_experts=1)
    assert stats.troubles == ""
    stats.daemon_late, stats.daemon_stale, stats.daemon_checksum_failures = 3, 0, 1
    assert re.fullmatch(r".*\b3 late\b.*\b1 damaged\b.*", stats.troubles)
    record = stats.as_record()
    names = ("daemon_late", "daemon_stale", "daemon_checksum_failures")
    assert [record[name] for name in names] == [3, 0, 1]
