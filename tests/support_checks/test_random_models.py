"""The random models: what their files hold, and that llama.cpp accepts every variant."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash_protocol.ids import AnyArray, F32Array
from support.float64_qwen3moe import float64_logits
from support.llama_oracle import LlamaOracle, llama_library, position_errors, relative_error
from support.random_models import (
    BLOCK_32_SHAPE,
    BLOCK_256_SHAPE,
    END_OF_TEXT,
    END_OF_TEXT_ID,
    ODD_SHAPES,
    Qwen3MoeShape,
    TensorTypes,
    byte_characters,
    random_tensors,
    write_qwen3moe,
    write_sparse_30b,
)

SEED = 5


def some_ids(shape: Qwen3MoeShape) -> AnyArray:
    return np.random.default_rng(SEED).integers(0, shape.vocab_size, 60)


def oracle_logits(path: Path, shape: Qwen3MoeShape) -> F32Array:
    with LlamaOracle(path, context_length=128) as oracle:
        return oracle.logits(some_ids(shape))


def stored_tensors(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("shape", [*ODD_SHAPES, BLOCK_32_SHAPE], ids=lambda shape: shape.name)
def test_model_uses_its_experts_and_gives_logits_of_about_five(
    tmp_path: Path, shape: Qwen3MoeShape
) -> None:
    path = write_qwen3moe(tmp_path / "model.gguf", shape, seed=SEED)
    names = [f"ffn_moe_topk-{layer_id}" for layer_id in range(shape.num_layers)]
    with LlamaOracle(path, context_length=128) as oracle:
        tensors = oracle.layer_tensors(some_ids(shape), [*names, "result_output"])
    assert 3 < np.abs(tensors["result_output"]).max() < 12
    for name in names:
        uses = np.bincount(tensors[name].ravel(), minlength=shape.num_experts)
        assert np.count_nonzero(uses) > 0.7 * shape.num_experts
        assert uses.max() <= 60


def test_norm_weights_are_around_one_but_not_one() -> None:
    norms = [v for v in random_tensors(ODD_SHAPES[0], seed=SEED).values() if v.ndim == 1]
    assert all(0.5 < weight.min() < 0.95 and 1.05 < weight.max() < 1.6 for weight in norms)


def test_values_follow_from_seed_and_name() -> None:
    first, again = (random_tensors(ODD_SHAPES[0], seed=SEED) for _ in range(2))
    other = random_tensors(ODD_SHAPES[0], seed=SEED + 1)
    for name, values in first.items():
        np.testing.assert_array_equal(values, again[name])
        assert not np.array_equal(values, other[name])


@pytest.mark.parametrize("num_shards", [2, 7])
def test_shards_hold_the_model_of_one_file(tmp_path: Path, num_shards: int) -> None:
    shape = ODD_SHAPES[0]
    one = write_qwen3moe(tmp_path / "one.gguf", shape, seed=SEED)
    first = write_qwen3moe(tmp_path / "many.gguf", shape, seed=SEED, split_into=num_shards)
    shards = sorted(tmp_path.glob("many*.gguf"))
    assert [shard.name for shard in shards] == [
        f"many-{number:05d}-of-{num_shards:05d}.gguf" for number in range(1, num_shards + 1)
    ]
    assert first == shards[0]
    tensor_names = [name for shard in shards for name in stored_tensors(shard)]
    assert tensor_names == list(stored_tensors(one))
    np.testing.assert_array_equal(oracle_logits(first, shape), oracle_logits(one, shape))


def by_layer(name: str) -> str:
    if name == "output.weight":
        return "Q6_K"
    if "ffn_down_exps" in name:
        return "Q6_K" if name.startswith("blk.0.") else "Q4_K"
    return "Q8_0" if "_exps" in name else "F32"


@pytest.mark.parametrize(
    ("shape", "tensor_type", "expected"),
    [
        (BLOCK_32_SHAPE, "Q8_0", {"attn_q": "Q8_0", "attn_norm": "F32", "ffn_gate_inp": "F32"}),
        (BLOCK_32_SHAPE, "BF16", {"ffn_up_exps": "BF16"}),
        (BLOCK_32_SHAPE, {"ffn_up_exps": "MXFP4"}, {"ffn_up_exps": "MXFP4", "attn_q": "F32"}),
        (BLOCK_256_SHAPE, by_layer, {"ffn_down_exps": "Q6_K", "ffn_up_exps": "Q8_0"}),
    ],
    ids=["Q8_0", "BF16", "one tensor", "by layer"],
)
def test_quantised_file_is_near_the_exact_model_of_its_values(
    tmp_path: Path, shape: Qwen3MoeShape, tensor_type: TensorTypes, expected: dict[str, str]
) -> None:
    path = write_qwen3moe(tmp_path / "model.gguf", shape, seed=SEED, tensor_type=tensor_type)
    stored = stored_tensors(path)
    found = {kind: stored[f"blk.0.{kind}.weight"].tensor_type.name for kind in expected}
    assert found == expected

    twin = write_qwen3moe(
        tmp_path / "twin.gguf", shape, seed=SEED, tensor_type=tensor_type, dequantised=True
    )
    twins = stored_tensors(twin)
    assert {tensor.tensor_type.name for tensor in twins.values()} == {"F32"}
    values = {name: np.array(tensor.data, dtype=np.float32) for name, tensor in twins.items()}
    exact = float64_logits(shape, values, some_ids(shape))
    assert relative_error(oracle_logits(twin, shape), exact) < 2e-5
    # llama.cpp rounds activations too, which can flip an expert at some positions.
    assert np.median(position_errors(oracle_logits(path, shape), exact)) < 0.1


def test_byte_tokenizer_gives_bytes_merges_and_the_end_of_text(tmp_path: Path) -> None:
    shape = Qwen3MoeShape(vocab_size=300, num_layers=1)
    path = write_qwen3moe(tmp_path / "model.gguf", shape, seed=SEED, tokenizer="bytes")
    with LlamaOracle(path, context_length=64) as oracle:
        assert oracle.vocab_size == 300
        assert oracle.tokenize("ä\n") == [*"ä\n".encode()]
        assert oracle.tokenize(" the" + END_OF_TEXT) == [258, END_OF_TEXT_ID]
        assert np.isfinite(oracle.logits([0, 258, END_OF_TEXT_ID, 299])).all()


def test_byte_characters_are_one_to_a_byte() -> None:
    characters = byte_characters()
    assert len(set(characters)) == 256
    assert characters[ord("a")] == "a"
    assert characters[ord(" ")] == "Ġ"


def test_byte_tokenizer_refuses_a_vocabulary_without_room(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="265 or more"):
        write_qwen3moe(tmp_path / "model.gguf", ODD_SHAPES[0], seed=SEED, tokenizer="bytes")


def test_more_shards_than_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot fill 99 shards"):
        write_qwen3moe(tmp_path / "model.gguf", ODD_SHAPES[0], seed=SEED, split_into=99)


class GgufInitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


def test_sparse_30b_is_large_outside_and_small_on_disk(tmp_path: Path) -> None:
    path = write_sparse_30b(tmp_path / "sparse.gguf")
    status = path.stat()
    assert 18.55e9 < status.st_size < 18.56e9  # the published file has 18.557e9 bytes
    assert status.st_blocks * 512 < 16e6

    library = llama_library()
    library.gguf_init_from_file.restype = ctypes.c_void_p
    library.gguf_init_from_file.argtypes = [ctypes.c_char_p, GgufInitParams]
    library.gguf_get_n_tensors.restype = ctypes.c_int64
    library.gguf_get_n_tensors.argtypes = [ctypes.c_void_p]
    library.gguf_free.restype = None
    library.gguf_free.argtypes = [ctypes.c_void_p]
    file = library.gguf_init_from_file(str(path).encode(), GgufInitParams(True, None))
    assert file, "llama.cpp checks every tensor's type, dimensions and offset here"
    try:
        assert library.gguf_get_n_tensors(file) == 579
    finally:
        library.gguf_free(file)

    with LlamaOracle(path, context_length=64, vocab_only=True) as oracle:
        assert oracle.vocab_size == 151_936
        token_ids = oracle.tokenize("<|im_start|>user\nthe<think>")
        assert token_ids[0] == 151_644
        assert token_ids[-1] == 151_667


def test_tied_shape_has_no_output_tensor() -> None:
    tied = next(shape for shape in ODD_SHAPES if shape.tied_output)
    assert "output.weight" not in tied.tensors()
    assert "output.weight" in ODD_SHAPES[0].tensors()
