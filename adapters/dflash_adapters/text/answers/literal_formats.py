"""Formats that write calls as a programming language does."""

from __future__ import annotations

import re

from dflash_adapters.text.answers.calls import json_calls, sound_call
from dflash_adapters.text.answers.events import ToolCall, Tools
from dflash_adapters.text.answers.leads import NAME, NAME_PART, SOME_SPACE, SPACE
from dflash_adapters.text.answers.literals import GEMMA_QUOTE, literal, literal_calls
from dflash_adapters.text.answers.marked import MarkedFormat
from dflash_adapters.text.answers.scanning import CallSyntax, Lead, Quotes

_QUOTES = Quotes((('"', '"'), ("'", "'")), has_escapes=True)
_JSON = re.compile(rf"{SPACE}(?:\[{SPACE})?\{{")
_FUNCTION = r"[A-Za-z_][\w.\-]{0,127}+"


def _listed_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Calls as Python writes them, or JSON."""
    if _JSON.match(text):
        return json_calls(text, tools)
    return [sound_call(name, arguments, tools) for name, arguments in literal_calls(text)]


# Its template asks for JSON, its makers for a list of calls.
LLAMA4 = MarkedFormat(
    think=None,
    call=CallSyntax(
        "[",
        Lead.of(
            rf"(?={SOME_SPACE}(?:{_FUNCTION}{SOME_SPACE}\("
            rf'|(?:\{{{SOME_SPACE})?"(?:name|type|parameters|arguments)"))',
            rf'{SOME_SPACE}(?:{_FUNCTION}{SOME_SPACE}|(?:\{{{SOME_SPACE})?(?:"[a-z]{{0,10}})?)',
        ),
        _listed_calls,
        quotes=_QUOTES,
    ),
    before=("<|python_start|>",),
    after=("<|python_end|>",),
)

LFM2 = MarkedFormat(
    call=CallSyntax(
        "<|tool_call_start|>",
        Lead.of(rf"{SOME_SPACE}(?=[\[{{A-Za-z_])", SOME_SPACE),
        _listed_calls,
        ends="<|tool_call_end|>",
        quotes=_QUOTES,
    )
)


def _gemma_calls(text: str, tools: Tools) -> list[ToolCall]:
    name, _, arguments = text.strip().removeprefix("call:").partition("{")
    return [sound_call(name.strip(), literal("{" + arguments), tools)]


GEMMA4 = MarkedFormat(
    think=("<|channel>thought", "<channel|>"),
    thinks_anywhere=True,
    call=CallSyntax(
        "<|tool_call>",
        Lead.of(
            rf"{SOME_SPACE}call:{NAME}{SOME_SPACE}(?=\{{)",
            rf"{SOME_SPACE}(?:c|ca|cal|call|call:{NAME_PART}{SOME_SPACE})?",
        ),
        _gemma_calls,
        ends="<tool_call|>",
        quotes=Quotes(((GEMMA_QUOTE, GEMMA_QUOTE),)),
    ),
)
