"""Routed experts of a step: both kernels against float64, and the promises about their bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.quant import TensorType
from dflash_adapters.routing import Gating, RoutingRule
from dflash_adapters.spec import Activation
from dflash_protocol.ids import AnyArray, F32Array, F64Array
from dflash_runtime.compute.gpu.device.kernel_sources import Defines
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows
from dflash_runtime.compute.gpu.launch.decode_experts import (
    Choice,
    DecodeExperts,
    ExpertsShape,
    ExpertsTuning,
)
from dflash_runtime.compute.gpu.launch.row_kernels import ChooseExperts
from support.attention_rig import relative_error
from support.decode_experts_rig import Layer, Step, random_layer, random_step
from support.device_weights import as_int8_rows, int8_values
from support.emulated_device import EmulatedDevice
from support.emulated_device.device_checks import WRONG_GUESS
from support.emulated_device.emulated_device import EmulatedModule
from support.float64_experts import activated

Q4_0, Q5_0, Q8_0 = TensorType.Q4_0, TensorType.Q5_0, TensorType.Q8_0
Q4_K, Q6_K, IQ4_NL = TensorType.Q4_K, TensorType.Q6_K, TensorType.IQ4_NL
F32, F16 = TensorType.F32, TensorType.F16

BASE = ExpertsShape(
    num_tokens=3,
    num_experts_used=2,
    num_experts=5,
    hidden_size=256,
    ffn_size=96,
    gate_type=Q4_K,
    up_type=Q4_K,
    down_type=Q5_0,
)


def run(
    device: EmulatedDevice,
    experts: DecodeExperts,
    layer: Layer,
    step: Step,
    *,
    slots: list[int] | None = None,
    residual: F32Array | None = None,
    are_known: bool = False,
) -> tuple[AnyArray, F64Array]:
    """The output of a step, and what down was given, as it stands for. `are_known`: slots are
    those of the pairs, and there is no table."""
    shape = experts.shape
    slots = list(range(shape.num_experts)) if slots is None else slots
    resident = layer.resident(device, slots)
    int8 = as_int8_rows(step.x)
    x = StepRows(device.upload(int8.quants), device.upload(int8.meta), device.upload(step.x))
    choice = Choice(device.upload(step.topk_ids), device.upload(step.topk_weights))
    if are_known:
        of_pairs = np.append(slots, -1)[step.topk_ids].astype(np.int32)
        choice = replace(choice, slots=device.upload(of_pairs))
        resident = replace(resident, slot_of_expert=device.empty(0, np.int32))
    hidden = experts.hidden_rows()
    experts.launch_gate_up(resident, choice, x, hidden)
    size = shape.num_tokens, shape.hidden_size
    out = device.empty(size, np.float64)
    if not shape.gives_sums:
        out = device.upload(np.zeros(size, np.float32) if residual is None else residual)
    experts.launch_down(resident, choice, hidden, out)
    if hidden.quants is None:
        assert hidden.values is not None
        return out, device.download(hidden.values).astype(np.float64)
    assert hidden.meta is not None
    quants, meta = device.download(hidden.quants), device.download(hidden.meta)
    return out, int8_values(quants, meta, shape.ffn_size)


def wanted_hidden(layer: Layer, step: Step) -> F64Array:
    """Before it is quantised. Shapes: result [P, F]."""
    int8, wide = as_int8_rows(step.x).values, step.x.astype(np.float64)
    result = []
    for token, ids in enumerate(step.topk_ids):
        for expert in ids:
            given = [
                wide[token] if kind in (F32, F16) else int8[token]
                for kind in (layer.shape.gate_type, layer.shape.up_type)
            ]
            gate, up = (layer.project(index, int(expert), given[index]) for index in range(2))
            result.append(activated(layer.activation, gate, up, layer.limit))
    return np.array(result)


def wanted_sums(layer: Layer, step: Step, hidden: F64Array) -> F64Array:
    """Of what down was given. Shapes: hidden [P, F]; result [T, H]."""
    sums = np.zeros((len(step.x), layer.shape.hidden_size))
    for pair, (expert, weight) in enumerate(
        zip(step.topk_ids.ravel(), step.topk_weights.ravel(), strict=True)
    ):
        token = pair // layer.shape.num_experts_used
        sums[token] += weight * layer.project(2, int(expert), hidden[pair])
    return sums


SHAPES = {
    "eight of sixteen": replace(
        BASE, num_tokens=1, num_experts_used=8, num_experts=16, hidden_size=512
    ),
    "as in a daemon": replace(BASE, up_type=Q6_K, down_type=Q6_K, ffn_size=256, gives_sums=True),
    "rows that fill no tile": replace(
        BASE, num_tokens=8, hidden_size=160, gate_type=IQ4_NL, up_type=Q8_0, num_experts_used=1
    ),
    "floats": replace(
        BASE, hidden_size=100, ffn_size=44, gate_type=F32, up_type=F32, down_type=F16
    ),
    "floats and bytes": replace(BASE, num_tokens=2, gate_type=F16, down_type=F32),
}


@pytest.mark.wide(1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "floats and bytes" else ())
        for name in SHAPES
    ],
)
def test_experts_are_the_formula(device: EmulatedDevice, name: str) -> None:
    shape = SHAPES[name]
    rng = np.random.default_rng(shape.hidden_size)
    layer, step = random_layer(rng, shape), random_step(rng, shape)
    residual = rng.standard_normal((shape.num_tokens, shape.hidden_size)).astype(np.float32)
    out, hidden = run(device, DecodeExperts(device, shape), layer, step, residual=residual)

    exact = wanted_hidden(layer, step)
    if shape.down_type in (F32, F16):
        assert relative_error(hidden, exact) < 2e-6
    else:  # half a step of the largest of each 16
        granules = exact.reshape(len(exact), -1, 16)
        steps = np.abs(granules).max(axis=2, keepdims=True) / 127
        assert (np.abs(hidden.reshape(granules.shape) - granules) < 0.501 * steps).all()
    sums = wanted_sums(layer, step, hidden)
    if not shape.gives_sums:
        sums += residual
    assert relative_error(out, sums) < 1e-6


@pytest.mark.parametrize("activation", [Activation.GPT_OSS, Activation.SWIGLU_CLAMPED])
def test_biases_scales_and_other_activations(
    backward_device: EmulatedDevice, activation: Activation
) -> None:
    device, rng = backward_device, np.random.default_rng(3)
    shape = replace(BASE, down_type=F32, has_vectors=True)
    experts, hidden_size, ffn_size = shape.num_experts, shape.hidden_size, shape.ffn_size

    def vectors(*sizes: tuple[int, ...]) -> tuple[F32Array, F32Array, F32Array]:
        gate, up, down = (rng.standard_normal(size).astype(np.float32) for size in sizes)
        return gate, up, down

    layer = replace(
        random_layer(rng, shape),
        biases=vectors((experts, ffn_size), (experts, ffn_size), (experts, hidden_size)),
        scales=vectors((experts,), (experts,), (experts,)),
        activation=activation,
    )
    step = random_step(rng, shape)
    slots = [3, 0, 4, 2, 1]  # vectors are by expert, matrices by slot
    out, hidden = run(device, DecodeExperts(device, shape), layer, step, slots=slots)
    assert relative_error(hidden, wanted_hidden(layer, step)) < 2e-6
    assert relative_error(out, wanted_sums(layer, step, hidden)) < 1e-6


def test_what_is_not_resident_is_left_out(device: EmulatedDevice) -> None:
    rng = np.random.default_rng(5)
    shape = replace(BASE, gives_sums=True)
    layer, step = random_layer(rng, shape), random_step(rng, shape)
    step.topk_ids[0] = [1, 3]
    step.topk_ids[1] = [4, -1]
    experts = DecodeExperts(device, shape)
    here, remote = [0, -1, 1, 2, -1], [-1, 0, -1, -1, 1]
    part, hidden = run(device, experts, layer, step, slots=here)
    is_left_out = np.isin(step.topk_ids, (1, 4, -1)).ravel()
    assert not hidden[is_left_out].any()
    assert np.abs(hidden[~is_left_out]).max(axis=1).min() > 0
    assert not part[1].any()
    known, _ = run(device, experts, layer, step, slots=here, are_known=True)
    np.testing.assert_array_equal(known, part)
    other, _ = run(device, experts, layer, step, slots=remote)
    whole, _ = run(device, experts, layer, step)
    np.testing.assert_array_equal((part + other).astype(np.float32), whole.astype(np.float32))


def test_a_table_with_slots_that_do_not_exist_reads_nothing_else(
    backward_device: EmulatedDevice,
) -> None:
    device, rng = backward_device, np.random.default_rng(6)
    shape = replace(BASE, gives_sums=True)
    layer, step = random_layer(rng, shape), random_step(rng, shape)
    experts = DecodeExperts(device, shape)
    resident = layer.resident(device, [0, 1, 2, 3, 4])
    table = device.upload(np.array([5, 1 << 30, -5, 5, 7], np.int32))
    resident = replace(resident, slot_of_expert=table)
    int8 = as_int8_rows(step.x)
    x = StepRows(device.upload(int8.quants), device.upload(int8.meta))
    choice = Choice(device.upload(step.topk_ids), device.upload(step.topk_weights))
    of_pairs = np.full_like(step.topk_ids, 5)
    for each in (choice, replace(choice, slots=device.upload(of_pairs))):
        hidden, out = experts.hidden_rows(), device.empty(step.x.shape, np.float64)
        experts.launch_gate_up(resident, each, x, hidden)
        experts.launch_down(resident, each, hidden, out)
        assert not out.any()


@pytest.mark.parametrize("lanes", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_bits_of_a_token_depend_on_nothing_else(lanes: int) -> None:
    device = EmulatedDevice(lanes=lanes, runs_backward=True)
    rng = np.random.default_rng(7)
    layer, step = random_layer(rng, BASE), random_step(rng, BASE)
    experts = DecodeExperts(device, BASE)
    together, _ = run(device, experts, layer, step)
    moved, _ = run(device, experts, layer, step, slots=[4, 2, 6, 0, 1])
    np.testing.assert_array_equal(moved, together)
    tuning = experts.tuning
    others: list[ExpertsTuning] = [
        replace(tuning, gate_up_rows=2 * tuning.gate_up_rows, down_tile=16, down_warps=1),
        replace(tuning, down_tile=4, down_group=2, down_warps=1),
    ]
    single = replace(BASE, num_tokens=1)
    for tuned in others:
        alone, _ = run(
            device, DecodeExperts(device, single, tuned), layer, step.tokens(slice(1, 2))
        )
        np.testing.assert_array_equal(alone, together[1:2])


def test_experts_may_be_chosen_by_the_kernels_themselves(backward_device: EmulatedDevice) -> None:
    """Ids, weights and bits are those of a choice that was made before."""
    device, rng = backward_device, np.random.default_rng(8)
    rule = RoutingRule(BASE.num_experts_used, Gating.SOFTMAX, normalise=True)
    logits = rng.standard_normal((BASE.num_tokens, BASE.num_experts)).astype(np.float32)
    sizes = BASE.num_tokens, BASE.num_experts_used
    made = Choice(device.empty(sizes, np.int32), device.empty(sizes, np.float32))
    uploaded = device.upload(logits)
    ChooseExperts(device).launch(
        rule, uploaded, bias=None, ids=made.topk_ids, weights=made.topk_weights
    )
    layer, step = random_layer(rng, BASE), random_step(rng, BASE)
    step = replace(
        step,
        topk_ids=device.download(made.topk_ids),
        topk_weights=device.download(made.topk_weights),
    )
    slots = [2, -1, 0, 1, 3]
    before, _ = run(device, DecodeExperts(device, BASE), layer, step, slots=slots)

    experts = DecodeExperts(device, replace(BASE, rule=rule))
    resident, int8 = layer.resident(device, slots), as_int8_rows(step.x)
    x = StepRows(device.upload(int8.quants), device.upload(int8.meta))
    selections = device.zeros(BASE.num_experts, np.uint32)
    choice = Choice(
        device.empty(sizes, np.int32), device.empty(sizes, np.float32), uploaded, selections
    )
    hidden, out = experts.hidden_rows(), device.zeros(step.x.shape, np.float32)
    experts.launch_gate_up(resident, choice, x, hidden)
    experts.launch_down(resident, choice, hidden, out)
    np.testing.assert_array_equal(device.download(choice.topk_ids), step.topk_ids)
    np.testing.assert_array_equal(device.download(choice.topk_weights), step.topk_weights)
    np.testing.assert_array_equal(out, before)
    counts = np.bincount(step.topk_ids.reshape(-1), minlength=BASE.num_experts)
    np.testing.assert_array_equal(selections, counts)
    unrouted = DecodeExperts(device, BASE)
    unrouted.launch_gate_up(
        resident, replace(made, selections=selections), x, unrouted.hidden_rows()
    )
    np.testing.assert_array_equal(selections, 2 * counts)
    with pytest.raises(ValueError, match=r"\blogits\b.*missing"):
        experts.launch_gate_up(resident, made, x, hidden)


class GuessesWrong(EmulatedDevice):
    """Down begins with other slots than gate and up have written."""

    def module(self, file: str | Path, defines: Defines) -> EmulatedModule:
        return super().module(WRONG_GUESS if file == "experts_decode.cu" else file, defines)


def test_a_wrong_guess_of_down_is_made_good() -> None:
    rng = np.random.default_rng(10)
    layer, step = random_layer(rng, BASE), random_step(rng, BASE)
    right, wrong = (
        run(device, DecodeExperts(device, BASE), layer, step, slots=[3, 0, -1, 2, 1])[0]
        for device in (EmulatedDevice(), GuessesWrong())
    )
    np.testing.assert_array_equal(wrong, right)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_token(device: EmulatedDevice, bad: float) -> None:
    rng = np.random.default_rng(9)
    layer, step = random_layer(rng, BASE), random_step(rng, BASE)
    experts = DecodeExperts(device, BASE)
    good, _ = run(device, experts, layer, step)
    int8 = as_int8_rows(step.x)
    int8.meta[1, 3] = np.nan  # as quantisers leave it
    resident = layer.resident(device, [0, 1, 2, 3, 4])
    weights = step.topk_weights.copy()
    weights[2, 1] = bad
    choice = Choice(device.upload(step.topk_ids), device.upload(weights))
    hidden, out = experts.hidden_rows(), device.zeros(step.x.shape, np.float32)
    x = StepRows(device.upload(int8.quants), device.upload(int8.meta))
    experts.launch_gate_up(resident, choice, x, hidden)
    experts.launch_down(resident, choice, hidden, out)
    assert np.isnan(out[1]).all()
    assert not np.isfinite(out[2]).any()
    np.testing.assert_array_equal(out[0], good[0])


def test_what_does_not_fit_is_refused() -> None:
    device = EmulatedDevice()
    with pytest.raises(ValueError, match=r"K=6\b.*E=5\b"):
        replace(BASE, num_experts_used=6)
    rule = RoutingRule(num_experts_used=3, gating=Gating.SOFTMAX, normalise=True)
    with pytest.raises(ValueError, match=r"K=2\b.*rule"):
        replace(BASE, rule=rule)
    with pytest.raises(ValueError, match=r"T=0\b.*\b1 .*\b8 tokens"):
        replace(BASE, num_tokens=0)
    with pytest.raises(ValueError, match=r"multiple\b.*Q4_K"):
        replace(BASE, hidden_size=288)
    with pytest.raises(ValueError, match=r"\b5 rows\b.*\b16384\b.*\b122880 bytes"):
        DecodeExperts(device, replace(BASE, num_experts_used=5, ffn_size=16384))

    rng = np.random.default_rng(1)
    layer, step = random_layer(rng, BASE), random_step(rng, BASE)
    experts = DecodeExperts(device, BASE)
    resident = layer.resident(device, [0, 1, 2, 3, 4])
    choice = Choice(device.upload(step.topk_ids), device.upload(step.topk_weights))
    hidden = experts.hidden_rows()
    out = device.zeros((3, 256), np.float32)
    routed = DecodeExperts(device, replace(BASE, rule=replace(rule, num_experts_used=2)))
    slots = replace(choice, slots=device.zeros((3, 2), np.int32))
    with pytest.raises(ValueError, match="slots"):
        routed.launch_down(resident, slots, hidden, out)
    with pytest.raises(ValueError, match=r"x\.quants\b.*missing"):
        experts.launch_gate_up(resident, choice, StepRows(values=device.upload(step.x)), hidden)
    with pytest.raises(ValueError, match=r"\bout\b.* float64 \[3, 256\].* float32"):
        experts.launch_down(resident, choice, hidden, device.zeros((3, 256), np.float64))
    wide = replace(choice, topk_ids=device.upload(step.topk_ids.astype(np.int64)))
    with pytest.raises(ValueError, match=r"topk_ids\b.* int64 .* int32 \[T=3, K=2\]"):
        experts.launch_down(resident, wide, hidden, out)
    short = replace(resident.down, weights=resident.down.weights[:, :, :-1])
    with pytest.raises(ValueError, match=r"\bdown\b.* uint8 .*\b96 Q5_0"):
        experts.launch_down(replace(resident, down=short), choice, hidden, out)
    biased = replace(resident.down, bias=device.zeros((5, 256), np.float32))
    with pytest.raises(ValueError, match=r"\bdown\b.*bias or scale"):
        experts.launch_down(replace(resident, down=biased), choice, hidden, out)
