"""A step is captured with the arrays of its trial: whatever is still referred to, and whenever
garbage is collected, nothing is allocated, and its bits are those of a step that is not captured.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from dflash_protocol.ids import F32Array, Phase
from dflash_runtime.compute.gpu.device.buffers import Buffer, Buffers
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.run.captured_step import GraphStep
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.model import Step, forward, run_to_end
from support.emulated_device import EmulatedDevice
from support.emulated_device.emulated_device import EmulatedGraph
from support.emulated_gpu import TINY
from support.gpu_models import SHAPES, GpuModel
from support.random_gguf import write_model
from support.random_models import write_qwen3moe

PROMPT = np.arange(9, dtype=np.int32)
CAPACITY = 1030
"""Two context buckets."""


class Holder:
    """Whoever takes a buffer is remembered, as a cycle would that nobody has collected yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: list[Buffer] = []
        take = Buffers.take

        def take_and_hold(buffers: Buffers, shape: tuple[int, ...], dtype: type) -> Buffer:
            self.held.append(take(buffers, shape, dtype))
            return self.held[-1]

        monkeypatch.setattr(Buffers, "take", take_and_hold)


def plain_logits(model: GpuModel, token_id: int, position: int) -> F32Array:
    moe = model.backend.moe(model.banks, Phase.DECODE, None)
    model.poison.again()
    step = Step.of_chunk(np.array([token_id], np.int32), position, model.cache, Phase.DECODE)
    hidden = run_to_end(forward(model.model, step, moe))
    logits: F32Array = model.backend.to_host(model.model.head(hidden))[0]
    return logits


def captured_logits(model: GpuModel, step: GraphStep, token_id: int, position: int) -> F32Array:
    model.poison.again()
    step.begin(token_id, position)
    step.start()
    return step.logits()


@pytest.mark.parametrize("what_stays", ["nothing", "everything", "garbage"])
def test_a_recording_takes_what_its_trial_took(
    any_device: KernelDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what_stays: str
) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")
    model = GpuModel(path, any_device, kv_type=KvType.F16, capacity=CAPACITY)
    model.logits(PROMPT, [PROMPT.size])
    expected = [plain_logits(model, token, PROMPT.size) for token in (3, 5)]
    if what_stays == "everything":
        Holder(monkeypatch)
    elif what_stays == "garbage":
        gc.disable()
    try:
        first, second = model.captured_step(), model.captured_step()
        first.begin(3, PROMPT.size)
        for _ in range(3):  # and nobody asks what came of it
            first.start()
        for _ in range(2):
            for step, token, logits in zip((second, first), (5, 3), expected[::-1], strict=True):
                assert (captured_logits(model, step, token, PROMPT.size) == logits).all()
        second.begin(3, CAPACITY - 2)  # another bucket, over positions that nothing has written
        second.start()
        second.start()
        assert (captured_logits(model, second, 3, PROMPT.size) == expected[0]).all()
    finally:
        gc.enable()
    first.close()
    second.close()
    model.close()


def test_a_step_that_fails_has_overwritten_an_older_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", SHAPES["qwen35moe"], seed=4, tensor_type="Q8_0")
    model = GpuModel(path, EmulatedDevice(), kv_type=KvType.F16)
    model.logits(PROMPT, [PROMPT.size])
    step, states = model.captured_step(), model.cache.states
    step.begin(3, PROMPT.size)
    for _ in range(5):
        step.start()
    end = PROMPT.size + 5
    oldest = next(each for each in range(1, end) if states.can_resume(each))
    replay = EmulatedGraph.replay

    def interrupted(graph: EmulatedGraph) -> None:
        replay(graph)
        raise KeyboardInterrupt

    monkeypatch.setattr(EmulatedGraph, "replay", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step.start()
    assert not states.can_resume(oldest)
    assert states.can_resume(end)
    step.close()
    model.close()
