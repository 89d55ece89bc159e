"""The bench of predictions for a model that is larger than memory, on a small one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench.disk_predictions import learn, measure, rows_of
from bench.planted_routing import Walk
from bench.texts import Texts

from dflash_protocol.device import CPU
from dflash_runtime import Engine
from dflash_runtime.placement.plan import Forecast
from support.emulated_gpu import TINY
from support.random_gguf import write_model
from support.undisturbed import settings_with

FORECAST = Forecast(decode=100.0, prompt_512=200.0, prompt_4096=300.0)


def test_a_row_for_each_kind_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "bench.disk_predictions.plan_of_file", lambda *_, **__: SimpleNamespace(forecast=FORECAST)
    )
    for name, value in (("WRITTEN", 5), ("LEARNT", 3)):
        monkeypatch.setattr(f"bench.disk_predictions.{name}", value)
    read: list[tuple[int, ...]] = []
    generate = Engine.generate

    def noted(engine: Engine, prompt: Sequence[int], *what: Any, **how: Any) -> Any:
        read.append(tuple(prompt))
        return generate(engine, prompt, *what, **how)

    monkeypatch.setattr(Engine, "generate", noted)
    path = write_model(
        tmp_path / "m.gguf", replace(TINY, vocab_size=800), seed=4, tensor_type="Q8_0"
    )
    heat = tmp_path / "learnt.heat"
    settings = replace(
        settings_with(), model=str(path), device=CPU, context=96, heat=str(heat), host_memory_mb=500
    )
    walk = Walk.of(800, 4)
    prompts = {
        length: [walk.stretch(at, size) for at in (100, 200)]
        for length, size in ((512, 20), (4096, 40))
    }
    decode = [walk.stretch(at, 6) for at in (300, 400)]
    texts = Texts([walk.stretch(0, 30), walk.stretch(50, 30)], decode, (), prompts)
    learn(settings, texts)
    assert heat.exists()
    learnt = set(read)
    read.clear()
    found = measure(settings, texts)
    assert not learnt & set(read[1:])  # the first one is not counted
    assert len(read) == 1 + 2 + 2 + 2
    assert [len(found[each]) for each in ("prompt_512", "prompt_4096", "decode")] == [2, 2, 2]
    found["decode"] = [0.02, 0.02]
    rows = rows_of(500, found)
    assert rows[0] == ["500 MiB, decode", "100.0", "50.0", "+100%"]
    assert [row[0] for row in rows[1:]] == ["500 MiB, prompt of 512", "500 MiB, prompt of 4096"]
