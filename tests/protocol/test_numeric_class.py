"""Which numeric classes compute the same bits, in prompts and in decode steps."""

from __future__ import annotations

import pytest

from dflash_protocol.ids import Phase
from dflash_protocol.numeric_class import (
    class_in_phase,
    in_step_order,
    is_in_step_order,
    is_same_class,
)

GPU, CPU = in_step_order("cupy-2/sm_90"), in_step_order("cpu-3/avx2")


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.VERIFY])
def test_decode_steps_in_step_order_have_the_same_bits(phase: Phase) -> None:
    assert is_same_class(GPU, CPU, phase)
    assert not is_same_class(GPU, "cpu-3/avx2", phase)
    assert not is_same_class("cpu-3/avx2", "cpu-3/avx512vnni", phase)
    assert is_same_class("cpu-3/avx2", "cpu-3/avx2", phase)


def test_prompts_have_those_of_a_backend() -> None:
    assert not is_same_class(GPU, CPU, Phase.PREFILL)
    assert is_same_class(GPU, GPU, Phase.PREFILL)
    assert class_in_phase(GPU, Phase.PREFILL) == GPU


@pytest.mark.parametrize("phase", Phase)
def test_an_unknown_class_equals_no_other(phase: Phase) -> None:
    assert not is_same_class("", "", phase)
    assert not is_same_class("", GPU, phase)
    assert class_in_phase("", phase) == ""


def test_a_class_is_put_into_step_order_once() -> None:
    assert in_step_order(GPU) == GPU
    assert is_in_step_order(GPU)
    assert not is_in_step_order("")
    assert not is_in_step_order("cpu0's " + GPU)
