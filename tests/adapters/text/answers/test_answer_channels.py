"""Answers in harmony's channels: what a reader sees of them, and which are calls."""

from __future__ import annotations

import pytest

from dflash_adapters.text.answers import AnswerEvent, AnswerFormat, Content, Reasoning, ToolCall
from support.answer_families import parsed

CALL = ToolCall("now", '{"a": 1}')
TO_NOW = "<|channel|>commentary to=functions.now<|message|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>Hello, 世界!\n", [Content("Hello, 世界!\n")]),
        (
            "<|channel|>analysis<|message|>hm <|end|>\n<|start|>assistant"
            "<|channel|>final<|message|> Hi.<|return|>",
            [Reasoning("hm "), Content(" Hi.")],
        ),
        (
            "<|channel|>commentary<|message|>I'll look.<|end|><|start|>assistant"
            + TO_NOW
            + '{"a":1}',
            [Content("I'll look."), CALL],
        ),
        ("<|channel|>analysis<|message|>cut off", [Reasoning("cut off")]),
        ("<|channel|>fin", []),
        ("<|start|>assis", []),
        ("no channels at all", [Content("no channels at all")]),
        (" no channels", [Content(" no channels")]),
        (" to be", [Content(" to be")]),
        ("t", [Content("t")]),
        (" to", [Content(" to")]),
        ("to<|end|>", [Content("to")]),
        ("<|channel|>final<|message|>a<|end|>t<|return|>", [Content("at")]),
        ("to<|channel|>final<|message|>a", [Content("a")]),
        ("\n", []),
        ("<|channel|>finally<|message|>this", [Content("this")]),
        (
            "<|channel|>final <|constrain|>json<|message|>[1]<|end|>",
            [Content("[1]")],
        ),
        (
            "<|channel|>final<|message|>a<|end|><|start|>assistant<|message|>b<|return|>",
            [Content("ab")],
        ),
        ("<|channel|>final<|message|>a<|start|>assistant<|message|>b", [Content("ab")]),
        (
            "<|channel|>commentary to=assistant<|channel|>analysis<|message|>hm",
            [Reasoning("hm")],
        ),
    ],
)
def test_messages(text: str, expected: list[AnswerEvent]) -> None:
    assert parsed(AnswerFormat.HARMONY, [text]) == expected
    assert parsed(AnswerFormat.HARMONY, list(text)) == expected


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.now<|message|>",
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.now code<|message|>",
        "<|channel|>analysis to=functions.now<|message|>",
        "<|channel|>commentary to=now<|message|>",
        " to=functions.now<|channel|>commentary<|message|>",
        " to=functions.now <|message|>",
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>",
    ],
)
@pytest.mark.parametrize("end", ["<|call|>", "<|end|>", ""])
def test_calls(header: str, end: str) -> None:
    text = header + '{"a": 1}' + end
    for pieces in ([text], list(text)):
        assert parsed(AnswerFormat.HARMONY, pieces) == [CALL]


@pytest.mark.parametrize(
    "text",
    [
        TO_NOW + '{"a": 1',
        TO_NOW + "[]<|call|>",
        TO_NOW,
        TO_NOW.removesuffix("<|message|>"),
        " to=functions.now",
        "<|channel|>commentary to=functions.unknown<|message|>{}<|call|>",
        "<|start|>assistant to=python<|channel|>commentary<|message|>1 + 1<|call|>",
        "<|channel|>commentary to=now<|end|>",
        "<|start|>somebody else<|end|>",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    for pieces in ([text], list(text)):
        assert parsed(AnswerFormat.HARMONY, pieces) == [Content(text)]


def test_several_calls_and_text_after_them() -> None:
    start = "<|start|>assistant"
    text = start.join([TO_NOW + '{"a":1}<|call|>\n'] * 3) + start + "<|channel|>final<|message|>Hi"
    assert parsed(AnswerFormat.HARMONY, list(text)) == [CALL, CALL, CALL, Content("Hi")]


def test_an_answer_that_begins_within_reasoning() -> None:
    text = "hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    found = parsed(AnswerFormat.HARMONY, list(text), starts_in_reasoning=True)
    assert found == [Reasoning("hm"), Content("Hi")]
