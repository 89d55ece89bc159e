"""What architecture.md promises of logits when experts are elsewhere: the same bits with equal GPUs
in steps and chunks of every size, and a bounded error with a CPU. Emulated here, or on a device."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dflash_runtime import Engine
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.engine.demo_model import demo_model_path
from dflash_runtime.placement.split import LOCAL_OWNER
from support.emulated_gpu import TINY
from support.gpu_devices import EMULATED, EMULATED_AND_GPU, first_gpu, opened_device
from support.gpu_models import error_of
from support.gpu_splits import Layers, Split
from support.random_models import write_qwen3moe

NewDevice = Callable[[contextlib.ExitStack], KernelDevice]

# Every number of tokens that steps have kernels for, more than one chunk of a device holds, a
# remainder; then tokens by themselves.
CHUNKS = [13, 8, 7, 6, 5, 4, 3, 2, 20, 9, 1, 1, 1]
IDS = np.random.default_rng(1).integers(0, TINY.vocab_size, sum(CHUNKS)).astype(np.int32)
WHOLE: Layers = dict.fromkeys(range(TINY.num_layers), range(TINY.num_experts))
HOT: Layers = {0: [4, 0, 2], 1: [3]}
NOT_HOT: Layers = {0: [3, 1], 1: [0, 4, 2, 1]}


@pytest.fixture
def undo() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(params=[pytest.param(EMULATED, marks=pytest.mark.slow), *EMULATED_AND_GPU[1:]])
def new_device(request: pytest.FixtureRequest) -> NewDevice:
    return lambda undo: undo.enter_context(opened_device(request.param))


@pytest.mark.parametrize("tensor_type", ["Q8_0", pytest.param("F32", marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_where_experts_are(
    new_device: NewDevice, undo: contextlib.ExitStack, tmp_path: Path, tensor_type: str
) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type=tensor_type)
    opened = partial(Split, undo, path, ids=IDS, chunks=CHUNKS, new_device=new_device)
    resident = opened({LOCAL_OWNER: WHOLE})
    expected = resident.logits()
    assert np.isfinite(expected).all()
    assert (resident.captured_logits() == expected[-2:]).all()
    verified = resident.verified_logits(CHUNKS[0], CHUNKS[1:8])
    for owners in ({"gpu1": WHOLE}, {LOCAL_OWNER: HOT, "gpu1": NOT_HOT}):
        other = opened(owners)
        assert (other.logits() == expected).all()
        assert (other.captured_logits() == expected[-2:]).all()
        assert (other.verified_logits(CHUNKS[0], CHUNKS[1:8]) == verified).all()
        assert other.runtime.hits.remote > 0


def test_a_token_has_the_same_bits_alone_and_among_others_of_a_draft(
    new_device: NewDevice, undo: contextlib.ExitStack, tmp_path: Path
) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    resident = Split(
        undo, path, {LOCAL_OWNER: WHOLE}, ids=IDS, chunks=CHUNKS, new_device=new_device
    )
    resident.logits()
    singly = resident.verified_logits(13, [1] * 35)
    assert (resident.verified_logits(13, CHUNKS[1:8]) == singly).all()


def test_errors_with_a_cpu_are_within_those_of_either_alone(
    new_device: NewDevice, undo: contextlib.ExitStack, tmp_path: Path
) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    chunks = [20, 11, *[1] * 9]
    ids = IDS[: sum(chunks)]
    with Engine.open(path, backend="reference", kv_type="f16") as engine:
        reference = engine.logits(ids.tolist())
    with Engine.open(path, backend="cpu", threads=1, kv_type="f16") as engine:
        cpu = engine.logits(ids.tolist())
    opened = partial(Split, undo, path, ids=ids, chunks=chunks, new_device=new_device)
    gpu = opened({LOCAL_OWNER: WHOLE}).logits()
    for owners in ({"cpu1": WHOLE}, {LOCAL_OWNER: HOT, "cpu1": NOT_HOT}):
        split = opened(owners)
        mixed = split.logits()
        assert (mixed != gpu).any()
        for some in (slice(0, 31), slice(31, None)):  # chunks, steps
            bound = max(error_of(each[some], reference[some]) for each in (gpu, cpu))
            assert 0 < error_of(mixed[some], reference[some]) <= bound
        captured = split.captured_logits()
        assert error_of(captured, reference[-2:]) <= 2 * bound  # of two positions only


@pytest.mark.gpu
def test_with_a_cpu_nearly_all_tokens_are_the_same(undo: contextlib.ExitStack) -> None:
    """Of what the demo model was made for, Python, teacher-forced: 448 in chunks, 64 in steps."""
    first_gpu()
    path = demo_model_path()
    text = Path(logging.__file__).read_text(encoding="utf-8")
    with Engine.open(path, backend="reference") as engine:
        assert engine.tokenizer is not None
        ids = np.array(engine.tokenizer.encode(text)[:512], np.int32)
    chunks = [448, *[1] * 64]
    assert ids.size == sum(chunks)

    def new_device(undo: contextlib.ExitStack) -> KernelDevice:
        return undo.enter_context(opened_device("gpu"))

    opened = partial(Split, undo, path, ids=ids, chunks=chunks, new_device=new_device)
    everything = dict.fromkeys(range(8), range(32))
    gpu = opened({LOCAL_OWNER: everything}).logits()
    mixed = opened({"cpu1": everything}).logits()
    assert (mixed != gpu).any()
    assert (mixed.argmax(axis=1) == gpu.argmax(axis=1)).mean() >= 0.99
