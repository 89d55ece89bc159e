"""However an answer is cut into pieces, and whatever it contains: the same events, and no error."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dflash_adapters.text.answers import (
    AnswerFormat,
    Content,
    Reasoning,
    ToolCall,
    shown_markers,
)
from dflash_adapters.text.answers.formats import MARKED_FORMATS
from support.answer_families import FAMILIES, TOOLS, Call, Family, parsed

MARKERS = sorted({marker for kind in AnswerFormat for marker in shown_markers(kind)})
# What is at the edges of markers, quotations and numbers, and what JSON and Python write specially.
CHARACTERS = st.sampled_from("abn<>/|[]{}()\"'\\,:=.-+1e \n\tß世😀\u2028\x7f")
TEXTS = st.text(CHARACTERS, max_size=12)
VALUES = st.recursive(
    TEXTS | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b_1", "Cc"]), inner, max_size=2)
    ),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["x", "key_2", "Z"]), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from([*TOOLS]), ARGUMENTS), min_size=1, max_size=3)
SAID = st.text(CHARACTERS, min_size=1, max_size=20).map(str.strip).filter(bool)
CUTS = st.lists(st.integers(0, 500), max_size=20)


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in pairwise(places)]


def schema(value: Any) -> dict[str, str]:
    types = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
    return {"type": types.get(type(value), "object")}


def tools(calls: list[Call]) -> dict[str, dict[str, Any]]:
    """Tools with the types of the arguments; of a tool that is called twice, those of both."""
    found: dict[str, dict[str, Any]] = {name: {"properties": {}} for name in TOOLS}
    for name, arguments in calls:
        for key, value in arguments.items():
            types = found[name]["properties"].setdefault(key, schema(value))
            assume(types == schema(value))
    return found


def told(value: Any, *, is_inner: bool = False) -> Any:
    """A value of which MiniMax M3's elements tell the types: no texts or empty lists in others."""
    match value:
        case list():
            return [told(each, is_inner=True) for each in value] or ([0] if is_inner else [])
        case dict():
            inner = {key: told(each, is_inner=True) for key, each in value.items()}
            return inner or ({"a": 0} if is_inner else {})
        case str() if is_inner:
            return len(value)
    return value


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=12, deadline=None)
@given(st.none() | SAID, st.none() | SAID, CALLS, CUTS)
def test_generated_answers(
    family: Family, thought: str | None, said: str | None, calls: list[Call], cuts: list[int]
) -> None:
    if family.kind is AnswerFormat.MINIMAX_M3:
        calls = [(name, {k: told(v) for k, v in given.items()}) for name, given in calls]
    written = f"{thought} {said} " + json.dumps(calls, ensure_ascii=False).replace('\\"', '"')
    assume(not any(marker in written for marker in MARKERS))
    if family.kind in (AnswerFormat.LLAMA3, AnswerFormat.LLAMA4) and said is not None:
        assume(said[0] not in "[{")
    parts: list[Reasoning | Content | list[Call]] = [calls]
    if said is not None:
        parts.insert(0, Content(said))
    if thought is not None and family.has_reasoning:
        parts.insert(0, Reasoning(thought))
    text = family.answer(parts)
    expected = [*parts[:-1], *family.expected(calls)]
    offered = tools(calls)
    assert parsed(family.kind, [text], offered) == expected
    assert parsed(family.kind, pieces(text, cuts), offered) == expected
    assert parsed(family.kind, list(text), offered) == expected


def shown(text: str, kind: AnswerFormat) -> str:
    """Without space and markers around reasoning and content, which may be dropped."""
    text = "".join(text.split())
    known = MARKED_FORMATS[kind]
    for marker in (*(known.think or ()), *known.around):
        text = text.replace(marker, "")
    return text


@pytest.mark.parametrize("kind", AnswerFormat)
@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans(), CUTS)
def test_any_text(
    kind: AnswerFormat, data: st.DataObject, starts_in_reasoning: bool, cuts: list[int]
) -> None:
    family = next((each for each in FAMILIES if each.kind is kind), FAMILIES[0])
    some = [
        *shown_markers(kind),
        *('now":{}', '{"name":"now"}', "functions.now", "now", "[now()]", "[ARGS]", "call:now{}"),
        *('now">', "now>", "{}", '"', "to=", "analysis", " ", "\n", "]", "<", "x", "\\"),
        *(
            "x" * 99,
            " " * 99,
            "=a1",
            ":0",
            "[CALL_ID]",
            "<parameter=a>",
            "```json\n",
            "//",
            "(",
            ")",
        ),
        *(family.broken, family.calls([("now", {})]), family.calls([("size", {"of": "x"})])),
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(some), max_size=12)))
    whole = parsed(kind, [text], starts_in_reasoning=starts_in_reasoning)
    for cut in (pieces(text, cuts), list(text)):
        assert parsed(kind, cut, starts_in_reasoning=starts_in_reasoning) == whole
    assert all(each.name in TOOLS for each in whole if isinstance(each, ToolCall))
    if kind is not AnswerFormat.HARMONY and not any(isinstance(each, ToolCall) for each in whole):
        said = "".join(each.text for each in whole if not isinstance(each, ToolCall))
        assert shown(said, kind) == shown(text, kind)


@pytest.mark.wide(1)
@pytest.mark.parametrize("kind", AnswerFormat)
@pytest.mark.parametrize("part", ['"{', "['", "(", "<", "\\", "\ud800"])
def test_strange_texts(kind: AnswerFormat, part: str) -> None:
    family = next((each for each in FAMILIES if each.kind is kind), FAMILIES[0])
    for opening in ("", *sorted(shown_markers(kind)), family.calls([("size", {"of": "x"})])[:-9]):
        text = opening + part * 1000
        assert parsed(kind, [text]) == parsed(kind, pieces(text, [7, 12, 20, 33, 400]))


@pytest.mark.wide(1)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("brackets", ["[]", "{}", "()"])
def test_deep_values(family: Family, brackets: str) -> None:
    deep = brackets[0] * 20_000 + brackets[1] * 20_000
    text = family.calls([("size", {"n": [7]})]).strip()
    text = text.replace(
        "[7]" if "[7]" in text else "]<]minimax[>[<item>7]<]minimax[>[</item>", deep
    )
    assert deep in text
    found = parsed(family.kind, [text])
    # Where values are text, one that is no JSON stays text.
    assert found in (
        [Content(text)],
        [ToolCall("size", json.dumps({"n": deep}), family.call_ids(0, "size"))],
    )
