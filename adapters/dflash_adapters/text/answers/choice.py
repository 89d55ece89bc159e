"""Tells from a chat template how the model writes answers."""

from __future__ import annotations

from collections.abc import Collection

from dflash_adapters.text.answers.formats import AnswerFormat

# In a template, all of the texts; the first format whose texts a template has is its.
_IN_TEMPLATES: tuple[tuple[AnswerFormat, tuple[str, ...]], ...] = (
    (AnswerFormat.HARMONY, ("<|channel|>", "<|message|>")),
    (AnswerFormat.MINIMAX_M3, ("]<]minimax[>[", "<tool_call>")),
    (AnswerFormat.KIMI_K3, ("<|open|>", "<|close|>", "<|sep|>")),
    (AnswerFormat.COHERE, ("<|START_ACTION|>",)),
    (AnswerFormat.SEED_OSS, ("<seed:tool_call>",)),
    (AnswerFormat.DEEPSEEK_V4, ("\uff5cDSML\uff5c",)),
    (AnswerFormat.DEEPSEEK_V3_1, ("<\uff5ctool\u2581call\u2581begin\uff5c>",)),
    (AnswerFormat.KIMI_K2, ("<|tool_call_begin|>",)),
    (AnswerFormat.MINIMAX_M2, ("<minimax:tool_call>",)),
    (AnswerFormat.GEMMA4, ("<|tool_call>",)),
    (AnswerFormat.LFM2, ("<|tool_call_start|>",)),
    (AnswerFormat.LFM2, ("<|tool_list_start|>",)),
    (AnswerFormat.MISTRAL, ("[TOOL_CALLS]",)),
    (AnswerFormat.QWEN3_CODER, ("<tool_call>", "<function=", "<parameter=")),
    (AnswerFormat.GLM, ("<tool_call>", "<arg_key>")),
    (AnswerFormat.LLAMA4, ("<|python_start|>",)),
    (AnswerFormat.HERMES, ("<tool_call>",)),
    (AnswerFormat.LLAMA3, ('{"name": function name, "parameters":',)),
)

# In a vocabulary, where the template does not tell.
_IN_VOCABULARIES: tuple[tuple[AnswerFormat, frozenset[str]], ...] = (
    (AnswerFormat.HARMONY, frozenset({"<|start|>", "<|channel|>", "<|message|>"})),
    (AnswerFormat.LFM2, frozenset({"<|tool_call_start|>", "<|tool_call_end|>"})),
)


def answer_format(
    template: str | None, spellings: Collection[str], *, setting: str = "auto"
) -> AnswerFormat:
    """The format that the setting names; with ``auto`` it is told by the markers in a chat
    template, else by the vocabulary's special tokens, and plain if none is known."""
    if setting != "auto":
        return AnswerFormat(setting)
    if template is not None:
        for kind, texts in _IN_TEMPLATES:
            if all(text in template for text in texts):
                return kind
    for kind, markers in _IN_VOCABULARIES:
        if markers <= {*spellings}:
            return kind
    return AnswerFormat.PLAIN
