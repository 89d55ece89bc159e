"""The bench of experts that move while serving, on an emulated GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench.moves import measure
from bench.planted_routing import Walk

from dflash_protocol.settings import load_settings
from support.emulated_gpu import TINY
from support.planned_gpu import GPU, OneGpu
from support.random_models import write_qwen3moe


@pytest.mark.slow
def test_requests_are_served_with_moves_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(TINY, vocab_size=800)
    path = write_qwen3moe(tmp_path / "m.gguf", shape, seed=4, tensor_type="Q8_0")
    gpu = OneGpu(monkeypatch, path)
    gpu.copies_per_s = 1e12
    gpu.make_room_for(5)
    gpu.room_bytes += 1 << 20
    settings = replace(load_settings(), model=str(path), device=GPU, context=64, moe_mode="hot")
    found = measure(settings, Walk.of(800, 4), num_requests=5, num_tokens=6)
    rows = [line for line in found.splitlines() if ", requests " in line]
    assert [row.split(",")[0].strip("| ") for row in rows] == ["moves"] * 5 + ["stays"] * 5
    assert all(row.split("|")[5].strip() == "0" for row in rows[5:])
