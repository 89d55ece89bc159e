"""Tokens sampled on the device are those that the host samples from the same logits with the same
number, or left to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import AnyArray, BoolArray, F32Array
from dflash_runtime.compute.backend import NOT_FINITE, DeviceSampling, LogitChanges
from dflash_runtime.compute.gpu.device.cupy_device import CupyDevice
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.launch.sample_tokens import (
    MOST_VOCABULARY,
    NUM_OPTIONS,
    UNDECIDED,
    SampleInputs,
    SampleTokens,
    StepRules,
    option_values,
    rule_layout,
    write_rules,
)
from dflash_runtime.engine.penalties import changed
from dflash_runtime.engine.sampling import Sampler, SamplingParams
from support.emulated_device import EmulatedDevice
from support.examples import examples
from support.gpu_devices import first_gpu

CAPACITY = 7
FIRST = 3
"""The position of the row that is sampled from."""


def keys_of(logits: F32Array) -> AnyArray:
    """As argmax.cuh has them."""
    bits = (logits + np.float32(0)).view(np.uint32)
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    ordered = np.where(np.isfinite(logits), ordered, np.uint32(0xFFFFFFFF))
    ids = np.arange(logits.size, dtype=np.uint32)
    return ordered.astype(np.uint64) << np.uint64(32) | (np.uint32(0xFFFFFFFF) - ids)


class Rig:
    """One vocabulary's kernels on a device."""

    def __init__(self, device: KernelDevice, vocab_size: int, **options: int) -> None:
        self.device = device
        self.kernels = SampleTokens(device, vocab_size=vocab_size, **options)
        self.vocab_size = vocab_size
        self.layout = rule_layout(vocab_size=vocab_size, num_positions=CAPACITY)
        self.inputs = SampleInputs(
            device.zeros(NUM_OPTIONS, np.float64),
            device.zeros(CAPACITY, np.float64),
            StepRules(*(device.zeros(*shape) for shape in self.layout)),
        )
        self.token_ids = device.empty(1, np.int32)

    def sample(
        self,
        logits: F32Array,
        options: DeviceSampling | None,
        number: float,
        allowed: BoolArray | None = None,
        changes: LogitChanges | None = None,
    ) -> int:
        """What the history says; checks all that does not depend on what is sampled."""
        device = self.device
        numbers = np.full(CAPACITY, np.nan)
        numbers[FIRST + 1] = number
        device.write(self.inputs.numbers, numbers)
        values = option_values(
            options,
            vocab_size=self.vocab_size,
            is_ruled=allowed is not None or changes is not None,
        )
        device.write(self.inputs.options, values)
        rules = StepRules(*(np.zeros(*shape) for shape in self.layout))
        bits = None if allowed is None else np.packbits(allowed, bitorder="little")
        write_rules(rules, bits, changes)
        for field in fields(rules):
            device.write(getattr(self.inputs.rules, field.name), getattr(rules, field.name))
        keys = keys_of(logits)
        parts = [part.max() for part in np.array_split(keys, min(3, keys.size))]
        history = device.upload(np.full(CAPACITY, -7, np.int32))
        positions = device.upload(np.array([FIRST], np.int32))
        self.kernels.launch(
            device.upload(logits.reshape(1, -1)),
            device.upload(np.array(parts, np.uint64).reshape(-1, 1)),
            self.inputs,
            token_ids=self.token_ids,
            positions=positions,
            history=history,
        )
        written = device.download(history).tolist()
        said = int(written.pop(FIRST + 1))
        assert written == [-7] * (CAPACITY - 1)
        assert device.download(positions).tolist() == [FIRST + 1]
        (token_id,) = device.download(self.token_ids).tolist()
        if said == NOT_FINITE:  # the next step reads something all the same
            assert 0 <= token_id < self.vocab_size
        else:
            chosen_from = logits if changes is None else changed(logits, changes)
            best = Sampler(SamplingParams()).sample(chosen_from, 0.0, allowed)
            assert token_id == (best if said == UNDECIDED else said)
        return said


def host_sampled(logits: F32Array, options: DeviceSampling, number: float) -> int:
    of_host = SamplingParams(options.temperature, options.top_k, options.top_p, options.min_p)
    return Sampler(of_host).sample(logits, number)


@cache
def rig(vocab_size: int, lanes: int, runs_backward: bool) -> Rig:
    return Rig(EmulatedDevice(lanes=lanes, runs_backward=runs_backward), vocab_size)


RIGS = st.sampled_from([(67, 32, False), (1003, 64, True), (1, 32, True), (6000, 32, False)])
NUMBERS = st.floats(0.0, 1.0, exclude_max=True) | st.sampled_from([0.0, 0.5, 1 - 2**-53])


def random_logits(size: int, scale: float, step: float | None, seed: int) -> F32Array:
    """All different, or many alike; some of tokens that cannot be."""
    random = np.random.default_rng(seed)
    logits = (random.standard_normal(size) * scale).astype(np.float32)
    if step is not None:
        logits = (np.round(logits / step) * step).astype(np.float32)  # of both signs of zero
    logits[random.random(size) < 0.1] = -3e38
    logits[random.integers(size)] = scale
    return logits


@examples(150)
@given(
    RIGS,
    st.sampled_from([0.01, 0.5, 3.0, 30.0]),
    st.sampled_from([None, 0.05, 1.0]),
    st.integers(0, 1 << 32),
    st.sampled_from([0.01, 0.7, 1.0, 40.0]),
    st.sampled_from([0, 1, 2, 3, 40, 1500, 1 << 40]),
    st.sampled_from([1e-9, 0.2513, 0.9007, 0.99999, 1.0]),
    st.sampled_from([0.0, 1e-9, 0.05, 0.5003, 1.0]),
    st.lists(NUMBERS, min_size=1, max_size=4),
)
def test_tokens_are_those_of_the_host(
    which: tuple[int, int, bool],
    scale: float,
    step: float | None,
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    numbers: list[float],
) -> None:
    device_rig = rig(*which)
    logits = random_logits(device_rig.vocab_size, scale, step, seed)
    options = DeviceSampling(temperature, top_k, top_p, min_p)
    for number in numbers:
        said = device_rig.sample(logits, options, number)
        assert said in (UNDECIDED, host_sampled(logits, options, number))


OPTIONS = [
    DeviceSampling(1.0),
    DeviceSampling(0.7),
    DeviceSampling(1.5),
    DeviceSampling(0.7, top_k=40),
    DeviceSampling(1.0, top_p=0.9),
    DeviceSampling(0.8, top_p=0.9503),
    DeviceSampling(1.0, min_p=0.0503),
    DeviceSampling(0.6, top_k=20, top_p=0.9503, min_p=0.0103),
]


def undecided_share(device_rig: Rig, rows: Sequence[F32Array], numbers: Sequence[float]) -> float:
    """Checks what the device says of each row, for each of the options and numbers."""
    num_sampled = num_undecided = 0
    for logits in rows:
        for options in OPTIONS:
            for number in numbers:
                said = device_rig.sample(logits, options, number)
                assert said in (UNDECIDED, host_sampled(logits, options, number))
                num_sampled += 1
                num_undecided += said == UNDECIDED
    return num_undecided / num_sampled


def test_whatever_a_large_vocabulary_looks_like_the_device_decides(device: EmulatedDevice) -> None:
    size, random = 30_001, np.random.default_rng(3)
    rows = [random_logits(size, scale, None, 5) for scale in (0.3, 4.0)]
    peaked = random_logits(size, 2.0, None, 6)
    peaked[random.integers(0, size, 12)] += np.linspace(4.0, 11.0, 12, dtype=np.float32)
    assert undecided_share(Rig(device, size), [*rows, peaked], random.random(1).tolist()) == 0.0


@examples(100)
@given(
    RIGS,
    st.sampled_from([0.5, 3.0, 30.0]),
    st.sampled_from([None, 1.0]),
    st.integers(0, 1 << 32),
    st.sampled_from([0.0005, 0.05, 0.5, 1.0]),
    st.sampled_from([None, *OPTIONS]),
    NUMBERS,
)
def test_of_a_masked_vocabulary_tokens_are_those_of_the_host(
    which: tuple[int, int, bool],
    scale: float,
    step: float | None,
    seed: int,
    share: float,
    options: DeviceSampling | None,
    number: float,
) -> None:
    device_rig = rig(*which)
    size, random = device_rig.vocab_size, np.random.default_rng(seed)
    logits = random_logits(size, scale, step, seed)
    allowed = random.random(size) < share
    allowed[random.integers(size)] = True
    said = device_rig.sample(logits, options, number, allowed)
    if options is None:
        assert said == np.where(allowed, logits, -np.inf).argmax()
    else:
        token_ids = np.flatnonzero(allowed)
        host_id = int(token_ids[host_sampled(logits[allowed], options, number)])
        assert said in (UNDECIDED, host_id)


@examples(80)
@given(
    RIGS,
    st.sampled_from([0.5, 30.0]),
    st.integers(0, 1 << 32),
    st.sampled_from([0, 1, 9, 300]),
    st.booleans(),
    st.sampled_from([None, *OPTIONS]),
    NUMBERS,
)
def test_logits_change_as_on_the_host(
    which: tuple[int, int, bool],
    scale: float,
    seed: int,
    num_changes: int,
    is_masked: bool,
    options: DeviceSampling | None,
    number: float,
) -> None:
    device_rig = rig(*which)
    size, random = device_rig.vocab_size, np.random.default_rng(seed)
    logits = random_logits(size, scale, None, seed)
    token_ids = random.permutation(size)[:num_changes].astype(np.int32)
    changes = LogitChanges(
        token_ids,
        random.choice([1.0, 1.1, 0.7, 5.0], token_ids.size).astype(np.float32),
        random.normal(0.0, 2.0, token_ids.size).astype(np.float32),
    )
    allowed = random.random(size) < 0.5 if is_masked else None
    if allowed is not None:
        allowed[random.integers(size)] = True
    said = device_rig.sample(logits, options, number, allowed, changes)
    of_host = SamplingParams() if options is None else SamplingParams(**asdict(options))
    expected = Sampler(of_host).sample(changed(logits, changes), number, allowed)
    assert said in ((expected,) if options is None else (UNDECIDED, expected))


@pytest.mark.parametrize("options", [None, DeviceSampling(1.0, top_k=30)])
def test_a_logit_that_is_not_finite_ends_a_masked_text_too(options: DeviceSampling | None) -> None:
    device_rig, allowed = rig(67, 32, False), np.arange(67) < 20
    for bad_id in (3, 50):
        logits = random_logits(67, 1.0, None, 1)
        logits[bad_id] = np.nan
        assert device_rig.sample(logits, options, 0.25, allowed) == NOT_FINITE


def test_without_options_the_likeliest_is_taken(device: EmulatedDevice) -> None:
    device_rig = Rig(device, 67)
    for seed in range(3):
        logits = random_logits(67, 1.0, 1.0, seed)  # many are equal
        assert device_rig.sample(logits, None, 0.9) == logits.argmax()


@pytest.mark.parametrize("options", [None, DeviceSampling(1.0, top_k=30)])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_have_no_token(
    bad: float, options: DeviceSampling | None
) -> None:
    device_rig = rig(67, 32, False)
    logits = random_logits(67, 1.0, None, 1)
    good = logits.copy()
    logits[20] = bad
    assert device_rig.sample(logits, options, 0.25) == NOT_FINITE
    assert device_rig.sample(np.full(67, bad, np.float32), options, 0.25) == NOT_FINITE
    if options is not None:
        assert device_rig.sample(good, options, 0.25) == host_sampled(good, options, 0.25)


@pytest.mark.parametrize(
    ("options", "number"),
    [
        (DeviceSampling(1.0), 0.5),  # between the second and the third of four
        (DeviceSampling(1.0, top_p=0.5), 0.3),
        (DeviceSampling(1.0, top_p=0.3), 0.5),
        (DeviceSampling(1.0, top_k=2, top_p=0.5), 0.3),
        (DeviceSampling(1e-305), 0.3),
        (DeviceSampling(1.0, min_p=1e-20), 0.3),
    ],
)
def test_where_rounding_decides_the_host_does(options: DeviceSampling, number: float) -> None:
    device_rig = rig(67, 32, False)
    logits = np.full(67, -3e38, np.float32)
    logits[[3, 5, 40, 66]] = 2.5
    assert device_rig.sample(logits, options, number) == UNDECIDED
    near = DeviceSampling(1.0, options.top_k, options.top_p + 1e-4 if options.top_p < 1 else 1.0)
    said = device_rig.sample(logits, near, number + 1e-3)
    assert said == host_sampled(logits, near, number + 1e-3)


def test_min_p_of_one_keeps_all_that_are_likeliest() -> None:
    device_rig, options = rig(67, 32, False), DeviceSampling(2.0, min_p=1.0)
    logits = np.zeros(67, np.float32)
    logits[[3, 5, 40]] = 2.5
    assert [device_rig.sample(logits, options, each) for each in (0.2, 0.5, 0.9)] == [3, 5, 40]


def test_a_bin_with_too_many_is_left_to_the_host(device: EmulatedDevice) -> None:
    device_rig = Rig(device, 67, bin_capacity=8)
    logits = (np.arange(67) / -16).astype(np.float32)
    logits[20:29] = logits[20]
    for count, number in ((67, 0.2), (67, 0.65), (67, 0.99), (15, 0.9), (24, 0.1)):
        options = DeviceSampling(1.0, top_k=count)
        expected = host_sampled(logits, options, number)
        is_among = 20 <= expected < 29 or 20 < count < 29
        said = device_rig.sample(logits, options, number)
        assert said == (UNDECIDED if is_among else expected)


def test_what_does_not_fit_is_refused() -> None:
    device = EmulatedDevice()
    for size in (0, MOST_VOCABULARY + 1):
        with pytest.raises(ValueError, match=rf"\b{size}\b"):
            SampleTokens(device, vocab_size=size)
    device_rig = rig(67, 32, False)
    with pytest.raises(ValueError, match=r"\blogits\b.* float32 \[1, 66\]"):
        device_rig.sample(np.zeros(66, np.float32), None, 0.0)


@pytest.fixture(params=[None, 64], ids=["own lanes", "64 lanes"])
def gpu(request: pytest.FixtureRequest) -> Iterator[CupyDevice]:
    device = CupyDevice(first_gpu(), lanes=request.param)
    yield device
    device.close()


@pytest.mark.gpu
def test_a_whole_vocabulary_on_a_gpu(gpu: CupyDevice) -> None:
    size, random = 151_936, np.random.default_rng(4)
    rows = [random_logits(size, scale, None, 5) for scale in (0.3, 1.0, 4.0)]
    rows.append(random_logits(size, 3.0, 0.05, 6))
    share = undecided_share(Rig(gpu, size), rows, random.random(20).tolist())
    assert share < 0.01
