"""Random GGUF files in the shape of Qwen3-30B-A3B, for measurements of speed.

Weights are random blocks whose scales keep activations in their usual range; only the number of
layers differs from the real model (and, in the one-type files, the vocabulary). Text that such a
model writes means nothing.

Files (build/bench-models/<name>.gguf):
  q4_k_m   experts and attention as llama.cpp's Q4_K_M mixes Q4_K and Q6_K, 12 layers
  q8_0     everything Q8_0, 8 layers
  q4_0, q5_k, q6_k, iq4_xs, mxfp4, bf16
           experts of that type alone, the rest Q8_0 with a small vocabulary, 2 layers

Examples:
  python -m bench.random_moe q4_k_m
  python -m bench.random_moe q4_k_m --layers 48 --out /tmp/whole-model.gguf
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from bench.machine import BUILD
from gguf import GGMLQuantizationType as Type

from dflash_protocol.ids import AnyArray, U8Array

MODELS = BUILD / "bench-models"

HIDDEN, FFN = 2048, 768
NUM_EXPERTS, NUM_USED = 128, 8
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 4, 128
VOCABULARY = 151_936
_SMALL_VOCABULARY = 1024

_WEIGHT_RMS = 0.022
"""1 / sqrt(HIDDEN): a product with a normalised row has about its size."""
_PIECE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Mix:
    """Types of one file. `more` is the type that Q4_K_M gives some layers' sensitive tensors."""

    experts: Type
    attention: Type
    head: Type
    num_layers: int
    vocabulary: int = VOCABULARY
    more: Type | None = None


def _one_type(experts: Type) -> Mix:
    return Mix(experts, Type.Q8_0, Type.Q8_0, num_layers=2, vocabulary=_SMALL_VOCABULARY)


MIXES: dict[str, Mix] = {
    "q4_k_m": Mix(Type.Q4_K, Type.Q4_K, Type.Q6_K, num_layers=12, more=Type.Q6_K),
    "q8_0": Mix(Type.Q8_0, Type.Q8_0, Type.Q8_0, num_layers=8),
    "q4_0": _one_type(Type.Q4_0),
    "q5_k": _one_type(Type.Q5_K),
    "q6_k": _one_type(Type.Q6_K),
    "iq4_xs": _one_type(Type.IQ4_XS),
    "mxfp4": _one_type(Type.MXFP4),
    "bf16": _one_type(Type.BF16),
}


def model_path(name: str) -> Path:
    """The file of a mix, written now if it is not there.

    Raises: KeyError for a name that is not in `MIXES`.
    """
    mix, path = MIXES[name], MODELS / f"{name}.gguf"
    if not path.exists():
        write(path, mix)
    return path


def write(path: Path, mix: Mix, *, num_layers: int | None = None, seed: int = 0) -> None:
    """Write one file; it has its name only once it is whole."""
    num_layers = num_layers or mix.num_layers
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    tensors = list(_tensors(mix, num_layers))
    random = np.random.Generator(np.random.SFC64(seed))
    writer = gguf.GGUFWriter(unfinished, "qwen3moe")
    try:
        _add_metadata(writer, mix, num_layers)
        for name, tensor_type, shape in tensors:
            byte_shape = gguf.quant_shape_to_byte_shape(shape, tensor_type)
            num_bytes = int(np.prod(byte_shape, dtype=np.int64))
            is_float = tensor_type is Type.F32
            dtype = np.dtype(np.float32 if is_float else np.uint8)
            stored = shape if is_float else byte_shape
            writer.add_tensor_info(name, stored, dtype, num_bytes, raw_dtype=tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for number, (name, tensor_type, shape) in enumerate(tensors):
            writer.write_tensor_data(_values(random, name, tensor_type, shape))
            print(f"\rwriting {path.name}: tensor {number + 1} of {len(tensors)}", end="")
        print(flush=True)
        writer.close()
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _tensors(mix: Mix, num_layers: int) -> Iterator[tuple[str, Type, tuple[int, ...]]]:
    """Name, type and row-major shape of every tensor, in file order."""
    heads, kv_heads = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    yield "token_embd.weight", mix.attention, (mix.vocabulary, HIDDEN)
    yield "output_norm.weight", Type.F32, (HIDDEN,)
    yield "output.weight", mix.head, (mix.vocabulary, HIDDEN)
    for layer in range(num_layers):
        # Source: llama.cpp's rule of which layers get more bits (first, last, every third).
        eighth = num_layers // 8
        gets_more = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
        more = mix.more if mix.more is not None and gets_more else None
        place = f"blk.{layer}."
        yield place + "attn_norm.weight", Type.F32, (HIDDEN,)
        yield place + "attn_q_norm.weight", Type.F32, (HEAD_DIM,)
        yield place + "attn_k_norm.weight", Type.F32, (HEAD_DIM,)
        yield place + "attn_q.weight", mix.attention, (heads, HIDDEN)
        yield place + "attn_k.weight", mix.attention, (kv_heads, HIDDEN)
        yield place + "attn_v.weight", more or mix.attention, (kv_heads, HIDDEN)
        yield place + "attn_output.weight", mix.attention, (HIDDEN, heads)
        yield place + "ffn_norm.weight", Type.F32, (HIDDEN,)
        yield place + "ffn_gate_inp.weight", Type.F32, (NUM_EXPERTS, HIDDEN)
        yield place + "ffn_gate_exps.weight", mix.experts, (NUM_EXPERTS, FFN, HIDDEN)
        yield place + "ffn_up_exps.weight", mix.experts, (NUM_EXPERTS, FFN, HIDDEN)
        yield place + "ffn_down_exps.weight", more or mix.experts, (NUM_EXPERTS, HIDDEN, FFN)


def _add_metadata(writer: gguf.GGUFWriter, mix: Mix, num_layers: int) -> None:
    writer.add_type("model")
    writer.add_name("random weights, shape of Qwen3-30B-A3B")
    writer.add_quantization_version(2)
    writer.add_block_count(num_layers)
    writer.add_context_length(40960)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(6144)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(NUM_USED)
    writer.add_expert_feed_forward_length(FFN)
    # Byte-level BPE (Source: Radford et al. 2019), then tokens that no text gives.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]
    tokens = [*letters, "he", *(f"[PAD{number}]" for number in range(257, mix.vocabulary))]
    types = [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.UNUSED] * (mix.vocabulary - 257)
    types[-1] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(mix.vocabulary - 1)
    writer.add_add_bos_token(False)


def _values(
    random: np.random.Generator, name: str, tensor_type: Type, shape: tuple[int, ...]
) -> AnyArray:
    """A tensor as it is stored. Shapes: result `shape` float32, or [bytes] uint8."""
    if name.endswith("norm.weight"):
        return (1 + 0.1 * random.standard_normal(shape, np.float32)).astype(np.float32)
    if tensor_type is Type.F32:
        return (_WEIGHT_RMS * random.standard_normal(shape, np.float32)).astype(np.float32)
    elements, num_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
    num_blocks = int(np.prod(shape, dtype=np.int64)) // elements
    result = np.empty((num_blocks, num_bytes), np.uint8)
    piece = max(1, _PIECE_BYTES // num_bytes)
    for first in range(0, num_blocks, piece):
        blocks = result[first : first + piece]
        blocks[:] = np.frombuffer(random.bytes(blocks.size), np.uint8).reshape(blocks.shape)
        _SHAPERS[tensor_type](random, blocks)
    return result.reshape(-1)


def _set_halves(blocks: U8Array, offset: int, values: AnyArray) -> None:
    blocks[:, offset : offset + 2] = values.astype(np.float16).view(np.uint8).reshape(-1, 2)


def _spread(random: np.random.Generator, count: int) -> AnyArray:
    """Factors around 1, so that no two blocks have the same scale."""
    return random.uniform(0.6, 1.4, count).astype(np.float32)


def _with_scale(offset: int, code_rms: float) -> Callable[[np.random.Generator, U8Array], None]:
    """Random codes of this RMS under a half scale at `offset`."""

    def shape(random: np.random.Generator, blocks: U8Array) -> None:
        scales = _WEIGHT_RMS / code_rms * _spread(random, len(blocks))
        _set_halves(blocks, offset, scales)

    return shape


def _with_minimum(code_rms: float, middle: float) -> Callable[[np.random.Generator, U8Array], None]:
    """Q4_K, Q5_K: every sub-block's minimum lies so that its values are centred on 0.

    The 12 bytes after the halves hold 6-bit scales and minima; they are made equal in pairs.
    Source: ggml's `get_scale_min_k4`.
    """

    def shape(random: np.random.Generator, blocks: U8Array) -> None:
        scales = _WEIGHT_RMS / code_rms * _spread(random, len(blocks))
        _set_halves(blocks, 0, scales)
        _set_halves(blocks, 2, middle * scales)
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17

    return shape


def _shape_mxfp4(random: np.random.Generator, blocks: U8Array) -> None:
    blocks[:, 0] = random.integers(119, 122, len(blocks))  # 2^-8 … 2^-6 over values of RMS 2.9


def _shape_bf16(random: np.random.Generator, blocks: U8Array) -> None:
    """Random sign and mantissa, exponents of 2^-8 … 2^-5."""
    words = blocks.view(np.uint16)
    exponents = 119 + ((words >> 7) & 3)
    words[:] = (words & 0x807F) | (exponents << 7)


_SHAPERS: dict[Type, Callable[[np.random.Generator, U8Array], None]] = {
    Type.Q4_0: _with_scale(0, 4.6),
    Type.Q8_0: _with_scale(0, 74.0),
    Type.Q4_K: _with_minimum(168.0, 7.5),
    Type.Q5_K: _with_minimum(337.0, 15.5),
    Type.Q6_K: _with_scale(208, 1366.0),
    Type.IQ4_XS: _with_scale(0, 1260.0),
    Type.MXFP4: _shape_mxfp4,
    Type.BF16: _shape_bf16,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.random_moe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=list(MIXES))
    parser.add_argument("--layers", type=int, help="number of layers (default: see above)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: build/bench-models/<name>.gguf")
    options = parser.parse_args()
    path = options.out or MODELS / f"{options.name}.gguf"
    write(path, MIXES[options.name], num_layers=options.layers, seed=options.seed)
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
