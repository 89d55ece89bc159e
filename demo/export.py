"""Writes trained weights as a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType, TokenType
from tokenizers import Tokenizer

from demo.config import LagunaConfig, ModelConfig, Qwen35MoeConfig
from demo.vocab import end_of_text_id, tokens_and_merges
from demo.weights import Arrays, load_config, load_weights

F32, Q5_0, Q8_0 = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q8_0,
)

_SIGMOID = 2
"""GGUF's number of the sigmoid among the functions that weight experts."""

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
_SHARED_TENSORS = {
    "experts.shared.gate": "ffn_gate_shexp",
    "experts.shared.up": "ffn_up_shexp",
    "experts.shared.down": "ffn_down_shexp",
}
_QWEN35MOE_TENSORS = {
    **_BLOCK_TENSORS,
    **_SHARED_TENSORS,
    "ffn_norm": "post_attention_norm",
    "experts.shared_gate": "ffn_gate_inp_shexp",
}
_DELTA_TENSORS = {
    "attention.qkv": "attn_qkv",
    "attention.gate": "attn_gate",
    "attention.alpha": "ssm_alpha",
    "attention.beta": "ssm_beta",
    "attention.conv": "ssm_conv1d",
    "attention.dt_bias": "ssm_dt.bias",
    "attention.log_a": "ssm_a",
    "attention.norm": "ssm_norm",
    "attention.output": "ssm_out",
}
_LAGUNA_TENSORS = {
    **_BLOCK_TENSORS,
    **_SHARED_TENSORS,
    "attention.gate": "attn_gate",
    "experts.bias": "exp_probs_b.bias",
}
_DENSE_TENSORS = {
    "experts.gate": "ffn_gate",
    "experts.up": "ffn_up",
    "experts.down": "ffn_down",
}


@dataclass(frozen=True)
class ChatFacts:
    """What a file of a model that chats has besides."""

    template: str
    turn_end: str
    """The token that ends an answer; it and the other `control` tokens are no text."""
    control: Sequence[str]
    tags: Sequence[str]
    """Tokens around reasoning and calls, which are text."""


def tensor_name(parameter: str, config: ModelConfig) -> str:
    """GGUF tensor name of a model parameter."""
    if not parameter.startswith("blocks."):
        return f"{parameter}.weight"
    _, block, rest = parameter.split(".", 2)
    name = _names_of(config, int(block))[rest]
    return f"blk.{block}.{name}" + ("" if name.endswith((".bias", "ssm_a")) else ".weight")


def _names_of(config: ModelConfig, layer: int) -> dict[str, str]:
    if isinstance(config, Qwen35MoeConfig):
        more = _DELTA_TENSORS if config.is_recurrent(layer) else {}
        return _QWEN35MOE_TENSORS | more
    if isinstance(config, LagunaConfig):
        return _LAGUNA_TENSORS | (_DENSE_TENSORS if config.is_dense(layer) else {})
    return _BLOCK_TENSORS


def tensor_type(name: str, ndim: int, *, quantised: bool) -> GGMLQuantizationType:
    """Storage type: vectors, routers and convolutions F32, experts Q5_0, other matrices Q8_0."""
    if not quantised or ndim == 1 or "ffn_gate_inp" in name or "conv1d" in name:
        return F32
    return Q5_0 if "_exps" in name else Q8_0


def _add_metadata(
    writer: gguf.GGUFWriter, folder: Path, tokenizer: Tokenizer, chat: ChatFacts | None
) -> None:
    c = load_config(folder)
    writer.add_type("model")
    name = "dflash demo" if type(c) is ModelConfig else f"dflash demo, {c.architecture}"
    subject = "the Python standard library" if chat is None else "made talks"
    writer.add_name(name if chat is None else f"{name}, chat")
    writer.add_description(f"A small mixture of experts trained on {subject}")
    writer.add_license("PSF-2.0")
    writer.add_languages(["en"])
    writer.add_tags(["text-generation", "python"])
    writer.add_block_count(c.block_count)
    writer.add_context_length(c.context_length)
    writer.add_embedding_length(c.embedding_length)
    writer.add_feed_forward_length(
        c.feed_forward_length
        if isinstance(c, LagunaConfig)
        else c.expert_used_count * c.expert_feed_forward_length
    )
    writer.add_head_count(
        [c.heads_of(layer) for layer in range(c.block_count)]
        if isinstance(c, LagunaConfig)
        else c.head_count
    )
    writer.add_head_count_kv(c.head_count_kv)
    writer.add_key_length(c.key_length)
    writer.add_value_length(c.key_length)
    writer.add_rope_freq_base(c.rope_freq_base)
    writer.add_layer_norm_rms_eps(c.layer_norm_rms_epsilon)
    writer.add_expert_count(c.expert_count)
    writer.add_expert_used_count(c.expert_used_count)
    writer.add_expert_feed_forward_length(c.expert_feed_forward_length)
    writer.add_vocab_size(c.vocab_size)
    _add_own_metadata(writer, c)
    eos = end_of_text_id(tokenizer)
    tokens, merges = tokens_and_merges(tokenizer)
    types = [TokenType.CONTROL if i == eos else TokenType.NORMAL for i in range(len(tokens))]
    end = eos
    if chat is not None:
        end = tokens.index(chat.turn_end)
        for token in chat.control:
            types[tokens.index(token)] = TokenType.CONTROL
        for token in chat.tags:
            types[tokens.index(token)] = TokenType.USER_DEFINED
        writer.add_chat_template(chat.template)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(end)
    writer.add_eot_token_id(end)
    writer.add_pad_token_id(eos)
    writer.add_add_bos_token(False)


def _add_own_metadata(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """What qwen3moe has not."""
    own: dict[str, int | float | bool | list[int]] = {}
    if isinstance(config, Qwen35MoeConfig):
        inner = config.ssm_time_step_rank * config.ssm_state_size
        pairs = config.rope_dimension_count // 2
        third = -(-pairs // 3)
        own = {
            "expert_shared_feed_forward_length": config.expert_shared_feed_forward_length,
            "rope.dimension_count": config.rope_dimension_count,
            "rope.dimension_sections": [third, third, pairs - 2 * third, 0],
            "full_attention_interval": config.full_attention_interval,
            "ssm.conv_kernel": config.ssm_conv_kernel,
            "ssm.state_size": config.ssm_state_size,
            "ssm.group_count": config.ssm_group_count,
            "ssm.time_step_rank": config.ssm_time_step_rank,
            "ssm.inner_size": inner,
        }
    elif isinstance(config, LagunaConfig):
        own = {
            "expert_shared_feed_forward_length": config.expert_shared_feed_forward_length,
            "expert_weights_norm": True,
            "expert_weights_scale": config.expert_weights_scale,
            "expert_gating_func": _SIGMOID,
            "leading_dense_block_count": config.leading_dense_block_count,
            "attention.sliding_window": config.sliding_window,
            "attention.sliding_window_pattern": config.sliding_window_pattern,
            "rope.dimension_count": config.rope_dimension_count,
            "rope.dimension_count_swa": config.key_length,
            "rope.freq_base_swa": config.rope_freq_base_swa,
        }
    for key, value in own.items():
        name = f"{config.architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)


def export(
    folder: Path,
    tokenizer: Tokenizer,
    out: Path,
    *,
    quantised: bool = True,
    chat: ChatFacts | None = None,
) -> None:
    """Write saved weights to `out` (replaced atomically); unquantised files are all F32."""
    arrays: Arrays = load_weights(folder)
    config = load_config(folder)
    partial = out.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, config.architecture)
    _add_metadata(writer, folder, tokenizer, chat)
    writer.add_file_type(LlamaFileType.MOSTLY_Q5_0 if quantised else LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for parameter, array in arrays.items():
        name = tensor_name(parameter, config)
        if name.endswith(".ssm_a"):
            array = -np.exp(array)
        kind = tensor_type(name, array.ndim, quantised=quantised)
        stored = array if kind == F32 else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, out)


def read_weights(path: Path) -> tuple[ModelConfig, Arrays]:
    """A qwen3moe file that `export` has written, back as parameters by name."""
    reader = gguf.GGUFReader(path)

    def fact(key: str) -> Any:
        return reader.fields[f"{ModelConfig.architecture}.{key}"].contents()

    config = ModelConfig(
        vocab_size=fact("vocab_size"),
        context_length=fact("context_length"),
        block_count=fact("block_count"),
        embedding_length=fact("embedding_length"),
        head_count=fact("attention.head_count"),
        head_count_kv=fact("attention.head_count_kv"),
        key_length=fact("attention.key_length"),
        expert_count=fact("expert_count"),
        expert_used_count=fact("expert_used_count"),
        expert_feed_forward_length=fact("expert_feed_forward_length"),
        rope_freq_base=fact("rope.freq_base"),
        layer_norm_rms_epsilon=fact("attention.layer_norm_rms_epsilon"),
    )
    parameters = ["token_embd", "output_norm"]
    parameters += [
        f"blocks.{i}.{name}" for i in range(config.block_count) for name in _BLOCK_TENSORS
    ]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    arrays: Arrays = {}
    for parameter in parameters:
        tensor = tensors[tensor_name(parameter, config)]
        array = gguf.quants.dequantize(np.asarray(tensor.data), tensor.tensor_type)
        shape = tuple(int(n) for n in reversed(tensor.shape))
        arrays[parameter] = np.asarray(array, np.float32).reshape(shape)
    return config, arrays


def dequantised_copy(source: Path, out: Path) -> None:
    """Copy a GGUF file with every tensor expanded to F32: the same weights, exact arithmetic."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
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
