"""Unsupported fields of requests: refused by name, unless they do not change the answer.

The names are those of OpenAI's interface, and of vLLM's and llama.cpp's servers. Unknown fields are
refused too, as OpenAI does: a client must not take an answer without an option for one with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from dflash_protocol.errors import one_line
from dflash_runtime.serving.errors import ApiError

IGNORED = frozenset(
    {
        # The client, its purpose, storage of the answer.
        "metadata", "priority", "request_id", "safety_identifier", "service_tier", "store", "user",
        # Caching, scheduling and speed of the same answer.
        "backend_sampling", "cache_prompt", "id_slot", "n_cache_reuse", "parallel_tool_calls",
        "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "slot_id", "speculative", "sse_ping_interval",
        # Further output beside the text.
        "return_progress", "timings_per_token", "verbose",
        # Parameters of features that are off: the field that turns them on is refused.
        "adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n",
        "dry_sequence_breakers", "dynatemp_exponent", "grammar_lazy", "grammar_triggers",
        "grammar_type", "guided_decoding_backend", "guided_whitespace_pattern", "mirostat_eta",
        "mirostat_tau", "n_discard", "n_keep", "penalize_nl", "preserved_tokens", "repeat_last_n",
        "xtc_threshold",
    }
)  # fmt: skip
"""Fields that do not change the text, whatever their values."""

_REFUSED = (
    "add_special_tokens", "allowed_token_ids", "audio", "cache_salt", "chat_format",
    "chat_template", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "json_schema", "kv_transfer_params", "moderation", "n_predict", "prompt_logprobs",
    "reasoning_effort", "samplers", "structural_tag", "structured_outputs",
    "thinking_token_budget", "truncate_prompt_tokens", "web_search_options",
)  # fmt: skip
"""Fields that may change the answer, whatever their values."""

NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    **dict.fromkeys(_REFUSED, ()),
    # OpenAI
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({}, []),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    # vLLM
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "repetition_penalty": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # llama.cpp
    "adaptive_target": (-1,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "image_data": ([],),
    "input_extra": ([],),
    "input_prefix": ("",),
    "input_suffix": ("",),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "n_cmpl": (1,),
    "n_indent": (0,),
    "n_probs": (0,),
    "parse_tool_calls": (False,),
    "post_sampling_probs": (False,),
    "reasoning_format": ("none",),
    "reasoning_in_content": (True,),
    "repeat_penalty": (1,),
    "response_fields": ([],),
    "return_tokens": (False,),
    "system_prompt": ("",),
    "t_max_predict_ms": (0, -1),
    "tfs_z": (1,),
    "thinking_forced_open": (False,),
    "top_n_sigma": (0, -1),
    "typical_p": (1,),
    "with_pieces": (False,),
    "xtc_probability": (0,),
}
"""Fields that may change the answer, each with the values, besides null, that do not."""

_LONGEST_NAME = 100


def refuse_unsupported(fields: Mapping[str, JsonValue]) -> None:
    """Check the fields of a body that have no meaning here. Raises: ApiError naming the first that
    changes the answer, or may."""
    for name, value in fields.items():
        if value is None or name in IGNORED:
            continue
        if name not in NEUTRAL:
            shown = one_line(name)[:_LONGEST_NAME]
            raise ApiError(
                400,
                f"{shown}: unknown field",
                param=shown,
                code="unknown_parameter",
            )
        allowed = NEUTRAL[name]
        if not any(_is_same(value, each) for each in allowed):
            but = f"; only {allowed[0]!r} is" if allowed else ""
            raise ApiError(
                400, f"{name}: is not supported{but}", param=name, code="unsupported_value"
            )


def _is_same(value: JsonValue, other: JsonValue) -> bool:
    """Equality in which 1 is 1.0, but not true."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
