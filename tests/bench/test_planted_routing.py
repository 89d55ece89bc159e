"""Planted routing: what the file holds, and that only the embedding writes the planted channels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from bench.planted_routing import (
    CHANNELS,
    CODE,
    KINDS,
    UNITS,
    PlantedRouting,
    Walk,
    code_words,
    codes,
)
from bench.random_moe import MIXES, blocks, write
from gguf import GGMLQuantizationType as Type

from bench import model_shapes
from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.errors import ModelFileError
from dflash_protocol.ids import AnyArray, F32Array

HIDDEN, VOCABULARY, LAYERS = 512, 3000, 4
PLANTED = 128


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in model_shapes.SHAPES.items():
        small = replace(shape, hidden=HIDDEN, ffn=256, num_experts=16, num_heads=4, num_kv_heads=1)
        monkeypatch.setitem(model_shapes.SHAPES, name, small)


def written(path: Path, mix: str, routing: str | None = "qwen3", seed: int = 5) -> Path:
    write(
        path,
        replace(MIXES[mix], vocabulary=VOCABULARY),
        num_layers=LAYERS,
        seed=seed,
        routing=routing,
    )
    return path


def tensors_of(path: Path) -> dict[str, F32Array]:
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }


@pytest.fixture
def planted() -> PlantedRouting:
    return PlantedRouting("qwen3", 5, vocabulary=VOCABULARY, num_layers=LAYERS)


@pytest.mark.usefixtures("small_shapes")
@pytest.mark.parametrize("mix", ["q4_k_m", "q8_0", "qwen35moe", "olmoe"])
def test_only_planted_tensors_change_and_hold_their_values_exactly(
    mix: str, planted: PlantedRouting, tmp_path: Path
) -> None:
    found = tensors_of(written(tmp_path / "planted.gguf", mix))
    plain = tensors_of(written(tmp_path / "plain.gguf", mix, routing=None))
    assert found.keys() == plain.keys()

    changed = {name for name in found if not np.array_equal(found[name], plain[name])}
    roles = {name.rpartition(".weight")[0].rpartition(".")[2] for name in changed}
    norm = "post_attention_norm" if mix == "qwen35moe" else "ffn_norm"
    outputs = {"attn_output", "ffn_down_exps"}
    if mix == "qwen35moe":
        outputs |= {"ssm_out", "ffn_down_shexp"}
    assert roles == {"token_embd", "output", "output_norm", "ffn_gate_inp", norm} | outputs

    for name in changed:
        role = name.rpartition(".weight")[0].rpartition(".")[2]
        if role in outputs:
            assert not found[name][..., :CHANNELS, :].any()
            np.testing.assert_array_equal(
                found[name][..., CHANNELS:, :], plain[name][..., CHANNELS:, :]
            )
        elif role.endswith("norm"):
            assert (found[name][:CHANNELS] == 1).all()
            np.testing.assert_array_equal(found[name][CHANNELS:], plain[name][CHANNELS:])
        elif role == "ffn_gate_inp":
            layer = int(name.split(".")[1])
            np.testing.assert_array_equal(found[name], planted.router(layer, 16, HIDDEN))
            assert not found[name][:, PLANTED:].any()

    embedding, head = found["token_embd.weight"], found["output.weight"]
    np.testing.assert_array_equal(embedding[:, :PLANTED], planted.levels * UNITS)
    assert not embedding[:, PLANTED:CHANNELS].any()
    np.testing.assert_array_equal(embedding[:, CHANNELS:], plain["token_embd.weight"][:, CHANNELS:])
    before = np.empty(VOCABULARY, int)
    before[planted.walk.token_ids] = np.roll(planted.walk.token_ids, 1)
    np.testing.assert_array_equal(np.sign(head[:, CODE]), codes(VOCABULARY)[before])
    assert np.unique(np.abs(head[:, CODE])).size == 1
    assert not np.delete(head, np.r_[CODE], axis=1).any()


@pytest.mark.parametrize(
    "tensor_type",
    [Type.Q4_0, Type.Q5_K, Type.Q6_K, Type.IQ4_XS, Type.MXFP4, Type.BF16, Type.Q8_0, Type.Q4_K],
)
def test_rows_of_every_type_can_be_left_out(tensor_type: Type, planted: PlantedRouting) -> None:
    shape = (2, HIDDEN, 256)
    stored = blocks(np.random.Generator(np.random.SFC64(0)), tensor_type, shape)
    planted.plant("blk.0.ffn_down_exps.weight", tensor_type, shape, stored)
    rows = gguf.dequantize(stored.reshape(2 * HIDDEN, -1), tensor_type).reshape(shape)
    assert not rows[:, :CHANNELS].any()
    assert rows[:, CHANNELS:].any(axis=2).all()


@pytest.mark.parametrize("name", ["token_embd.weight", "output.weight"])
def test_types_that_cannot_hold_the_values_are_refused(name: str, planted: PlantedRouting) -> None:
    shape = (VOCABULARY, HIDDEN)
    stored = blocks(np.random.Generator(np.random.SFC64(0)), Type.IQ4_XS, shape)
    with pytest.raises(ValueError, match="IQ4_XS"):
        planted.plant(name, Type.IQ4_XS, shape, stored)


def test_any_two_codes_differ_in_six_places() -> None:
    words = code_words(1 << 21)  # all of a linear code: differences are words
    counts = np.bitwise_count(words)
    assert np.count_nonzero(counts == 0) == 1
    assert counts[counts > 0].min() == 6
    assert int(words.max()) < 1 << 32
    of_model = codes(151_936)
    assert np.abs(of_model.mean(axis=0)).max() < 0.01


def test_a_walk_visits_every_token_once_and_ends_with_the_end_of_text() -> None:
    walk = Walk.of(VOCABULARY, 1)
    assert sorted(walk.token_ids) == list(range(VOCABULARY))
    assert walk.token_ids[-1] == VOCABULARY - 1
    assert walk.stretch(10, 5) == walk.token_ids[10:15].tolist()
    assert walk.stretch(0, VOCABULARY - 1)[-1] == walk.token_ids[-2]
    for begin, length in ((-1, 2), (0, VOCABULARY), (VOCABULARY, 1), (5, -1)):
        with pytest.raises(ValueError, match="the walk has"):
            walk.stretch(begin, length)


def test_a_seed_decides_all_and_layers_differ() -> None:
    def made(seed: int) -> PlantedRouting:
        return PlantedRouting("qwen3", seed, vocabulary=VOCABULARY, num_layers=LAYERS)

    one, same, other = made(1), made(1), made(2)
    np.testing.assert_array_equal(one.levels, same.levels)
    np.testing.assert_array_equal(one.router(1, 16, HIDDEN), same.router(1, 16, HIDDEN))
    assert not np.array_equal(one.levels, other.levels)
    assert one.walk.stretch(0, 9) != other.walk.stretch(0, 9)
    for router in (one.router(0, 16, HIDDEN), other.router(1, 16, HIDDEN)):
        correlation = np.corrcoef(router.ravel(), one.router(1, 16, HIDDEN).ravel())[0, 1]
        assert abs(correlation) < 0.2


@pytest.mark.parametrize("name", list(KINDS))
def test_activations_rounded_to_tf32_choose_nearly_alike(name: str) -> None:
    made = PlantedRouting(name, 1, vocabulary=4_000, num_layers=1)
    router = made.router(0, 128, CHANNELS)[:, :PLANTED].astype(np.float64)
    np.testing.assert_array_equal(rounded_to_tf32(router), router)
    exact = made.levels * UNITS / np.float32(0.37)  # as a norm scales them
    chosen = [
        np.sort(np.argsort(-(x.astype(np.float64) @ router.T), axis=1)[:, :8], axis=1)
        for x in (exact, rounded_to_tf32(exact))
    ]
    shared = [np.intersect1d(*pair).size for pair in zip(*chosen, strict=True)]
    assert np.mean(shared) / 8 > 0.9995


def rounded_to_tf32(values: AnyArray) -> F32Array:
    """With 10 bits of mantissa."""
    words = values.astype(np.float32).view(np.uint32)
    return ((words + 0x1000) & 0xFFFF_E000).view(np.float32)


@pytest.mark.usefixtures("small_shapes")
def test_a_file_tells_its_walk(tmp_path: Path) -> None:
    path = written(tmp_path / "planted.gguf", "q4_k_m", "flat", seed=7)
    assert Walk.of_file(path).stretch(0, 99) == Walk.of(VOCABULARY, 7).stretch(0, 99)
    with pytest.raises(ModelFileError):
        Walk.of_file(written(tmp_path / "plain.gguf", "q4_k_m", routing=None))
    with GgufFile.open(path) as file:
        assert file.get_str("bench.routing") == "flat"
