"""Expert FFNs on the CPU: right, and with bits that depend on nothing but the pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.moe_spec import Activation, ExpertProjection, MoeLayer
from dflash_adapters.quant import TensorType
from dflash_adapters.quant.reference import dequantise
from dflash_protocol.ids import F32Array, F64Array, I32Array, Phase
from dflash_protocol.routed_batch import RoutedBatch, group_by_expert
from dflash_runtime.compute.backend import ExpertBank
from dflash_runtime.compute.cpu import CpuBackend, experts

E = 6
SIZES = {TensorType.F32: (52, 36), TensorType.Q8_0: (96, 64), TensorType.TQ2_0: (256, 256)}
TYPES = [TensorType.F32, TensorType.F16, TensorType.Q8_0, TensorType.Q4_0, TensorType.TQ2_0]


@dataclass(frozen=True, slots=True)
class Experts:
    """A file of one layer's experts, and their values."""

    file: GgufFile
    layer: MoeLayer
    weights: dict[str, F32Array]


def make_experts(path: Path, tensor_type: TensorType) -> Experts:
    hidden_size, ffn_size = SIZES.get(tensor_type, SIZES[TensorType.Q8_0])
    rng = np.random.default_rng(int(tensor_type))
    qtype = gguf.GGMLQuantizationType(int(tensor_type))
    shapes = {
        "gate": (E, ffn_size, hidden_size),
        "up": (E, ffn_size, hidden_size),
        "down": (E, hidden_size, ffn_size),
    }
    writer = gguf.GGUFWriter(path, "some-architecture")
    for name, shape in shapes.items():
        values = (rng.standard_normal(shape) / np.sqrt(shape[2]) * 2).astype(np.float32)
        if tensor_type is TensorType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile.open(path)

    def projection(name: str) -> ExpertProjection:
        info = file.tensor(name)
        return ExpertProjection(
            tensor_name=name,
            tensor_type=info.tensor_type,
            rows=info.shape[1],
            columns=info.shape[2],
            shard_index=info.shard_index,
            offset_bytes=info.offset_bytes,
            stride_bytes=info.num_bytes // E,
        )

    layer = MoeLayer(
        layer_id=0,
        num_experts=E,
        num_experts_used=3,
        hidden_size=hidden_size,
        ffn_size=ffn_size,
        activation=Activation.SWIGLU,
        gate=projection("gate"),
        up=projection("up"),
        down=projection("down"),
    )
    weights = {
        name: dequantise(file.tensor_bytes(name), tensor_type, shape)
        for name, shape in shapes.items()
    }
    return Experts(file, layer, weights)


@pytest.fixture(scope="module")
def all_experts(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[TensorType, Experts]]:
    folder = tmp_path_factory.mktemp("experts")
    made = {kind: make_experts(folder / f"{kind.name}.gguf", kind) for kind in TYPES}
    yield made
    for one in made.values():
        one.file.close()


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[int, CpuBackend]]:
    by_threads = {num_threads: CpuBackend(num_threads=num_threads) for num_threads in (1, 2, 3)}
    yield by_threads
    for backend in by_threads.values():
        backend.close()


def all_ids() -> I32Array:
    return np.arange(E, dtype=np.int32)


def random_batch(hidden_size: int, num_tokens: int, seed: int) -> RoutedBatch:
    rng = np.random.default_rng(seed)
    tokens = np.repeat(np.arange(num_tokens, dtype=np.int32), 3)
    ids = [rng.choice(E, 3, replace=False) for _ in range(num_tokens)]
    return group_by_expert(
        rng.standard_normal((num_tokens, hidden_size)).astype(np.float32),
        tokens,
        np.concatenate([*ids, np.zeros(0)]).astype(np.int32),
        rng.random(tokens.size).astype(np.float32),
        phase=Phase.PREFILL,
    )


def result_of(bank: ExpertBank, batch: RoutedBatch) -> F64Array:
    out = np.zeros(batch.hidden.shape, np.float64)
    bank.accumulate(batch, out)
    return out


def one_pair(batch: RoutedBatch, pair: int, local_expert_id: int) -> RoutedBatch:
    token = batch.token_indices[pair]
    return RoutedBatch(
        phase=Phase.DECODE,
        hidden=batch.hidden[token : token + 1].copy(),
        expert_ids=np.array([local_expert_id], np.int32),
        group_starts=np.array([0, 1], np.int32),
        token_indices=np.zeros(1, np.int32),
        weights=batch.weights[pair : pair + 1].copy(),
    )


def pair_expert_ids(batch: RoutedBatch) -> I32Array:
    return np.repeat(batch.expert_ids, np.diff(batch.group_starts))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 9, 150])
@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_against_float64(
    all_experts: dict[TensorType, Experts],
    backends: dict[int, CpuBackend],
    kind: TensorType,
    num_tokens: int,
) -> None:
    made = all_experts[kind]
    batch = random_batch(made.layer.hidden_size, num_tokens, seed=num_tokens)
    bank = backends[1].load_experts(made.file, made.layer, all_ids())
    assert bank.num_experts == E
    assert bank.layer is made.layer
    gate, up, down = (made.weights[name].astype(np.float64) for name in ("gate", "up", "down"))
    expected = np.zeros(batch.hidden.shape)
    for pair, expert in enumerate(pair_expert_ids(batch)):
        token = batch.token_indices[pair]
        x = batch.hidden[token].astype(np.float64)
        gated = gate[expert] @ x
        term = down[expert] @ (gated / (1 + np.exp(-gated)) * (up[expert] @ x))
        expected[token] += batch.weights[pair] * term
    got = result_of(bank, batch)
    scale = np.abs(expected).max(initial=0)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * scale)


def test_terms_are_added_to_what_is_there(
    all_experts: dict[TensorType, Experts], backends: dict[int, CpuBackend]
) -> None:
    made = all_experts[TensorType.Q8_0]
    bank = backends[1].load_experts(made.file, made.layer, all_ids())
    one = one_pair(random_batch(made.layer.hidden_size, 3, seed=0), 0, 0)
    out = np.full(one.hidden.shape, 1e9)
    bank.accumulate(one, out)
    np.testing.assert_array_equal(out, 1e9 + result_of(bank, one))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", [TensorType.F32, TensorType.Q8_0, TensorType.Q4_0])
def test_a_terms_bits_depend_on_nothing_else(
    all_experts: dict[TensorType, Experts],
    backends: dict[int, CpuBackend],
    kind: TensorType,
    data: st.DataObject,
) -> None:
    """A pair alone, on a bank of its own, gives what it gives in any batch with any threads."""
    made = all_experts[kind]
    num_tokens = data.draw(st.integers(1, 40), "num_tokens")
    num_threads = data.draw(st.sampled_from([1, 2, 3]), "num_threads")
    order = data.draw(st.permutations(range(E)), "local numbering")
    held = np.array(order[: data.draw(st.integers(1, E), "num_held")], np.int32)
    full = random_batch(made.layer.hidden_size, num_tokens, data.draw(st.integers(0, 99), "seed"))

    local_id_of = {int(expert): local for local, expert in enumerate(held)}
    kept = [p for p, expert in enumerate(pair_expert_ids(full)) if int(expert) in local_id_of]
    local_ids = [local_id_of[int(expert)] for expert in pair_expert_ids(full)[kept]]
    batch = group_by_expert(
        full.hidden,
        full.token_indices[kept],
        np.array(local_ids, np.int32),
        full.weights[kept],
        phase=Phase.PREFILL,
    )
    bank = backends[num_threads].load_experts(made.file, made.layer, held)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "PARALLEL_PRODUCTS", 0)
        got = result_of(bank, batch)

    alone = backends[1].load_experts(made.file, made.layer, all_ids())
    expected = np.zeros(batch.hidden.shape, np.float64)
    for pair, local_expert_id in enumerate(pair_expert_ids(batch)):
        term = result_of(alone, one_pair(batch, pair, int(held[local_expert_id])))[0]
        np.testing.assert_array_equal(term, term.astype(np.float32))
        expected[batch.token_indices[pair]] += term
    np.testing.assert_array_equal(got, expected)


def test_merged_gate_and_up_stacks(
    all_experts: dict[TensorType, Experts], backends: dict[int, CpuBackend]
) -> None:
    """Projections whose stride is larger than one expert: the same file read with every 2nd."""
    made = all_experts[TensorType.F32]
    half = E // 2

    def every_second(projection: ExpertProjection) -> ExpertProjection:
        return ExpertProjection(
            tensor_name=projection.tensor_name,
            tensor_type=projection.tensor_type,
            rows=projection.rows,
            columns=projection.columns,
            shard_index=projection.shard_index,
            offset_bytes=projection.offset_bytes,
            stride_bytes=2 * projection.stride_bytes,
        )

    layer = MoeLayer(
        layer_id=0,
        num_experts=half,
        num_experts_used=1,
        hidden_size=made.layer.hidden_size,
        ffn_size=made.layer.ffn_size,
        activation=Activation.SWIGLU,
        gate=every_second(made.layer.gate),
        up=every_second(made.layer.up),
        down=every_second(made.layer.down),
    )
    strided = backends[1].load_experts(made.file, layer, np.arange(half, dtype=np.int32))
    picked = backends[1].load_experts(made.file, made.layer, np.array([0, 2, 4], np.int32))
    batch = random_batch(layer.hidden_size, 20, seed=4)
    keep = pair_expert_ids(batch) < half
    batch = group_by_expert(
        batch.hidden,
        batch.token_indices[keep],
        pair_expert_ids(batch)[keep],
        batch.weights[keep],
        phase=Phase.PREFILL,
    )
    np.testing.assert_array_equal(result_of(strided, batch), result_of(picked, batch))


def test_batches_that_name_what_is_not_there_are_refused(
    all_experts: dict[TensorType, Experts], backends: dict[int, CpuBackend]
) -> None:
    made = all_experts[TensorType.Q8_0]
    bank = backends[1].load_experts(made.file, made.layer, all_ids()[:3])
    good = one_pair(random_batch(made.layer.hidden_size, 1, seed=0), 0, 2)

    def changed(**arrays: Any) -> RoutedBatch:
        fields = {name: getattr(good, name) for name in good.__dataclass_fields__}
        return RoutedBatch(**{**fields, **arrays})

    def ints(*values: int) -> I32Array:
        return np.array(values, np.int32)

    wrong = [
        changed(expert_ids=ints(3)),
        changed(expert_ids=ints(-1)),
        changed(token_indices=ints(1)),
        changed(token_indices=ints(-1)),
        changed(group_starts=ints(0, 2)),
        changed(group_starts=ints(1, 1)),
        changed(group_starts=ints(0)),
        changed(weights=np.ones(2, np.float32)),
        changed(hidden=np.ones((1, 7), np.float32)),
    ]
    for batch in wrong:
        with pytest.raises(ValueError, match=r"batch names|group_starts|weight for|expected \[T"):
            bank.accumulate(batch, np.zeros(batch.hidden.shape))
    with pytest.raises(ValueError, match="out"):
        bank.accumulate(good, np.zeros((2, made.layer.hidden_size)))
    with pytest.raises(TypeError):
        bank.accumulate(good, np.zeros(good.hidden.shape, np.float32))
    assert result_of(bank, good).any()


def test_experts_outside_the_layer_are_refused(
    all_experts: dict[TensorType, Experts], backends: dict[int, CpuBackend]
) -> None:
    made = all_experts[TensorType.Q8_0]
    for bad in (-1, E):
        with pytest.raises(ValueError, match=r"expert ids must lie within 0\.\.5"):
            backends[1].load_experts(made.file, made.layer, np.array([0, bad], np.int32))
    nobody = backends[1].load_experts(made.file, made.layer, all_ids()[:0])
    assert nobody.num_experts == 0
    assert not result_of(nobody, random_batch(made.layer.hidden_size, 0, seed=0)).any()


def test_weights_are_read_in_place_and_outlive_the_file(
    tmp_path: Path, backends: dict[int, CpuBackend]
) -> None:
    made = make_experts(tmp_path / "experts.gguf", TensorType.Q8_0)
    bank = backends[1].load_experts(made.file, made.layer, all_ids())
    batch = random_batch(made.layer.hidden_size, 4, seed=1)
    before = result_of(bank, batch)
    made.file.close()
    np.testing.assert_array_equal(result_of(bank, batch), before)
