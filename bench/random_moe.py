"""Random GGUF files in the shapes of real models, for measurements of speed.

Weights are random blocks whose scales keep activations in their usual range; only the number of
layers differs from the real model (and, in the one-type files, the vocabulary). Text that such a
model writes means nothing.

Files (build/bench-models/<name>.gguf):
  q4_k_m   experts and attention as llama.cpp's Q4_K_M mixes Q4_K and Q6_K, 12 layers
  q8_0     everything Q8_0, 8 layers
  q4_0, q5_k, q6_k, iq4_xs, mxfp4, bf16
           experts of that type alone, the rest Q8_0 with a small vocabulary, 2 layers
These are Qwen3-30B-A3B; of other models:
  qwen35moe  Qwen3.6-35B-A3B, Q4_K_M, 8 layers
  olmoe      OLMoE-1B-7B, Q4_K_M, all of its 16 layers

Random weights choose experts uniformly. With --routing the file itself holds other routing, which
any engine follows (see bench.planted_routing), and <name>-<routing>.gguf is its name:
  qwen3    as Qwen3-30B-A3B routes text: popular experts, of which some stay for a while
  fickle   popular experts alone, each token's drawn anew
  flat     all experts alike

Examples:
  python -m bench.random_moe q4_k_m
  python -m bench.random_moe q4_k_m --layers 48 --out /tmp/whole-model.gguf
  python -m bench.random_moe q4_k_m --layers 48 --routing qwen3 --out /tmp/whole-qwen3.gguf
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from bench.machine import BUILD
from bench.model_shapes import SHAPES, Mix, add_metadata, tensors
from bench.options import bench_parser
from bench.planted_routing import KIND_KEY, KINDS, SEED_KEY, PlantedRouting
from gguf import GGMLQuantizationType as Type

from dflash_protocol.ids import AnyArray, U8Array

MODELS = BUILD / "bench-models"

HIDDEN, NUM_EXPERTS, NUM_USED = 2048, 128, 8
"""Sizes of Qwen3-30B-A3B."""
_SMALL_VOCABULARY = 1024

_WEIGHT_RMS = 0.022
"""1 / sqrt(2048): a product with a normalised row has about its size."""
_PIECE_BYTES = 1 << 26


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
    "qwen35moe": Mix(
        Type.Q4_K, Type.Q4_K, Type.Q6_K, num_layers=8, more=Type.Q6_K, shape="qwen35moe"
    ),
    "olmoe": Mix(Type.Q4_K, Type.Q4_K, Type.Q6_K, num_layers=16, more=Type.Q6_K, shape="olmoe"),
}


def model_path(name: str) -> Path:
    """The file of a mix, written now if it does not exist.

    Raises: KeyError for a name that is not in `MIXES`.
    """
    mix, path = MIXES[name], MODELS / f"{name}.gguf"
    if not path.exists():
        write(path, mix)
    return path


def write(
    path: Path,
    mix: Mix,
    *,
    num_layers: int | None = None,
    seed: int = 0,
    routing: str | None = None,
) -> None:
    """Write one file; it gets its name when it is complete.

    `routing`: one of `planted_routing.KINDS`, or None for random routers.
    """
    num_layers = num_layers or mix.num_layers
    vocabulary = mix.vocabulary or SHAPES[mix.shape].vocabulary
    planted = routing and PlantedRouting(
        routing, seed, vocabulary=vocabulary, num_layers=num_layers
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    written = list(tensors(mix, num_layers))
    random = np.random.Generator(np.random.SFC64(seed))
    writer = gguf.GGUFWriter(unfinished, mix.shape)
    try:
        add_metadata(writer, mix, num_layers)
        _add_tokenizer(writer, vocabulary)
        if routing:
            writer.add_string(KIND_KEY, routing)
            writer.add_uint32(SEED_KEY, seed)
        for name, tensor_type, shape in written:
            byte_shape = gguf.quant_shape_to_byte_shape(shape, tensor_type)
            num_bytes = int(np.prod(byte_shape, dtype=np.int64))
            is_float = tensor_type is Type.F32
            dtype = np.dtype(np.float32 if is_float else np.uint8)
            stored = shape if is_float else byte_shape
            writer.add_tensor_info(name, stored, dtype, num_bytes, raw_dtype=tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for number, (name, tensor_type, shape) in enumerate(written):
            values = _values(random, name, tensor_type, shape)
            if planted:
                planted.plant(name, tensor_type, shape, values)
            writer.write_tensor_data(values)
            print(f"\rwriting {path.name}: tensor {number + 1} of {len(written)}", end="")
        print(flush=True)
        writer.close()
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _add_tokenizer(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    # Byte-level BPE (Source: Radford et al. 2019), then tokens that no text encodes to.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]
    tokens = [*letters, "he", *(f"[PAD{number}]" for number in range(257, vocabulary))]
    types = [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.UNUSED] * (vocabulary - 257)
    types[-1] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(vocabulary - 1)
    writer.add_add_bos_token(False)


def _values(
    random: np.random.Generator, name: str, tensor_type: Type, shape: tuple[int, ...]
) -> AnyArray:
    """A tensor as stored. Shapes: result `shape` float32, or [bytes] uint8."""
    if name.endswith("norm.weight"):
        return (1 + 0.1 * random.standard_normal(shape, np.float32)).astype(np.float32)
    if name.endswith("ssm_a"):  # decays, from slow to fast
        return -np.exp(random.uniform(-4, 1, shape)).astype(np.float32)
    if name.endswith("ssm_dt.bias"):
        return random.uniform(-3, 0, shape).astype(np.float32)
    if name.endswith("ssm_conv1d.weight"):
        return (0.5 * random.standard_normal(shape, np.float32)).astype(np.float32)
    if tensor_type is Type.F32:
        return (_WEIGHT_RMS * random.standard_normal(shape, np.float32)).astype(np.float32)
    return blocks(random, tensor_type, shape)


def blocks(random: np.random.Generator, tensor_type: Type, shape: tuple[int, ...]) -> U8Array:
    """Weights in blocks of a type. Shapes: result [bytes] uint8."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
    num_blocks = int(np.prod(shape, dtype=np.int64)) // elements
    result = np.empty((num_blocks, num_bytes), np.uint8)
    piece = max(1, _PIECE_BYTES // num_bytes)
    for first in range(0, num_blocks, piece):
        part = result[first : first + piece]
        part[:] = np.frombuffer(random.bytes(part.size), np.uint8).reshape(part.shape)
        _SHAPERS[tensor_type](random, part)
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
    """Q4_K, Q5_K: every sub-block's minimum centres its values on 0.

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
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("name", choices=list(MIXES))
    parser.add_argument("--layers", type=int, help="number of layers (default: see above)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--routing", choices=list(KINDS), help="default: random routers")
    parser.add_argument("--out", type=Path, help="default: build/bench-models/<name>.gguf")
    options = parser.parse_args()
    name = f"{options.name}-{options.routing}" if options.routing else options.name
    path = options.out or MODELS / f"{name}.gguf"
    write(
        path,
        MIXES[options.name],
        num_layers=options.layers,
        seed=options.seed,
        routing=options.routing,
    )
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
