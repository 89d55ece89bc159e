"""The bench of ways to a processor's experts, on an emulated GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench.gpu_ways import measure, rows_of
from bench.planted_routing import Walk

from dflash_runtime.compute.cpu.captured.mail_thread import MailThread
from dflash_runtime.engine.steps import Steps
from support.emulated_gpu import MAX_CHUNK, TINY, install_emulated_gpus
from support.planned_gpu import GPU
from support.random_gguf import write_model
from support.undisturbed import settings_with


def test_both_ways_are_timed_and_find_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_emulated_gpus(monkeypatch)
    num_asked, groups, ask, group = 0, list[int](), MailThread.ask, Steps._group

    def counted(thread: MailThread, num_tokens: int) -> None:
        nonlocal num_asked
        num_asked += 1
        ask(thread, num_tokens)

    def noted(steps: Steps, step: object, before_layer: object) -> object:
        groups.append(step.token_ids.size)  # type: ignore[attr-defined]
        return group(steps, step, before_layer)  # type: ignore[arg-type]

    monkeypatch.setattr(MailThread, "ask", counted)
    monkeypatch.setattr(Steps, "_group", noted)
    monkeypatch.setattr("bench.gpu_ways.BEFORE", 6)
    shape = replace(TINY, vocab_size=800)
    path = write_model(tmp_path / "m.gguf", shape, seed=4, tensor_type="Q8_0")
    settings = replace(
        settings_with(),
        model=str(path),
        device=GPU,
        local_experts=2,
        context=96,
        prefill_offload="on",
        swap_max=0,
    )
    length = MAX_CHUNK + 15
    found = measure(settings, Walk.of(800, 4), rounds=2, num_tokens=4, prompts=[8, length])
    assert num_asked == 2 * 3 * 3  # two runs a turn
    assert groups == [length] * 2 * 3
    assert found["pairs"]["host"] > 0
    rows = rows_of("all", found)
    assert [row[1].partition(":")[0] for row in rows] == [
        "written",
        "prompt of 8",
        f"prompt of {length}",
    ]
