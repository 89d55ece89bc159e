"""The reference backend's experts against float64, in every form that a layer may have."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_adapters.spec import Activation, MoeLayer
from dflash_protocol.batch import RoutedBatch
from dflash_protocol.ids import F64Array
from dflash_runtime.compute.backend import ExpertBank
from dflash_runtime.compute.reference import ReferenceBackend
from dflash_runtime.compute.reference.experts import activate
from support.expert_files import write_expert_layer
from support.float64_experts import activated, expert_sums, read_experts
from support.routed_batches import batch_of, moe_layer

E = 4
F32 = TensorType.F32
MIXES = {
    "F32": (F32, F32, F32),
    "one of each": (TensorType.Q4_K, TensorType.Q6_K, TensorType.Q8_0),
    "NVFP4": (TensorType.NVFP4, TensorType.NVFP4, TensorType.NVFP4),
    "MXFP4": (TensorType.MXFP4, TensorType.MXFP4, TensorType.Q5_1),
    "plain": (TensorType.BF16, TensorType.BF16, TensorType.F16),
}


def random_batch(hidden_size: int, num_tokens: int = 6) -> RoutedBatch:
    random = np.random.default_rng(num_tokens)
    hidden = random.standard_normal((num_tokens, hidden_size), dtype=np.float32)
    pairs = {
        (token_idx, int(expert_id)): float(np.float32(random.random()))
        for token_idx in range(num_tokens)
        for expert_id in random.choice(E, 2, replace=False)
    }
    return batch_of(num_tokens, pairs, hidden=hidden)


def result_of(bank: ExpertBank, batch: RoutedBatch) -> F64Array:
    out = np.zeros(batch.hidden.shape)
    bank.accumulate(batch, out)
    return out


def computed(path: Path, layer: MoeLayer, batch: RoutedBatch) -> F64Array:
    with GgufFile.open(path) as file:
        return result_of(
            ReferenceBackend().load_experts(file, layer, np.arange(E, dtype=np.int32)), batch
        )


@pytest.mark.wide(2)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("extras", ["", "bias", "scale", "bias scale"])
@pytest.mark.parametrize("merged", [False, True], ids=["separate", "merged"])
def test_every_form_of_a_layer_against_float64(
    tmp_path: Path, activation: Activation, extras: str, merged: bool
) -> None:
    path = tmp_path / "experts.gguf"
    layer = write_expert_layer(
        path,
        num_experts=E,
        hidden_size=52,
        ffn_size=36,
        merged=merged,
        biases="bias" in extras,
        scales="scale" in extras,
        activation=activation,
    )
    batch = random_batch(52)
    expected = expert_sums(read_experts(path), layer, batch)
    np.testing.assert_allclose(
        computed(path, layer, batch), expected, rtol=0, atol=1e-6 * np.abs(expected).max()
    )


@pytest.mark.parametrize("merged", [False, True], ids=["separate", "merged"])
@pytest.mark.parametrize("mix", MIXES)
def test_every_projection_has_a_type_of_its_own(tmp_path: Path, mix: str, merged: bool) -> None:
    gate, up, down = MIXES[mix]
    path = tmp_path / "experts.gguf"
    layer = write_expert_layer(
        path,
        num_experts=E,
        hidden_size=256,
        ffn_size=512,
        types=(gate, gate if merged else up, down),
        merged=merged,
        biases=True,
        scales=True,
        activation=Activation.GPT_OSS,
    )
    batch = random_batch(256, num_tokens=2)
    expected = expert_sums(read_experts(path), layer, batch)
    np.testing.assert_allclose(
        computed(path, layer, batch), expected, rtol=0, atol=1e-6 * np.abs(expected).max()
    )


def test_merging_and_splitting_give_the_same_bits(tmp_path: Path) -> None:
    batch = random_batch(52)
    results = []
    for merged in (False, True):
        path = tmp_path / f"{merged}.gguf"
        layer = write_expert_layer(
            path, num_experts=E, hidden_size=52, ffn_size=36, merged=merged, biases=True
        )
        results.append(computed(path, layer, batch).tobytes())
    assert results[0] == results[1]


def test_each_form_gives_another_result(tmp_path: Path) -> None:
    """Otherwise the comparisons above could pass by leaving something out."""
    batch = random_batch(52)
    results = set()
    for number, (activation, biases, scales) in enumerate(
        itertools.product(Activation, (False, True), (False, True))
    ):
        path = tmp_path / f"{number}.gguf"
        layer = write_expert_layer(
            path,
            num_experts=E,
            hidden_size=52,
            ffn_size=36,
            biases=biases,
            scales=scales,
            activation=activation,
        )
        results.add(computed(path, layer, batch).tobytes())
        if activation is not Activation.SWIGLU:
            wider = replace(layer, activation_limit=2 * layer.activation_limit)
            results.add(computed(path, wider, batch).tobytes())
    assert len(results) == 4 * (1 + 2 + 2)


def test_experts_of_two_files_are_kept_apart(tmp_path: Path) -> None:
    batch = random_batch(52)
    backend, results = ReferenceBackend(), []
    paths = [tmp_path / "0.gguf", tmp_path / "1.gguf"]
    layers = [
        write_expert_layer(path, num_experts=E, hidden_size=52, ffn_size=36, seed=seed)
        for seed, path in enumerate(paths)
    ]
    ids = np.arange(E, dtype=np.int32)
    with GgufFile.open(paths[0]) as first, GgufFile.open(paths[1]) as second:
        banks = [
            backend.load_experts(file, layer, ids)
            for file, layer in zip((first, second), layers, strict=True)
        ]
        results = [result_of(bank, batch) for bank in banks]
    for path, layer, result in zip(paths, layers, results, strict=True):
        np.testing.assert_array_equal(result, computed(path, layer, batch))


@settings(deadline=None)
@given(
    activation=st.sampled_from(Activation),
    limit=st.sampled_from([0.5, 7.0, 10.0]),
    values=st.lists(st.tuples(*[st.floats(-3e4, 3e4, width=32)] * 2), min_size=1, max_size=8),
)
def test_activations_against_float64(
    activation: Activation, limit: float, values: list[tuple[float, float]]
) -> None:
    layer = replace(
        moe_layer(),
        activation=activation,
        activation_limit=np.inf if activation is Activation.SWIGLU else limit,
        activation_alpha=1.702 if activation is Activation.GPT_OSS else 1.0,
    )
    gate, up = np.array(values, np.float32).T
    with np.errstate(over="ignore"):
        expected = activated(activation, gate.astype(np.float64), up.astype(np.float64), limit)
    # A float32 exponent is off by its own rounding times its size, of which 90 is the largest.
    np.testing.assert_allclose(activate(layer, gate, up), expected, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("activation", Activation)
def test_activations_at_the_edges(activation: Activation) -> None:
    limit, offset = 7.0, activation.up_offset
    clamps = activation is not Activation.SWIGLU
    layer = replace(
        moe_layer(), activation=activation, activation_limit=limit if clamps else np.inf
    )

    def value(gate: float, up: float) -> float:
        values = np.array([[gate], [up]], np.float32)
        return float(activate(layer, *values)[0])

    assert value(0.0, 3.0) == 0.0
    assert value(-1e30, 3.0) == 0.0
    # Above the limits nothing changes; far below it, the gate is not limited.
    assert (value(7.0, 7.0) == value(8.0, 9.0)) == clamps
    assert (value(7.0, -7.0) == value(7.0, -9.0)) == clamps
    assert value(-8.0, 1.0) != value(-7.0, 1.0)
    assert value(7.0, 7.0) == pytest.approx(7.0 * (7.0 + offset), rel=1e-3)
