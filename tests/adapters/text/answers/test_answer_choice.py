"""The format that a template or a vocabulary tells."""

from __future__ import annotations

import pytest

from dflash_adapters.text.answers import AnswerFormat, answer_format, shown_markers
from dflash_adapters.text.answers.formats import MARKED_FORMATS
from dflash_protocol.settings.table import ANSWER_FORMATS

TEMPLATES = {
    "<tool_call>\n{'name': <function-name>}\n</tool_call>": AnswerFormat.HERMES,
    "<tool_call>\n<function=f>\n<parameter=p>\n": AnswerFormat.QWEN3_CODER,
    "<tool_call>{name}<arg_key>{key}</arg_key>": AnswerFormat.GLM,
    "{{ '<|python_start|>' }}": AnswerFormat.LLAMA4,
    "'[TOOL_CALLS]'": AnswerFormat.MISTRAL,
    "<|channel|>analysis<|message|>": AnswerFormat.HARMONY,
    "<\uff5ctool\u2581call\u2581begin\uff5c>": AnswerFormat.DEEPSEEK_V3_1,
    "dsml_token = '\uff5cDSML\uff5c' <tool_call>": AnswerFormat.DEEPSEEK_V4,
    "<|tool_call_begin|>": AnswerFormat.KIMI_K2,
    "'<minimax:tool_call>'": AnswerFormat.MINIMAX_M2,
    "<|tool_call_start|>[": AnswerFormat.LFM2,
    "List of tools: <|tool_list_start|>[": AnswerFormat.LFM2,
    "<|tool_call>call:": AnswerFormat.GEMMA4,
    "<think>": AnswerFormat.PLAIN,
    "ns = ']<]minimax[>[' <tool_call>": AnswerFormat.MINIMAX_M3,
    "<seed:tool_call><function=f><parameter=p>": AnswerFormat.SEED_OSS,
    "<|START_ACTION|>[": AnswerFormat.COHERE,
    "'<|open|>' + tag + '<|sep|>' '<|close|>'": AnswerFormat.KIMI_K3,
    'the format {"name": function name, "parameters": dictionary': AnswerFormat.LLAMA3,
    "": AnswerFormat.PLAIN,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates(template: str) -> None:
    assert answer_format(template, ["<think>", "<tool_call>"]) is TEMPLATES[template]


def test_every_format_is_found() -> None:
    assert {*TEMPLATES.values()} == {*AnswerFormat}


def test_a_setting_names_the_format_whatever_the_template_tells() -> None:
    assert ("auto", *AnswerFormat) == ANSWER_FORMATS
    for kind in AnswerFormat:
        assert answer_format("[TOOL_CALLS]", ["<|message|>"], setting=kind.value) is kind


def test_vocabularies_tell_where_templates_do_not() -> None:
    harmony = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    for template in (None, "", "<think>"):
        assert answer_format(template, harmony) is AnswerFormat.HARMONY
        assert (
            answer_format(template, ["<|tool_call_start|>", "<|tool_call_end|>"])
            is AnswerFormat.LFM2
        )
        assert answer_format(template, ["<tool_call>"]) is AnswerFormat.PLAIN
    assert answer_format("[TOOL_CALLS]", harmony) is AnswerFormat.MISTRAL


@pytest.mark.parametrize("kind", AnswerFormat)
def test_no_marker_contains_another_that_is_searched_for_with_it(kind: AnswerFormat) -> None:
    if kind in MARKED_FORMATS:
        call = MARKED_FORMATS[kind].call
        inner = {*call.inner} if call is not None else set()
        markers = shown_markers(kind) - inner
    else:
        markers = shown_markers(kind)
    assert not [(a, b) for a in markers for b in markers if a != b and a in b]
