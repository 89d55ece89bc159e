"""Prompts whose chunks go through a layer one after the other, where a GPU, emulated here, copies
weights of experts for them: the same bits as with each chunk alone, and fewer copies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.errors import DeviceUnavailable
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.experts import offload_room
from dflash_runtime.compute.gpu.transfers.file_copier import FileCopier, FileRuns
from dflash_runtime.engine.steps import Steps
from support.emulated_gpu import MAX_CHUNK, TINY, EmulatedGpus, install_emulated_gpus
from support.gpu_models import SHAPES
from support.interrupts import interrupt_main_thread
from support.logprobs import bits_of
from support.random_gguf import RandomShape, write_model
from support.undisturbed import settings_with

GROUP, CONTEXT = 3 * MAX_CHUNK, 256
PROMPT = [int(i) for i in np.random.default_rng(3).integers(0, TINY.vocab_size, GROUP + 33)]
NUM_GROUPS = 2
NUM_TOKENS = 3

MODELS: dict[str, RandomShape] = {"qwen3moe": replace(TINY, num_layers=5), **SHAPES}
"""Of the first, experts are copied through fewer places than there are layers."""
BY_DEFAULT = ("qwen3moe", 1), ("qwen35moe", None)
"""The plainest, and one with recurrent layers."""


class Copies:
    """Counts what is copied for prompts, by where it lies; `before` is called with the number of
    transfers so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_source = Counter[int]()
        self.num_transfers = 0
        self.fail_at = self.interrupt_at = 0
        begin = FileCopier.begin

        def counted(copier: FileCopier, runs: FileRuns, **options: Any) -> Any:
            self.num_transfers += 1
            self.of_source.update(runs.table[:, 0].tolist())
            if self.num_transfers == self.fail_at:
                raise DeviceUnavailable("cuda:0: the GPU has fallen off the bus")
            if self.num_transfers == self.interrupt_at:
                interrupt_main_thread()
            return begin(copier, runs, **options)

        monkeypatch.setattr(FileCopier, "begin", counted)

    def reset(self) -> None:
        self.of_source.clear()
        self.num_transfers = self.fail_at = self.interrupt_at = 0


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    return install_emulated_gpus(monkeypatch)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shape = MODELS[getattr(request, "param", "qwen3moe")]
    return write_model(tmp_path / "m.gguf", shape, seed=4, tensor_type="Q8_0")


def opened(gpus: EmulatedGpus, model: Path, *, group: int = GROUP) -> Engine:
    gpus.group_tokens = group
    settings = replace(settings_with(), context=CONTEXT, prefill_offload="on")
    return Engine.open(model, device="cuda:0", settings=settings, local_experts=1)


@pytest.mark.parametrize(
    ("model", "part_bytes"),
    [
        pytest.param(name, size, marks=() if (name, size) in BY_DEFAULT else pytest.mark.slow)
        for name in MODELS
        for size in (None, 1)
    ],
    indirect=["model"],
)
def test_bits_are_those_of_chunks_alone(
    model: Path,
    gpus: EmulatedGpus,
    copies: Copies,
    monkeypatch: pytest.MonkeyPatch,
    part_bytes: int | None,
) -> None:
    """Also where a layer has more parts, of an expert each, than there are places."""
    if part_bytes is not None:
        monkeypatch.setattr(offload_room, "_PLACE_BYTES", part_bytes)
    found, num_copied = [], []
    for group in (0, GROUP):
        with opened(gpus, model, group=group) as engine:
            copies.reset()
            found.append(bits_of(engine, PROMPT, num_tokens=NUM_TOKENS))
            num_copied.append(copies.of_source.total())
            found.append(bits_of(engine, [7, *PROMPT[: GROUP + 5]], num_tokens=NUM_TOKENS))
    assert found[:2] == found[2:]
    assert num_copied[1] <= num_copied[0]


def test_an_expert_is_copied_once_for_a_group(
    model: Path, gpus: EmulatedGpus, copies: Copies
) -> None:
    with opened(gpus, model) as engine:
        copies.reset()
        bits_of(engine, PROMPT, num_tokens=NUM_TOKENS)
        assert 0 < max(copies.of_source.values()) <= NUM_GROUPS
        grouped = copies.of_source.total()
    with opened(gpus, model, group=0) as engine:
        copies.reset()
        bits_of(engine, PROMPT, num_tokens=NUM_TOKENS)
        assert copies.of_source.total() > 2 * grouped


@pytest.mark.parametrize("what", ["fails", pytest.param("is interrupted", marks=pytest.mark.slow)])
def test_a_group_that_ends_early_leaves_the_next_prompts_right(
    model: Path, gpus: EmulatedGpus, copies: Copies, what: str
) -> None:
    with opened(gpus, model) as engine:
        expected = bits_of(engine, PROMPT, num_tokens=NUM_TOKENS)
        for at in (1, 4):
            copies.reset()
            if what == "fails":
                copies.fail_at = at
            else:
                copies.interrupt_at = at
            with pytest.raises(DeviceUnavailable if what == "fails" else KeyboardInterrupt):
                bits_of(engine, [at, *PROMPT], num_tokens=NUM_TOKENS)
            copies.reset()
            assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == expected


def test_a_group_can_be_cancelled_between_its_chunks(model: Path, gpus: EmulatedGpus) -> None:
    with opened(gpus, model) as engine:
        expected, num_asked = bits_of(engine, PROMPT, num_tokens=NUM_TOKENS), 0

        def is_cancelled() -> bool:
            nonlocal num_asked
            num_asked += 1
            return num_asked > 5

        assert not list(engine.generate([3, *PROMPT], NUM_TOKENS, is_cancelled=is_cancelled))
        assert num_asked == 6
        assert bits_of(engine, PROMPT, num_tokens=NUM_TOKENS) == expected


def test_logits_of_all_positions_and_features_need_no_group(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    group = Steps._group

    def noted(steps: Steps, step: Any, before_layer: Any) -> Any:
        groups.append(step.token_ids.size)
        return group(steps, step, before_layer)

    monkeypatch.setattr(Steps, "_group", noted)
    with opened(gpus, model) as engine:
        engine.logits(PROMPT, MAX_CHUNK)
        engine.prefill(PROMPT)
        assert not groups
        bits_of(engine, PROMPT, num_tokens=NUM_TOKENS)
        assert groups == [GROUP, 33]


@pytest.mark.parametrize(
    "model", ["qwen3moe", pytest.param("qwen35moe", marks=pytest.mark.slow)], indirect=True
)
def test_prefixes_that_groups_have_computed_are_reused(model: Path, gpus: EmulatedGpus) -> None:
    """As those of chunks alone."""
    options: dict[str, Any] = {"ignore_eos": True, "reuse_prefix": True}
    longer, found = [*PROMPT, *range(1, 24)], []
    for group in (0, GROUP):
        with opened(gpus, model, group=group) as engine:
            list(engine.generate(PROMPT, NUM_TOKENS, **options))
            texts = [
                [each.token_id for each in engine.generate(longer, NUM_TOKENS, **given)]
                for given in (options, {"ignore_eos": True})
            ]
            assert texts[0] == texts[1]
            list(engine.generate(PROMPT, NUM_TOKENS, **options))
            list(engine.generate(longer, NUM_TOKENS, **options))
            found.append((texts, engine.last_generation.num_reused_tokens))
    assert found[0][0] == found[1][0]
    assert found[1][1] == found[0][1] > 0
