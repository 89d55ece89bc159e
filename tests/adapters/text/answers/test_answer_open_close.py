"""Values of Kimi K3's and MiniMax M3's calls, and calls of Llama 3 and Cohere as templates ask."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_adapters.text.answers import AnswerFormat, Content, Reasoning, ToolCall
from support.answer_families import parsed

NS = "]<]minimax[>["
TOOLS: dict[str, Any] = {
    "set": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "count": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "at": {"type": "object", "properties": {"zip": {"type": "string"}, "x": {}}},
            "none": {"type": "array"},
        },
    }
}


def minimax(inner: str) -> str:
    written = inner.replace("<", f"{NS}<")
    return f'{NS}<tool_call>\n{NS}<invoke name="set">{written}{NS}</invoke>\n{NS}</tool_call>'


def call(**arguments: Any) -> ToolCall:
    return ToolCall("set", json.dumps(arguments))


@pytest.mark.parametrize(
    ("inner", "arguments"),
    [
        ("<name>12</name>", {"name": "12"}),
        ("<count>-14</count><name> a\n</name>", {"count": -14, "name": " a\n"}),
        ("<tags><item>1</item><item>true</item></tags>", {"tags": ["1", "true"]}),
        ("<at><zip>01</zip><x>2</x></at>", {"at": {"zip": "01", "x": 2}}),
        ("<at><x><item>1</item><item><y>2</y></item></x></at>", {"at": {"x": [1, {"y": 2}]}}),
        ("<none></none><at></at>", {"none": [], "at": {}}),
        ("<other><a>1</a></other>", {"other": {"a": 1}}),
        ("", {}),
    ],
)
def test_elements_have_the_types_of_the_schema(inner: str, arguments: dict[str, Any]) -> None:
    for pieces in ([minimax(inner)], list(minimax(inner))):
        assert parsed(AnswerFormat.MINIMAX_M3, pieces, TOOLS) == [call(**arguments)]


@pytest.mark.parametrize(
    "inner",
    ["<name>a", "</name>", "<name>a</other>", "a", "<at>a<zip>1</zip></at>", "<name>a</name>b"],
)
def test_elements_that_do_not_fit_are_content(inner: str) -> None:
    text = minimax(inner)
    assert parsed(AnswerFormat.MINIMAX_M3, [text], TOOLS) == [Content(text)]


def test_deep_and_many_elements() -> None:
    deep = minimax("<x>" * 20_000 + "</x>" * 20_000)
    assert parsed(AnswerFormat.MINIMAX_M3, [deep], TOOLS) == [Content(deep)]
    many = minimax("<tags>" + "<item>a</item>" * 20_000 + "</tags>")
    assert parsed(AnswerFormat.MINIMAX_M3, [many], TOOLS) == [call(tags=["a"] * 20_000)]


def kimi(inner: str) -> str:
    text = f'<|open|>tools<|sep|><|open|>call tool="set" index="1"<|sep|>{inner}'
    return f"{text}<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"


@pytest.mark.parametrize(
    ("inner", "arguments"),
    [
        ('argument key="a&quot;&amp;b" type="string"<|sep|>1<|close|>argument', {'a"&b': "1"}),
        ('argument key="a" type="number"<|sep|>1.5<|close|>argument', {"a": 1.5}),
        ('argument key="a" type="null"<|sep|>null<|close|>argument', {"a": None}),
        ('json type="object"<|sep|>{"a": [1]}<|close|>json', {"a": [1]}),
    ],
)
def test_arguments_have_the_types_that_are_written(inner: str, arguments: dict[str, Any]) -> None:
    text = kimi(f"<|open|>{inner}<|sep|>")
    for pieces in ([text], list(text)):
        assert parsed(AnswerFormat.KIMI_K3, pieces, TOOLS) == [call(**arguments)]


@pytest.mark.parametrize(
    "inner",
    [
        'json type="object"<|sep|>[["a", 1]]<|close|>json',
        'argument key="a" type="number"<|sep|>one<|close|>argument',
        'argument key="a"<|sep|>1<|close|>argument',
    ],
)
def test_arguments_that_are_none_are_content(inner: str) -> None:
    text = kimi(f"<|open|>{inner}<|sep|>")
    shown = text.removesuffix("<|close|>message<|sep|>")
    assert parsed(AnswerFormat.KIMI_K3, [text], TOOLS) == [Content(shown)]


def test_an_answer_of_kimi_k3_whose_prompt_has_opened_the_reasoning() -> None:
    text = (
        "I should.<|close|>think<|sep|><|open|>response<|sep|>On it.<|close|>response<|sep|>"
        + kimi('<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>')
    )
    assert parsed(AnswerFormat.KIMI_K3, [text], TOOLS, starts_in_reasoning=True) == [
        Reasoning("I should."),
        Content("On it."),
        call(a=1),
    ]


def test_llama_3_answers_with_json_alone() -> None:
    text = '{"name": "set", "parameters": {"count": 1}}'
    typed = '{"type": "function", "name": "set", "parameters": {"count": 1}}'
    for written in (text, f"<|python_tag|>{text}", f"\n{text}\n", typed):
        assert parsed(AnswerFormat.LLAMA3, [written], TOOLS) == [call(count=1)]
    for written in (
        f"So: {text}",
        '{"answer": 1}',
        '```json\n"42"\n```',
        '<|python_tag|>print("a")',
    ):
        assert parsed(AnswerFormat.LLAMA3, [written], TOOLS) == [Content(written)]


def test_cohere_writes_a_list_of_calls_with_ids() -> None:
    one = '{"tool_call_id": "7", "tool_name": "set", "parameters": {"count": 1}}'
    thinking = "<|START_THINKING|>hm<|END_THINKING|>"
    text = f"{thinking}<|START_ACTION|>[\n    {one},\n    {one}\n]<|END_ACTION|>"
    expected = ToolCall("set", '{"count": 1}', "7")
    assert parsed(AnswerFormat.COHERE, [text], TOOLS) == [Reasoning("hm"), expected, expected]
    for name in ("RESPONSE", "TEXT"):
        said = f"{thinking}<|START_{name}|>Hello.<|END_{name}|>"
        assert parsed(AnswerFormat.COHERE, [said], TOOLS) == [Reasoning("hm"), Content("Hello.")]
    empty = "<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>Hello.<|END_RESPONSE|>"
    assert parsed(AnswerFormat.COHERE, [empty], TOOLS) == [Content("Hello.")]
