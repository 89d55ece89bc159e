"""The doors over a small model: they give the same text, have their own errors, and bear any
body."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_adapters.text.answers import AnswerEvent, Content, Reasoning, ToolCall
from dflash_protocol.errors import DaemonUnavailable
from dflash_runtime.engine.answer_text import Delta
from dflash_runtime.engine.engine import Engine, GenerationStats
from dflash_runtime.serving.access import ApiKeys
from dflash_runtime.serving.answers import Answer
from dflash_runtime.serving.doors.anthropic_answers import MessagesAnswer
from dflash_runtime.serving.doors.anthropic_bodies import CountBody, MessagesBody
from dflash_runtime.serving.doors.responses_answers import ResponsesAnswer
from dflash_runtime.serving.doors.responses_bodies import ResponsesBody
from dflash_runtime.serving.doors.responses_store import ResponseStore
from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.requests import parse_body
from dflash_runtime.serving.tools import thinking_variables
from dflash_runtime.serving.wire import JSON_LINES
from dflash_runtime.serving.worker import Finished

Serve = Callable[..., AbstractAsyncContextManager[Any]]
KEY = "a-key-of-32-characters-or-so-----"
OTHER = "another-key-of-32-characters-----"
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 24},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 24},
    "/v1/responses": {"input": "hello", "max_output_tokens": 24},
}


def text_of(path: str, answer: dict[str, Any]) -> str:
    match path:
        case "/v1/messages":
            return "".join(block["text"] for block in answer["content"])
        case "/v1/responses":
            parts = [part for item in answer["output"] for part in item["content"]]
            return "".join(part["text"] for part in parts)
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.asyncio
async def test_the_text_is_the_same_whatever_endpoint_was_asked(serve: Serve) -> None:
    options: dict[str, Any] = {"seed": 7, "temperature": 1.5, "top_k": 50, "ignore_eos": True}
    async with serve() as served:
        texts = {}
        for path, body in BODIES.items():
            answer = await served.post(path, **body, **options)
            texts[path] = text_of(path, answer.raise_for_status().json())
        assert len(set(texts.values())) == 1, texts
        assert len(texts["/v1/messages"]) > 5


@pytest.mark.asyncio
async def test_each_door_has_its_own_errors(serve: Serve) -> None:
    async with serve(keys=ApiKeys([KEY.encode()])) as served:
        for path, body in BODIES.items():
            for headers, kind in (({}, "authentication_error"), ({"x-api-key": KEY}, None)):
                body = {**body, "n": 3}
                answer = await served.client.post(path, json=body, headers=headers)
                found = answer.json()
                if path == "/v1/messages":
                    assert set(found) == {"type", "error"}
                    assert found["type"] == "error"
                    assert found["error"]["type"] == (kind or "invalid_request_error")
                else:
                    assert set(found) == {"error"}
                assert answer.status_code == (400 if headers else 401)
                assert found["error"]["param"] == ("n" if headers else None)
        answer = await served.client.get("/v1/messages", headers={"x-api-key": KEY})
        assert (answer.status_code, answer.json()["type"]) == (405, "error")
        for headers in ({"x-api-key": KEY}, {"authorization": f"bearer {KEY}", "x-api-key": "no"}):
            assert (await served.client.get("/v1/models", headers=headers)).status_code == 200
        wrong = {"authorization": "Bearer no", "x-api-key": KEY}
        assert (await served.client.get("/v1/models", headers=wrong)).status_code == 401
        assert (await served.client.get("/v1/health")).json() == {"status": "ok"}
        answer = await served.client.post("/v1/embeddings", headers={"x-api-key": KEY})
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_implemented")


@pytest.mark.asyncio
async def test_a_response_is_known_to_its_key_alone(serve: Serve) -> None:
    async with serve(keys=ApiKeys([KEY.encode(), OTHER.encode()])) as served:

        async def ask(key: str, **more: Any) -> Any:
            body = {"input": "hello", "max_output_tokens": 2, **more}
            headers = {"x-api-key": key}
            return await served.client.post("/v1/responses", json=body, headers=headers)

        name = (await ask(KEY)).json()["id"]
        for key, status in ((OTHER, 404), (KEY, 200)):
            headers = {"x-api-key": key}
            found = await served.client.get(f"/v1/responses/{name}", headers=headers)
            assert found.status_code == status
            again = await ask(key, previous_response_id=name)
            assert again.status_code == (200 if key == KEY else 400)
            listed = await served.client.get(f"/v1/responses/{name}/input_items", headers=headers)
            assert listed.status_code == status
            found = await served.client.delete(f"/v1/responses/{name}", headers=headers)
            assert found.status_code == status


@pytest.mark.asyncio
async def test_what_a_response_has_read_is_listed(serve: Serve) -> None:
    async with serve() as served:
        said: dict[str, Any] = {"choice": ["hi"], "max_output_tokens": 5}
        first = await served.post("/v1/responses", input="hello", **said)
        said["previous_response_id"] = first.json()["id"]
        question = [{"role": "user", "content": "?"}]
        second = await served.post("/v1/responses", input=question, **said)
        path = f"/v1/responses/{second.json()['id']}/input_items"
        listed = (await served.client.get(path, params={"order": "asc"})).json()
        assert [each["content"][0]["text"] for each in listed["data"][::2]] == ["hello", "?"]
        assert listed["data"][1]["id"] == first.json()["output"][0]["id"]
        assert (await served.client.get(path, params={"limit": 0})).status_code == 400
        gone = await served.client.get("/v1/responses/resp_1/input_items")
        assert gone.status_code == 404
        refused = await served.post("/v1/responses", input="hello", background=True)
        assert refused.json()["error"]["param"] == "background"


@pytest.mark.asyncio
async def test_texts_of_a_response_have_log_probabilities(serve: Serve) -> None:
    text = "<think>\nhm\n</think>\n\nyes, é"
    asked: dict[str, Any] = {"input": "hello", "choice": [text], "top_logprobs": 2}
    async with serve() as served:
        for body in (asked, {**asked, "choice": [text + " and no more"]}):
            whole = (await served.post("/v1/responses", **body)).json()
            [reasoning, message] = whole["output"]
            assert "logprobs" not in reasoning["content"][0]
            [part] = message["content"]
            written = b"".join(bytes(each["bytes"]) for each in part["logprobs"])
            assert written.decode().strip() == part["text"].strip()
            assert part["text"].startswith("yes")
            assert {len(each["top_logprobs"]) for each in part["logprobs"]} == {2}
            stream = await served.post("/v1/responses", **body, stream=True)
            events = [
                json.loads(line.removeprefix("data: "))
                for line in stream.text.splitlines()
                if line.startswith("data: ")
            ]
            last = events[-1]["response"]
            assert without_ids(last["output"]) == without_ids(whole["output"])
            deltas = [each for each in events if each["type"] == "response.output_text.delta"]
            assert [each for delta in deltas for each in delta["logprobs"]] == part["logprobs"]
        greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        body = {"input": "hello", "max_output_tokens": 3, **greedy}
        body["include"] = ["message.output_text.logprobs"]
        answer = await served.post("/v1/responses", **body)
        [message] = answer.json()["output"]
        found = message["content"][0]["logprobs"]
        assert [each["top_logprobs"] for each in found] == [[]] * 3
        messages = [{"role": "user", "content": "hello"}]
        chat = {"messages": messages, "max_tokens": 3, "logprobs": True, **greedy}
        same = (await served.post("/v1/chat/completions", **chat)).json()["choices"][0]
        assert same["logprobs"]["content"] == found
        path = f"/v1/responses/{answer.json()['id']}"
        kept = (await served.client.get(path)).json()
        assert kept == answer.json()
        del body["include"]
        plain = await served.post("/v1/responses", **body)
        assert plain.json()["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.asyncio
async def test_of_a_response_whose_client_leaves_nothing_is_kept(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[ResponseStore] = []
    begin = ResponseStore.__init__

    def noted(store: ResponseStore, most_bytes: int) -> None:
        begin(store, most_bytes)
        stores.append(store)

    monkeypatch.setattr(ResponseStore, "__init__", noted)
    async with serve() as served:
        body = {"input": "hello", "ignore_eos": True}
        asked = asyncio.create_task(served.post("/v1/responses", **body))
        while served.state.worker.running is None:
            await asyncio.sleep(0.005)
        asked.cancel()
        while served.state.worker.running is not None:
            await asyncio.sleep(0.005)
        [store] = stores
        assert (len(store), store.num_bytes) == (0, 0)
        await served.post("/v1/responses", input="hello", max_output_tokens=1)
        assert len(store) == 1


@pytest.mark.asyncio
async def test_a_conversation_by_id_has_no_end_of_its_own(serve: Serve) -> None:
    """It grows until it fits the context no more, and says so by the field's name."""
    async with serve() as served:
        name = None
        for _ in range(20):
            body = {"input": "x" * 60, "max_output_tokens": 2, "previous_response_id": name}
            answer = await served.post("/v1/responses", **body)
            if answer.status_code != 200:
                break
            name = answer.json()["id"]
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "input")
        assert error["code"] == "context_length_exceeded"


@pytest.mark.asyncio
async def test_a_conversation_by_id_has_no_more_values_than_a_body(serve: Serve) -> None:
    """Else a small request would have much to be parsed, while all others wait."""
    parts = [{"type": "input_text", "text": ""}] * 20_000
    message = {"role": "user", "content": [{"type": "input_text", "text": "x"}, *parts]}
    async with serve() as served:
        name, statuses = None, []
        for _ in range(3):
            body = {"input": [message], "max_output_tokens": 1, "previous_response_id": name}
            answer = await served.post("/v1/responses", **body)
            statuses.append(answer.status_code)
            name = answer.json().get("id")
        assert statuses == [200, 200, 413]
        assert answer.json()["error"]["param"] == "previous_response_id"


EVENTS = st.lists(
    st.one_of(
        st.builds(Content, st.text(min_size=1, max_size=3)),
        st.builds(Reasoning, st.text(min_size=1, max_size=3)),
        st.builds(ToolCall, st.sampled_from(["add", "weather"]), st.just('{"a": 1}')),
    ),
    max_size=6,
)
ENDS = st.sampled_from(
    [Finished(*each) for each in (("stop", GenerationStats()), ("length", GenerationStats()))]
    + [Finished("stop", GenerationStats(), "END")]
)


def pieces(events: list[AnswerEvent]) -> Iterator[Sequence[AnswerEvent]]:
    """Texts one character at a time."""
    for event in events:
        if isinstance(event, ToolCall):
            yield [event]
        else:
            yield from ([type(event)(character)] for character in event.text)


def streamed(answer: Answer, events: list[AnswerEvent], end: Finished) -> list[dict[str, Any]]:
    chunks = answer.first_chunks(5)
    for piece in pieces(events):
        chunks += answer.next_chunks(Delta(tuple(piece)))
    return [*chunks, *answer.last_chunks(end)]


@given(EVENTS, ENDS)
def test_blocks_of_a_message_are_the_same_in_a_stream(
    events: list[AnswerEvent], end: Finished
) -> None:
    whole = MessagesAnswer("m").whole([Delta(tuple(events))], end)
    started, _, *chunks, delta, stopped = streamed(MessagesAnswer("m"), events, end)
    assert (started["type"], stopped["type"]) == ("message_start", "message_stop")
    content: list[dict[str, Any]] = []
    is_open = False
    for chunk in chunks:
        assert chunk["index"] == len(content) - is_open
        match chunk["type"], chunk.get("delta", {}).get("type"):
            case "content_block_start", _:
                assert not is_open
                content.append({**chunk["content_block"]})
                is_open = True
            case "content_block_stop", _:
                is_open = False
            case _, "text_delta":
                content[-1]["text"] += chunk["delta"]["text"]
            case _, "thinking_delta":
                content[-1]["thinking"] += chunk["delta"]["thinking"]
            case _, "input_json_delta":
                content[-1]["input"] = json.loads(chunk["delta"]["partial_json"])
    assert not is_open
    assert without_ids(content) == without_ids(whole["content"])
    assert delta["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    has_calls = any(isinstance(event, ToolCall) for event in events)
    expected = "max_tokens" if end.finish_reason == "length" else "end_turn"
    if end.finish_reason == "stop" and (end.stop or has_calls):
        expected = "tool_use" if has_calls else "stop_sequence"
    assert whole["stop_reason"] == expected


@given(EVENTS, ENDS)
def test_items_of_a_response_are_the_same_in_a_stream(
    events: list[AnswerEvent], end: Finished
) -> None:
    kept: list[dict[str, Any]] = []
    answers = [ResponsesAnswer("m", echo={}, keep=kept.append) for _ in range(2)]
    whole = answers[0].whole([Delta(tuple(events))], end)
    chunks = streamed(answers[1], events, end)
    assert [chunk["sequence_number"] for chunk in chunks] == list(range(len(chunks)))
    last = chunks[-1]["response"]
    assert without_ids(last["output"]) == without_ids(whole["output"])
    assert kept == [whole, last]
    done = [each["item"] for each in chunks if each["type"] == "response.output_item.done"]
    assert done == last["output"]
    for index, item in enumerate(done):
        own = [chunk for chunk in chunks if chunk.get("output_index") == index]
        ids = {chunk.get("item_id") or chunk["item"]["id"] for chunk in own}
        assert ids == {item["id"]}
        text = "".join(chunk["delta"] for chunk in own if chunk["type"].endswith(".delta"))
        assert text == (item.get("arguments") or item["content"][0]["text"])


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in items
    ]


# Names of fields and types of both interfaces, in places where they do not belong.
NAMES = st.sampled_from(
    [
        "messages", "input", "role", "content", "type", "text", "thinking", "tool_use",
        "tool_result", "input_text", "output_text", "function_call", "function_call_output",
        "reasoning", "call_id", "arguments", "output", "name", "id", "user", "assistant",
        "system", "tools", "tool_choice", "input_schema", "parameters", "function", "custom",
        "any", "auto", "max_tokens", "max_output_tokens", "stop_sequences",
        "previous_response_id", "metadata", "format", "json_schema", "schema", "output_config",
        "effort", "budget_tokens", "enabled", "image", "summary", "item_reference", "is_error",
    ]
)  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | NAMES
    | st.text(max_size=3),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(NAMES, each, max_size=5),
    max_leaves=14,
)
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {"type": NAMES},
        optional={"text": st.text(max_size=3), "name": NAMES, "id": NAMES, "input": VALUES},
    ),
    max_size=3,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "system", "tool"]),
            "content": VALUES | BLOCKS,
            "type": NAMES,
            "output": VALUES | BLOCKS,
            "call_id": NAMES,
            "arguments": st.text(max_size=4),
            "name": NAMES,
        },
    ),
    max_size=3,
)
HOSTILE = st.dictionaries(NAMES, VALUES, max_size=5) | st.fixed_dictionaries(
    {"messages": TURNS, "input": TURNS, "max_tokens": st.just(5)},
    optional={"tools": VALUES, "tool_choice": VALUES, "metadata": VALUES, "thinking": VALUES},
)


def refusal_of(
    kind: type[CountBody] | type[ResponsesBody], body: dict[str, Any]
) -> ApiError | None:
    try:
        parsed = parse_body(kind, json.dumps(body).encode())
        if isinstance(parsed, ResponsesBody):
            parsed.echo()
            parsed.chat([])
        else:
            parsed.chat("enable_thinking tools reasoning_effort")
    except ApiError as error:
        return error
    return None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(HOSTILE)
def test_any_body_is_a_chat_or_a_refusal(body: dict[str, Any]) -> None:
    for kind in (MessagesBody, CountBody, ResponsesBody):
        own = {**body}
        own.pop("messages" if kind is ResponsesBody else "input", None)
        error = refusal_of(kind, own)
        if error is not None:
            assert error.status == 400
            assert error.param is None or len(error.param) <= 100
            assert len(str(error).splitlines()) <= 1


@pytest.mark.asyncio
async def test_a_deep_or_wide_body_is_refused(serve: Serve) -> None:
    deep = "[" * 5000 + "]" * 5000
    wide = "[" + ",".join(["{}"] * 70_000) + "]"
    async with serve() as served:
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses"):
            field = "input" if path == "/v1/responses" else "messages"
            for text in (deep, wide, "NaN", '"' + "\\ud800" + '"', "{"):
                content = f'{{"{field}": {text}, "max_tokens": 5}}'
                answer = await served.client.post(path, content=content)
                assert answer.status_code == 400, (path, text[:20])
        assert (await served.post("/v1/messages", **BODIES["/v1/messages"])).status_code == 200


@pytest.mark.parametrize(
    ("template", "thinks", "expected"),
    [
        ("{% if enable_thinking %}", True, {"enable_thinking": True}),
        ("{% if not thinking %}</think>", False, {"thinking": False}),
        ("<think>", True, {}),
        ("{{ reasoning_effort }}", True, {}),
        ("no thinking here", False, {}),
        ("<think>", False, None),
        ("", True, None),
    ],
)
def test_thinking_is_turned_on_and_off_or_refused(
    template: str, thinks: bool, expected: dict[str, bool] | None
) -> None:
    if expected is not None:
        assert thinking_variables(template, thinks=thinks, field="thinking") == expected
        return
    with pytest.raises(ApiError) as caught:
        thinking_variables(template, thinks=thinks, field="thinking")
    assert caught.value.param == "thinking"


@pytest.mark.asyncio
async def test_a_failure_within_a_stream_has_the_doors_form(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Engine.generate

    def failing(*arguments: Any, **options: Any) -> Any:
        tokens = generate(*arguments, **options)
        for _ in range(3):
            yield next(tokens)
        tokens.close()
        time.sleep(0.2)
        raise DaemonUnavailable("cpu0 is gone")

    monkeypatch.setattr(Engine, "generate", failing)
    async with serve() as served:
        lasts = {}
        for path, body in BODIES.items():
            answer = await served.post(path, **body, stream=True, ignore_eos=True)
            assert answer.status_code == 200
            data = [line for line in answer.text.splitlines() if line.startswith("data: ")]
            lasts[path] = json.loads(data[-1].removeprefix("data: "))
        assert lasts["/v1/chat/completions"]["error"]["code"] == "model_unavailable"
        assert lasts["/v1/messages"]["error"]["type"] == "overloaded_error"
        assert lasts["/v1/messages"]["type"] == "error"
        failed = lasts["/v1/responses"]
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"]["code"] == "model_unavailable"
        name = failed["response"]["id"]
        assert (await served.client.get(f"/v1/responses/{name}")).status_code == 404


@pytest.mark.asyncio
@pytest.mark.usefixtures("slow_generation")
async def test_a_stream_of_messages_that_waits_pings(serve: Serve) -> None:
    async with serve() as served:
        answer = await served.post("/v1/messages", **BODIES["/v1/messages"], stream=True)
        names = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
        assert names.count("ping") > 1
        assert names[-1] == "message_stop"
        assert "still here" not in answer.text


def test_space_between_json_lines_is_nothing_to_their_readers() -> None:
    data = JSON_LINES.keep_alive + JSON_LINES.bytes_of([{"a": "é\n"}, {}]) + JSON_LINES.keep_alive
    data += JSON_LINES.bytes_of([{"done": True}])
    assert [json.loads(line) for line in data.splitlines()] == [{"a": "é\n"}, {}, {"done": True}]
