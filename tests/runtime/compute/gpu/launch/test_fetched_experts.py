"""Gate and up of the pairs whose expert was fetched, and of no others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflash_adapters.quant import TensorType
from dflash_protocol.ids import AnyArray
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows
from dflash_runtime.compute.gpu.launch.decode_experts import (
    FETCH_WORDS,
    Choice,
    DecodeExperts,
    ExpertsShape,
    ExpertsUse,
)
from dflash_runtime.compute.gpu.launch.layouts import ResidentExperts
from support.decode_experts_rig import Layer, random_layer, random_step
from support.device_weights import as_int8_rows
from support.emulated_device import EmulatedDevice

BASE = ExpertsShape(
    num_tokens=1,
    num_experts_used=3,
    num_experts=6,
    hidden_size=256,
    ffn_size=96,
    gate_type=TensorType.Q4_K,
    up_type=TensorType.Q8_0,
    down_type=TensorType.Q5_0,
    gives_sums=True,
)
SLOTS = [0, -1, 1, 2, 3, 4]
"""Expert 1 lies in slot 5, which no table says."""
FETCHED, SLOT = 1, 5


def biased(layer: Layer, rng: np.random.Generator) -> Layer:
    sizes = (layer.shape.ffn_size, layer.shape.ffn_size, layer.shape.hidden_size)
    gate, up, down = (
        rng.standard_normal((layer.shape.num_experts, size)).astype(np.float32) for size in sizes
    )
    return replace(layer, biases=(gate, up, down))


def results(device: KernelDevice, hidden: StepRows, out: DeviceArray) -> list[AnyArray]:
    """What down was given, and gave."""
    assert hidden.quants is not None
    assert hidden.meta is not None
    return [device.download(each) for each in (hidden.quants, hidden.meta, out)]


def run(
    device: KernelDevice,
    experts: DecodeExperts,
    here: ResidentExperts,
    choice: Choice,
    x: StepRows,
) -> list[AnyArray]:
    shape = experts.shape
    hidden, out = (
        experts.hidden_rows(),
        device.empty((shape.num_tokens, shape.hidden_size), np.float64),
    )
    experts.launch_gate_up(here, choice, x, hidden)
    experts.launch_down(here, choice, hidden, out)
    return results(device, hidden, out)


@pytest.mark.wide(2)
@pytest.mark.parametrize("has_vectors", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_pairs_of_what_was_fetched_have_the_bits_of_what_is_here(
    device: EmulatedDevice, num_tokens: int, has_vectors: bool
) -> None:
    shape = replace(BASE, num_tokens=num_tokens, has_vectors=has_vectors)
    rng = np.random.default_rng(num_tokens)
    layer, step = random_layer(rng, shape), random_step(rng, shape)
    if has_vectors:
        layer = biased(layer, rng)
    step.topk_ids[0] = [3, FETCHED, 0]
    step.topk_ids[1:2] = [2, 0, 5]  # without it
    step.topk_ids[2:] = [FETCHED, 4, 2]
    pairs = np.flatnonzero(step.topk_ids.ravel() == FETCHED)
    whole = layer.resident(device, [0, SLOT, *SLOTS[2:]])
    here = replace(whole, slot_of_expert=device.upload(np.array(SLOTS, np.int32)))
    int8 = as_int8_rows(step.x)
    x = StepRows(device.upload(int8.quants), device.upload(int8.meta), device.upload(step.x))
    choice = Choice(device.upload(step.topk_ids), device.upload(step.topk_weights))
    experts = DecodeExperts(device, shape)
    expected = run(device, experts, whole, choice, x)
    without = run(device, experts, here, choice, x)
    assert (without[-1] != expected[-1]).any()

    hidden, out = experts.hidden_rows(), device.empty(step.x.shape, np.float64)
    experts.launch_gate_up(here, choice, x, hidden)
    slots = device.download(experts.pair_slots).copy()
    assert (slots.ravel()[pairs] == -1).all()
    slots.ravel()[pairs[0]] = SLOT  # as fetch_expert does
    device.write(experts.pair_slots, slots)
    fetched = DecodeExperts(device, replace(shape, gives_sums=False, use=ExpertsUse.FETCHED))
    known = replace(choice, slots=experts.pair_slots)
    decision = np.full(FETCH_WORDS, -1, np.int32)
    fetched.launch_gate_up(here, known, x, hidden, fetched=device.upload(decision))  # nothing
    np.testing.assert_array_equal(device.download(experts.pair_slots), slots)
    decision[0] = pairs[0]
    fetched.launch_gate_up(here, known, x, hidden, fetched=device.upload(decision))
    assert (device.download(experts.pair_slots).ravel()[pairs] == SLOT).all()
    experts.launch_down(here, choice, hidden, out)
    for one, other in zip(results(device, hidden, out), expected, strict=True):
        np.testing.assert_array_equal(one, other)
