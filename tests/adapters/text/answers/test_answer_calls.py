"""What calls may look like in each format, beyond what its template renders."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_adapters.text.answers import AnswerEvent, AnswerFormat, Content, ToolCall
from support.answer_families import NOW, deepseek, parsed

TOLD = ToolCall("now", '{"a": 1}')
DONE = ToolCall("now", "{}")


def check(kind: AnswerFormat, text: str, expected: list[AnswerEvent] | None) -> None:
    """None: all of it is content."""
    events = [Content(text)] if expected is None else expected
    assert parsed(kind, [text]) == events
    assert parsed(kind, list(text)) == events


@pytest.mark.parametrize(
    ("json_text", "expected"),
    [
        ('{"name":"now"}', [DONE]),
        ('{"name":"now","parameters":{"a":1},"id":"x"}', [TOLD]),
        ('{"arguments":"{\\"a\\":1}","name":"now"}', [TOLD]),
        ('[{"name":"now"},{"name":"now","arguments":{"a":1}}]', [DONE, TOLD]),
        ('{"name":"now","arguments":{"a":"b\nc"}}', [ToolCall("now", '{"a": "b\\nc"}')]),
        # The end of a call may be quoted, and other calls.
        (
            '{"name":"now","arguments":{"a":"</tool_call> <tool_call>"}}',
            [ToolCall("now", '{"a": "</tool_call> <tool_call>"}')],
        ),
        ('{"name":"now","arguments":{"a":"\\ud83d\\ude00é"}}', [ToolCall("now", '{"a": "😀é"}')]),
        ('{"name":"now","arguments":{"\\udc00":1}}', [ToolCall("now", '{"\ufffd": 1}')]),
        ('[{"name":"now"},{"name":"unknown"}]', None),
        ("[]", None),
        ("{}", None),
        ('{"name":7}', None),
        ('{"name":["now"]}', None),
        ('{"name":"now","arguments":null}', None),
        ('{"name":"now","arguments":[]}', None),
        ('{"name":"now","arguments":"a"}', None),
        ('{"name":"now","arguments":{"a":NaN}}', None),
        ('{"name":"now","arguments":{"a":-Infinity}}', None),
        ('{"name":"now","arguments":{"a":1e999}}', None),
        ('{"name":"now","arguments":{"a":' + "9" * 5000 + "}}", None),
        ('{"name":"now","arguments":{"a":1}} and more', None),
        ('{"name":"now","arguments":{"a":1}', None),
        ('{"name":"now","arguments":{"a":' + "[" * 100_000 + "]" * 100_000 + "}}", None),
    ],
)
def test_json_calls(json_text: str, expected: list[AnswerEvent] | None) -> None:
    check(AnswerFormat.HERMES, f"<tool_call>{json_text}</tool_call>", expected)


def test_what_cannot_be_a_call_is_not_held_back() -> None:
    check(AnswerFormat.HERMES, "The tag <tool_call> begins a call, </tool_call> ends it.", None)
    text = '<tool_call>{"name": <tool_call>{"name":"now"}</tool_call>'
    check(AnswerFormat.HERMES, text, [Content('<tool_call>{"name":'), DONE])


def test_a_call_after_one_with_an_open_string_is_found() -> None:
    broken = '<tool_call>{"name":"now","arguments":{"a":"b}}</tool_call>'
    call = '<tool_call>{"name":"now"}</tool_call>'
    check(AnswerFormat.HERMES, broken + call, [Content(broken), DONE])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Without the marker before it, or the one after it.
        ("<function=now></function>", [DONE]),
        ("<function=now>\n</function>\n</tool_call>", [DONE]),
        ("<tool_call>\n<function=now>\n</function>", [DONE]),
        ("<tool_call><function=now><parameter=a>1</parameter></function></tool_call>", [TOLD]),
        (
            "<function=now>\n<parameter=a>\n</function></tool_call>\n\n</parameter>\n</function>",
            [ToolCall("now", '{"a": "</function></tool_call>\\n"}')],
        ),
        ("<function=now>\n<parameter=a>\n1\n</function>", None),
        ("<function=>\n</function>", None),
        ("<tool_call>\nnow\n</tool_call>", None),
        ("the <function=now something", None),
    ],
)
def test_functions(text: str, expected: list[AnswerEvent] | None) -> None:
    check(AnswerFormat.QWEN3_CODER, text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool_call>now</tool_call>", [DONE]),
        ("<tool_call>\nnow\n</tool_call>", [DONE]),
        ("<tool_call>now\n<arg_key> a </arg_key> <arg_value>1</arg_value></tool_call>", [TOLD]),
        (
            "<tool_call>now<arg_key>a</arg_key><arg_value> </tool_call>\n</arg_value></tool_call>",
            [ToolCall("now", '{"a": " </tool_call>\\n"}')],
        ),
        ("<tool_call></tool_call>", None),
        ("<tool_call>now<arg_key>a</arg_key>1</tool_call>", None),
        ("<tool_call>now then</tool_call>", None),
    ],
)
def test_keys_and_values(text: str, expected: list[AnswerEvent] | None) -> None:
    check(AnswerFormat.GLM, text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[now()]", [DONE]),
        ("\n[ now ( a = 1 , ) , now() ]\n", [TOLD, DONE]),
        ("<|python_start|>[now(a=1)]<|python_end|>", [TOLD]),
        ('{"name": "now", "parameters": {"a": 1}}', [TOLD]),
        ('[{"name": "now", "parameters": {"a": 1}}]', [TOLD]),
        ('{"type": "function", "name": "now"}', [DONE]),
        ("[now(a=1)] and [now()]", [TOLD, Content("and [now()]")]),
        ("Call [now(a=1)]", None),
        ("[1] is a footnote", None),
        ("[now](https://now.example)", None),
        ('{"answer": 1}', None),
        ("[now(1)]", None),
        ("[now(a=__import__)]", None),
        ("[now(a=1]", None),
        ("[now(a=(1]))]", None),
    ],
)
def test_bare_calls(text: str, expected: list[AnswerEvent] | None) -> None:
    check(AnswerFormat.LLAMA4, text, expected)


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ("now()", [DONE]),
        ('[{"name": "now", "arguments": {"a": 1}}]', [TOLD]),
        ('{"name": "now"}', [DONE]),
        (
            "[now(a=\"<|tool_call_end|>\", b='it\\'s')]",
            [ToolCall("now", '{"a": "<|tool_call_end|>", "b": "it\'s"}')],
        ),
        ("[now(a='it's')]", None),
        ("[]", None),
    ],
)
def test_listed_calls(inner: str, expected: list[AnswerEvent] | None) -> None:
    check(AnswerFormat.LFM2, f"<|tool_call_start|>{inner}<|tool_call_end|>", expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[TOOL_CALLS]now[ARGS]{}", [DONE]),
        ('[TOOL_CALLS] now [ARGS] {"a":1}[TOOL_CALLS]now[ARGS]{}', [TOLD, DONE]),
        ('[TOOL_CALLS]now[CALL_ID]x1[ARGS]{"a":1}', [ToolCall("now", '{"a": 1}', "x1")]),
        ('[TOOL_CALLS] [ {"name":"now","arguments":{"a":1}} ]', [TOLD]),
        ('[TOOL_CALLS]{"name":"now","id":"x"}', [ToolCall("now", "{}", "x")]),
        ('[TOOL_CALLS]now[ARGS]{"a":"}]"} b', [ToolCall("now", '{"a": "}]"}'), Content("b")]),
        ("[TOOL_CALLS]now", None),
        ("[TOOL_CALLS]now{}", None),
        ("[TOOL_CALLS]now[ARGS][]", None),
        ("[TOOL_CALLS][ARGS]{}", None),
    ],
)
def test_mistral_calls(text: str, expected: list[AnswerEvent] | None) -> None:
    check(AnswerFormat.MISTRAL, text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # As the model writes it at times: without all the markers after the JSON, or around calls.
        (
            "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
            '<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{"a": 1}',
            [
                ToolCall("now", "{}", "functions.now:0"),
                ToolCall("now", '{"a": 1}', "functions.now:1"),
            ],
        ),
        (
            "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>",
            [ToolCall("now", "{}", "now")],
        ),
        ("<|tool_call_begin|>functions.now:0<|tool_call_end|>", None),
    ],
)
def test_kimi_calls(text: str, expected: list[AnswerEvent] | None) -> None:
    check(AnswerFormat.KIMI_K2, text, expected)


def test_deepseek_r1_calls() -> None:
    text = deepseek(*NOW).replace("now", "function")
    text = text.replace("{}", 'now\n```json\n{"a": 1}\n```')
    check(AnswerFormat.DEEPSEEK_V3_1, text, [TOLD])
    check(AnswerFormat.DEEPSEEK_V3_1, text.replace("```<", "<"), None)


@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        (' string="true"', "1", "1"),
        (' string="false"', "1", 1),
        (' string="false"', "x", "x"),
        ("", "1", 1),
    ],
)
def test_dsml_parameters(attribute: str, value: str, expected: Any) -> None:
    bar = "\uff5c"
    text = (
        f'<{bar}DSML{bar}invoke name="now">\n<{bar}DSML{bar}parameter name="a"{attribute}>{value}'
        f"</{bar}DSML{bar}parameter>\n</{bar}DSML{bar}invoke>"
    )
    arguments = json.dumps({"a": expected})
    check(AnswerFormat.DEEPSEEK_V4, text, [ToolCall("now", arguments)])


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ("call:now{}", [DONE]),
        ("call:now{a:1}", [TOLD]),
        (
            'call:now{a:<|"|>"}<tool_call|><|"|>,b:{c:[null,-1.5e3]}}',
            [ToolCall("now", '{"a": "\\"}<tool_call|>", "b": {"c": [null, -1500.0]}}')],
        ),
        ("call:now", None),
        ("now{}", None),
        ("call:now{a:b}", None),
        ('call:now{a:<|"|>b}', None),
    ],
)
def test_gemma_calls(inner: str, expected: list[AnswerEvent] | None) -> None:
    check(AnswerFormat.GEMMA4, f"<|tool_call>{inner}<tool_call|>", expected)


def test_a_broken_call_among_others_is_content_alone() -> None:
    call = '<invoke name="now">\n</invoke>\n'
    broken = '<invoke name="unknown">\n</invoke>'
    text = f"<minimax:tool_call>\n{call}{broken}\n{call}</minimax:tool_call>"
    check(AnswerFormat.MINIMAX_M2, text, [DONE, Content(broken), DONE])
    text = f"<minimax:tool_call>\n{broken}\n</minimax:tool_call>"
    check(AnswerFormat.MINIMAX_M2, text, None)
