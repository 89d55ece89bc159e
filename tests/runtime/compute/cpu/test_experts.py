"""Expert FFNs on the CPU: correct, with bits that depend only on the pair."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_adapters.spec import Activation, ExpertProjection, MoeLayer
from dflash_protocol.batch import HostHidden, RoutedBatch, group_by_expert
from dflash_protocol.ids import F32Array, F64Array, I32Array, Phase
from dflash_protocol.ring import compiled_experts as ring
from dflash_protocol.transports.ports import PHASES
from dflash_runtime.compute.backend import ExpertBank
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.cpu.experts import CpuExpertBank
from dflash_runtime.compute.cpu.threads import parallel
from dflash_runtime.compute.cpu.weights.repacked.formats import FORMATS
from support.examples import examples
from support.expert_files import write_expert_layer
from support.float64_experts import ExpertValues, activated, expert_sums, read_experts
from support.int8_activations import as_int8, doubtful_steps

E = 6
SIZES = {1: (52, 36), 32: (96, 64), 64: (192, 64), 256: (256, 512)}
"""Hidden size and FFN size by the elements of the largest block."""
KINDS = {
    "F32": (TensorType.F32,) * 3,
    "F16": (TensorType.F16,) * 3,
    "Q8_0": (TensorType.Q8_0,) * 3,
    "Q4_0": (TensorType.Q4_0,) * 3,
    "NVFP4": (TensorType.NVFP4,) * 3,
    "TQ2_0": (TensorType.TQ2_0,) * 3,
    "of 256": (TensorType.Q4_K, TensorType.Q2_K, TensorType.Q6_K),
    "of 32": (TensorType.MXFP4, TensorType.Q5_1, TensorType.IQ4_NL),
    "float gate": (TensorType.F32, TensorType.Q8_0, TensorType.BF16),
    "float up": (TensorType.Q4_1, TensorType.F16, TensorType.Q5_0),
    "float down": (TensorType.Q8_0, TensorType.Q8_0, TensorType.F32),
    "quantised down": (TensorType.F16, TensorType.F16, TensorType.Q8_0),
}
DOUBT = 5e-4
"""Tolerance of activations, in steps of int8: errors of float32 are about 1e-6 of a block's largest
value, which is 127 steps."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A file of one layer's experts, and their values."""

    file: GgufFile
    layer: MoeLayer
    values: ExpertValues


def make_experts(
    path: Path, types: tuple[TensorType, TensorType, TensorType], **form: Any
) -> Experts:
    hidden_size, ffn_size = SIZES[max(each.layout.block_elements for each in types)]
    layer = write_expert_layer(
        path,
        num_experts=E,
        num_experts_used=3,
        hidden_size=hidden_size,
        ffn_size=ffn_size,
        types=types,
        **form,
    )
    return Experts(GgufFile.open(path), layer, read_experts(path))


@pytest.fixture(scope="module")
def all_experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Experts]]:
    folder = tmp_path_factory.mktemp("experts")
    made = {kind: make_experts(folder / f"{kind}.gguf", types) for kind, types in KINDS.items()}
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


def random_batch(
    hidden_size: int, num_tokens: int, seed: int, phase: Phase = Phase.PREFILL
) -> RoutedBatch:
    rng = np.random.default_rng(seed)
    tokens = np.repeat(np.arange(num_tokens, dtype=np.int32), 3)
    ids = [rng.choice(E, 3, replace=False) for _ in range(num_tokens)]
    return group_by_expert(
        rng.standard_normal((num_tokens, hidden_size)).astype(np.float32),
        tokens,
        np.concatenate([*ids, np.zeros(0)]).astype(np.int32),
        weights=rng.random(tokens.size).astype(np.float32),
        phase=phase,
    )


def result_of(bank: ExpertBank, batch: RoutedBatch) -> F64Array:
    """Steps are those beside a GPU, in step order."""
    if batch.phase is not Phase.PREFILL:
        assert isinstance(bank, CpuExpertBank)
        bank = bank.in_step_order()
    out = np.zeros(batch.hidden.shape, np.float64)
    bank.accumulate(batch, out)
    return out


def one_pair(batch: RoutedBatch, pair: int, local_expert_id: int) -> RoutedBatch:
    token = batch.token_indices[pair]
    return RoutedBatch(
        phase=batch.phase,
        rows=HostHidden(batch.hidden[token : token + 1].copy()),
        expert_ids=np.array([local_expert_id], np.int32),
        group_starts=np.array([0, 1], np.int32),
        token_indices=np.zeros(1, np.int32),
        weights=batch.weights[pair : pair + 1].copy(),
    )


def pair_expert_ids(batch: RoutedBatch) -> I32Array:
    return np.repeat(batch.expert_ids, np.diff(batch.group_starts))


def sum_of_terms(bank: ExpertBank, batch: RoutedBatch, held: I32Array) -> F64Array:
    """A batch whose ids index `held`, computed pair by pair with a bank of all experts."""
    sums = np.zeros(batch.hidden.shape, np.float64)
    for pair, local_expert_id in enumerate(pair_expert_ids(batch)):
        term = result_of(bank, one_pair(batch, pair, int(held[local_expert_id])))[0]
        np.testing.assert_array_equal(term, term.astype(np.float32))
        sums[batch.token_indices[pair]] += term
    return sums


# -- values ---------------------------------------------------------------------------------------


def seen_by(projection: ExpertProjection, x: F32Array, phase: Phase) -> F64Array:
    """Activations as rounded for a projection's products."""
    of_step = phase is not Phase.PREFILL
    return (
        as_int8(x, of_step=of_step) if projection.tensor_type in FORMATS else x.astype(np.float64)
    )


def int8_sums(made: Experts, batch: RoutedBatch) -> tuple[F64Array, F64Array]:
    """The expected sums of a batch of global ids with rounded activations, and their tolerance.

    A difference in float32 can change the rounding of an activation; mostly none is that close.
    Shapes: both [T, H].
    """
    layer, values = made.layer, made.values
    sums, doubt = np.zeros((2, *batch.hidden.shape))
    phase, of_step = batch.phase, batch.phase is not Phase.PREFILL
    x_by_projection = {
        name: seen_by(getattr(layer, name), batch.hidden, phase) for name in ("gate", "up")
    }

    def project(name: str, expert: int, x: F64Array) -> F64Array:
        scale = values[f"{name}.scale"][expert] if f"{name}.scale" in values else 1.0
        bias = values[f"{name}.bias"][expert] if f"{name}.bias" in values else 0.0
        result: F64Array = values[name][expert] @ x * scale + bias
        return result

    for pair, expert in enumerate(pair_expert_ids(batch)):
        token, weight = batch.token_indices[pair], batch.weights[pair]
        gate, up = (project(name, expert, x[token]) for name, x in x_by_projection.items())
        inner = activated(layer.activation, gate, up, layer.activation_limit).astype(np.float32)
        sums[token] += weight * project("down", expert, seen_by(layer.down, inner, phase))
        if layer.down.tensor_type in FORMATS:
            steps = np.abs(values["down"][expert]) @ doubtful_steps(inner, DOUBT, of_step=of_step)
            scale = values["down.scale"][expert] if "down.scale" in values else 1.0
            doubt[token] += abs(weight * scale) * steps
    return sums, doubt


def assert_right(made: Experts, batch: RoutedBatch, got: F64Array) -> None:
    """As close as float32 is, given int8 activations, and never far off."""
    sums, doubt = int8_sums(made, batch)
    largest = np.abs(sums).max(initial=0)
    assert (np.abs(got - sums) <= 2e-6 * largest + doubt).all()
    # A block for which either grid may be chosen makes all outputs of its token uncertain.
    assert doubt.sum() <= 0.02 * largest * doubt.size
    exact = expert_sums(made.values, made.layer, batch)
    assert np.linalg.norm(got - exact) <= 0.02 * np.linalg.norm(exact)


@pytest.mark.wide(1)
@pytest.mark.parametrize(
    ("phase", "num_tokens"),
    [*((Phase.PREFILL, size) for size in (0, 1, 2, 9, 150)), (Phase.DECODE, 1), (Phase.VERIFY, 9)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(
    all_experts: dict[str, Experts],
    backends: dict[int, CpuBackend],
    kind: str,
    phase: Phase,
    num_tokens: int,
) -> None:
    made = all_experts[kind]
    batch = random_batch(made.layer.hidden_size, num_tokens, num_tokens, phase)
    bank = backends[1].load_experts(made.file, made.layer, all_ids())
    assert bank.num_experts == E
    assert bank.layer is made.layer
    assert_right(made, batch, result_of(bank, batch))


@pytest.mark.wide(2)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("extras", ["", "bias", "scale", "bias scale"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("merged", [False, True], ids=["separate", "merged"])
def test_every_form_of_a_layer(
    tmp_path: Path,
    backends: dict[int, CpuBackend],
    activation: Activation,
    extras: str,
    kind: str,
    merged: bool,
) -> None:
    made = make_experts(
        tmp_path / "experts.gguf",
        KINDS[kind],
        merged=merged,
        biases="bias" in extras,
        scales="scale" in extras,
        activation=activation,
    )
    with made.file:
        held = np.array([4, 1, 5, 0, 3, 2], np.int32)
        bank = backends[2].load_experts(made.file, made.layer, held)
        batch = random_batch(made.layer.hidden_size, 13, seed=3)
        local = replace(batch, expert_ids=np.argsort(held).astype(np.int32)[batch.expert_ids])
        assert_right(made, batch, result_of(bank, local))


def test_terms_are_added_to_what_is_there(
    all_experts: dict[str, Experts], backends: dict[int, CpuBackend]
) -> None:
    made = all_experts["Q8_0"]
    bank = backends[1].load_experts(made.file, made.layer, all_ids())
    one = one_pair(random_batch(made.layer.hidden_size, 3, seed=0), 0, 0)
    out = np.full(one.hidden.shape, 1e9)
    bank.accumulate(one, out)
    np.testing.assert_array_equal(out, 1e9 + result_of(bank, one))


# -- bits -----------------------------------------------------------------------------------------


@examples(40)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_a_terms_bits_depend_on_nothing_else(
    all_experts: dict[str, Experts],
    backends: dict[int, CpuBackend],
    kind: str,
    data: st.DataObject,
) -> None:
    """A pair alone, on a bank of its own, gives what it gives in any batch with any threads."""
    made = all_experts[kind]
    num_tokens = data.draw(st.integers(1, 40), "num_tokens")
    num_threads = data.draw(st.sampled_from([1, 2, 3]), "num_threads")
    order = data.draw(st.permutations(range(E)), "local numbering")
    held = np.array(order[: data.draw(st.integers(1, E), "num_held")], np.int32)
    phase = data.draw(st.sampled_from([Phase.PREFILL, Phase.VERIFY]), "phase")
    seed = data.draw(st.integers(0, 99), "seed")
    full = random_batch(made.layer.hidden_size, num_tokens, seed, phase)

    local_id_of = {int(expert): local for local, expert in enumerate(held)}
    kept = [p for p, expert in enumerate(pair_expert_ids(full)) if int(expert) in local_id_of]
    local_ids = [local_id_of[int(expert)] for expert in pair_expert_ids(full)[kept]]
    batch = group_by_expert(
        full.hidden,
        full.token_indices[kept],
        np.array(local_ids, np.int32),
        weights=full.weights[kept],
        phase=phase,
    )
    bank = backends[num_threads].load_experts(made.file, made.layer, held)
    alone = backends[1].load_experts(made.file, made.layer, all_ids())
    np.testing.assert_array_equal(result_of(bank, batch), sum_of_terms(alone, batch, held))


@pytest.mark.wide(1)
@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.VERIFY])
@pytest.mark.parametrize("kind", KINDS)
def test_a_terms_bits_do_not_depend_on_a_large_batch(
    all_experts: dict[str, Experts], backends: dict[int, CpuBackend], kind: str, phase: Phase
) -> None:
    """More pairs of an expert than totals are kept for, not all of them a multiple of 8."""
    made = all_experts[kind]
    batch = random_batch(made.layer.hidden_size, 520, 7, phase)
    num_pairs = np.diff(batch.group_starts)
    assert num_pairs.max() > 256
    assert (num_pairs % 8).any()
    alone = backends[1].load_experts(made.file, made.layer, all_ids())
    expected = sum_of_terms(alone, batch, all_ids())
    for backend in backends.values():
        bank = backend.load_experts(made.file, made.layer, all_ids())
        np.testing.assert_array_equal(result_of(bank, batch), expected)


def test_batches_that_are_not_sound_are_refused(
    all_experts: dict[str, Experts], backends: dict[int, CpuBackend]
) -> None:
    made = all_experts["Q8_0"]
    bank = backends[3].load_experts(made.file, made.layer, all_ids())
    good = random_batch(made.layer.hidden_size, 1, 1)
    starts = good.group_starts
    out = np.zeros((1, made.layer.hidden_size))
    wrong: list[dict[str, Any]] = [
        {"group_starts": np.sort(np.concatenate([starts, np.full(200, starts[-1], np.int32)])),
         "expert_ids": np.resize(good.expert_ids, good.expert_ids.size + 200)},
        {"group_starts": starts[:-1]},
        {"weights": good.weights[:-1]},
        {"expert_ids": np.full_like(good.expert_ids, bank.num_experts)},
        {"token_indices": np.ones_like(good.token_indices)},
    ]  # fmt: skip
    for changed in wrong:
        with pytest.raises(ValueError, match="out of range"):
            bank.accumulate(replace(good, **changed), out)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="cannot be written"):
        bank.accumulate(good, out)
    assert not out.any()


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.VERIFY])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_threads_share_the_quantising_of_activations(
    all_experts: dict[str, Experts], backends: dict[int, CpuBackend], num_tokens: int, phase: Phase
) -> None:
    """Each half of a q8 block may be another thread's, in another way each time."""
    made = all_experts["of 256"]
    batches = [random_batch(made.layer.hidden_size, num_tokens, seed, phase) for seed in (1, 2)]
    one, several = (
        backends[num_threads].load_experts(made.file, made.layer, all_ids())
        for num_threads in (1, 3)
    )
    expected = [result_of(one, batch) for batch in batches]
    for index in range(300):
        result = result_of(several, batches[index % 2])
        np.testing.assert_array_equal(result, expected[index % 2])


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "of 256"])
def test_one_token_alone_and_beside_others(
    all_experts: dict[str, Experts], backends: dict[int, CpuBackend], kind: str
) -> None:
    """Decoding: the activations of one token are shared by its experts."""
    made = all_experts[kind]
    batch = random_batch(made.layer.hidden_size, 1, seed=8)
    twice = RoutedBatch(
        phase=Phase.PREFILL,
        rows=HostHidden(np.repeat(batch.hidden, 2, axis=0)),
        expert_ids=batch.expert_ids,
        group_starts=2 * batch.group_starts,
        token_indices=np.tile(np.arange(2, dtype=np.int32), batch.num_pairs),
        weights=np.repeat(batch.weights, 2),
    )
    for backend in backends.values():
        bank = backend.load_experts(made.file, made.layer, all_ids())
        one, two = result_of(bank, batch), result_of(bank, twice)
        np.testing.assert_array_equal(two, np.repeat(one, 2, axis=0))


# -- banks and batches ----------------------------------------------------------------------------


def test_merged_gate_and_up_stacks(
    all_experts: dict[str, Experts], backends: dict[int, CpuBackend]
) -> None:
    """Projections whose stride is larger than one expert: the same file read with every 2nd."""
    made = all_experts["F32"]
    half = E // 2

    def every_second(projection: ExpertProjection) -> ExpertProjection:
        return replace(projection, stride_bytes=2 * projection.stride_bytes)

    layer = replace(
        made.layer,
        num_experts=half,
        num_experts_used=1,
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
        weights=batch.weights[keep],
        phase=Phase.PREFILL,
    )
    np.testing.assert_array_equal(result_of(strided, batch), result_of(picked, batch))


def test_batches_that_name_what_is_not_there_are_refused(
    all_experts: dict[str, Experts], backends: dict[int, CpuBackend]
) -> None:
    made = all_experts["Q8_0"]
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
        changed(rows=HostHidden(np.ones((1, 7), np.float32))),
    ]
    for batch in wrong:
        with pytest.raises(ValueError, match=r"batch has|group_starts|weight for|expected \[T"):
            bank.accumulate(batch, np.zeros(batch.hidden.shape))
    with pytest.raises(ValueError, match="out"):
        bank.accumulate(good, np.zeros((2, made.layer.hidden_size)))
    with pytest.raises(TypeError):
        bank.accumulate(good, np.zeros(good.hidden.shape, np.float32))
    assert result_of(bank, good).any()


def test_experts_outside_the_layer_are_refused(
    all_experts: dict[str, Experts], backends: dict[int, CpuBackend]
) -> None:
    made = all_experts["Q8_0"]
    for bad in (-1, E):
        with pytest.raises(ValueError, match=r"expert ids\b.* 0\.\.5"):
            backends[1].load_experts(made.file, made.layer, np.array([0, bad], np.int32))
    empty = backends[1].load_experts(made.file, made.layer, all_ids()[:0])
    assert empty.num_experts == 0
    assert not result_of(empty, random_batch(made.layer.hidden_size, 0, seed=0)).any()


def test_weights_are_read_in_place_and_outlive_the_file(
    tmp_path: Path, backends: dict[int, CpuBackend]
) -> None:
    made = make_experts(tmp_path / "experts.gguf", KINDS["Q8_0"])
    bank = backends[1].load_experts(made.file, made.layer, all_ids())
    batch = random_batch(made.layer.hidden_size, 4, seed=1)
    before = result_of(bank, batch)
    made.file.close()
    np.testing.assert_array_equal(result_of(bank, batch), before)


def compiled_run(
    backend: CpuBackend, bank: ExpertBank, batch: RoutedBatch, out: F64Array
) -> Callable[[], int]:
    """What computes a batch as compiled callers do; 0: the batch is not sound."""
    compiled = backend.compile_banks({0: bank}, max_tokens=32, max_experts_used=3)
    assert compiled is not None
    function, experts = compiled.layers[0, [ring.LAYER_COMPUTE, ring.LAYER_EXPERTS]].tolist()
    compute = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 3)(function)
    arrays = batch.hidden, batch.expert_ids, batch.group_starts, batch.token_indices, batch.weights
    counts = batch.num_tokens, batch.num_groups, batch.num_pairs
    places = [each.ctypes.data for each in (*arrays, out)]
    words = np.array([*counts, *places, PHASES.index(batch.phase)], np.int64)

    def run() -> int:
        assert compiled is not None  # and alive
        return int(compute(experts, words.ctypes.data))

    return run


@pytest.mark.wide(2)
@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.VERIFY])
@pytest.mark.parametrize("num_tokens", [1, 5, 20])
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "float gate"])
def test_compiled_callers_get_the_same_bits(
    all_experts: dict[str, Experts],
    backends: dict[int, CpuBackend],
    kind: str,
    num_tokens: int,
    phase: Phase,
) -> None:
    made = all_experts[kind]
    bank = backends[2].load_experts(made.file, made.layer, all_ids())
    if phase is not Phase.PREFILL:
        bank = bank.in_step_order()
    batch = random_batch(made.layer.hidden_size, num_tokens, 3, phase)
    batch = replace(batch, group_starts=batch.group_starts.copy())
    out = np.ones(batch.hidden.shape)
    run = compiled_run(backends[2], bank, batch, out)
    assert run() == 1
    expected = np.ones(batch.hidden.shape)
    bank.accumulate(batch, expected)
    np.testing.assert_array_equal(out, expected)
    for array, bad in (
        (batch.expert_ids, -1),
        (batch.expert_ids, E),
        (batch.group_starts, 0),
        (batch.token_indices, -1),
        (batch.token_indices, num_tokens),
    ):
        before, array[-1] = array[-1], bad
        assert run() == 0
        array[-1] = before
    np.testing.assert_array_equal(out, expected)


@pytest.fixture
def one_thread_decodes() -> Iterator[CpuBackend]:
    """Two threads, of which one takes part in decode steps."""
    backend = CpuBackend(num_threads=2)
    backend._workers.use_for_decode(1)
    yield backend
    backend.close()


def test_a_prompts_few_rows_here_leave_its_threads_as_they_are(
    all_experts: dict[str, Experts], one_thread_decodes: CpuBackend
) -> None:
    made, workers = all_experts["F32"], one_thread_decodes._workers
    bank = one_thread_decodes.load_experts(made.file, made.layer, all_ids())
    workers.begin(512)
    prompt = random_batch(made.layer.hidden_size, 3, seed=1)
    result_of(bank, prompt)
    assert workers._pool[parallel.LIMIT] == 1
    bank.accumulate(replace(prompt, phase=Phase.DECODE), np.zeros(prompt.hidden.shape))
    assert workers._pool[parallel.LIMIT] == 0


def test_batches_of_few_rows_use_the_threads_of_decode_steps_in_compiled_code_too(
    all_experts: dict[str, Experts], one_thread_decodes: CpuBackend
) -> None:
    made, workers = all_experts["F32"], one_thread_decodes._workers
    bank = one_thread_decodes.load_experts(made.file, made.layer, all_ids())
    for num_tokens, limit in ((20, 1), (3, 0), (20, 1)):
        batch = random_batch(made.layer.hidden_size, num_tokens, seed=1)
        out = np.zeros(batch.hidden.shape)
        assert compiled_run(one_thread_decodes, bank, batch, out)() == 1
        assert workers._pool[parallel.LIMIT] == limit
