"""MoeExpertComputeRuntime against the naive sum over all pairs, with owners that fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import MoeSpec
from dflash_protocol.batch import Hidden, Pairs, RoutedBatch, Sums
from dflash_protocol.errors import DaemonUnavailable, DeadlineExceeded
from dflash_protocol.ids import F32Array, I32Array, Phase
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime.compute.asking import OwnerTotals
from dflash_runtime.compute.reference import ReferenceBackend
from dflash_runtime.experts.compute import (
    ExpertCompute,
    LocalExpertCompute,
    LocalIds,
    Ticket,
)
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.experts.store import every_expert, load_banks
from dflash_runtime.experts.telemetry import OwnerKind, OwnerStats
from dflash_runtime.placement.split import make_placement
from support.examples import examples
from support.placements import random_placement
from support.planned_boxes import model_spec
from support.planned_settings import large_offer
from support.random_models import ODD_SHAPES, write_qwen3moe
from support.routed_batches import (
    HIDDEN_SIZE,
    ScalingBank,
    moe_layer,
    naive_sums,
    numbered_rows,
    routed_sums,
)

LAYER_ID = 2
NUM_EXPERTS = 6
SPEC = MoeSpec((moe_layer(layer_id=LAYER_ID, num_experts=NUM_EXPERTS),))


class FakeCompute:
    """Computes with a ScalingBank; `fails` names the call that raises, if any.

    Begins and finishes are written to a log that several may share.
    """

    def __init__(
        self,
        name: str,
        owned: OwnedExperts,
        log: list[str],
        *,
        kind: OwnerKind = OwnerKind.DAEMON,
        fails: str = "",
    ) -> None:
        self.stats = OwnerStats(kind, owned.num_experts)
        self.name = name
        self.fails = fails
        self.log = log
        self.batches: list[RoutedBatch] = []
        self._bank = ScalingBank(SPEC.layers[0], owned.by_layer[LAYER_ID].tolist())

    def begin(self, layer_id: int, rows: Hidden, pairs: Pairs, *, phase: Phase) -> Ticket:
        assert layer_id == LAYER_ID
        batch = RoutedBatch.group(phase, rows, pairs)
        batch.check(hidden_size=HIDDEN_SIZE, num_experts=self._bank.num_experts)
        self.log.append(f"begin {self.name}")
        if self.fails == "begin":
            raise DaemonUnavailable(f"daemon {self.name}: not connected yet")
        self.batches.append(batch)
        return Ticket(layer_id, phase, rows, pairs)

    def poll(self, *, until_sent: bool = False) -> None:
        self.log.append(f"{'send' if until_sent else 'look'} {self.name}")

    def finish(self, ticket: Ticket, out: Sums) -> None:
        self.log.append(f"finish {self.name}")
        if self.fails == "interrupt":
            raise KeyboardInterrupt
        if self.fails == "finish":
            raise DeadlineExceeded(f"daemon {self.name}: no reply within 250 ms")
        batch = RoutedBatch.group(ticket.phase, ticket.rows, ticket.pairs)
        self._bank.accumulate(batch, out.to_host())
        self.stats.requests += 1

    def abandon(self, ticket: Ticket) -> None:
        self.log.append(f"abandon {self.name}")

    def mail_route(self, owner_index: int, local_ids: LocalIds) -> None:
        """None."""

    def ask_route(self, owner_index: int) -> None:
        """None."""

    def count_asked(self, asked: OwnerTotals, phase: Phase = Phase.DECODE) -> None:
        """Not called."""

    def prepare(self, owned: OwnedExperts) -> None:
        """None."""

    def close(self) -> None:
        self.log.append(f"close {self.name}")


class Rig:
    """A runtime over fake owners."""

    def __init__(
        self, placement: Placement, *, fails: dict[str, str], with_fallback: bool = True
    ) -> None:
        self.log: list[str] = []
        self.owners = {
            name: FakeCompute(
                name,
                owned,
                self.log,
                kind=OwnerKind.LOCAL if name == "local" else OwnerKind.DAEMON,
                fails=fails.get(name, ""),
            )
            for name, owned in zip(placement.owner_names, placement.owners, strict=True)
        }
        self.fallback = FakeCompute(
            "fallback", every_expert(SPEC), self.log, kind=OwnerKind.FALLBACK
        )
        owners: list[ExpertCompute] = list(self.owners.values())
        self.runtime = MoeExpertComputeRuntime(
            placement, owners, fallback=self.fallback if with_fallback else None
        )

    def compute(self, hidden: F32Array, ids: I32Array, weights: F32Array) -> F32Array:
        return routed_sums(self.runtime, LAYER_ID, hidden, (ids, weights), Phase.PREFILL)

    def assert_right(self) -> None:
        """One good layer."""
        hidden, ids, weights = numbered_rows(4), *routing_of(4, seed=1)
        np.testing.assert_array_equal(
            self.compute(hidden, ids, weights), expected(hidden, ids, weights)
        )


def routing_of(
    num_tokens: int, *, seed: int, num_used: int = 3, num_experts: int = NUM_EXPERTS
) -> tuple[I32Array, F32Array]:
    """Different experts for each token, weights of eighths. Shapes: both [T, K]."""
    random = np.random.default_rng(seed)
    ids = np.argsort(random.random((num_tokens, num_experts)), axis=1)[:, :num_used]
    weights = random.integers(1, 9, (num_tokens, num_used)) / 8
    return ids.astype(np.int32), weights.astype(np.float32)


def expected(hidden: F32Array, ids: I32Array, weights: F32Array) -> F32Array:
    pairs = {
        (token_idx, int(global_expert_id)): float(weights[token_idx, slot])
        for token_idx, chosen in enumerate(ids)
        for slot, global_expert_id in enumerate(chosen)
    }
    return naive_sums(hidden, pairs).astype(np.float32)


def split(*lists: list[int], names: tuple[str, ...] = ("local", "cpu0", "cpu1")) -> Placement:
    owners = {
        name: OwnedExperts.from_lists({LAYER_ID: ids})
        for name, ids in zip(names, lists, strict=False)
    }
    return make_placement(SPEC, owners)


@examples(100)
@given(st.data())
def test_every_placement_gives_the_naive_sum_whoever_is_lost(data: st.DataObject) -> None:
    num_owners = data.draw(st.integers(1, 4))
    names = ["local", "cpu0", "cpu1", "cpu2"][:num_owners]
    seed = data.draw(st.integers(0, 1 << 20))
    placement = random_placement(SPEC, names, np.random.default_rng(seed))
    # An owner of nothing has no bank to fake.
    owners = {
        name: owned
        for name, owned in zip(placement.owner_names, placement.owners, strict=True)
        if owned.num_experts
    }
    rig = Rig(
        make_placement(SPEC, owners),
        fails={name: data.draw(st.sampled_from(["", "begin", "finish"])) for name in owners},
    )
    num_tokens = data.draw(st.integers(0, 9))
    num_used = data.draw(st.integers(1, NUM_EXPERTS))
    hidden = numbered_rows(num_tokens)
    ids, weights = routing_of(num_tokens, seed=seed, num_used=num_used)
    sums = rig.compute(hidden, ids, weights)
    np.testing.assert_array_equal(sums, expected(hidden, ids, weights), strict=True)


@pytest.mark.parametrize("how", ["begin", "finish"])
def test_pairs_of_a_lost_owner_are_computed_by_the_fallback_and_only_they(how: str) -> None:
    rig = Rig(split([0, 1], [2, 3], [4, 5]), fails={"cpu0": how})
    rig.assert_right()
    assert [batch.expert_ids.tolist() for batch in rig.fallback.batches] == [[2, 3]]
    rig.owners["cpu0"].fails = ""
    rig.fallback.batches.clear()
    rig.assert_right()
    assert rig.fallback.batches == []


def test_the_fallback_computes_everything_when_all_owners_are_lost() -> None:
    rig = Rig(split([0, 1], [2, 3], [4, 5]), fails={"local": "finish", "cpu0": "begin"})
    rig.owners["cpu1"].fails = "finish"
    rig.assert_right()
    for owner in rig.owners.values():
        owner.fails = ""
    rig.assert_right()


@pytest.mark.parametrize("how", ["begin", "finish"])
def test_without_a_fallback_a_lost_owner_is_an_error_that_names_it(how: str) -> None:
    rig = Rig(split([0, 1], [2, 3], [4, 5]), fails={"cpu0": how}, with_fallback=False)
    with pytest.raises(DaemonUnavailable, match="daemon cpu0: "):
        rig.assert_right()
    rig.owners["cpu0"].fails = ""
    rig.assert_right()


@pytest.mark.parametrize("how", ["begin", "finish"])
def test_what_other_owners_were_asked_is_finished_or_abandoned_although_one_is_lost(
    how: str,
) -> None:
    """An answer that nobody takes would be kept, and its pairs counted as in flight, for ever."""
    rig = Rig(split([0, 1], [2, 3], [4, 5]), fails={"cpu0": how}, with_fallback=False)
    with pytest.raises(DaemonUnavailable, match="daemon cpu0: "):
        rig.assert_right()
    begun = [line for line in rig.log if line.startswith("begin")]
    assert sorted(begun) == ["begin cpu0", "begin cpu1", "begin local"]
    for name in ("cpu1", "local"):
        assert f"finish {name}" in rig.log or f"abandon {name}" in rig.log


@examples(100)
@given(st.data())
def test_without_a_fallback_every_pair_is_computed_or_it_is_an_error(data: st.DataObject) -> None:
    """An error exactly if some chosen expert has no owner left."""
    names = ["local", "cpu0", "cpu1"]
    ids_of = {
        name: data.draw(st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=1, unique=True))
        for name in names
    }
    homeless = set(range(NUM_EXPERTS)).difference(*ids_of.values())
    ids_of["local"] += sorted(homeless)
    fails = {name: data.draw(st.sampled_from(["", "begin", "finish"])) for name in names}
    rig = Rig(split(*ids_of.values()), fails=fails, with_fallback=False)
    seed = data.draw(st.integers(0, 1000))
    hidden, (ids, weights) = numbered_rows(3), routing_of(3, seed=seed, num_used=2)
    alive = {i for name in names if not fails[name] for i in ids_of[name]}
    if set(ids.ravel().tolist()) <= alive:
        sums = rig.compute(hidden, ids, weights)
        np.testing.assert_array_equal(sums, expected(hidden, ids, weights))
    else:
        with pytest.raises(DaemonUnavailable, match=r"daemon (local|cpu0|cpu1): "):
            rig.compute(hidden, ids, weights)
    asked = {line.removeprefix("begin ") for line in rig.log if line.startswith("begin ")}
    for name in asked:
        if fails[name] != "begin":
            assert f"finish {name}" in rig.log or f"abandon {name}" in rig.log


def test_a_replica_answers_for_a_lost_owner_before_the_fallback_does() -> None:
    rig = Rig(split([0, 1, 2], [2, 3, 4, 5], [0, 1, 2]), fails={"cpu0": "finish"})
    rig.assert_right()
    replicated = Rig(
        split([0, 1, 2, 3, 4, 5], [0, 1, 2], [3, 4, 5], names=("cpu0", "cpu1", "local")),
        fails={"cpu0": "begin"},
        with_fallback=False,
    )
    replicated.assert_right()
    assert {"finish cpu1", "finish local"} <= set(replicated.log)


@pytest.mark.parametrize(("with_replica", "how"), [(False, "begin"), (True, "finish")])
@pytest.mark.parametrize("now", ["a", "b", ""])
def test_what_another_class_computes_for_a_lost_owner_is_counted(
    with_replica: bool, how: str, now: str
) -> None:
    every = list(range(NUM_EXPERTS))
    placement = split(*([every] * (1 + with_replica)), names=("cpu0", "cpu1"))
    classes = {"cpu0": "a", "cpu1": now}
    rig = Rig(replace(placement, numeric_classes=classes), fails={"cpu0": how})
    for name, owner in rig.owners.items():
        owner.stats.numeric_class = classes[name]
    rig.fallback.stats.numeric_class = now
    rig.assert_right()
    assert rig.runtime.hits.other_class == (0 if now == "a" else 4 * 3)
    rig.owners["cpu0"].fails = ""
    before = rig.runtime.hits.other_class
    rig.assert_right()
    assert rig.runtime.hits.other_class == before


def test_an_interrupt_abandons_whatever_was_in_flight() -> None:
    """Ctrl-C ends one generation, not the engine."""
    rig = Rig(split([0, 1], [2, 3], [4, 5]), fails={"cpu1": "interrupt"})
    with pytest.raises(KeyboardInterrupt):
        rig.assert_right()
    for name in ("cpu0", "cpu1"):
        is_finished = f"finish {name}" in rig.log and name != "cpu1"
        assert is_finished or f"abandon {name}" in rig.log
    rig.owners["cpu1"].fails = ""
    rig.assert_right()


def test_all_owners_are_at_work_before_any_is_waited_for_and_local_work_goes_first() -> None:
    rig = Rig(split([4, 5], [0, 1], [2, 3], names=("cpu0", "local", "cpu1")), fails={})
    rig.assert_right()
    assert set(rig.log[:3]) == {"begin cpu0", "begin local", "begin cpu1"}
    assert set(rig.log[3:6]) == {"send cpu0", "send local", "send cpu1"}
    assert rig.log[6] == "finish local"
    assert set(rig.log[7:]) == {"finish cpu0", "finish cpu1"}


def test_an_owner_without_a_pair_of_the_batch_is_not_asked() -> None:
    rig = Rig(split([0, 1], [2, 3], [4, 5]), fails={"cpu0": "begin", "cpu1": "finish"})
    ids = np.array([[0, 1], [1, 0]], dtype=np.int32)
    weights = np.full((2, 2), 0.5, dtype=np.float32)
    hidden = numbered_rows(2)
    np.testing.assert_array_equal(rig.compute(hidden, ids, weights), expected(hidden, ids, weights))
    assert rig.log == ["begin local", "finish local"]


def test_an_owner_gets_its_own_local_ids_and_the_pairs_of_its_experts_only() -> None:
    rig = Rig(split([5, 0], [3, 1, 2, 4]), fails={})
    ids = np.array([[0, 3], [4, 5], [1, 2]], dtype=np.int32)
    weights = np.ones((3, 2), dtype=np.float32)
    rig.compute(numbered_rows(3), ids, weights)
    local, remote = rig.owners["local"].batches[0], rig.owners["cpu0"].batches[0]
    assert local.expert_ids.tolist() == [0, 1]  # global 5 and 0
    assert local.token_indices.tolist() == [1, 0]
    assert remote.expert_ids.tolist() == [0, 1, 2, 3]  # global 3, 1, 2, 4
    assert remote.token_indices.tolist() == [0, 2, 2, 1]
    assert local.phase is Phase.PREFILL


def test_replicas_do_not_compute_twice() -> None:
    rig = Rig(split([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]), fails={"cpu0": "begin"})
    rig.assert_right()
    assert rig.log == ["begin local", "finish local"]


@pytest.mark.parametrize("with_fallback", [True, False])
def test_no_tokens_ask_nobody(with_fallback: bool) -> None:
    rig = Rig(split([0, 1], [2, 3], [4, 5]), fails={"cpu0": "begin"}, with_fallback=with_fallback)
    sums = rig.compute(numbered_rows(0), *routing_of(0, seed=1))
    assert sums.shape == (0, HIDDEN_SIZE)
    assert sums.dtype == np.float32
    assert rig.log == []


def test_one_expert_a_token_is_legal() -> None:
    rig = Rig(split([0, 1], [2, 3], [4, 5]), fails={})
    ids = np.array([[5], [2], [2], [0]], dtype=np.int32)
    weights = np.ones((4, 1), dtype=np.float32)
    hidden = numbered_rows(4)
    np.testing.assert_array_equal(rig.compute(hidden, ids, weights), expected(hidden, ids, weights))


def test_partial_sums_of_different_owners_are_rounded_to_float32_once() -> None:
    """1 + 2⁻²⁴ + 2⁻²⁴ is 1 if it is rounded after each addition."""
    rig = Rig(split([0], [1, 2], [3, 4, 5]), fails={})
    hidden = np.ones((1, HIDDEN_SIZE), dtype=np.float32)
    ids = np.array([[0, 1, 3]], dtype=np.int32)
    terms = np.array([1.0, 2**-24, 2**-24])
    scales = 1 + np.array([0, 1, 3]) / 4
    weights = (terms / scales).astype(np.float32)[None]
    sums = rig.compute(hidden, ids, weights)
    exact = np.sum(weights.astype(np.float64) * scales)
    np.testing.assert_array_equal(sums, np.full((1, HIDDEN_SIZE), np.float32(exact)))
    assert sums[0, 0] > 1.0


def test_the_callers_arrays_are_left_alone() -> None:
    rig = Rig(split([0, 1], [2, 3], [4, 5]), fails={"cpu0": "finish"})
    hidden, ids, weights = numbered_rows(4), *routing_of(4, seed=1)
    before = hidden.copy(), ids.copy(), weights.copy()
    sums = rig.compute(hidden, ids, weights)
    for array, old in zip((hidden, ids, weights), before, strict=True):
        np.testing.assert_array_equal(array, old)
    assert not np.shares_memory(sums, hidden)


def test_threads_of_daemons_are_those_that_they_told() -> None:
    offer = large_offer(model_spec(SPEC))
    rig = Rig(split([0, 1], [2, 3], [4, 5]), fails={})
    assert rig.runtime.daemon_threads(8) == 16
    rig.owners["cpu0"].stats.offer = replace(offer, num_threads=3)
    assert rig.runtime.daemon_threads(8) == 11


def test_stats_are_by_owner_name_and_the_fallback_appears_when_used() -> None:
    rig = Rig(split([0, 1], [2, 3], [4, 5]), fails={})
    rig.assert_right()
    assert list(rig.runtime.stats()) == ["local", "cpu0", "cpu1"]
    rig.owners["cpu1"].fails = "begin"
    rig.assert_right()
    stats = rig.runtime.stats()
    assert list(stats) == ["local", "cpu0", "cpu1", "fallback"]
    assert stats["fallback"].kind is OwnerKind.FALLBACK
    assert stats["fallback"].requests == 1
    assert (stats["cpu1"].retries, stats["cpu1"].fallbacks) == (1, 1)
    assert (stats["cpu0"].retries, stats["cpu0"].fallbacks) == (0, 0)


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 70])
def test_what_was_chosen_is_counted_once_whoever_computes_it(num_tokens: int) -> None:
    rig = Rig(split([0, 1], [2, 3], [4, 5]), fails={"cpu0": "finish", "cpu1": "begin"})
    hidden, (ids, weights) = numbered_rows(num_tokens), routing_of(num_tokens, seed=2)
    for _ in range(2):
        rig.compute(hidden, ids, weights)
    chosen = np.bincount(ids.reshape(-1), minlength=NUM_EXPERTS)
    assert rig.runtime.selections() == {LAYER_ID: (2 * chosen).tolist()}


def test_what_a_replica_takes_over_is_a_retry_but_no_fallback() -> None:
    rig = Rig(split([0, 1], [2, 3, 4], [2, 3, 4, 5]), fails={"cpu0": "finish"})
    rig.assert_right()
    stats = rig.runtime.stats()
    assert (stats["cpu0"].retries, stats["cpu0"].fallbacks) == (1, 0)


def test_closing_closes_every_owner_and_the_fallback() -> None:
    rig = Rig(split([0, 1], [2, 3], [4, 5]), fails={})
    rig.runtime.close()
    assert sorted(rig.log) == ["close cpu0", "close cpu1", "close fallback", "close local"]
    Rig(split([0, 1, 2, 3, 4, 5]), fails={}, with_fallback=False).runtime.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GgufFile]:
    shape = replace(ODD_SHAPES[0], num_layers=2)
    path: Path = tmp_path_factory.mktemp("model") / "model.gguf"
    with GgufFile.open(write_qwen3moe(path, shape, seed=10)) as file:
        yield file


def test_the_split_of_a_real_model_does_not_show_in_the_bits(model: GgufFile) -> None:
    spec = read_spec(model).moe
    layer = spec.layers[1]
    backend = ReferenceBackend()
    random = np.random.default_rng(5)
    hidden = random.standard_normal((9, layer.hidden_size), dtype=np.float32)
    ids, _ = routing_of(9, seed=6, num_experts=layer.num_experts)
    weights = random.random(ids.shape, dtype=np.float32)

    def logits_of(placement: Placement) -> bytes:
        owners = [
            LocalExpertCompute(
                OwnerKind.LOCAL, load_banks(backend, model, spec, owned=owned, read_now=False)
            )
            for owned in placement.owners
        ]
        runtime = MoeExpertComputeRuntime(placement, owners, fallback=None)
        sums = routed_sums(runtime, layer.layer_id, hidden, (ids, weights), Phase.DECODE)
        runtime.close()
        return sums.tobytes()

    whole = logits_of(make_placement(spec, {"local": every_expert(spec)}))
    for seed in range(8):
        names = ["local", "cpu0", "cpu1", "cpu2"][: 2 + seed % 3]
        assert logits_of(random_placement(spec, names, np.random.default_rng(seed))) == whole
    backend.close()
