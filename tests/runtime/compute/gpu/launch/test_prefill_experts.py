"""Expert FFNs of a prefill chunk against float64, and their bits against each other."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_adapters.quant import TensorType
from dflash_adapters.spec import Activation, MoeLayer
from dflash_protocol.batch import RoutedBatch, group_by_expert
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import AnyArray, F32Array, F64Array, I32Array, Phase
from dflash_runtime.compute.gpu.device.kernel_sources import Defines
from dflash_runtime.compute.gpu.launch import prefill_experts
from dflash_runtime.compute.gpu.launch.prefill_operands import (
    IN_UNITS,
    TENSOR_PRODUCTS,
    Products,
    Tile,
)
from support.emulated_device import EmulatedDevice
from support.emulated_device.emulated_device import EmulatedModule
from support.expert_files import write_expert_layer
from support.float64_experts import expert_sums, read_experts
from support.prefill_rig import (
    SMALL_HALF,
    SMALL_TENSOR,
    ExpertsOnDevice,
    PrefillRig,
    choose,
)

F32, F16, BF16 = TensorType.F32, TensorType.F16, TensorType.BF16
Q4_K, Q6_K, Q8_0, MXFP4 = TensorType.Q4_K, TensorType.Q6_K, TensorType.Q8_0, TensorType.MXFP4
PRODUCTS = pytest.mark.parametrize("products", [SMALL_TENSOR, SMALL_HALF], ids=["tensor", "fma"])
QUANTISED = (Q8_0, MXFP4, Q8_0)
NUM_EXPERTS, HIDDEN_SIZE, FFN_SIZE = 5, 96, 160


def _slow(*values: object) -> Any:
    """A near twin of another case, for the long run of the tests."""
    return pytest.param(*values, marks=pytest.mark.slow)


def batch_of(hidden: F32Array, ids: I32Array, weights: F32Array, kept: AnyArray) -> RoutedBatch:
    """The pairs whose expert is kept. Shapes: ids, weights [T, K]; kept [E] bool."""
    tokens, places = np.nonzero(kept[ids])
    return group_by_expert(
        hidden,
        tokens.astype(np.int32),
        ids[tokens, places],
        weights=weights[tokens, places],
        phase=Phase.PREFILL,
    )


def relative_error(found: F64Array, wanted: F64Array) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def small_layer(
    folder: Path,
    *,
    types: tuple[TensorType, TensorType, TensorType] = QUANTISED,
    activation: Activation = Activation.SWIGLU,
    has_vectors: bool = False,
) -> tuple[MoeLayer, Path]:
    """Sizes that are no multiples of tiles, and rows of weights that end within a unit."""
    path = folder / "experts.gguf"
    layer = write_expert_layer(
        path,
        num_experts=NUM_EXPERTS,
        hidden_size=HIDDEN_SIZE,
        ffn_size=FFN_SIZE,
        types=types,
        activation=activation,
        biases=has_vectors,
        scales=has_vectors,
    )
    return layer, path


def rig_of(
    layer: MoeLayer,
    path: Path,
    *,
    products: Products = SMALL_TENSOR,
    device: EmulatedDevice | None = None,
    slots: I32Array | None = None,
    max_tokens: int = 40,
    pairs_per_token: int = 2,
    scratch_experts: int = 2,
) -> PrefillRig:
    device = device or EmulatedDevice()
    return PrefillRig(
        device,
        layer,
        ExpertsOnDevice(device, path, layer, slots),
        products,
        max_tokens=max_tokens,
        pairs_per_token=pairs_per_token,
        scratch_experts=scratch_experts,
    )


def small_rig(folder: Path, **options: Any) -> PrefillRig:
    return rig_of(*small_layer(folder), **options)


def hidden_rows(num_tokens: int, seed: int = 1) -> F32Array:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((num_tokens, HIDDEN_SIZE), dtype=np.float32)


@pytest.mark.parametrize(
    ("products", "types", "bound"),
    [
        (SMALL_TENSOR, (F32, F32, F32), 2e-6),
        (SMALL_TENSOR, (F16, F16, F16), 2e-6),
        (SMALL_TENSOR, QUANTISED, 1e-3),
        _slow(SMALL_TENSOR, (BF16, F16, BF16), 2e-6),
        _slow(SMALL_TENSOR, (F32, F32, Q8_0), 1e-3),
        _slow(SMALL_HALF, (F16, F16, F16), 2e-6),
        (SMALL_HALF, QUANTISED, 1e-3),
    ],
)
def test_sums_are_those_of_float64(
    tmp_path: Path,
    products: Products,
    types: tuple[TensorType, TensorType, TensorType],
    bound: float,
) -> None:
    layer, path = small_layer(tmp_path, types=types)
    slots = np.array([2, -1, 0, 4, 3], np.int32)
    rig = rig_of(layer, path, products=products, slots=slots)
    rng, hidden = np.random.default_rng(1), hidden_rows(37)
    ids, weights = choose(rng, 37, NUM_EXPERTS, 2)
    ids[ids == 4] = 3  # nobody chooses expert 4; a token may have expert 3 twice
    rig.group(ids, weights)
    found = rig.sums(hidden)
    values, wanted = read_experts(path), np.zeros_like(found)
    for place in range(2):
        only = slice(place, place + 1)
        batch = batch_of(hidden, ids[:, only], weights[:, only], slots >= 0)
        wanted += expert_sums(values, layer, batch)
    assert relative_error(found, wanted) <= bound


@pytest.mark.parametrize("activation", list(Activation))
def test_every_activation_with_biases_and_scales(tmp_path: Path, activation: Activation) -> None:
    layer, path = small_layer(tmp_path, activation=activation, has_vectors=True)
    rig = rig_of(layer, path)
    ids, weights = choose(np.random.default_rng(2), 7, NUM_EXPERTS, 2)
    hidden = hidden_rows(7)
    rig.group(ids, weights)
    everyone = np.ones(NUM_EXPERTS, bool)
    wanted = expert_sums(read_experts(path), layer, batch_of(hidden, ids, weights, everyone))
    assert relative_error(rig.sums(hidden), wanted) <= 1e-3


@pytest.mark.slow
def test_types_of_256_values_a_block(tmp_path: Path) -> None:
    path = tmp_path / "experts.gguf"
    layer = write_expert_layer(
        path, num_experts=3, hidden_size=256, ffn_size=256, types=(Q4_K, Q4_K, Q6_K)
    )
    rig = rig_of(layer, path, max_tokens=10, pairs_per_token=1, scratch_experts=3)
    rng = np.random.default_rng(3)
    ids, weights = choose(rng, 10, 3, 1)
    hidden = rng.standard_normal((10, 256), dtype=np.float32)
    rig.group(ids, weights)
    batch = batch_of(hidden, ids, weights, np.ones(3, bool))
    wanted = expert_sums(read_experts(path), layer, batch)
    assert relative_error(rig.sums(hidden), wanted) <= 1e-3


@PRODUCTS
def test_bits_do_not_depend_on_the_batch(tmp_path: Path, products: Products) -> None:
    rig = small_rig(tmp_path, products=products)
    ids, weights = choose(np.random.default_rng(4), 37, NUM_EXPERTS, 2)
    ids[5:] = [1, 3]  # most tokens share two experts, a few have others
    hidden = hidden_rows(37)
    rig.group(ids, weights)
    together = rig.sums(hidden)
    for chosen in (slice(0, 1), slice(3, 8), slice(36, 20, -1)):
        part, part_ids = np.ascontiguousarray(hidden[chosen]), np.ascontiguousarray(ids[chosen])
        rig.group(part_ids, np.ascontiguousarray(weights[chosen]))
        np.testing.assert_array_equal(rig.sums(part), together[chosen], strict=True)


class EagerDevice(EmulatedDevice):
    """Copies that a device may do later are done at once."""

    def module(self, file: str | Path, defines: Defines) -> EmulatedModule:
        if str(file).startswith("gemm_"):  # no others copy
            defines = {**defines, "COPY_EARLY": 1}
        return super().module(file, defines)


BIG_TENSOR = TENSOR_PRODUCTS[0]


@pytest.mark.parametrize(
    "case",
    [
        *("backward", "early copies", "one pass"),
        *(_slow(each) for each in ("slots", "big tiles")),
    ],
)
def test_bits_do_not_depend_on_anything_else(tmp_path: Path, case: str) -> None:
    ids, weights = choose(np.random.default_rng(5), 20, NUM_EXPERTS, 2)
    hidden = hidden_rows(20)
    (tmp_path / "first").mkdir()
    rig = small_rig(tmp_path / "first")
    rig.group(ids, weights)
    wanted = rig.sums(hidden)
    shared_bytes = BIG_TENSOR.half_tile.shared_bytes
    other = small_rig(
        tmp_path,
        products=BIG_TENSOR if case == "big tiles" else SMALL_TENSOR,
        device=EagerDevice()
        if case == "early copies"
        else EmulatedDevice(runs_backward=case == "backward", max_shared_bytes=shared_bytes),
        slots=np.array([3, 1, 4, 0, 2], np.int32) if case == "slots" else None,
        scratch_experts=NUM_EXPERTS if case == "one pass" else 1,
    )
    other.group(ids, weights)
    for mean_rows in (None, prefill_experts._MOST_ROWS + 0.5):
        np.testing.assert_array_equal(other.sums(hidden, mean_rows), wanted, strict=True)


@pytest.mark.parametrize(
    "types",
    [
        (Q8_0, Q8_0, MXFP4),
        (Q4_K, Q4_K, Q6_K),
        *(_slow((each, each, each)) for each in sorted(IN_UNITS - {Q8_0, MXFP4, Q4_K})),
    ],
)
def test_matrices_read_as_they_are_stored_give_the_bits_of_their_halves(
    tmp_path: Path,
    types: tuple[TensorType, TensorType, TensorType],
) -> None:
    """With columns that are whole blocks of all types, and an odd number of steps."""
    path = tmp_path / "experts.gguf"
    block_elements = max(each.layout.block_elements for each in types)
    sizes = {32: (160, 96), 64: (192, 128), 256: (256, 512)}[block_elements]
    layer = write_expert_layer(
        path, num_experts=3, hidden_size=sizes[0], ffn_size=sizes[1], types=types
    )
    device = EmulatedDevice()
    # Its warps compute more columns than those of the tile for matrices as they are stored.
    half_tile = Tile(rows=32, columns=128, warps_m=2, warps_n=2, stages=2)
    products = replace(SMALL_TENSOR, half_tile=half_tile)
    options: dict[str, Any] = {"products": products, "scratch_experts": 3}
    rig = rig_of(layer, path, device=device, max_tokens=20, pairs_per_token=1, **options)
    rng = np.random.default_rng(3)
    ids, weights = choose(rng, 9, 3, 1)
    hidden = rng.standard_normal((9, sizes[0]), dtype=np.float32)
    hidden[4] *= np.float32(1e5)  # overflows halves
    rig.group(ids, weights)
    num_launches = device.num_launches
    stored = rig.sums(hidden)
    num_stored = device.num_launches - num_launches
    # What is known of groups decides, whatever was launched for as many pairs before.
    many = prefill_experts._MOST_ROWS + 0.5
    np.testing.assert_array_equal(rig.sums(hidden, many), stored, strict=True)
    assert device.num_launches - num_launches == 2 * num_stored + 3  # which make halves


@pytest.mark.parametrize("converts", [False, True])
@pytest.mark.parametrize("types", [QUANTISED, (F16, F16, F16), _slow((F32, F32, F32))])
def test_terms_have_the_same_bits_some_columns_at_a_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    types: tuple[TensorType, TensorType, TensorType],
    converts: bool,
) -> None:
    layer, path = small_layer(tmp_path, types=types, has_vectors=True)
    ids, weights = choose(np.random.default_rng(5), 40, NUM_EXPERTS, 2)
    mean_rows = prefill_experts._MOST_ROWS + 0.5 if converts else None
    sums, num_launches = [], []
    for columns in (HIDDEN_SIZE, 64, 8):
        monkeypatch.setattr(prefill_experts, "_TERMS_BYTES", 1)
        monkeypatch.setattr(prefill_experts, "_LEAST_COLUMNS", columns)
        device = EmulatedDevice()
        rig = rig_of(layer, path, device=device)
        assert rig.prefill._buffers.terms.nbytes == 4 * 2 * 40 * columns
        rig.group(ids, weights)
        before = device.num_launches
        sums.append(rig.sums(hidden_rows(40), mean_rows))
        num_launches.append(device.num_launches - before)
        with monkeypatch.context() as context:  # room for more columns of few pairs
            context.setattr(prefill_experts, "_LEAST_COLUMNS", 4)
            assert len([*rig.prefill._columns_of(80)]) == -(-HIDDEN_SIZE // columns)
            assert [*rig.prefill._columns_of(1)] == [range(HIDDEN_SIZE)]
    for found in sums[1:]:
        np.testing.assert_array_equal(found, sums[0], strict=True)
    assert num_launches == sorted(set(num_launches))


def test_bits_do_not_depend_on_the_logical_warp(tmp_path: Path) -> None:
    ids, weights = choose(np.random.default_rng(5), 20, NUM_EXPERTS, 2)
    sums = []
    for lanes in (32, 64):
        folder = tmp_path / str(lanes)
        folder.mkdir()
        rig = small_rig(folder, products=SMALL_HALF, device=EmulatedDevice(lanes=lanes))
        rig.group(ids, weights)
        sums.append(rig.sums(hidden_rows(20)))
    np.testing.assert_array_equal(sums[0], sums[1], strict=True)


def test_a_sorted_batch_gives_what_its_choice_gives(tmp_path: Path) -> None:
    rig = small_rig(tmp_path)
    ids, weights = choose(np.random.default_rng(6), 20, NUM_EXPERTS, 2)
    ids.sort(axis=1)  # terms are added in order of the choice, or of experts
    hidden = hidden_rows(20)
    rig.group(ids, weights)
    wanted = rig.sums(hidden)
    rig.grouped = rig.groups.load(batch_of(hidden, ids, weights, np.ones(NUM_EXPERTS, bool)))
    np.testing.assert_array_equal(rig.sums(hidden), wanted, strict=True)
    rig.group(ids, weights)  # as it was launched before the batch
    np.testing.assert_array_equal(rig.sums(hidden), wanted, strict=True)


def test_launches_are_kept_for_experts_which_may_go(tmp_path: Path) -> None:
    rig = small_rig(tmp_path)
    first, launches = rig.experts.stored, rig.prefill._launches
    choices = {size: choose(np.random.default_rng(size), size, NUM_EXPERTS, 2) for size in (7, 20)}
    expected: dict[int, F64Array] = {}
    for size in (20, 7, 20):
        rig.group(*choices[size])
        sums = rig.sums(hidden_rows(size))
        np.testing.assert_array_equal(sums, expected.setdefault(size, sums), strict=True)
    kept = launches[first].launches
    np.testing.assert_array_equal(rig.sums(hidden_rows(20)), expected[20], strict=True)
    assert launches[first].launches is kept
    rig.experts.stored = second = replace(first)  # as alike as can be
    assert second not in launches
    rig.prefill.prepare(second)
    np.testing.assert_array_equal(rig.sums(hidden_rows(20)), expected[20], strict=True)
    assert launches[second].launches is not kept
    gone = weakref.ref(first)
    del first
    assert gone() is None
    assert list(launches) == [second]


@PRODUCTS
@pytest.mark.parametrize("factor", [1e5, *(_slow(each) for each in (300.0, 1e12))])
def test_what_overflows_halves_is_computed_all_the_same(
    tmp_path: Path, products: Products, factor: float
) -> None:
    rig = small_rig(tmp_path, products=products)
    ids, weights = choose(np.random.default_rng(7), 20, NUM_EXPERTS, 2)
    hidden = hidden_rows(20)
    rig.group(ids, weights)
    wanted = rig.sums(hidden)
    hidden[11] *= np.float32(factor)
    found = rig.sums(hidden)
    others = np.arange(20) != 11
    np.testing.assert_array_equal(found[others], wanted[others])
    values = read_experts(tmp_path / "experts.gguf")
    batch = batch_of(hidden, ids, weights, np.ones(NUM_EXPERTS, bool))
    with np.errstate(over="ignore"):  # of exp: silu is 0 then
        expected = expert_sums(values, rig.layer, batch)
    assert relative_error(found[11], expected[11]) <= 1e-3


@pytest.mark.parametrize("value", [np.nan, _slow(np.inf)])
def test_what_is_no_number_stays_so(tmp_path: Path, value: float) -> None:
    rig = small_rig(tmp_path)
    ids, weights = choose(np.random.default_rng(8), 20, NUM_EXPERTS, 2)
    hidden = hidden_rows(20)
    rig.group(ids, weights)
    wanted = rig.sums(hidden)
    hidden[11, 17] = value
    found = rig.sums(hidden)
    assert not np.isfinite(found[11]).any()
    others = np.arange(20) != 11
    np.testing.assert_array_equal(found[others], wanted[others])


@pytest.mark.parametrize("columns", [HIDDEN_SIZE, 64, 8])
def test_sums_of_others_and_the_residual_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """With so many columns of terms at a time."""
    monkeypatch.setattr(prefill_experts, "_TERMS_BYTES", 1)
    monkeypatch.setattr(prefill_experts, "_LEAST_COLUMNS", columns)
    rig = small_rig(tmp_path, max_tokens=12)
    device = rig.device
    ids, weights = choose(np.random.default_rng(9), 12, NUM_EXPERTS, 2)
    hidden = hidden_rows(12)
    rig.group(ids, weights)
    own = rig.sums(hidden)
    rng = np.random.default_rng(10)
    others, residual = rng.standard_normal((12, HIDDEN_SIZE)), hidden_rows(12, seed=11)
    x, rows = device.upload(residual), rig.rows.prepare(device.upload(hidden))
    sums = device.upload(others)
    rig.prefill.run(rows, rig.grouped, rig.experts.stored, sums=sums, residual=x)
    wanted = residual + (others + own).astype(np.float32)
    np.testing.assert_allclose(device.download(x), wanted, rtol=0, atol=2e-6)
    rig.prefill.run(rows, rig.grouped, rig.experts.stored, sums=sums, out_sums=sums)
    np.testing.assert_allclose(device.download(sums), others + own, rtol=0, atol=1e-12)


def test_no_expert_is_resident(tmp_path: Path) -> None:
    rig = small_rig(tmp_path)
    ids, weights = choose(np.random.default_rng(12), 12, NUM_EXPERTS, 2)
    nobody = rig.device.upload(np.full(NUM_EXPERTS, -1, np.int32))
    upload = rig.device.upload
    rig.grouped = rig.groups.group_chosen(upload(ids), upload(weights), slot_of_expert=nobody)
    assert (rig.sums(hidden_rows(12)) == 0).all()


def test_wrong_shapes_are_refused(tmp_path: Path) -> None:
    rig = small_rig(tmp_path)
    ids, weights = choose(np.random.default_rng(13), 12, NUM_EXPERTS, 2)
    rig.group(ids, weights)
    with pytest.raises(SettingsError, match="12 tokens"):
        rig.sums(hidden_rows(11))
    upload = rig.device.upload
    rows = rig.rows.prepare(upload(hidden_rows(12)))
    with pytest.raises(SettingsError, match="wanted"):
        rig.prefill.run(
            rows, rig.grouped, rig.experts.stored, residual=upload(np.zeros((12, 32), np.float32))
        )
    stored = rig.experts.stored
    mixed = replace(stored, gate=replace(stored.gate, tensor_type=F32))
    with pytest.raises(SettingsError, match="together"):
        rig.prefill.prepare(mixed)
    unknown = replace(stored, down=replace(stored.down, tensor_type=TensorType.TQ1_0))
    with pytest.raises(SettingsError, match="TQ1_0"):
        rig.prefill.prepare(unknown)


def test_scratch_memory_holds_at_least_one_expert(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"\bone expert\b"):
        small_rig(tmp_path, scratch_experts=0)
