"""Fuzz target of requests' bodies at every door that generates."""

from __future__ import annotations

import json
from typing import Any

from dflash_protocol.errors import SettingsError
from dflash_runtime.serving.constraints import constraint_of
from dflash_runtime.serving.doors.anthropic_bodies import CountBody, MessagesBody
from dflash_runtime.serving.doors.responses_bodies import ResponsesBody
from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.llama_fields import LlamaCompletionBody
from dflash_runtime.serving.ollama_bodies import OllamaChatBody, OllamaGenerateBody
from dflash_runtime.serving.requests import (
    ChatBody,
    CompletionBody,
    RequestBody,
    body_of,
    parse_body,
)
from fuzz.mutation import Mutator
from fuzz.target import Target

_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
_FUNCTION = {"name": "weather", "description": "é", "parameters": _SCHEMA, "strict": False}
_CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"a":[1]}'}}
_TEMPLATE = "tools reasoning_effort enable_thinking"
_KINDS = (
    *(ChatBody, CompletionBody, MessagesBody, CountBody, ResponsesBody),
    *(LlamaCompletionBody, OllamaChatBody, OllamaGenerateBody),
)
_ANTHROPIC = {
    "messages": [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "ü", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "3", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ],
    "max_tokens": 5,
    "system": [{"type": "text", "text": "Be brief."}],
    "stop_sequences": ["END"],
    "tools": [{"name": "weather", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}},
    "top_k": 3,
}
_GOOD: tuple[dict[str, Any], ...] = (
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "logit_bias": {"5": -1.5},
        "stop": ["a", "b"],
        "response_format": {"type": "text"},
    },
    {"prompt": [1, 2, 3], "max_tokens": 5, "logprobs": 2, "seed": -1, "guided_choice": ["a"]},
    _ANTHROPIC,
    _ANTHROPIC,
    {
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "h"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ],
        "instructions": "é",
        "tools": [{"type": "function", **_FUNCTION}],
        "tool_choice": "auto",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "metadata": {"a": "b"},
        "previous_response_id": "resp_1",
    },
    {
        "prompt": "hello",
        "n_predict": 5,
        "n_probs": 2,
        "json_schema": _SCHEMA,
        "dry_multiplier": 0.5,
        "dry_sequence_breakers": ["\n"],
        "response_fields": ["content", "timings/prompt_n"],
    },
    {
        "model": "m",
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "thinking": "hm", "tool_calls": [{"function": {"name": "f"}}]},
            {"role": "tool", "tool_name": "f", "content": "3"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
        "think": "low",
        "format": _SCHEMA,
        "options": {"seed": 1, "num_predict": 5, "stop": ["END"], "num_ctx": 100, "mirostat": 0},
        "keep_alive": "5m",
    },
    {
        "model": "m",
        "prompt": "hello",
        "system": "Be brief.",
        "think": False,
        "format": "json",
        "logprobs": True,
        "top_logprobs": 2,
    },
)


class DoorBodies(Target):
    """The first frame is the door's index, the second the body."""

    refusals = (SettingsError,)

    def __init__(self) -> None:
        self._bodies = [json.dumps(body).encode() for body in _GOOD]

    def make(self, mutator: Mutator) -> list[bytes]:
        index = mutator.below(len(_KINDS))
        if mutator.chance(0.2):
            body = mutator.damage(self._bodies[index], mutator.choose(self._bodies))
        else:
            body = json.dumps(_damaged(mutator, _GOOD[index], mutator.choose(_GOOD))).encode()
        return [b"%d" % index, body]

    def feed(self, frames: list[bytes]) -> None:
        index, data = frames
        try:
            body: RequestBody = parse_body(_KINDS[int(index)], data)
            match body:
                case OllamaChatBody() | OllamaGenerateBody():
                    body = body_of(ChatBody, body.chat(_TEMPLATE, 512))
                case ResponsesBody():
                    json.dumps(body.echo())
                    body = body.chat([])
                case CountBody():
                    body = body.chat(_TEMPLATE)
            if isinstance(body, ChatBody):
                json.dumps([message.for_template() for message in body.messages])
                body.template_variables(_TEMPLATE, body.offered_tools())
                body.call_rules(body.offered_tools(), beside="response_format")
            if isinstance(body, ChatBody | CompletionBody):
                constraint_of(body)
                body.sampling()
                body.penalties(None)
        except ApiError as error:
            raise SettingsError(error.message) from error

    def serve_good(self) -> None:
        for index, body in enumerate(self._bodies):
            self.feed([b"%d" % index, body])


def _damaged(mutator: Mutator, value: Any, other: dict[str, Any]) -> Any:
    """A copy in which a map, however deep, has wrong fields."""
    if isinstance(value, dict) and value and mutator.chance(0.6):
        name = mutator.choose(list(value))
        return {**value, name: _damaged(mutator, value[name], other)}
    if isinstance(value, list) and value:
        place = mutator.below(len(value))
        return [*value[:place], _damaged(mutator, value[place], other), *value[place + 1 :]]
    if isinstance(value, dict):
        return mutator.damage_fields(value, other)
    return mutator.damage_fields({"": value}, {}).get("", [value])
