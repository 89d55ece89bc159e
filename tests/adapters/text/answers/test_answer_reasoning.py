"""Where reasoning begins and ends, and which space around it and around calls is dropped."""

from __future__ import annotations

import pytest

from dflash_adapters.text.answers import AnswerEvent, AnswerFormat, Content, Reasoning, ToolCall
from support.answer_families import TOOLS, parsed

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NOW = ToolCall("now", "{}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\n\na \n\n</think> \n\nb", [Reasoning("a"), Content("b")]),
        ("\n <think>a</think>b", [Reasoning("a"), Content("b")]),
        ("<think>\n\n</think>\n\nb", [Content("b")]),
        ("<think></think><think>a</think>b", [Reasoning("a"), Content("b")]),
        # Only where an answer begins: it may write about the markers.
        ("b <think>a</think>", [Content("b <think>a</think>")]),
        ("<think>a <think> b</think>c", [Reasoning("a <think> b"), Content("c")]),
        ("<think>a</think>b</think>c", [Reasoning("a"), Content("b</think>c")]),
        # The prompt has <think></think>, but the model repeats the end.
        ("</think>\n\nb", [Content("b")]),
        ("<think>a </thin", [Reasoning("a </thin")]),
        ("<think>a\n", [Reasoning("a")]),
    ],
)
@pytest.mark.parametrize("kind", [AnswerFormat.PLAIN, AnswerFormat.HERMES, AnswerFormat.GLM])
@pytest.mark.parametrize("tools", [{}, TOOLS], ids=["no tools", "tools"])
def test_reasoning(
    kind: AnswerFormat, tools: dict[str, dict[str, object]], text: str, expected: list[AnswerEvent]
) -> None:
    assert parsed(kind, [text], tools) == expected
    assert parsed(kind, list(text), tools) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a</think>\n\nb", [Reasoning("a"), Content("b")]),
        ("\n</think>\n\nb", [Content("b")]),
        # The prompt has the marker, and the model repeats it.
        ("<think>\na</think>b", [Reasoning("a"), Content("b")]),
        ("a", [Reasoning("a")]),
        ("", []),
    ],
)
def test_reasoning_that_the_prompt_began(text: str, expected: list[AnswerEvent]) -> None:
    assert parsed(AnswerFormat.HERMES, list(text), starts_in_reasoning=True) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A model may forget to end its reasoning before a call.
        (f"a\n{CALL}", [Reasoning("a"), NOW]),
        (f"a\n{CALL}\n{CALL}\n", [Reasoning("a"), NOW, NOW]),
        (CALL, [NOW]),
        # It may also think about calls.
        (f"a {CALL} b", [Reasoning(f"a {CALL} b")]),
        (f"a {CALL}\n</think>\n{CALL}", [Reasoning(f"a {CALL}"), NOW]),
        (f"a {CALL} b\n{CALL}", [Reasoning(f"a {CALL} b"), NOW]),
        ('a <tool_call>{"x </think> b', [Reasoning('a <tool_call>{"x'), Content("b")]),
        ("a <tool_call> is a tag</think>b", [Reasoning("a <tool_call> is a tag"), Content("b")]),
        ("a <tool_call>{", [Reasoning("a <tool_call>{")]),
    ],
)
def test_calls_within_reasoning(text: str, expected: list[AnswerEvent]) -> None:
    for pieces in ([text], list(text)):
        assert parsed(AnswerFormat.HERMES, pieces, starts_in_reasoning=True) == expected


def test_calls_within_reasoning_between_markers() -> None:
    call = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    for text, expected in (
        (f"a\n{call}\n", [Reasoning("a"), NOW]),
        (f"a\n{call}\n</think>b", [Reasoning(f"a\n{call}"), Content("b")]),
        (f"a\n{call}<tool_call>", [Reasoning(f"a\n{call}<tool_call>")]),
        ("a <tool_call> </think>b", [Reasoning("a <tool_call>"), Content("b")]),
        ("a <tool_call>\n", [Reasoning("a <tool_call>\n")]),
    ):
        for pieces in ([text], list(text)):
            found = parsed(AnswerFormat.QWEN3_CODER, pieces, starts_in_reasoning=True)
            assert found == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n\n a \n", [Content("a \n")]),
        (" \n", []),
        (f"\n{CALL}\n", [NOW]),
        (f"a \n\n{CALL}\t\n {CALL} \nb\n", [Content("a"), NOW, NOW, Content("b\n")]),
        (f"a\n\n<tool_call>\n{CALL}", [Content("a\n\n<tool_call>"), NOW]),
        ("a\n\n<tool_call>\n{}\n</tool_call>\n\nb", None),
        ("a\u3000\n", None),
    ],
)
def test_space_around_calls(text: str, expected: list[AnswerEvent] | None) -> None:
    for pieces in ([text], list(text)):
        found = parsed(AnswerFormat.HERMES, pieces)
        assert found == ([Content(text)] if expected is None else expected)


def test_a_plain_answer_keeps_space_at_its_beginning() -> None:
    assert parsed(AnswerFormat.PLAIN, [" \n a"]) == [Content(" \n a")]
    assert parsed(AnswerFormat.PLAIN, [" \n "]) == [Content(" \n ")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought<channel|>b", [Content("b")]),
        (
            "<|channel>thought\na<channel|>b<|channel>thought\nc\n<channel|>d<channel|>",
            [Reasoning("a"), Content("b"), Reasoning("c"), Content("d")],
        ),
        ("<|channel>other", [Content("<|channel>other")]),
    ],
)
def test_gemma_may_think_again(text: str, expected: list[AnswerEvent]) -> None:
    assert parsed(AnswerFormat.GEMMA4, [text]) == expected
    assert parsed(AnswerFormat.GEMMA4, list(text)) == expected
