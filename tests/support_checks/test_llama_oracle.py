"""The oracle against itself in other chunks, and against float64 numpy."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from bench.llama_api import (
    ContextParams,
    LlamaError,
    OlderContextParams,
    check_defaults,
    default_params,
    written_params,
)
from bench.peer import keep_errors

from dflash_adapters.rope import RopePairing, YarnScaling, rope_table
from dflash_protocol.ids import AnyArray
from support.float64_qwen3moe import float64_logits, rope_frequencies
from support.llama_oracle import (
    LlamaOracle,
    OracleError,
    llama_library,
    position_errors,
    quantise,
    relative_error,
)
from support.random_models import (
    ODD_SHAPES,
    LinearRope,
    Qwen3MoeShape,
    YarnRope,
    random_tensors,
    write_qwen3moe,
)

NUM_TOKENS = 90
SEED = 10  # no router score is so near the next that float32 could swap two experts
SCALED_SHAPES = [shape for shape in ODD_SHAPES if shape.rope_scaling is not None]


def name_of(shape: Qwen3MoeShape) -> str:
    return shape.name


def random_ids(shape: Qwen3MoeShape) -> AnyArray:
    return np.random.default_rng(SEED).integers(0, shape.vocab_size, NUM_TOKENS)


def written(folder: Path, shape: Qwen3MoeShape) -> Path:
    return write_qwen3moe(folder / "model.gguf", shape, seed=SEED)


@pytest.fixture
def oracle(tmp_path: Path) -> Iterator[LlamaOracle]:
    with LlamaOracle(written(tmp_path, ODD_SHAPES[0]), context_length=256) as opened:
        yield opened


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=name_of)
def test_logits_do_not_depend_on_the_chunks(tmp_path: Path, shape: Qwen3MoeShape) -> None:
    token_ids = random_ids(shape)
    with LlamaOracle(written(tmp_path, shape), context_length=256) as oracle:
        at_once = oracle.logits(token_ids)
        assert at_once.shape == (NUM_TOKENS, shape.vocab_size) == (NUM_TOKENS, oracle.vocab_size)
        assert relative_error(oracle.logits(token_ids, [70] + [1] * 20), at_once) < 1e-5
        assert relative_error(oracle.logits(token_ids, [33, 33, 24]), at_once) < 1e-5


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=name_of)
def test_logits_agree_with_float64(tmp_path: Path, shape: Qwen3MoeShape) -> None:
    token_ids, tensors = random_ids(shape), random_tensors(shape, seed=SEED)
    with LlamaOracle(written(tmp_path, shape), context_length=256) as oracle:
        error = relative_error(oracle.logits(token_ids), float64_logits(shape, tensors, token_ids))
        assert error < 2e-5
        # llama.cpp multiplies up a position's angles in float32: the error grows with positions.
        far = oracle.logits(token_ids, start_position=1000)
        assert relative_error(far, float64_logits(shape, tensors, token_ids, 1000)) < 1e-4


@pytest.mark.parametrize("shape", SCALED_SHAPES, ids=name_of)
def test_a_wrong_context_scaling_would_be_seen(tmp_path: Path, shape: Qwen3MoeShape) -> None:
    token_ids, tensors = random_ids(shape), random_tensors(shape, seed=SEED)
    unscaled = dataclasses.replace(shape, rope_scaling=None)
    with LlamaOracle(written(tmp_path, shape), context_length=256) as oracle:
        logits = oracle.logits(token_ids)
    assert relative_error(logits, float64_logits(unscaled, tensors, token_ids)) > 0.01


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=name_of)
def test_rope_table_has_the_frequencies_that_agree_with_the_oracle(shape: Qwen3MoeShape) -> None:
    scaling = shape.rope_scaling
    context_scaling: float | YarnScaling = 1.0
    if isinstance(scaling, YarnRope):
        context_scaling = YarnScaling(scaling.factor, scaling.original_context)
    elif isinstance(scaling, LinearRope):
        context_scaling = scaling.factor
    table = rope_table(
        RopePairing.HALF_SPLIT,
        shape.head_dim,
        shape.rope_freq_base,
        scaling=context_scaling,
    )
    frequencies, scale = rope_frequencies(shape)
    np.testing.assert_allclose(table.inv_freq, frequencies, rtol=1e-14)
    assert table.scale == pytest.approx(scale, rel=1e-14)


def test_half_precision_cache_moves_the_logits_a_little(tmp_path: Path) -> None:
    shape = next(shape for shape in ODD_SHAPES if shape.name == "one layer")
    token_ids, path = random_ids(shape), written(tmp_path, shape)
    with LlamaOracle(path, context_length=256) as exact:
        reference = exact.logits(token_ids)
    with LlamaOracle(path, context_length=256, kv_type="f16") as rounded:
        assert 1e-5 < relative_error(rounded.logits(token_ids), reference) < 1e-2


def test_threads_and_a_smaller_batch_leave_the_logits(tmp_path: Path) -> None:
    token_ids, path = random_ids(ODD_SHAPES[0]), written(tmp_path, ODD_SHAPES[0])
    with LlamaOracle(path, context_length=256) as oracle:
        reference = oracle.logits(token_ids)
    with LlamaOracle(path, context_length=256, threads=2, max_batch=32) as oracle:
        assert relative_error(oracle.logits(token_ids), reference) < 1e-5


def test_layer_tensors_show_routing_and_logits(oracle: LlamaOracle) -> None:
    shape, token_ids = ODD_SHAPES[0], random_ids(ODD_SHAPES[0])
    names = ["Qcur-1", "ffn_moe_logits-2", "ffn_moe_topk-2", "l_out-3", "result_output"]
    tensors = oracle.layer_tensors(token_ids, names)
    assert tensors["Qcur-1"].shape == (NUM_TOKENS, shape.num_heads, shape.head_dim)
    assert tensors["l_out-3"].shape == (NUM_TOKENS, shape.hidden_size)
    best = np.argsort(-tensors["ffn_moe_logits-2"], axis=1)[:, : shape.num_experts_used]
    np.testing.assert_array_equal(tensors["ffn_moe_topk-2"], best)
    np.testing.assert_array_equal(tensors["result_output"], oracle.logits(token_ids))

    of_one_token = oracle.layer_tensors(token_ids[:1], ["Qcur-1", "l_out-3"])
    assert of_one_token["Qcur-1"].shape == (1, shape.num_heads, shape.head_dim)
    assert of_one_token["l_out-3"].shape == (1, shape.hidden_size)


def test_layer_tensors_refuses_a_name_that_the_graph_has_not(oracle: LlamaOracle) -> None:
    with pytest.raises(OracleError, match="l_out-9"):
        oracle.layer_tensors([1, 2], ["l_out-0", "l_out-9"])


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (lambda oracle: oracle.logits([0, 101]), "token ids"),
        (lambda oracle: oracle.logits([0, -1]), "token ids"),
        (lambda oracle: oracle.logits([0] * 257), "exceed the context of 256"),
        (lambda oracle: oracle.logits([0] * 3, [2]), "chunks"),
        (lambda oracle: oracle.logits([0] * 3, [3, 0]), "chunks"),
    ],
)
def test_oracle_refuses_what_would_abort_the_process(
    oracle: LlamaOracle, refused: Callable[[LlamaOracle], object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        refused(oracle)
    assert np.isfinite(oracle.logits([0, 1])).all()


def test_oracle_says_why_a_file_does_not_load(tmp_path: Path) -> None:
    path = tmp_path / "not.gguf"
    path.write_bytes(b"GGUF, but not really")
    keep_errors(llama_library())  # as a bench of the same process does
    with pytest.raises(OracleError, match=r"not\.gguf: .+"):
        LlamaOracle(path, context_length=64)


def test_closed_oracle_refuses_and_closes_again(tmp_path: Path) -> None:
    oracle = LlamaOracle(written(tmp_path, ODD_SHAPES[0]), context_length=64)
    oracle.close()
    oracle.close()
    with pytest.raises(OracleError, match="closed"):
        oracle.logits([1])


def test_oracle_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with LlamaOracle(written(tmp_path, ODD_SHAPES[0]), context_length=64) as oracle:
        oracle.logits([1, 2])
    assert capfd.readouterr() == ("", "")


class Shorter(ctypes.Structure):
    """a structure"""

    _fields_ = (("n_ctx", ctypes.c_uint32), ("n_batch", ctypes.c_uint32))


def test_unknown_structure_layout_is_refused() -> None:
    with pytest.raises(LlamaError, match=r"have 168 bytes.*known here is a structure \(8 bytes\):"):
        default_params(llama_library(), "llama_context_default_params", Shorter)


@pytest.mark.parametrize(("layout", "num_bytes"), [(ContextParams, 168), (OlderContextParams, 160)])
def test_a_build_tells_by_its_bytes_which_of_the_known_layouts_it_has(
    layout: type[ctypes.Structure], num_bytes: int
) -> None:
    """A library of which only the defaults are asked, and which fills all but the padding."""
    assert ctypes.sizeof(layout) == num_bytes
    values = layout(n_ctx=512, n_samplers=7)
    fields = [getattr(layout, name) for name, *_ in layout._fields_]

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)  # type: ignore[untyped-decorator]
    def write_defaults(address: int) -> int:
        for field in fields:
            ctypes.memmove(
                address + field.offset, ctypes.addressof(values) + field.offset, field.size
            )
        return address

    found = written_params(write_defaults, OlderContextParams, ContextParams)
    assert type(found) is layout
    assert (found.n_ctx, found.n_samplers) == (512, 7)
    with pytest.raises(LlamaError, match=r"defaults \{'n_ctx': 512, 'n_batch': 0\}"):
        check_defaults(found, n_ctx=512, n_batch=2048)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "MXFP4"])
def test_quantise_gives_the_bytes_of_the_gguf_package(type_name: str) -> None:
    values = np.random.default_rng(SEED).standard_normal((5, 96), dtype=np.float32)
    expected = gguf.quantize(values, gguf.GGMLQuantizationType[type_name])
    np.testing.assert_array_equal(quantise(values, type_name), expected)


@pytest.mark.parametrize(
    ("type_name", "bound"),
    [("Q6_K", 0.03), ("Q5_K", 0.05), ("Q4_K", 0.1), ("IQ4_XS", 0.1), ("IQ2_XXS", 0.5)],
)
def test_quantised_rows_are_near_their_values(type_name: str, bound: float) -> None:
    values = np.random.default_rng(SEED).standard_normal((3, 512), dtype=np.float32)
    rows = quantise(values, type_name)
    restored = gguf.dequantize(rows, gguf.GGMLQuantizationType[type_name])
    assert 0 < relative_error(restored, values) < bound


@pytest.mark.parametrize(
    ("type_name", "reason"), [("Q8_1", "not one of"), ("Q4_K", "whole Q4_K blocks")]
)
def test_quantise_refuses_what_would_abort_the_process(type_name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        quantise(np.ones((1, 96), dtype=np.float32), type_name)


def test_errors_are_on_the_scale_of_the_whole_reference() -> None:
    reference = np.array([[4.0, 1.0], [0.0, -2.0]])
    values = np.array([[4.0, 1.5], [0.0, -3.0]])
    np.testing.assert_array_equal(position_errors(values, reference), [0.125, 0.25])
    assert relative_error(values, reference) == 0.25
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(values[0], reference)
