"""Logits have the same bits wherever experts are on equal GPUs, emulated here: all with the parent,
some with it, none with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.ops import KvType
from dflash_adapters.qwen3moe import load
from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ids import F32Array, F64Array
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime.compute.cupy.backend import CupyBackend
from dflash_runtime.engine.steps import Steps
from dflash_runtime.experts.compute import LocalExpertCompute, OwnerKind, Ticket
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.experts.store import load_banks
from dflash_runtime.placement.split import LOCAL_OWNER, make_placement
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import MAX_CHUNK, SCRATCH_BYTES, TINY
from support.random_models import write_qwen3moe

CHUNKS = [20, 3, 1, 9, 1, 1]
IDS = np.random.default_rng(1).integers(0, TINY.vocab_size, sum(CHUNKS)).astype(np.int32)

Layers = Mapping[int, Sequence[int]]
"""Experts by layer id."""

PAIRS = IDS.size * TINY.num_layers * TINY.num_experts_used
WHOLE: Layers = dict.fromkeys(range(TINY.num_layers), range(TINY.num_experts))


@pytest.fixture(scope="module", params=["F32", "Q8_0"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type=request.param)


def new_backend() -> CupyBackend:
    return CupyBackend(EmulatedDevice(), max_chunk=MAX_CHUNK, scratch_bytes=SCRATCH_BYTES)


class LostDaemon(LocalExpertCompute):
    """Takes work and never answers."""

    def collect(self, ticket: Ticket, out: F64Array) -> None:
        raise DaemonUnavailable("gone")


class Split:
    """A parent on a device, and daemons in this process, each with a device of its own."""

    def __init__(
        self, undo: contextlib.ExitStack, path: Path, owners: Mapping[str, Layers]
    ) -> None:
        """The parent is called ``local``, and a daemon whose name begins with ``lost`` is."""
        self.file = undo.enter_context(GgufFile.open(path))
        backend: Any = new_backend()  # whose arrays are not numpy's
        undo.callback(backend.close)
        model = load(self.file, backend.ops)
        spec = model.spec
        owned = {name: OwnedExperts.from_lists(layers) for name, layers in owners.items()}
        self.placement: Placement = make_placement(spec.moe, owned)
        computes, local_banks, device_owner = [], {}, None
        for index, (name, each) in enumerate(owned.items()):
            kind, compute, of = OwnerKind.DAEMON, LocalExpertCompute, backend
            if name == LOCAL_OWNER:
                kind, device_owner = OwnerKind.LOCAL, index
            else:
                of = new_backend()
                undo.callback(of.close)
                compute = LostDaemon if name.startswith("lost") else compute
            banks = load_banks(of, self.file, spec.moe, owned=each, read_now=True)
            if name == LOCAL_OWNER:
                local_banks = banks
            computes.append(compute(kind, banks))
        self.runtime = MoeExpertComputeRuntime(
            self.placement, computes, fallback=None, device_owner=device_owner
        )
        self.steps = Steps(
            self.file,
            model,
            backend.ops.new_kv_cache(spec.kv_layers, IDS.size, KvType.F16),
            backend=backend,
            runtime=self.runtime,
            local_banks=local_banks,
            num_positions=IDS.size,
        )
        undo.callback(self.steps.end)

    def logits(self) -> F32Array:
        run = self.steps.begin()
        out = np.empty((IDS.size, TINY.vocab_size), np.float32)
        for first, last in self.steps.chunks(IDS.size, CHUNKS):
            self.steps.all_logits(self.steps.forward(run, IDS[first:last], first), out[first:last])
        return out

    def recorded_logits(self) -> F32Array:
        """Of the last two positions, whose tokens were chunks of their own, by recorded steps."""
        recorded = self.steps.recorded(self.steps.begin())
        assert recorded is not None
        rows = []
        for position in range(IDS.size - 2, IDS.size):
            recorded.begin(int(IDS[position]), position)
            recorded.start()
            rows.append(recorded.logits())
            assert recorded.token(position + 1) == rows[-1].argmax()
        return np.array(rows)


@pytest.fixture
def undo() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_every_split_has_the_same_bits(model: Path, undo: contextlib.ExitStack) -> None:
    resident = Split(undo, model, {LOCAL_OWNER: WHOLE})
    expected = resident.logits()
    assert resident.runtime.hits.hot == PAIRS
    assert (resident.recorded_logits() == expected[-2:]).all()
    remote = Split(undo, model, {"gpu1": WHOLE})
    assert (remote.logits() == expected).all()
    assert remote.runtime.hits.remote == PAIRS
    assert (remote.recorded_logits() == expected[-2:]).all()
    assert remote.runtime.hits.layers_hot_only == 0
    hot: Layers = {0: [4, 0, 2], 1: [3]}
    some = Split(undo, model, {LOCAL_OWNER: hot, "gpu1": {0: [3, 1]}, "gpu2": {1: [0, 4, 2, 1]}})
    assert (some.logits() == expected).all()
    hits, selections = some.runtime.hits, some.runtime.selections()
    assert sum(map(sum, selections.values())) == PAIRS
    assert hits.hot == sum(selections[layer][e] for layer, ids in hot.items() for e in ids)
    assert hits.hot + hits.remote == PAIRS
    assert 0 < hits.layers_hot_only < hits.layers == len(CHUNKS) * TINY.num_layers
    stats = some.runtime.stats()
    assert stats[LOCAL_OWNER].pairs == hits.hot
    assert stats["gpu1"].pairs + stats["gpu2"].pairs == hits.remote
    some.steps.try_out()  # which asks nobody
    assert hits.hot + hits.remote == PAIRS
    assert (some.recorded_logits() != expected[-2:]).any()  # over what was tried
    some.logits()
    before = replace(hits)
    assert (some.recorded_logits() == expected[-2:]).all()
    steps_pairs = 2 * TINY.num_layers * TINY.num_experts_used
    assert hits.hot + hits.remote == before.hot + before.remote + steps_pairs
    assert hits.layers == before.layers + 2 * TINY.num_layers
    assert stats[LOCAL_OWNER].pairs == hits.hot


def test_a_layer_without_experts_here(model: Path, undo: contextlib.ExitStack) -> None:
    expected = Split(undo, model, {LOCAL_OWNER: WHOLE}).logits()
    half = Split(undo, model, {LOCAL_OWNER: {1: WHOLE[1]}, "gpu1": {0: WHOLE[0]}})
    assert (half.logits() == expected).all()
    assert half.runtime.hits.layers_hot_only == len(CHUNKS)
    assert (half.recorded_logits() == expected[-2:]).all()
    assert half.runtime.hits.layers_hot_only == len(CHUNKS) + 2


def test_replicas_here_are_used_when_their_owner_is_lost(
    model: Path, undo: contextlib.ExitStack
) -> None:
    expected = Split(undo, model, {LOCAL_OWNER: WHOLE}).logits()
    # The first owner answers: the parent computes its copies only when that one cannot.
    for name in ("gpu1", "lost1"):
        split = Split(undo, model, {name: {0: [2, 3]}, LOCAL_OWNER: WHOLE})
        assert (split.logits() == expected).all()
        stats = split.runtime.stats()
        assert stats[LOCAL_OWNER].pairs + stats[name].pairs == PAIRS
        assert (split.recorded_logits() == expected[-2:]).all()
        stats = split.runtime.stats()
        assert (stats[name].pairs > 0) == (name == "gpu1")
        assert (stats[name].retries > 0) == (name == "lost1")


def test_a_step_that_nobody_can_finish_fails_and_the_next_one_does_not(
    model: Path, undo: contextlib.ExitStack
) -> None:
    split = Split(undo, model, {LOCAL_OWNER: {0: WHOLE[0], 1: [0, 1]}, "lost1": {1: [2, 3, 4]}})
    with pytest.raises(DaemonUnavailable, match="gone; daemons are required"):
        split.logits()
    recorded = split.steps.recorded(split.steps.begin())
    assert recorded is not None
    num_done = 0
    for token_id in range(TINY.vocab_size):  # some choose what is here
        recorded.begin(token_id, 0)
        try:
            recorded.start()
        except DaemonUnavailable:
            continue
        assert 0 <= recorded.token(1) < TINY.vocab_size
        num_done += 1
    assert 0 < num_done < TINY.vocab_size
