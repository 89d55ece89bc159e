"""Writes trained weights as a GGUF file of architecture qwen3moe."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType, TokenType
from tokenizers import Tokenizer

from demo.vocab import end_of_text_id, tokens_and_merges
from demo.weights import Arrays, load_config, load_weights

F32, Q5_0, Q8_0 = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q8_0,
)

_BLOCK_TENSORS = {
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.output": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "experts.router": "ffn_gate_inp",
    "experts.gate": "ffn_gate_exps",
    "experts.up": "ffn_up_exps",
    "experts.down": "ffn_down_exps",
}


def tensor_name(parameter: str) -> str:
    """GGUF tensor name of a model parameter."""
    if not parameter.startswith("blocks."):
        return f"{parameter}.weight"
    _, block, rest = parameter.split(".", 2)
    return f"blk.{block}.{_BLOCK_TENSORS[rest]}.weight"


def tensor_type(name: str, ndim: int, *, quantised: bool) -> GGMLQuantizationType:
    """Storage type: norms and routers F32, experts Q5_0, the other matrices Q8_0."""
    if not quantised or ndim == 1 or "ffn_gate_inp" in name:
        return F32
    return Q5_0 if "_exps" in name else Q8_0


def _add_metadata(writer: gguf.GGUFWriter, folder: Path, tokenizer: Tokenizer) -> None:
    c = load_config(folder)
    writer.add_type("model")
    writer.add_name("dflash demo")
    writer.add_description("A small mixture of experts trained on the Python standard library")
    writer.add_license("PSF-2.0")
    writer.add_languages(["en"])
    writer.add_tags(["text-generation", "python"])
    writer.add_block_count(c.block_count)
    writer.add_context_length(c.context_length)
    writer.add_embedding_length(c.embedding_length)
    writer.add_feed_forward_length(c.expert_used_count * c.expert_feed_forward_length)
    writer.add_head_count(c.head_count)
    writer.add_head_count_kv(c.head_count_kv)
    writer.add_key_length(c.key_length)
    writer.add_value_length(c.key_length)
    writer.add_rope_freq_base(c.rope_freq_base)
    writer.add_layer_norm_rms_eps(c.layer_norm_rms_epsilon)
    writer.add_expert_count(c.expert_count)
    writer.add_expert_used_count(c.expert_used_count)
    writer.add_expert_feed_forward_length(c.expert_feed_forward_length)
    writer.add_vocab_size(c.vocab_size)
    eos = end_of_text_id(tokenizer)
    tokens, merges = tokens_and_merges(tokenizer)
    types = [TokenType.CONTROL if i == eos else TokenType.NORMAL for i in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(eos)
    writer.add_eot_token_id(eos)
    writer.add_pad_token_id(eos)
    writer.add_add_bos_token(False)


def export(folder: Path, tokenizer: Tokenizer, out: Path, *, quantised: bool = True) -> None:
    """Write saved weights to `out` (replaced atomically); unquantised files are all F32."""
    arrays: Arrays = load_weights(folder)
    partial = out.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    _add_metadata(writer, folder, tokenizer)
    writer.add_file_type(LlamaFileType.MOSTLY_Q5_0 if quantised else LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for parameter, array in arrays.items():
        name = tensor_name(parameter)
        kind = tensor_type(name, array.ndim, quantised=quantised)
        stored = array if kind == F32 else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, out)


def dequantised_copy(source: Path, out: Path) -> None:
    """Copy a GGUF file with every tensor expanded to F32: the same weights, exact arithmetic."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, "qwen3moe")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=sub)
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(np.asarray(tensor.data), tensor.tensor_type)
        shape = tuple(int(n) for n in reversed(tensor.shape))
        writer.add_tensor(tensor.name, array.astype(np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
