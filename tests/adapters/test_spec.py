"""What a MoE layer says of itself: its parts, their sizes, its fingerprint."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dflash_adapters.quant import TensorType
from dflash_adapters.spec import (
    Activation,
    ExpertProjection,
    ExpertVector,
    MoeLayer,
    MoeSpec,
)

SCALE = ExpertVector("scale", 0, 900, 4, 1)
UP_BIAS = ExpertVector("up.bias", 0, 1000, 16, 4)
GATE = ExpertProjection("gate", TensorType.Q8_0, 4, 32, 0, 0, 136)
UP = ExpertProjection("up", TensorType.F32, 4, 32, 0, 4096, 512)
DOWN = ExpertProjection("down", TensorType.BF16, 32, 4, 0, 8192, 256)


def layer(**changes: object) -> MoeLayer:
    plain = MoeLayer(0, 2, 1, 32, 4, Activation.SWIGLU, GATE, UP, DOWN)
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_parts_are_matrices_then_vectors_each_once() -> None:
    assert layer().parts == (GATE, UP, DOWN)
    gate, up = replace(GATE, scale=SCALE), replace(UP, scale=SCALE, bias=UP_BIAS)
    full = layer(gate=gate, up=up)
    assert full.parts == (gate, up, DOWN, SCALE, UP_BIAS)
    assert full.projections == (gate, up, DOWN)


def test_an_experts_bytes_are_those_of_all_its_parts() -> None:
    plain = 4 * 34 + 4 * 32 * 4 + 32 * 4 * 2
    assert layer().expert_bytes == plain
    full = layer(gate=replace(GATE, scale=SCALE), up=replace(UP, bias=UP_BIAS))
    assert full.expert_bytes == plain + 4 + 16
    assert MoeSpec((full,)).expert_bytes_total == 2 * (plain + 20)


def test_everything_that_decides_a_result_is_in_the_digest() -> None:
    clamped = layer(activation=Activation.SWIGLU_CLAMPED, activation_limit=7.0)
    gpt_oss = replace(clamped, activation=Activation.GPT_OSS)
    layers = [
        layer(),
        clamped,
        gpt_oss,
        replace(clamped, activation_limit=10.0),
        replace(gpt_oss, activation_alpha=1.702),
        layer(gate=replace(GATE, bias=UP_BIAS)),
        layer(gate=replace(GATE, bias=replace(UP_BIAS, offset_bytes=2000))),
        layer(gate=replace(GATE, scale=SCALE)),
        layer(up=replace(UP, scale=SCALE)),
    ]
    digests = [MoeSpec((one,)).digest for one in layers]
    assert len(set(digests)) == len(layers)
    assert MoeSpec((layer(),)).digest == digests[0]


@pytest.mark.parametrize(
    ("activation", "limit", "alpha"),
    [
        (Activation.SWIGLU, 7.0, 1.0),
        (Activation.SWIGLU, math.inf, 1.702),
        (Activation.SWIGLU_CLAMPED, 7.0, 1.702),
        (Activation.SWIGLU_CLAMPED, 0.0, 1.0),
        (Activation.GPT_OSS, math.nan, 1.702),
    ],
)
def test_parameters_of_another_form_are_a_mistake(
    activation: Activation, limit: float, alpha: float
) -> None:
    with pytest.raises(AssertionError):
        layer(activation=activation, activation_limit=limit, activation_alpha=alpha)
