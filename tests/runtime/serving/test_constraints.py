"""What answers have to follow: the fields that say so, and answers that do."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from dflash_adapters.text.grammar import MOST_GRAMMAR_BYTES, GrammarKind, GrammarSource
from dflash_runtime.serving.constraints import constraint_of
from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.requests import ChatBody, CompletionBody, parse_body

Serve = Callable[..., AbstractAsyncContextManager[Any]]
SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"enum": [1]}}}
TEXT = json.dumps(SCHEMA)
MESSAGES = [{"role": "user", "content": "hello"}]


def parsed(fields: dict[str, Any], kind: str = "chat") -> ChatBody | CompletionBody:
    if kind == "chat":
        return parse_body(ChatBody, json.dumps({"messages": MESSAGES, **fields}).encode())
    return parse_body(CompletionBody, json.dumps({"prompt": "hello", **fields}).encode())


JSON, REGEX, GBNF, CHOICE = (
    GrammarKind.JSON_SCHEMA,
    GrammarKind.REGEX,
    GrammarKind.GBNF,
    GrammarKind.CHOICE,
)
ANY_OBJECT = '{"type":"object"}'


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarSource(JSON, ANY_OBJECT)),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            GrammarSource(JSON, TEXT),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            GrammarSource(JSON, TEXT),
        ),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            GrammarSource(JSON, TEXT),
        ),
        ({"json_schema": SCHEMA}, GrammarSource(JSON, TEXT)),
        ({"grammar": 'root ::= "a"'}, GrammarSource(GBNF, 'root ::= "a"')),
        ({"regex": "a+"}, GrammarSource(REGEX, "a+")),
        ({"choice": ["a", "ü"]}, GrammarSource(CHOICE, '["a", "ü"]')),
        ({"guided_json": SCHEMA}, GrammarSource(JSON, TEXT)),
        ({"guided_json": TEXT}, GrammarSource(JSON, TEXT)),
        (
            {"guided_json": TEXT, "guided_whitespace_pattern": " ?"},
            GrammarSource(JSON, TEXT, " ?"),
        ),
        ({"guided_regex": "a+"}, GrammarSource(REGEX, "a+")),
        ({"guided_choice": ["a"]}, GrammarSource(CHOICE, '["a"]')),
        ({"guided_grammar": "start: A"}, GrammarSource(GBNF, "start: A")),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarSource(JSON, TEXT)),
        (
            {"structured_outputs": {"json": TEXT, "disable_any_whitespace": True}},
            GrammarSource(JSON, TEXT, ""),
        ),
        ({"structured_outputs": {"json_object": True}}, GrammarSource(JSON, '{"type": "object"}')),
        ({"structured_outputs": {"regex": "a"}}, GrammarSource(REGEX, "a")),
        ({"structured_outputs": {"choice": ["a"]}}, GrammarSource(CHOICE, '["a"]')),
        ({"structured_outputs": {"grammar": "start: A"}}, GrammarSource(GBNF, "start: A")),
    ],
    ids=repr,
)
def test_a_field_says_what_the_answer_follows(
    fields: dict[str, Any], source: GrammarSource, kind: str
) -> None:
    assert constraint_of(parsed(fields, kind)) == (next(iter(fields)), source)


def test_what_says_nothing_leaves_the_answer_free() -> None:
    for fields in (
        {},
        {"response_format": {"type": "text"}},
        {"grammar": ""},
        {"guided_json": None, "response_format": None},
        {"grammar_lazy": False},
    ):
        assert constraint_of(parsed(fields)) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_object", "more": 1}}, "response_format"),
        ({"json_schema": SCHEMA, "regex": "a"}, "regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "other": 1}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_whitespace_pattern": " ?", "guided_regex": "a"}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
        ({"choice": ["a"] * 5000}, "choice"),
        ({"grammar": 5}, "grammar"),
        ({"grammar": "root ::= x", "grammar_lazy": True}, "grammar_lazy"),
        ({"structural_tag": {}}, "structural_tag"),
    ],
    ids=repr,
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        constraint_of(parsed(fields))
    assert (caught.value.status, caught.value.body["error"]["param"]) == (400, param)


PAIR = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 4}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.asyncio
async def test_answers_follow_their_schema_whole_and_as_streams(serve: Serve) -> None:
    async with serve() as served:
        for path, asked in (
            ("/v1/completions", {"prompt": "hello"}),
            ("/v1/chat/completions", {"messages": MESSAGES}),
        ):
            body = {**asked, "seed": 1, "max_tokens": 60, "guided_json": PAIR}
            whole = (await served.post(path, **body)).json()["choices"][0]
            text = whole["text"] if "text" in whole else whole["message"]["content"]
            pair = json.loads(text)
            assert len(pair["a"]) <= 4
            assert pair["b"] in (True, False)
            assert whole["finish_reason"] == "stop"
            streamed = await served.post(path, **body, stream=True)
            choices = [
                json.loads(line.removeprefix("data: "))["choices"][0]
                for line in streamed.text.split("\n\n")
                if line.startswith("data: {")
            ]
            parts = [each.get("text") or each.get("delta", {}).get("content") for each in choices]
            assert "".join(filter(None, parts)) == text
            assert choices[-1]["finish_reason"] == "stop"
            body["max_tokens"] = 3
            cut = (await served.post(path, **body)).json()["choices"][0]
            assert cut["finish_reason"] == "length"


@pytest.mark.asyncio
async def test_what_cannot_be_followed_is_refused_and_the_next_one_is_served(serve: Serve) -> None:
    async with serve() as served:
        for field, value in (
            ("json_schema", {"type": "strin"}),
            ("json_schema", {"$ref": "http://127.0.0.1:1/x"}),
            ("guided_json", {"not": {}}),
            ("guided_regex", "(a"),
            ("regex", "a" * (MOST_GRAMMAR_BYTES + 1)),
            ("grammar", "root ::= ("),
        ):
            answer = await served.post("/v1/completions", prompt="hello", **{field: value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field)
            assert error["message"].startswith(f"{field}: ")
            assert "\n" not in error["message"]
        good = await served.post("/v1/completions", prompt="hello", choice=["yes"])
        assert good.json()["choices"][0]["text"] == "yes"
