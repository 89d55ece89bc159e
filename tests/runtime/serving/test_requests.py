"""Bodies are taken field by field; what is wrong, or cannot be done, is named."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import SettingsError
from dflash_runtime.engine.penalties import Penalties
from dflash_runtime.serving.errors import ApiError, api_error
from dflash_runtime.serving.json_values import has_more_values
from dflash_runtime.serving.requests import (
    IGNORED,
    NEUTRAL,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from support.imported_later import openai

MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"prompt": "x", **fields}).encode())


def chat(**fields: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"messages": MESSAGES, **fields}).encode())


def test_the_defaults_are_openais() -> None:
    options = completion().sampling()
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (1.0, 1.0, 0, 0.0)
    assert (completion().most_tokens, chat().most_tokens) == (16, None)
    assert chat(max_tokens=5, max_completion_tokens=7).most_tokens == 7
    assert completion(stop="a").stops == ("a",)
    assert completion(stop=["a", "b"]).stops == ("a", "b")
    assert completion(seed=-1).sampling().seed == (1 << 63) - 1
    assert completion(top_k=-1).sampling().top_k == 0


def test_null_is_the_default() -> None:
    names = ("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "max_tokens",
             "stream", "n", "logit_bias", "stream_options", "presence_penalty",
             "logprobs")  # fmt: skip
    assert completion(**dict.fromkeys(names)).sampling() == completion().sampling()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("x", "x"), ([1, 2], [1, 2]), (["x"], "x"), ([[1, 2]], [1, 2])],
)
def test_a_prompt_is_text_or_tokens(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).one_prompt == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1 << 31]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stream": 1}, "stream"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
    ids=repr,
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        _ = completion(**fields).one_prompt
    assert caught.value.status == 400
    error = caught.value.body["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert str(error["message"]).startswith(f"{param}: ")
    assert "\n" not in str(error["message"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
    ],
    ids=repr,
)
def test_what_is_wrong_with_a_chat_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.body["error"]["param"] == param


UNSUPPORTED: list[dict[str, Any]] = [
    # A client that sends them does not want an answer without them.
    {"structural_tag": {"format": {}}},
    {"grammar_lazy": True},
    {"n": 2},
    {"n": True},
    {"n_predict": 5},
    {"min_tokens": 5},
    {"mirostat": 2},
    {"xtc_probability": 0.5},
    {"top_n_sigma": 1.0},
    {"samplers": ["top_k"]},
    {"functions": [{"name": "f"}]},
    {"tool_choice": "required"},
    {"chat_template": "{{ messages }}"},
    {"add_generation_prompt": False},
    {"continue_final_message": True},
    {"cache_salt": "x"},
]


@pytest.mark.parametrize("fields", UNSUPPORTED, ids=repr)
@pytest.mark.parametrize("ask", [completion, chat])
def test_what_changes_the_answer_and_is_not_supported_is_refused(
    ask: Any, fields: dict[str, Any]
) -> None:
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    error = caught.value.body["error"]
    assert caught.value.status == 400
    assert (error["param"], error["code"]) == (*fields, "unsupported_value")
    assert ask(**dict.fromkeys(fields)).sampling() == ask().sampling()


@pytest.mark.parametrize("ask", [completion, chat])
def test_what_changes_nothing_is_passed_over(ask: Any) -> None:
    for name in IGNORED:
        ask(**{name: {"any": "thing"}})
    for name, values in NEUTRAL.items():
        for value in values:
            ask(**{name: value})
    ask(repeat_penalty=1.0, n=1, presence_penalty=0.0, response_format={"type": "text"})
    ask(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})


@pytest.mark.parametrize("ask", [completion, chat])
def test_an_unknown_field_is_refused_by_its_name(ask: Any) -> None:
    for name in ("no_such_field", "a\nb", "x" * 999):
        with pytest.raises(ApiError) as caught:
            ask(**{name: 1})
        error = caught.value.body["error"]
        assert error["code"] == "unknown_parameter"
        shown = str(error["param"])
        assert shown[0] == name[0]
        assert shown == name or (shown.isprintable() and len(shown) <= 100)
        ask(**{name: None})


def test_so_is_what_is_unknown_about_tokens() -> None:
    for body, field in (({"content": "x", "with_pieces": "yes"}, "with_pieces"),
                        ({"prompt": "x", "return_token_strs": True}, "return_token_strs"),
                        ({"content": "x", "odd": 1}, "odd")):  # fmt: skip
        with pytest.raises(ApiError) as caught:
            parse_body(TokenizeBody, json.dumps(body).encode())
        assert caught.value.body["error"]["param"] == field
    parse_body(TokenizeBody, b'{"content": "x", "with_pieces": false, "user": "me"}')
    with pytest.raises(ApiError):
        parse_body(DetokenizeBody, b'{"tokens": [1], "odd": 1}')
    for data in (b"{}", b'{"content": "x", "prompt": "x"}'):
        with pytest.raises(ApiError) as caught:
            _ = parse_body(TokenizeBody, data).text
        assert caught.value.body["error"]["param"] == "content"


def test_a_part_that_is_no_text_is_named() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ApiError) as caught:
        chat(messages=[{"role": "user", "content": parts}])
    assert "image_url" in str(caught.value.body["error"]["message"])


def test_several_prompts_are_refused_as_such() -> None:
    for prompts in (["a", "b"], [[1], [2]], ["a", [1]]):
        with pytest.raises(ApiError) as caught:
            _ = completion(prompt=prompts).one_prompt
        error = caught.value.body["error"]
        assert (error["param"], error["code"]) == ("prompt", "unsupported_value")


@pytest.mark.parametrize(
    ("kind", "resources_of"),
    [
        (CompletionBody, lambda: openai.resources.Completions),
        (ChatBody, lambda: openai.resources.chat.Completions),
    ],
)
def test_every_field_that_openais_client_sends_is_taken_refused_or_passed_over(
    kind: Any, resources_of: Callable[[], Any]
) -> None:
    of_the_client = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    sent = set(inspect.signature(resources_of().create).parameters) - of_the_client
    assert len(sent) > 15
    assert sent <= set(kind.model_fields) | IGNORED | set(NEUTRAL)
    assert not IGNORED & set(NEUTRAL)
    assert not (IGNORED | set(NEUTRAL)) & set(CompletionBody.model_fields)


@pytest.mark.parametrize(
    "fields", [{"temperature": -1}, {"temperature": 101}, {"top_p": 0}, {"top_p": 2}, {"min_p": -1}]
)
def test_sampling_out_of_range_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(fields))):
        completion(**fields).sampling()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b"5", b'"x"', b"\xff\xfe", b'{"prompt": "\\ud800"}',
     b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": Infinity}',
     b"[" * 100_000, b'{"prompt":' * 10_000],
)  # fmt: skip
def test_what_is_no_sound_json_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionBody, body)
    assert caught.value.status == 400
    assert len(str(caught.value)) <= 300


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * 70_000},
        {"prompt": ["a"] * 70_000},
        {"prompt": "x", "stop": [["a"]] * 70_000},
        {"prompt": "x", "odd": [[[1]]] * 30_000},
        {"prompt": "x", **{f"a{number}": {} for number in range(40_000)}},
    ],
    ids=["ids", "texts", "lists", "unknown", "names"],
)
def test_a_body_has_only_so_many_values(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=r"\b65536 values"):
        parse_body(CompletionBody, json.dumps(body).encode())


def test_a_text_is_one_value_whatever_is_in_it() -> None:
    text = '[{"a": 1}, \\, "\\"] ' * 50_000
    assert completion(prompt=text).prompt == text
    ids = [1] * 70_000
    data = json.dumps({"prompt": ids}).encode()
    assert parse_body(CompletionBody, data, most_values=80_000).one_prompt == ids


@given(st.recursive(st.text() | st.none() | st.integers(), lambda inner: (
    st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
), max_leaves=20))  # fmt: skip
def test_values_are_counted_as_json_has_them(value: Any) -> None:
    def num_marks(value: Any) -> int:
        """A comma between two, and a bracket around all."""
        if not isinstance(value, list | dict):
            return 0
        inner = list(value.values()) if isinstance(value, dict) else value
        return 1 + max(0, len(inner) - 1) + sum(map(num_marks, inner))

    data = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    num = num_marks(value)
    assert not has_more_values(data, num)
    assert num == 0 or has_more_values(data, num - 1)


def test_messages_keep_what_templates_may_read() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(
        messages=[
            {"role": "user", "content": parts, "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]},
        ]
    )
    assert [message.for_template() for message in body.messages] == [
        {"role": "user", "content": "ab", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]},
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = sorted(set(CompletionBody.model_fields) | set(ChatBody.model_fields))


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
def test_any_json_is_taken_or_refused(fields: dict[str, Any]) -> None:
    data = json.dumps(fields).encode()
    for kind in (CompletionBody, ChatBody):
        with contextlib.suppress(ApiError, SettingsError):
            body = parse_body(kind, data)
            assert isinstance(body.sampling().temperature, float)


@pytest.mark.parametrize("ask", [completion, chat])
@pytest.mark.parametrize(
    ("fields", "penalties"),
    [
        ({}, Penalties()),
        ({"presence_penalty": 0.5, "frequency_penalty": -1}, Penalties(0.5, -1)),
        ({"repetition_penalty": 1.1}, Penalties(repetition=1.1)),
        ({"repeat_penalty": 1.1}, Penalties(repetition=1.1, window=64)),
        ({"repeat_penalty": 1.1, "repeat_last_n": 8}, Penalties(repetition=1.1, window=8)),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, Penalties(repetition=1.1)),
        ({"repeat_last_n": 8}, Penalties()),
        ({"logit_bias": {"5": 1, "77": -100}}, Penalties(biases={5: 1, 77: -100})),
        ({"logit_bias": [[5, 1.5], [7, False]]}, Penalties(biases={5: 1.5, 7: -100})),
        ({"logit_bias": []}, Penalties()),
        ({"logit_bias": [[5, 0]]}, Penalties(biases={5: 0})),
    ],
    ids=repr,
)
def test_penalties_are_those_that_were_asked_for(
    ask: Any, fields: dict[str, Any], penalties: Penalties
) -> None:
    assert ask(**fields).penalties() == penalties


@pytest.mark.parametrize("ask", [completion, chat])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"presence_penalty": 500}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.1}, "repeat_penalty"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": [[5, True]]}, "logit_bias"),
        ({"logit_bias": [["word", 1]]}, "logit_bias"),
        ({"logit_bias": {str(each): 1 for each in range(2000)}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(17))}, "stop_token_ids"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_penalties_that_cannot_be_are_named(ask: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises((ApiError, SettingsError)) as caught:
        ask(**fields).penalties()
    error = api_error(caught.value)
    assert (error.status, error.body["error"]["param"]) == (400, param)
