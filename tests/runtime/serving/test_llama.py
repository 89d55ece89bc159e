"""llama-server's endpoints, asked as its own tests ask them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_runtime.compute.reference.backend import ReferenceBackend
from dflash_runtime.serving.access import ApiKeys
from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.llama_fields import LlamaCompletionBody, default_settings
from dflash_runtime.serving.requests import parse_body
from support.examples import examples

Serve = Callable[..., AbstractAsyncContextManager[Any]]
PROMPT = "I believe the meaning of life is"
STREAM_FIELDS = {
    "index", "content", "tokens", "id_slot", "stop", "tokens_predicted", "tokens_evaluated",
}  # fmt: skip


def chunks(response: Any) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


@pytest.mark.asyncio
async def test_a_completion_has_what_llama_servers_has(serve: Serve) -> None:
    async with serve() as served:
        for path in ("/completion", "/completions"):
            body = {"n_predict": 8, "prompt": PROMPT, "return_tokens": True, "seed": 42}
            whole = (await served.post(path, **body)).json()
            assert whole["timings"]["predicted_n"] == whole["tokens_predicted"] == 8
            ids = (await served.post("/tokenize", content=PROMPT)).json()["tokens"]
            assert whole["tokens_evaluated"] == len(ids)
            assert (whole["stop"], whole["stop_type"], whole["stopping_word"]) == (
                True,
                "limit",
                "",
            )
            assert whole["truncated"] is False
            assert isinstance(whole["has_new_line"], bool)
            assert len(whole["tokens"]) == 8
            assert (whole["model"], whole["prompt"], whole["index"]) == ("small", PROMPT, 0)
            settings = whole["generation_settings"]
            assert settings == {**default_settings(), "n_predict": 8, "max_tokens": 8, "seed": 42}
            body |= {"return_tokens": False}
            again = (await served.post(path, **body)).json()
            assert (again["tokens"], again["content"]) == ([], whole["content"])
            *parts, last = chunks(await served.post(path, **body, stream=True))
            assert all({*part} == STREAM_FIELDS and not part["stop"] for part in parts)
            assert "".join(part["content"] for part in [*parts, last]) == whole["content"]
            assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
            # A token without a whole character comes with the next one.
            assert [len(part["tokens"]) for part in parts][:2] == [1, 1]
            assert parts[-1]["tokens_predicted"] == 8
            assert {*last} == {*again}
            for name in ("tokens_predicted", "stop_type", "prompt", "truncated", "has_new_line"):
                assert last[name] == again[name]


@pytest.mark.asyncio
async def test_a_prompt_of_which_nothing_is_asked_is_cached(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients send one so that its text is read before it is needed."""
    chunking = replace(ReferenceBackend.chunking, preferred=8)  # it keeps whole chunks only
    monkeypatch.setattr(ReferenceBackend, "chunking", chunking)
    body = {"prompt": PROMPT * 8, "n_predict": 0}
    async with serve() as served:
        timings = [(await served.post("/completion", **body)).json()["timings"] for _ in range(2)]
    assert timings[0]["cache_n"] == 0 < timings[1]["cache_n"]


@pytest.mark.asyncio
async def test_how_it_ended_is_said(serve: Serve) -> None:
    async with serve() as served:
        tokenizer = served.state.engine.tokenizer
        [space] = tokenizer.encode("q")
        body = {"prompt": PROMPT, "logit_bias": [[space, 100.0]], "n_predict": 50}
        word = (await served.post("/completion", **body, stop=["qqq"])).json()
        assert (word["stop_type"], word["stopping_word"], word["content"]) == ("word", "qqq", "")
        body["logit_bias"] = [[tokenizer.eos_id, 100.0]]
        ended = (await served.post("/completion", **body)).json()
        assert (ended["stop_type"], ended["tokens_predicted"]) == ("eos", 0)
        nothing = (await served.post("/completion", prompt=PROMPT, n_predict=0)).json()
        assert (nothing["content"], nothing["stop_type"]) == ("", "limit")
        full = await served.post("/completion", prompt=[65] * 509, ignore_eos=True)
        assert (full.json()["truncated"], full.json()["stop_type"]) == (True, "limit")


@pytest.mark.asyncio
async def test_probabilities_and_fields(serve: Serve) -> None:
    body = {"prompt": PROMPT, "n_probs": 10, "temperature": 0.0, "n_predict": 5}
    async with serve() as served:
        whole = (await served.post("/completion", **body, ignore_eos=True)).json()
        assert len(whole["completion_probabilities"]) == 5
        for token in whole["completion_probabilities"]:
            assert {*token} == {"id", "token", "bytes", "logprob", "top_logprobs"}
            assert len(token["top_logprobs"]) == 10
            assert token["top_logprobs"][0]["id"] == token["id"]
            assert all(each["logprob"] <= 0 for each in token["top_logprobs"])
        parts = chunks(await served.post("/completion", **body, ignore_eos=True, stream=True))
        streamed = [each for part in parts[:-1] for each in part["completion_probabilities"]]
        assert streamed == whole["completion_probabilities"]
        fields = ["content", "generation_settings/n_predict", "prompt", "no/such"]
        some = (await served.post("/completion", **body, response_fields=fields)).json()
        assert {*some} == {*fields[:3]}
        assert some["generation_settings/n_predict"] == 5


@pytest.mark.asyncio
async def test_a_grammar_and_a_schema_are_followed(serve: Serve) -> None:
    async with serve() as served:
        body = {"prompt": PROMPT, "seed": 1, "n_predict": 60}
        ruled = await served.post("/completion", **body, grammar='root ::= "yes" | "no"')
        assert ruled.json()["content"] in ("yes", "no")
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                  "additionalProperties": False}  # fmt: skip
        made = (await served.post("/completion", **body, json_schema=schema)).json()
        assert isinstance(json.loads(made["content"])["a"], bool)


@pytest.mark.asyncio
async def test_tokens_templates_and_slots(serve: Serve) -> None:
    async with serve() as served:
        text = "áβ What?"
        ids = (await served.post("/tokenize", content=text)).json()["tokens"]
        of_vllm = (await served.post("/tokenize", model="small", prompt=text,
                                     add_special_tokens=False)).json()  # fmt: skip
        num_positions = served.state.engine.num_positions
        assert of_vllm == {"tokens": ids, "count": len(ids), "max_model_len": num_positions}
        back = (await served.post("/detokenize", tokens=ids)).json()
        assert back == {"content": text, "prompt": text}
        known = (await served.client.get("/tokenizer_info")).json()
        assert known["eos_token"] == served.state.engine.tokenizer.eos_text
        pieces = (await served.post("/tokenize", content=text, with_pieces=True)).json()["tokens"]
        assert [each["id"] for each in pieces] == ids
        data = b"".join(
            each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"])
            for each in pieces
        )
        assert data.decode() == text
        by_ids = (await served.post("/completion", prompt=ids, n_predict=3, seed=1)).json()
        by_text = (await served.post("/completion", prompt=text, n_predict=3, seed=1)).json()
        assert by_ids["prompt"] == by_text["prompt"] == text
        assert by_ids["content"] == by_text["content"]
        rendered = await served.post(
            "/apply-template",
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
            ],
        )
        assert rendered.json() == {"prompt": "system: Be brief.\nuser: Hi\nassistant: "}
        [slot] = (await served.client.get("/slots")).json()
        assert (slot["id"], slot["n_ctx"], slot["is_processing"]) == (0, 512, False)
        assert (await served.client.get("/slots?fail_on_no_slot=1")).status_code == 200
        props = (await served.client.get("/props")).json()
        assert props["total_slots"] == 1
        assert props["default_generation_settings"]["n_ctx"] == 512
        assert props["default_generation_settings"]["params"]["temperature"] == 0.8
        assert props["chat_template"]
        assert props["model_path"].endswith("small.gguf")
        assert props["modalities"] == {"vision": False, "audio": False}


@pytest.mark.asyncio
async def test_probes_need_no_key_and_the_rest_does(serve: Serve) -> None:
    async with serve(keys=ApiKeys([b"a-key-of-32-characters-or-so-----"])) as served:
        for path in ("/health", "/v1/health"):
            assert (await served.client.get(path)).json() == {"status": "ok"}
        assert (await served.client.get("/slots")).status_code == 401
        assert (await served.post("/completion", prompt="x")).status_code == 401


@pytest.mark.asyncio
async def test_what_is_wrong_is_named(serve: Serve) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt": PROMPT * 32}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1 << 20]}, "prompt"),
        ({"n_predict": -3}, "n_predict"),
        ({"n_probs": 21}, "n_probs"),
        ({"echo": True}, "echo"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"lora": [{"id": 0, "scale": 1.0}]}, "lora"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"mirostat": 2}, "mirostat"),
        ({"image_data": [{"data": "x", "id": 1}]}, "image_data"),
        ({"temperatur": 1}, "temperatur"),
    ]
    async with serve() as served:
        for fields, param in wrong:
            response = await served.post("/completion", **{"prompt": "x", **fields})
            assert response.status_code == 400, fields
            assert response.json()["error"]["param"] == param


def test_defaults_are_llama_servers() -> None:
    def body(**fields: Any) -> LlamaCompletionBody:
        return parse_body(LlamaCompletionBody, json.dumps({"prompt": "x", **fields}).encode())

    plain = body()
    sampling = plain.sampling()
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (
        0.8, 40, 0.95, 0.05,
    )  # fmt: skip
    names = ("temperature", "top_k", "top_p", "min_p", "n_predict", "n_probs", "seed", "stop")
    assert body(**dict.fromkeys(names)) == plain
    assert body(seed=-1).sampling().seed is body(seed=4294967295).sampling().seed is None
    assert body(seed=7).sampling().seed == 7
    assert (plain.most_tokens, body(n_predict=-1).most_tokens) == (None, None)
    assert (body(max_tokens=5).most_tokens, body(max_tokens=5, n_predict=6).most_tokens) == (5, 6)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@examples(60)
@given(
    st.dictionaries(
        st.sampled_from([*LlamaCompletionBody.model_fields, "samplers", "x"]),
        JSON_VALUES,
        max_size=6,
    )
)
def test_any_json_is_taken_or_refused(fields: dict[str, Any]) -> None:
    with suppress(ApiError):  # anything else is an error
        body = parse_body(LlamaCompletionBody, json.dumps(fields).encode())
        _ = body.one_prompt, body.most_tokens
