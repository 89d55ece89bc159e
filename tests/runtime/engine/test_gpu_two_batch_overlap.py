"""Chunks in two micro-batches have the bits of whole chunks, wherever their experts are computed
and whatever fails meanwhile."""

from __future__ import annotations

import contextlib
import gc
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.batch import Sums
from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ids import F32Array, I32Array
from dflash_protocol.settings import load_settings
from dflash_protocol.transports.device_copies import DeviceCopies
from dflash_runtime import Engine
from dflash_runtime.compute.sliding_window import MOST_KEPT
from dflash_runtime.engine.reuse import StateCheckpoints
from dflash_runtime.engine.run_guard import Cancelled
from dflash_runtime.experts.compute import LocalExpertCompute, Ticket
from dflash_runtime.experts.offload import OffloadMode
from dflash_runtime.placement.split import LOCAL_OWNER
from support.emulated_gpu import TINY, EmulatedGpus, install_emulated_gpus
from support.gpu_splits import Layers, Split
from support.interrupts import interrupt_main_thread
from support.random_gguf import RandomShape, write_model
from support.random_models import write_qwen3moe
from support.random_qwen35moe import Qwen35MoeShape

HALVED_FROM = 18
CHUNKS = [20, 19, 1, 9]
"""The first two as micro-batches of 10 and 10, 10 and 9."""
NUM_HALVES = len(CHUNKS) + 2
WHOLE: Layers = dict.fromkeys(range(TINY.num_layers), range(TINY.num_experts))
RECURRENT = Qwen35MoeShape(
    hidden_size=64,
    num_experts=7,
    num_experts_used=2,
    ffn_size=32,
    num_layers=4,
    head_dim=16,
    shared_ffn_size=32,
)


def ids_for(shape: RandomShape, num_tokens: int) -> I32Array:
    return np.random.default_rng(1).integers(0, shape.vocab_size, num_tokens).astype(np.int32)


IDS = ids_for(TINY, sum(CHUNKS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


@pytest.fixture
def undo() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def halved(undo: contextlib.ExitStack, path: Path, owners: Mapping[str, Layers]) -> Split:
    return Split(undo, path, owners, ids=IDS, chunks=CHUNKS, overlapped_from=HALVED_FROM)


def test_halves_have_the_bits_of_a_whole(model: Path, undo: contextlib.ExitStack) -> None:
    resident = halved(undo, model, {LOCAL_OWNER: WHOLE})
    expected = resident.logits()
    assert resident.runtime.hits.layers == len(CHUNKS) * TINY.num_layers  # no daemon is asked
    for owners in (
        {"gpu1": WHOLE},
        {
            LOCAL_OWNER: {0: [4, 0, 2], 1: [3]},
            "gpu1": {0: [3, 1]},
            "gpu2": {1: [0, 4, 2, 1]},
        },
        {LOCAL_OWNER: {1: WHOLE[1]}, "gpu1": {0: WHOLE[0]}},
    ):
        split = halved(undo, model, owners)
        assert (split.logits() == expected).all()
        assert split.runtime.hits.layers == NUM_HALVES * TINY.num_layers


def test_only_owners_on_cpus_may_have_their_experts_copied_to_a_whole_chunk(
    model: Path, undo: contextlib.ExitStack
) -> None:
    """By default, owners on GPUs are asked in micro-batches."""
    split = Split(
        undo,
        model,
        {"gpu1": WHOLE},
        ids=IDS,
        chunks=CHUNKS,
        overlapped_from=HALVED_FROM,
        offload=OffloadMode.AUTO,
    )
    (owner,) = split.runtime._owners
    for device, num_parts in (("cuda:1", NUM_HALVES), ("cpu", len(CHUNKS))):
        owner.stats.device = device
        num_before = split.runtime.hits.layers
        split.logits()
        assert split.runtime.hits.layers - num_before == num_parts * TINY.num_layers


class LostSometimes(LocalExpertCompute):
    """An owner that does not answer some requests."""

    lost: frozenset[int] = frozenset()
    num_finished = 0

    def finish(self, ticket: Ticket, out: Sums) -> None:
        self.num_finished += 1
        if self.num_finished in self.lost:
            raise DaemonUnavailable("gone")
        super().finish(ticket, out)


@pytest.mark.parametrize("lost", [{1, 4}, {2}])
def test_what_is_lost_is_computed_of_the_rows_of_its_half(
    model: Path, undo: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, lost: set[int]
) -> None:
    """By a local replica, after a turn of the other micro-batch."""
    expected = halved(undo, model, {LOCAL_OWNER: WHOLE}).logits()
    split = halved(undo, model, {"gpu1": WHOLE, LOCAL_OWNER: WHOLE})
    owner = split.runtime._owners[0]
    monkeypatch.setattr(owner, "__class__", LostSometimes)
    monkeypatch.setattr(LostSometimes, "lost", frozenset(lost))
    assert (split.logits() == expected).all()
    assert split.runtime.stats()["gpu1"].retries == len(lost)


def test_states_of_recurrent_layers_go_from_half_to_half(
    tmp_path: Path, undo: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are kept at the end of a chunk, and gone on from."""
    defaults = {"most_kept": MOST_KEPT, "least_apart": 1}
    monkeypatch.setattr(StateCheckpoints.__init__, "__kwdefaults__", defaults)
    path = write_model(tmp_path / "m.gguf", RECURRENT, seed=2)
    ids = ids_for(RECURRENT, 40)
    experts: Layers = dict.fromkeys(range(RECURRENT.num_layers), range(RECURRENT.num_experts))
    some: Layers = {layer: [1, 4, 6] for layer in experts}
    rest: Layers = {layer: [0, 2, 3, 5] for layer in experts}
    expected: F32Array | None = None
    for owners in ({LOCAL_OWNER: experts}, {LOCAL_OWNER: some, "gpu1": rest}):
        split = Split(undo, path, owners, ids=ids, chunks=[20, 20], overlapped_from=HALVED_FROM)
        found = split.logits()
        expected = found if expected is None else expected
        assert (found == expected).all()
        steps = split.steps
        run = steps.begin()
        steps.forward(run, ids[:20], 0)
        steps.reuse.save_state(20)
        steps.forward(run, ids[12:30], 20)  # another text
        assert (steps.head(steps.forward(run, ids[20:], 20)) == expected[20:]).all()


def test_a_run_that_is_cancelled_within_a_chunk_spoils_nothing(
    model: Path, undo: contextlib.ExitStack
) -> None:
    split = halved(undo, model, {"gpu1": WHOLE})
    expected = split.logits()
    for num_asked in range(2 * TINY.num_layers):
        answers = iter([False] * num_asked + [True] * 2 * TINY.num_layers)
        run = split.steps.begin(lambda answers=answers: next(answers))  # type: ignore[misc]
        with pytest.raises(Cancelled):
            split.steps.forward(run, IDS[:20], 0)
        split.steps.begin()
    assert (split.logits() == expected).all()


# With a real daemon, and shared memory that devices move payload through


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    gpus = install_emulated_gpus(monkeypatch)
    gpus.overlapped_from = HALVED_FROM
    return gpus


def opened(path: Path, **options: Any) -> Engine:
    """With timeout, so that a machine with much to do loses no daemon."""
    settings = replace(load_settings(), deadline_ms=60_000)
    return Engine.open(path, device="cuda:0", context=64, settings=settings, **options)


@pytest.mark.e2e
@pytest.mark.slow
def test_whatever_happens_to_a_half_the_chunk_is_computed(
    model: Path,
    gpus: EmulatedGpus,
    daemon: subprocess.Popen[str],
    endpoint: str,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two requests are in flight; an interrupt, and a daemon that is killed when one of them is on
    its way, end or lose both."""
    ids = [int(i) for i in IDS]
    with opened(model) as engine:
        expected = engine.logits(ids, CHUNKS)
    bound = 0.02 * np.abs(expected).max()
    begin = DeviceCopies.begin
    faults: list[str] = []
    most_in_flight = 0

    def begun(copies: DeviceCopies, *args: Any, **named: Any) -> None:
        nonlocal most_in_flight
        begin(copies, *args, **named)
        num_others = len(copies._requests.pending)
        most_in_flight = max(most_in_flight, num_others + 1)
        if faults and num_others == 1:  # the other micro-batch's
            fault = faults.pop()
            if fault == "kill":
                daemon.kill()
            else:
                interrupt_main_thread()

    monkeypatch.setattr(DeviceCopies, "begin", begun)
    for num_local in (2, 0):
        with opened(model, connect=[endpoint], local_experts=num_local) as engine:
            assert (engine.logits(ids, CHUNKS) == expected).all()
            assert most_in_flight == 2
            faults.append("interrupt")
            with pytest.raises(KeyboardInterrupt):
                engine.logits(ids, CHUNKS)
            assert not faults
            assert (engine.logits(ids, CHUNKS) == expected).all()
            stats = engine.stats()
            assert stats.owners["link0"].retries == 0
            assert not any(event.kind == "daemon_lost" for event in stats.events)
            if num_local:
                continue
            faults.append("kill")
            found = engine.logits(ids, CHUNKS)
            assert not faults
            assert 0 < np.abs(found - expected).max() < bound
            stats = engine.stats()
            assert stats.owners["link0"].is_lost
            assert stats.owners["link0"].retries > 1
    for left in run_dir.glob("gpu.sock*"):  # what is killed cannot clean up
        left.unlink()
    gc.collect()  # frames of what was interrupted
    for device in gpus.opened:
        assert not device.num_bytes
        assert not device._range_bytes
