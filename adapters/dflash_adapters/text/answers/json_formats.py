"""Formats in which the arguments of a call are JSON."""

from __future__ import annotations

import re

from dflash_adapters.text.answers.calls import json_calls, json_value, sound_call
from dflash_adapters.text.answers.events import ToolCall, Tools
from dflash_adapters.text.answers.leads import NAME, NAME_PART, SOME_SPACE, SPACE
from dflash_adapters.text.answers.marked import MarkedFormat
from dflash_adapters.text.answers.scanning import CallSyntax, Lead, Quotes

_QUOTES = Quotes((('"', '"'),), has_escapes=True)

HERMES = MarkedFormat(
    call=CallSyntax(
        "<tool_call>",
        Lead.of(rf"{SOME_SPACE}(?=[\[{{])", SOME_SPACE),
        json_calls,
        ends="</tool_call>",
        quotes=_QUOTES,
    )
)

_HEAD = re.compile(
    rf"{SOME_SPACE}(?P<name>{NAME}){SOME_SPACE}(?:\[CALL_ID\](?P<id>[^\[\]{{}}]{{0,128}}))?\[ARGS\]"
)


def _mistral_calls(text: str, tools: Tools) -> list[ToolCall]:
    head = _HEAD.match(text)
    if head is None:
        return json_calls(text, tools, has_ids=True)
    call_id = (head["id"] or "").strip() or None
    return [sound_call(head["name"], json_value(text[head.end() :]), tools, call_id=call_id)]


MISTRAL = MarkedFormat(
    think=("[THINK]", "[/THINK]"),
    call=CallSyntax(
        "[TOOL_CALLS]",
        Lead.of(
            rf"(?:{_HEAD.pattern})?{SOME_SPACE}(?=\{{)|{SOME_SPACE}(?=\[{SOME_SPACE}\{{)",
            rf"{SOME_SPACE}(?:\[{SOME_SPACE})?"
            rf"|{SOME_SPACE}{NAME_PART}{SOME_SPACE}(?:\[[A-Z_]{{0,8}}(?:\][^\[\]{{}}]{{0,128}})?){{0,2}}",
        ),
        _mistral_calls,
        quotes=_QUOTES,
        inner=("[CALL_ID]", "[ARGS]"),
    ),
)


def _deepseek(marker: str) -> str:
    return f"<\uff5c{marker}\uff5c>".replace(" ", "\u2581")


def _deepseek_calls(text: str, tools: Tools) -> list[ToolCall]:
    name, _, arguments = text.partition(_deepseek("tool sep"))
    fenced = re.fullmatch(rf"{SPACE}({NAME}){SPACE}```json\n(.*)```{SPACE}", arguments, re.DOTALL)
    if fenced and name.strip() == "function":  # R1
        name, arguments = fenced[1], fenced[2]
    return [sound_call(name.strip(), json_value(arguments), tools)]


DEEPSEEK_V3_1 = MarkedFormat(
    call=CallSyntax(
        _deepseek("tool call begin"),
        Lead.of(
            f"{SOME_SPACE}{NAME}{SOME_SPACE}{_deepseek('tool sep')}",
            f"{SOME_SPACE}{NAME_PART}{SOME_SPACE}(?:<[\uff5ctoolsep\u2581]{{0,10}})?",
        ),
        _deepseek_calls,
        ends=_deepseek("tool call end"),
        quotes=_QUOTES,
        inner=(_deepseek("tool sep"),),
    ),
    before=(_deepseek("tool calls begin"),),
    after=(_deepseek("tool calls end"),),
)

# Instead of an answer. Before calls of tools of the model's own is a marker.
LLAMA3 = MarkedFormat(
    think=None,
    call=CallSyntax(
        "[",
        Lead.of(
            rf'(?={SOME_SPACE}(?:\{{{SOME_SPACE})?"(?:name|type|parameters|arguments|function)")',
            rf'{SOME_SPACE}(?:\{{{SOME_SPACE})?(?:"[a-z]{{0,10}})?',
        ),
        json_calls,
        quotes=_QUOTES,
    ),
    before=("<|python_tag|>",),
)


def _cohere_calls(text: str, tools: Tools) -> list[ToolCall]:
    return json_calls(text, tools, has_ids=True, name_key="tool_name", id_key="tool_call_id")


COHERE = MarkedFormat(
    think=("<|START_THINKING|>", "<|END_THINKING|>"),
    call=CallSyntax(
        "<|START_ACTION|>",
        Lead.of(rf"{SOME_SPACE}(?=[\[{{])", SOME_SPACE),
        _cohere_calls,
        ends="<|END_ACTION|>",
        quotes=_QUOTES,
    ),
    around=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)

_KIMI_SEPARATOR = "<|tool_call_argument_begin|>"


def _kimi_calls(text: str, tools: Tools) -> list[ToolCall]:
    head, _, arguments = text.partition(_KIMI_SEPARATOR)
    call_id = head.strip()
    name = re.sub(r":\d+$", "", call_id.removeprefix("functions."))
    return [sound_call(name, json_value(arguments), tools, call_id=call_id)]


# The model forgets markers, so a call ends with its JSON, and the end marker is one around calls.
KIMI_K2 = MarkedFormat(
    call=CallSyntax(
        "<|tool_call_begin|>",
        Lead.of(
            rf"{SOME_SPACE}{NAME}{SOME_SPACE}{re.escape(_KIMI_SEPARATOR)}{SOME_SPACE}(?=\{{)",
            rf"{SOME_SPACE}{NAME_PART}{SOME_SPACE}(?:<[|a-z_]{{0,29}}(?:>{SOME_SPACE})?)?",
        ),
        _kimi_calls,
        quotes=_QUOTES,
        inner=(_KIMI_SEPARATOR,),
    ),
    before=("<|tool_calls_section_begin|>",),
    after=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)
