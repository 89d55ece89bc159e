"""The layers that are measured are some of each kind, and fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import DeltaNet, Ffn, RoutedFfn
from dflash_adapters.loading import model_spec
from dflash_adapters.registry import describe, read_spec
from dflash_runtime.engine.demo_model import demo_model_path
from dflash_runtime.engine.measuring.layers import (
    head_bytes,
    layer_bytes,
    sampled_layers,
    trunk_bytes,
    with_experts_used,
)
from support.architectures import RANDOM
from support.random_gguf import write_model

PLENTY = 1 << 40


def test_layers_of_one_kind_are_spread_and_halved() -> None:
    with GgufFile.open(demo_model_path()) as file:
        description, whole = describe(file), read_spec(file)
        size = layer_bytes(file, description.layers[0])
        for limit, num in ((PLENTY, 8), (5 * size, 4), (0, 2)):
            sampled = sampled_layers(file, description, limit_bytes=limit)
            (kind,) = sampled.kinds
            assert len(set(kind.layer_ids)) == num
            assert kind.num_all == 8
            assert sampled.ends == (num // 2, num)
            spec = model_spec(file, sampled.description)
            assert spec.num_layers == num
            num_experts = {layer.num_experts for layer in whole.moe.layers}
            assert {layer.num_experts for layer in spec.moe.layers} == num_experts


@pytest.mark.parametrize("architecture", sorted(RANDOM))
def test_each_kind_is_there(architecture: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", RANDOM[architecture].SMALL, seed=1)
    with GgufFile.open(path) as file:
        description = describe(file)
        sampled = sampled_layers(file, description, limit_bytes=PLENTY)
        assert sum(kind.num_all for kind in sampled.kinds) == len(description.layers)
        assert sampled.kinds[0].is_routed
        layers, begin = sampled.description.layers, 0
        for kind, end in zip(sampled.kinds, sampled.ends[1:], strict=True):
            assert end - begin == len(kind.layer_ids)
            for layer in layers[begin:end]:
                assert isinstance(layer.ffn, Ffn) is not kind.is_routed
                assert not (kind.sees_all and isinstance(layer.mixer, DeltaNet))
            begin = end
        assert begin == len(layers)
        model_spec(file, sampled.description)


def test_bytes_add_up() -> None:
    with GgufFile.open(demo_model_path()) as file:
        description, spec = describe(file), read_spec(file)
        for layer, moe in zip(description.layers, spec.moe.layers, strict=True):
            experts = moe.num_experts * moe.expert_bytes
            assert trunk_bytes(file, layer) + experts == layer_bytes(file, layer)
        assert head_bytes(file, description) > 0


def test_fewer_experts_for_each_token() -> None:
    with GgufFile.open(demo_model_path()) as file:
        fewer = with_experts_used(describe(file), 1)
        assert {layer.num_experts_used for layer in model_spec(file, fewer).moe.layers} == {1}
        for layer in fewer.layers:
            assert isinstance(layer.ffn, RoutedFfn)
            assert layer.ffn.rule.num_experts_used == 1
