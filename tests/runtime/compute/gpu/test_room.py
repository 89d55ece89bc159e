"""What a file takes of a device, counted before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import describe, read_spec
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.room import GpuRoom
from support.emulated_gpu import install_emulated_gpus
from support.random_gguf import write_model
from support.random_qwen35moe import Qwen35MoeShape

RECURRENT = Qwen35MoeShape(
    num_layers=4,
    hidden_size=64,
    head_dim=16,
    num_experts=7,
    num_experts_used=2,
    ffn_size=32,
    shared_ffn_size=32,
)


def test_a_convolution_has_shorter_rows_than_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", RECURRENT, seed=2)
    with GgufFile.open(path) as file:
        spec = read_spec(file)
        layers = spec.moe.layers
        stored = sum(tensor.num_bytes for tensor in file.tensors.values())
        experts = sum(layer.num_experts * layer.expert_bytes for layer in layers)
        room = GpuRoom(file, spec, describe(file))
        weights = room.ends + sum(layer.trunk for layer in room.layers)
        # All of it is F32, rows are padded to 64 values, and arrays to 512 bytes.
        assert stored - experts <= weights < 1.2 * (stored - experts)
    install_emulated_gpus(monkeypatch)
    prompt, texts = list(range(20)), []
    for device in ("cuda:0", "cpu"):
        with Engine.open(path, device=device, context=48, threads=1) as engine:
            tokens = engine.generate(prompt, 5, ignore_eos=True)
            texts.append([token.token_id for token in tokens])
            again = engine.generate([*prompt, 5], 3, ignore_eos=True, reuse_prefix=True)
            texts[-1] += [token.token_id for token in again]
    assert texts[0] == texts[1]
