"""The split does not show: logits have the same bits wherever and however experts are computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.ids import F32Array
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from support.faults import spawned_daemons
from support.placements import random_placement
from support.random_models import BLOCK_32_SHAPE, ODD_SHAPES, write_qwen3moe

pytestmark = pytest.mark.e2e

PREFILL = (31, 17)
NUM_DECODE = 40
SIZES = (*PREFILL, *[1] * NUM_DECODE)
"""Of the chunks in which all tokens are computed."""
SHAPES = {"F32": ODD_SHAPES[0], "Q8_0": BLOCK_32_SHAPE}


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to have the experts computed. `kill_at`: before this chunk a daemon is killed."""

    seed: int
    tensor_type: str
    backend: str
    num_daemons: int
    mode: str
    transport: str
    batch_capacity: int
    stream_batch: int
    threads: int
    kill_at: int | None


def configuration(seed: int) -> Configuration:
    """Everything drawn at random, the placement later from the same seed."""
    random = np.random.default_rng([2026, 11, seed])

    def one_of(*values: str | int) -> str | int:
        return values[int(random.integers(len(values)))]

    return Configuration(
        seed=seed,
        tensor_type=str(one_of("F32", "Q8_0")),
        backend=str(one_of("cpu", "cpu", "cpu", "reference")),
        num_daemons=int(one_of(1, 2, 3)),
        mode=str(one_of("auto", "batched", "stream")),
        transport=str(one_of("shared", "stream")),
        batch_capacity=int(one_of(1, 3, 5, 16, 1024)),
        stream_batch=int(one_of(1, 3, 4)),
        threads=int(one_of(1, 2)),
        kill_at=int(one_of(1, 2, 12, 25)) if random.random() < 0.5 else None,
    )


NUM_CONFIGURATIONS = 20
IN_EVERY_RUN = (6, 10, 15)


def token_ids(vocab_size: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(3).integers(0, vocab_size, sum(SIZES))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files by the type of their matrices."""
    folder = tmp_path_factory.mktemp("model")
    return {
        kind: write_qwen3moe(folder / f"{kind}.gguf", shape, seed=10, tensor_type=kind)
        for kind, shape in SHAPES.items()
    }


@cache
def in_process_logits(path: Path, backend: str) -> F32Array:
    with Engine.open(path, backend=backend) as engine:
        return engine.logits(token_ids(engine.spec.vocab_size), SIZES)


def configured_logits(path: Path, chosen: Configuration) -> F32Array:
    """Logits with a random placement over the parent and the daemons."""
    with GgufFile.open(path) as file:
        spec = read_spec(file).moe
    names = ["local", *(f"cpu{index}" for index in range(chosen.num_daemons))]
    placement = random_placement(spec, names, np.random.default_rng(chosen.seed))
    settings = replace(
        load_settings(),
        ipc_mode=chosen.mode,
        ipc_transport=chosen.transport,
        batch_capacity=chosen.batch_capacity,
        stream_batch=chosen.stream_batch,
    )

    def sizes() -> Iterator[int]:
        for place, size in enumerate(SIZES):
            if place == chosen.kill_at:
                spawned_daemons()[chosen.seed % chosen.num_daemons].kill()
            yield size

    with Engine.open(
        path,
        backend=chosen.backend,
        daemons=["cpu"] * chosen.num_daemons,
        placement=placement,
        threads=chosen.threads,
        settings=settings,
    ) as engine:
        logits = engine.logits(token_ids(engine.spec.vocab_size), sizes())
        stats = engine.stats()
    expected_events = [] if chosen.kill_at is None else ["daemon_lost"]
    assert [e.kind for e in stats.events if e.kind != "daemon_back"] == expected_events
    daemons = [owner for owner in stats.owners.values() if owner.kind == "daemon"]
    assert len(daemons) == chosen.num_daemons
    assert all(owner.requests for owner in daemons)
    assert {owner.transport for owner in daemons} == {chosen.transport}
    assert not any(owner.checksum_failures + owner.stale for owner in daemons)
    most = chosen.batch_capacity
    if chosen.mode == "stream":
        most = min(most, chosen.stream_batch)
    if chosen.kill_at is None:
        phases = [phase for owner in daemons for phase in owner.phases.values()]
        assert all(phase.tokens <= most * phase.requests for phase in phases)
    return logits


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=() if seed in IN_EVERY_RUN else pytest.mark.slow)
        for seed in range(NUM_CONFIGURATIONS)
    ],
)
def test_bits_do_not_depend_on_the_configuration(models: dict[str, Path], seed: int) -> None:
    chosen = configuration(seed)
    path = models[chosen.tensor_type]
    logits = configured_logits(path, chosen)
    assert np.array_equal(logits, in_process_logits(path, chosen.backend)), chosen


@pytest.mark.parametrize("seeds", [IN_EVERY_RUN, range(NUM_CONFIGURATIONS)], ids=["share", "all"])
def test_the_configurations_have_something_of_everything(seeds: range) -> None:
    drawn = [configuration(seed) for seed in seeds]
    assert {each.transport for each in drawn} == {"shared", "stream"}
    assert {each.mode for each in drawn} == {"auto", "batched", "stream"}
    assert {each.tensor_type for each in drawn} == {"F32", "Q8_0"}
    assert {each.num_daemons for each in drawn} >= {1, 2}
    assert {each.kill_at is None for each in drawn} == {True, False}
    assert min(each.batch_capacity for each in drawn) < 4, "small enough for slices of slices"


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=pytest.mark.slow)])
def test_no_tokens_are_legal(models: dict[str, Path], backend: str) -> None:
    with Engine.open(models["F32"], backend=backend, daemons=["cpu"]) as engine:
        assert engine.logits([]).shape == (0, engine.spec.vocab_size)
        assert engine.stats().owners["cpu0"].requests == 0
        assert np.isfinite(engine.logits([1, 2, 3])).all()


def test_tokens_without_a_remote_expert_are_not_sent(models: dict[str, Path]) -> None:
    """One expert is remote; most tokens do not choose it and must not travel."""
    model = models["Q8_0"]
    with GgufFile.open(model) as file:
        layers = read_spec(file).moe.layers
    num_experts = layers[0].num_experts
    with Engine.open(model, daemons=["cpu"], local_experts=num_experts - 1) as engine:
        ids = token_ids(engine.spec.vocab_size)
        engine.logits(ids, SIZES)
        owners = engine.stats().owners
    assert 0 < owners["cpu0"].tokens < len(ids) * len(layers)
    assert owners["cpu0"].tokens == owners["cpu0"].pairs
    assert owners["local"].tokens == len(ids) * len(layers)
