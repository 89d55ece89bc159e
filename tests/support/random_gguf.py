"""GGUF files of random weights for any architecture: small ones that compute something.

Every value follows from the seed and the tensor's name, so files of one seed that differ in
types, shards or tokenizer hold the same model. Independent of the architecture and of the packages
under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias
from zlib import crc32

import gguf
import numpy as np

from dflash_protocol.ids import F32Array, U8Array
from support.llama_oracle import quantise

TensorTypes: TypeAlias = str | Mapping[str, str] | Callable[[str], str]
"""One type name for all matrices; type names by tensor ("attn_q"); or a function of full names."""

Change: TypeAlias = Callable[[dict[str, F32Array]], dict[str, F32Array]]
"""A change of the tensors before they are written, such as fusing some."""

END_OF_TEXT = "<|endoftext|>"
_MOST_KEPT = 1 << 15
"""Values of a tensor that is kept for the next model."""


class RandomShape(Protocol):
    """Dimensions of a model of some architecture."""

    @property
    def name(self) -> str: ...

    @property
    def architecture(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    def keys(self) -> dict[str, Any]:
        """Metadata by key, without the architecture's name."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Row-major shapes by tensor name, in file order."""


SIZES_ON_GPU: dict[str, Any] = {
    "hidden_size": 64,
    "num_experts": 7,
    "num_experts_used": 2,
    "ffn_size": 32,
}
"""Rows as the GPU's kernels of quantised and float matrices take them."""

SIZES_OF_256: dict[str, Any] = {
    "hidden_size": 256,
    "num_experts": 4,
    "num_experts_used": 4,
    "ffn_size": 256,
}
"""Rows of whole blocks of 256 values. All experts are used: a router whose choice flips would drown
what is measured."""


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by `factor`."""

    factor: float

    def keys(self) -> dict[str, Any]:
        return {"rope.scaling.type": "linear", "rope.scaling.factor": self.factor}


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN from `original_context` positions to `factor` times as many."""

    factor: float
    original_context: int
    beta_fast: float | None = None

    def keys(self) -> dict[str, Any]:
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": self.factor,
            "rope.scaling.original_context_length": self.original_context,
            "rope.scaling.yarn_beta_fast": self.beta_fast,
        }


def scaling_keys(scaling: LinearRope | YarnRope | None) -> dict[str, Any]:
    """Keys of a context extension, if there is one."""
    return {} if scaling is None else scaling.keys()


def random_tensors(shape: RandomShape, *, seed: int) -> dict[str, F32Array]:
    """Weights by tensor name, before any quantisation.

    Scales keep every layer's share of the hidden state of the same order, spread the router's
    scores over the experts, and give logits of about 5.
    """
    shapes = shape.tensors()
    gains = {"ffn_gate_inp": 2.0, "ffn_down_exps": 2.0, "attn_output": 2.0, "output": 1.7}
    gains["ssm_out"] = gains["attn_output"]
    is_tied = "output.weight" not in shapes
    gains["token_embd"] = gains["output"] if is_tied else math.sqrt(shape.hidden_size)
    result = {}
    for name, dims in shapes.items():
        draw = _kept_values if math.prod(dims) <= _MOST_KEPT else _random_values
        result[name] = draw(seed, name, tuple(dims), gains.get(kind_of(name), 1.2)).copy()
    return result


def _random_values(seed: int, name: str, dims: tuple[int, ...], gain: float) -> F32Array:
    random = np.random.default_rng([seed, crc32(name.encode())])
    if name.endswith(("gate_exps.bias", "up_exps.bias")):  # some values are clamped
        return random.standard_normal(dims, dtype=np.float32) * np.float32(4)
    if name.endswith(".bias"):
        return random.standard_normal(dims, dtype=np.float32) * np.float32(0.3)
    if name.endswith(".ssm_a"):  # decay rates from very fast to very slow
        return -np.exp(random.uniform(-6.0, 1.0, dims)).astype(np.float32)
    if name == "rope_freqs.weight":
        return random.uniform(1.0, 8.0, dims).astype(np.float32)
    if len(dims) == 1 and not name.endswith("inp_shexp.weight"):  # a matrix of one row
        return random.uniform(0.6, 1.5, dims).astype(np.float32)
    deviation = gain / math.sqrt(dims[-1])
    return random.standard_normal(dims, dtype=np.float32) * np.float32(deviation)


_kept_values = lru_cache(maxsize=512)(_random_values)
"""Many tests write the same small model."""


def write_model(
    path: Path,
    shape: RandomShape,
    *,
    seed: int,
    tensor_type: TensorTypes = "F32",
    dequantised: bool = False,
    tokenizer: Literal["none", "bytes"] = "none",
    split_into: int = 1,
    change: Change | None = None,
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """Write a random model; gives the path to open, which for shards is the first one's.

    `tensor_type` names GGML types. A plain name is for all matrices except the router's and those
    of convolutions, a mapping's missing tensors are F32, a function decides for every matrix; norms
    are F32 always.
    `dequantised` stores as F32 the values that the types leave, for exact comparisons.
    `split_into` shards are named as llama.cpp wants them: ``<stem>-00001-of-0000N.gguf``.
    `keys` are full names of keys with other values than the shape's; those of None are left out.
    """
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_type("model")
    writer.add_name(f"random {shape.architecture}, {shape.name}")
    writer.add_quantization_version(2)
    of_shape = {f"{shape.architecture}.{key}": value for key, value in shape.keys().items()}
    for key, value in {**of_shape, **(keys or {})}.items():
        _add_key(writer, key, value)
    if tokenizer == "bytes":
        _add_byte_tokenizer(writer, shape.vocab_size)
    else:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(shape.vocab_size)
    tensors = random_tensors(shape, seed=seed)
    if change is not None:
        tensors = change(tensors)
    if not 1 <= split_into <= len(tensors):
        raise ValueError(f"{len(tensors)} tensors cannot fill {split_into} shards")
    first_of_shard = {len(tensors) * shard // split_into for shard in range(1, split_into)}
    for index, (name, values) in enumerate(tensors.items()):
        if index in first_of_shard:
            writer.tensors.append({})
        is_vector = values.ndim == 1 or name.endswith(".bias")
        type_name = "F32" if is_vector else _type_name(tensor_type, name)
        stored = values if type_name == "F32" else _quantise_stack(values, type_name)
        ggml_type = gguf.GGMLQuantizationType[type_name]
        if dequantised and type_name != "F32":
            stored, ggml_type = gguf.dequantize(stored, ggml_type), gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, stored, raw_dtype=ggml_type)
    files = writer.format_shard_names(path)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return files[0]


def with_fused_qkv(tensors: dict[str, F32Array]) -> dict[str, F32Array]:
    """The same model with a stacked matrix of queries, keys and values, and one bias."""
    result = {}
    for name, values in tensors.items():
        if ".attn_q." in name:
            parts = [tensors[name.replace("attn_q", f"attn_{letter}")] for letter in "qkv"]
            result[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
        elif ".attn_k." not in name and ".attn_v." not in name:
            result[name] = values
    return result


def with_scales(tensors: dict[str, F32Array]) -> dict[str, F32Array]:
    """Adds a scale for every matrix of attention and every expert, as NVFP4 files have, and input
    scales, which are not used."""
    result = dict(tensors)
    for name, values in tensors.items():
        kind = kind_of(name)
        if (kind.startswith("attn_") and values.ndim == 2) or "_exps" in kind:
            count = len(values) if "_exps" in kind else 1
            scales = np.linspace(0.8, 1.3, count, dtype=np.float32)
            result[name.replace(".weight", ".scale")] = scales
            result[name.replace(".weight", ".input_scale")] = scales
    return result


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def kind_of(name: str) -> str:
    """``attn_q`` of ``blk.3.attn_q.weight``."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _type_name(tensor_type: TensorTypes, name: str) -> str:
    if callable(tensor_type):
        return tensor_type(name)
    if isinstance(tensor_type, str):
        return "F32" if kind_of(name) in ("ffn_gate_inp", "ssm_conv1d") else tensor_type
    return tensor_type.get(kind_of(name), "F32")


def _quantise_stack(values: F32Array, type_name: str) -> U8Array:
    """Shapes: values [..., columns]; result [..., row_bytes] uint8."""
    rows = quantise(values.reshape(-1, values.shape[-1]), type_name)
    return rows.reshape(*values.shape[:-1], -1)


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE, by byte value.

    Source: Radford et al. 2019 (GPT-2): printable bytes stand for themselves, the rest follow 255.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [
        chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)
    ]


BYTE_MERGES = ("Ġ t", "h e", "Ġt he", "i n", "Ġ a", "e r", "Ġa n", "Ġan d")
"""Merges of the byte tokenizer; each gives one token after the 256 bytes."""

END_OF_TEXT_ID = 256 + len(BYTE_MERGES)
"""Id of `END_OF_TEXT` in the byte tokenizer."""


def _add_byte_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Ids in order: 256 bytes, the merges' tokens, the end of text, unused padding."""
    normal = byte_characters() + [merge.replace(" ", "") for merge in BYTE_MERGES]
    num_unused = vocab_size - len(normal) - 1
    if num_unused < 0:
        raise ValueError(f"the byte tokenizer needs a vocabulary of {len(normal) + 1} or more")
    padding = [f"[PAD{vocab_size - num_unused + index}]" for index in range(num_unused)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*normal, END_OF_TEXT, *padding])
    writer.add_token_types(
        [gguf.TokenType.NORMAL] * len(normal)
        + [gguf.TokenType.CONTROL]
        + [gguf.TokenType.UNUSED] * num_unused
    )
    writer.add_token_merges(BYTE_MERGES)
    writer.add_eos_token_id(END_OF_TEXT_ID)
    writer.add_add_bos_token(False)
