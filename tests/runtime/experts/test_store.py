"""Loading experts: exactly the owned byte ranges, and a measured rate."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import Activation, ExpertVector, MoeSpec
from dflash_protocol.batch import RoutedBatch
from dflash_protocol.errors import ModelFileError
from dflash_protocol.ids import F64Array, Phase, U8Array
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.compute import ExpertBank
from dflash_runtime.compute.reference import ReferenceBackend
from dflash_runtime.experts.store import (
    BankKind,
    every_expert,
    expert_tensor_types,
    load_banks,
    measure_pairs_per_second,
)
from support.expert_files import write_expert_layer
from support.random_models import BLOCK_32_SHAPE, write_qwen3moe
from support.routed_batches import ScalingBank, batch_of, moe_layer

SHAPE = replace(BLOCK_32_SHAPE, num_layers=3)
OWNED = OwnedExperts.from_lists({0: [7, 2], 2: [0, 10, 1]})

Range = tuple[int, int, int]
"""Shard, offset, bytes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GgufFile]:
    types = {"ffn_gate_exps": "Q8_0", "ffn_down_exps": "BF16"}
    path: Path = tmp_path_factory.mktemp("model") / "model.gguf"
    with GgufFile.open(write_qwen3moe(path, SHAPE, seed=4, tensor_type=types)) as file:
        yield file


@pytest.fixture
def spec(model: GgufFile) -> MoeSpec:
    return read_spec(model).moe


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Range]]:
    """Every range that is looked at or announced from now on."""
    ranges: dict[str, list[Range]] = {"region": [], "advise": []}
    region, advise = GgufFile.region, GgufFile.advise_willneed

    def captured_region(self: GgufFile, *each: int) -> U8Array:
        ranges["region"].append((each[0], each[1], each[2]))
        return region(self, *each)

    def captured_advise(self: GgufFile, *each: int) -> None:
        ranges["advise"].append((each[0], each[1], each[2]))
        advise(self, *each)

    monkeypatch.setattr(GgufFile, "region", captured_region)
    monkeypatch.setattr(GgufFile, "advise_willneed", captured_advise)
    return ranges


def owned_ranges(spec: MoeSpec, owned: OwnedExperts) -> set[Range]:
    return {
        (
            projection.shard_index,
            projection.offset_bytes + global_expert_id * projection.stride_bytes,
            projection.num_bytes,
        )
        for layer_id, ids in owned.by_layer.items()
        for projection in spec.by_layer_id[layer_id].projections
        for global_expert_id in ids.tolist()
    }


def test_ranges_of_all_experts_are_the_whole_of_their_tensors(
    model: GgufFile, spec: MoeSpec
) -> None:
    """What the other tests compare with: experts lie one after the other in their tensors."""
    expected = set()
    for layer in spec.layers:
        for projection in layer.projections:
            tensor = model.tensor(projection.tensor_name)
            size = tensor.num_bytes // layer.num_experts
            expected |= {
                (tensor.shard_index, tensor.offset_bytes + index * size, size)
                for index in range(layer.num_experts)
            }
    assert owned_ranges(spec, every_expert(spec)) == expected


def test_loading_touches_the_owned_ranges_and_no_others(
    model: GgufFile, spec: MoeSpec, touched: dict[str, list[Range]]
) -> None:
    banks = load_banks(ReferenceBackend(), model, spec, owned=OWNED, read_now=True)
    assert sorted(banks) == [0, 2]
    assert [banks[0].num_experts, banks[2].num_experts] == [2, 3]
    assert set(touched["region"]) == set(touched["advise"]) == owned_ranges(spec, OWNED)


def test_loading_touches_biases_and_scales_too(
    tmp_path: Path, touched: dict[str, list[Range]]
) -> None:
    path = tmp_path / "experts.gguf"
    layer = write_expert_layer(
        path, num_experts=4, hidden_size=32, ffn_size=8, merged=True, biases=True, scales=True
    )
    expected = set()
    with GgufFile.open(path) as file:
        touched["region"].clear()
        owned = OwnedExperts.from_lists({0: [3, 1]})
        load_banks(ReferenceBackend(), file, MoeSpec((layer,)), owned=owned, read_now=True)
        for name, tensor in file.tensors.items():
            num_parts = 2 if "gate_up" in name and not name.endswith("scale") else 1
            size = tensor.num_bytes // 4 // num_parts
            expected |= {
                (0, tensor.offset_bytes + size * (num_parts * expert + part), size)
                for expert in (1, 3)
                for part in range(num_parts)
            }
    assert set(touched["region"]) == set(touched["advise"]) == expected
    assert len(touched["advise"]) == len(expected), "what projections share is read once"


def test_computing_touches_the_chosen_experts_only(
    model: GgufFile, spec: MoeSpec, touched: dict[str, list[Range]]
) -> None:
    banks = load_banks(ReferenceBackend(), model, spec, owned=OWNED, read_now=False)
    assert touched == {"region": [], "advise": []}, "what may never be used is not read"
    hidden = np.ones((1, SHAPE.hidden_size), np.float32)
    batch = batch_of(1, {(0, 1): 1.0}, hidden=hidden)
    banks[2].accumulate(batch, np.zeros((1, SHAPE.hidden_size)))
    assert set(touched["region"]) == owned_ranges(spec, OwnedExperts.from_lists({2: [10]}))


def test_local_ids_follow_the_order_of_the_owned_list(model: GgufFile, spec: MoeSpec) -> None:
    backend = ReferenceBackend()
    random = np.random.default_rng(2)
    hidden = random.standard_normal((1, SHAPE.hidden_size), dtype=np.float32)

    def output(bank: ExpertBank, local_expert_id: int) -> bytes:
        out = np.zeros(hidden.shape)
        bank.accumulate(batch_of(1, {(0, local_expert_id): 1.0}, hidden=hidden), out)
        return out.tobytes()

    banks = load_banks(backend, model, spec, owned=OWNED, read_now=True)
    everything = load_banks(backend, model, spec, owned=every_expert(spec), read_now=False)
    for layer_id, ids in OWNED.by_layer.items():
        for local_expert_id, global_expert_id in enumerate(ids.tolist()):
            own = output(banks[layer_id], local_expert_id)
            assert own == output(everything[layer_id], global_expert_id)


def test_an_owner_of_nothing_gets_no_banks(
    model: GgufFile, spec: MoeSpec, touched: dict[str, list[Range]]
) -> None:
    nothing = OwnedExperts.from_lists({})
    assert load_banks(ReferenceBackend(), model, spec, owned=nothing, read_now=True) == {}
    assert touched == {"region": [], "advise": []}


def test_tensor_types_are_those_of_the_experts(spec: MoeSpec) -> None:
    assert expert_tensor_types(spec) == {TensorType.Q8_0, TensorType.F32, TensorType.BF16}


def test_what_is_read_when_it_is_used_is_not_taken_from_a_file_that_was_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_qwen3moe(tmp_path / "model.gguf", SHAPE, seed=4)
    batch = batch_of(1, {(0, 1): 1.0}, hidden=np.ones((1, SHAPE.hidden_size), np.float32))
    out = np.zeros((1, SHAPE.hidden_size))
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with GgufFile.open(path) as file:
        bank = load_banks(
            ReferenceBackend(), file, read_spec(file).moe, owned=OWNED, read_now=False
        )[0]
        bank.accumulate(batch, out)
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        clock[0] += 0.06
        bank.accumulate(batch, out)  # looked at a moment ago
        clock[0] += 0.06
        before = out.copy()
        with pytest.raises(ModelFileError, match=r"\bwritten\b"):
            bank.accumulate(batch, out)
        np.testing.assert_array_equal(out, before)


class CountingBank(ScalingBank):
    """Counts how often it is asked."""

    calls: ClassVar[Counter[int]] = Counter()

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        assert batch.phase is Phase.DECODE
        batch.check(hidden_size=self.layer.hidden_size, num_experts=self.num_experts)
        self.calls[self.layer.layer_id] += 1
        super().accumulate(batch, out)


def test_every_kind_of_bank_runs_before_its_rate_is_measured() -> None:
    CountingBank.calls.clear()
    banks = [
        CountingBank(moe_layer(layer_id=0)),
        CountingBank(moe_layer(layer_id=1)),  # of the same kind as layer 0
        CountingBank(moe_layer(layer_id=2, hidden_size=9)),
        CountingBank(moe_layer(layer_id=3, hidden_size=11), [4]),
    ]
    rate = measure_pairs_per_second(banks)
    assert 0.0 < rate < float("inf")
    assert CountingBank.calls == {0: 2, 2: 2, 3: 2}


def test_layers_of_other_forms_are_other_kinds() -> None:
    CountingBank.calls.clear()
    plain = moe_layer(layer_id=0)
    vector = ExpertVector("none", 0, 0, 0, 1)
    others = [
        replace(plain, activation=Activation.GPT_OSS),
        replace(plain, up=replace(plain.up, bias=vector)),
        replace(plain, up=replace(plain.up, scale=vector)),
    ]
    layers = [plain, *(replace(each, layer_id=number + 1) for number, each in enumerate(others))]
    measure_pairs_per_second([CountingBank(layer) for layer in layers])
    assert CountingBank.calls == dict.fromkeys(range(4), 2)


def test_the_slowest_kind_decides_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.5, 10.0, 10.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    banks = [ScalingBank(moe_layer()), ScalingBank(moe_layer(hidden_size=9))]
    assert measure_pairs_per_second(banks) == 4.0  # two pairs in half a second


def test_a_clock_that_stands_still_gives_a_finite_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 1.0)
    assert 0.0 < measure_pairs_per_second([ScalingBank(moe_layer())]) < float("inf")
    assert 0.0 < measure_pairs_per_second([]) < float("inf")


def test_kinds_that_were_measured_before_are_not_measured_again() -> None:
    CountingBank.calls.clear()
    known: dict[BankKind, float] = {}
    plain, other = CountingBank(moe_layer()), CountingBank(moe_layer(layer_id=1, hidden_size=9))
    rate = measure_pairs_per_second([plain], known)
    assert measure_pairs_per_second([plain], known) == rate
    both = measure_pairs_per_second([plain, other], known)
    assert both == min(known.values()) <= rate
    assert CountingBank.calls == {0: 2, 1: 2}
    assert measure_pairs_per_second([plain], known) == rate
    assert measure_pairs_per_second([], known) == measure_pairs_per_second([])
