"""Answers of all families: reasoning, content and calls, and what only looks like a call."""

from __future__ import annotations

import time

import pytest

from dflash_adapters.text.answers import (
    AnswerEvent,
    AnswerFormat,
    Content,
    Reasoning,
    ToolCall,
    answer_parser,
    shown_markers,
)
from support.answer_families import (
    FAMILIES,
    LOOK,
    NOW,
    SIZE,
    TOOLS,
    Call,
    Family,
    parsed,
)

THOUGHT, SAID = Reasoning("I'm\nthinking, <b>"), Content("Hello, [world]!\n\n{So}?")
all_families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
thinking_families = pytest.mark.parametrize(
    "family", [each for each in FAMILIES if each.has_reasoning], ids=lambda family: family.name
)


@all_families
def test_content_only(family: Family) -> None:
    assert parsed(family.kind, [family.answer([SAID])]) == [SAID]
    assert parsed(family.kind, [SAID.text]) == [SAID]
    assert parsed(family.kind, []) == []


@thinking_families
def test_reasoning_then_content(family: Family) -> None:
    text = family.answer([THOUGHT, SAID])
    assert parsed(family.kind, [text]) == [THOUGHT, SAID]
    assert parsed(family.kind, [text], {}) == [THOUGHT, SAID]
    rest = text.removeprefix(family.think[0])
    assert parsed(family.kind, [rest], starts_in_reasoning=True) == [THOUGHT, SAID]


@all_families
@pytest.mark.parametrize("call", [SIZE, LOOK, NOW], ids=lambda call: call[0])
def test_one_call(family: Family, call: Call) -> None:
    assert parsed(family.kind, [family.calls([call])]) == family.expected([call])


@all_families
def test_several_calls(family: Family) -> None:
    calls = [SIZE, NOW, LOOK, NOW]
    assert parsed(family.kind, [family.calls(calls)]) == family.expected(calls)


@thinking_families
def test_a_call_after_reasoning(family: Family) -> None:
    text = family.answer([THOUGHT, [SIZE]])
    assert parsed(family.kind, [text]) == [THOUGHT, *family.expected([SIZE])]


@all_families
def test_text_before_and_after_calls(family: Family) -> None:
    before, after, calls = Content("Let me look."), Content("Done."), [LOOK, SIZE]
    if family.kind is AnswerFormat.HARMONY:
        text = family.answer([before, calls, after])
    else:
        text = f"{before.text}\n\n{family.calls(calls)}\n {after.text}"
    assert parsed(family.kind, [text]) == [before, *family.expected(calls), after]


@all_families
def test_a_broken_call_is_content(family: Family) -> None:
    assert parsed(family.kind, [family.broken]) == [Content(family.broken)]
    between = family.answer([[SIZE]]) + family.broken + family.answer([[LOOK]])
    assert parsed(family.kind, [between]) == [
        *family.expected([SIZE]),
        Content(family.broken),
        *family.expected([LOOK]),
    ]


@all_families
def test_a_cut_call_is_content(family: Family) -> None:
    text = family.calls([SIZE])
    for length in range(text.index("size") + 1, text.index("2.5") + 1):
        cut = text[:length]
        assert parsed(family.kind, [cut]) == [Content(cut.lstrip())]
        assert parsed(family.kind, list(cut)) == [Content(cut.lstrip())]


@all_families
def test_a_call_of_an_unknown_tool_is_content(family: Family) -> None:
    text = family.calls([("unknown", {"of": "x"})]).strip()
    assert parsed(family.kind, [text]) == [Content(text)]
    assert parsed(family.kind, list(text)) == [Content(text)]


@all_families
def test_without_tools_nothing_is_a_call(family: Family) -> None:
    text = family.calls([SIZE, NOW]).strip()
    assert parsed(family.kind, [text], {}) == [Content(text)]


@thinking_families
def test_reasoning_that_never_ends(family: Family) -> None:
    text = family.think[0] + THOUGHT.text
    assert parsed(family.kind, [text]) == [THOUGHT]
    assert parsed(family.kind, [THOUGHT.text], starts_in_reasoning=True) == [THOUGHT]
    assert parsed(family.kind, list(text)) == [THOUGHT]
    assert parsed(family.kind, [family.think[0]]) == []


@thinking_families
def test_what_is_certain_is_emitted_at_once(family: Family) -> None:
    parser = answer_parser(family.kind, tools=TOOLS)
    text = family.think[0] + "one"
    assert [event for piece in text for event in parser.push(piece)][-1] == Reasoning("e")
    assert parser.push(" two") == [Reasoning(" two")]
    end = family.think[1].strip()
    held = parser.push(end[:-1])
    assert held == []
    assert parser.push(end[-1] + family.content[0] + "Hel") == [Content("Hel")]
    assert parser.push("lo, ") in ([Content("lo, ")], [Content("lo,")])
    calls = family.content[1] + family.answer([[SIZE, NOW]])
    found = [event for piece in calls for event in parser.push(piece)]
    ends = parser.finish() if family.kind is AnswerFormat.HARMONY else []
    assert [each for each in [*found, *ends] if isinstance(each, ToolCall)] == family.expected(
        [SIZE, NOW]
    )


@all_families
def test_shown_markers_are_those_in_the_text(family: Family) -> None:
    markers = shown_markers(family.kind)
    text = family.answer([THOUGHT, SAID, [SIZE, NOW]])
    assert markers
    assert all(marker for marker in markers)
    used = [marker for marker in markers if marker in text]
    assert len(used) >= (3 if family.has_reasoning else 1)


LONG = 'x\n"y <b> {' * 100_000  # 1 MB


def assert_linear(kind: AnswerFormat, text: str, size: int) -> list[AnswerEvent]:
    parser = answer_parser(kind, tools=TOOLS)
    began = time.process_time()
    events = [
        event for at in range(0, len(text), size) for event in parser.push(text[at : at + size])
    ] + parser.finish()
    assert time.process_time() - began < 2
    return events


@all_families
def test_the_time_is_linear(family: Family) -> None:
    # Of the ways to find the end of a call, two with a large text in small pieces.
    is_large = family.name in ("hermes", "harmony")
    calls: list[Call] = [("size", {"of": LONG if is_large else LONG[:250_000]})]
    found = assert_linear(family.kind, family.calls(calls), 4 if is_large else 16)
    assert found == family.expected(calls)


@pytest.mark.parametrize("opening", ["", "<think>"])
def test_the_time_is_linear_for_text(opening: str) -> None:
    assert len(assert_linear(AnswerFormat.HERMES, opening + LONG[:200_000], 4)) > 40_000


@pytest.mark.wide(1)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (AnswerFormat.PLAIN, " "),
        (AnswerFormat.HERMES, '<tool_call>{"'),
        (AnswerFormat.HERMES, '<tool_call>{"a</tool_call>'),
        (AnswerFormat.HERMES, "<think>"),
        (AnswerFormat.QWEN3_CODER, "<tool_call><function=now><parameter=a>"),
        (AnswerFormat.GLM, "<tool_call>now<arg_key>a</arg_key><arg_value>"),
        (AnswerFormat.LLAMA4, "[now("),
        (AnswerFormat.LLAMA4, "["),
        (AnswerFormat.MISTRAL, "[TOOL_CALLS]now[ARGS]{"),
        (AnswerFormat.HARMONY, "<|start|>"),
        (AnswerFormat.HARMONY, "<|start|> to=now" + " " * 100),
        (AnswerFormat.GEMMA4, '<|tool_call>call:now{<|"|>'),
    ],
)
@pytest.mark.parametrize("size", [64, 1 << 20])
def test_the_time_is_linear_for_hostile_texts(kind: AnswerFormat, text: str, size: int) -> None:
    for opening in ("", "<think>"):
        assert_linear(kind, opening + text * (50_000 // len(text)), size)
