"""Choosing experts on a device by every kind of rule, against the reference's formula."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_adapters.routing import Gating, RoutingRule
from dflash_runtime.compute.gpu.launch.row_kernels import ChooseExperts
from dflash_runtime.compute.reference.routing import route
from support.emulated_device import EmulatedDevice

TOKENS = 5
RULES = {
    "softmax scaled": RoutingRule(3, Gating.SOFTMAX, normalise=False, scale=0.5),
    "sigmoid": RoutingRule(4, Gating.SIGMOID, normalise=True, scale=2.5),
    "sigmoid by logits": RoutingRule(1, Gating.SIGMOID, normalise=False, selects_by_logits=True),
    "of the chosen": RoutingRule(4, Gating.SOFTMAX_WEIGHT, normalise=False),
    "root of softplus": RoutingRule(6, Gating.SQRT_SOFTPLUS, normalise=True, scale=1.5),
    "groups": RoutingRule(
        4, Gating.SIGMOID, normalise=True, scale=2.5, num_groups=5, num_groups_used=2
    ),
    "groups of one": RoutingRule(
        2, Gating.SOFTMAX, normalise=True, num_groups=75, num_groups_used=3
    ),
}


@pytest.fixture(params=[(32, False), (64, True)], ids=str)
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    lanes, runs_backward = request.param
    return EmulatedDevice(lanes=lanes, runs_backward=runs_backward)


@pytest.mark.wide(2)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_the_reference_chooses_the_same(device: EmulatedDevice, name: str, has_bias: bool) -> None:
    rng, rule, num_experts = np.random.default_rng(3), RULES[name], 75
    logits = (2 * rng.standard_normal((TOKENS, num_experts))).astype(np.float32)
    logits[1] = logits[1].round()  # equal ones
    bias = rng.standard_normal(num_experts).astype(np.float32) if has_bias else None
    shape = TOKENS, rule.num_experts_used
    ids, weights = device.empty(shape, np.int32), device.empty(shape, np.float32)
    ChooseExperts(device).launch(
        rule,
        device.upload(logits),
        bias=None if bias is None else device.upload(bias),
        ids=ids,
        weights=weights,
    )
    wanted_ids, wanted_weights = route(logits, rule, bias)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(weights, wanted_weights, rtol=1e-5)


@pytest.mark.parametrize(
    ("num_experts", "num_used", "normalise"),
    [(12, 4, True), (40, 8, False), pytest.param(33, 1, True, marks=pytest.mark.slow)],
)
def test_experts_are_chosen_as_by_the_reference(
    device: EmulatedDevice, num_experts: int, num_used: int, normalise: bool
) -> None:
    logits = np.random.default_rng(3).standard_normal((5, num_experts)).astype(np.float32)
    logits[:, num_experts - 2] = logits[:, 2] = 3  # the first of equals
    logits[3] = np.nan
    rule = RoutingRule(num_used, Gating.SOFTMAX, normalise)
    ids, weights = device.empty((5, num_used), np.int32), device.empty((5, num_used), np.float32)
    ChooseExperts(device).launch(rule, device.upload(logits), bias=None, ids=ids, weights=weights)
    assert ids[3].tolist() == list(range(num_used))
    assert np.isnan(weights[3]).all()
    kept = [0, 1, 2, 4]
    wanted_ids, wanted_weights = route(logits[kept], rule, None)
    np.testing.assert_array_equal(ids[kept], wanted_ids)
    np.testing.assert_allclose(weights[kept], wanted_weights, rtol=2e-6)


def test_groups_that_do_not_divide_the_experts_are_refused(device: EmulatedDevice) -> None:
    rows = device.upload(np.zeros((1, 76), np.float32))
    with pytest.raises(ValueError, match="5 groups"):
        ChooseExperts(device).launch(RULES["groups"], rows, bias=None, ids=rows, weights=rows)
