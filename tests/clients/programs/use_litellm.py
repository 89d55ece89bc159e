"""litellm, by four of its providers; prints what it found as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm
import pydantic

URL = sys.argv[1]
MESSAGES = [{"role": "user", "content": "hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
FORCED = {
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "max_tokens": 200,
}
OPENAI = {"api_base": f"{URL}/v1", "api_key": "none", "timeout": 120}


class City(pydantic.BaseModel):
    """What an answer is parsed into."""

    model_config = pydantic.ConfigDict(extra="forbid")
    is_large: bool
    district: str = pydantic.Field(max_length=5)


def whole(model: str, **options: Any) -> Any:
    return litellm.completion(model, MESSAGES, seed=1, **options).choices[0]


def streamed(model: str, **options: Any) -> Any:
    parts = list(litellm.completion(model, MESSAGES, seed=1, stream=True, **options))
    return litellm.stream_chunk_builder(parts).choices[0]


def calls(choice: Any) -> list[Any]:
    return [
        [each.function.name, json.loads(each.function.arguments)]
        for each in choice.message.tool_calls
    ]


found: dict[str, Any] = {}
for provider in ("openai", "hosted_vllm"):
    model = f"{provider}/dflash-demo"
    first = whole(model, max_tokens=10, **OPENAI)
    asked = whole(model, **FORCED, parallel_tool_calls=False, **OPENAI)
    turns = [
        *MESSAGES,
        asked.message.model_dump(),
        {"role": "tool", "tool_call_id": asked.message.tool_calls[0].id, "content": "3"},
    ]
    then = litellm.completion(model, turns, tools=[WEATHER], max_tokens=5, **OPENAI)
    city = whole(model, response_format=City, max_tokens=200, **OPENAI).message.content
    found[provider] = {
        "whole": first.message.content,
        "streamed": streamed(model, max_tokens=10, **OPENAI).message.content,
        "calls": calls(asked),
        "streamed calls": calls(streamed(model, **FORCED, parallel_tool_calls=False, **OPENAI)),
        "then": then.choices[0].finish_reason,
        "city": City.model_validate_json(city).model_dump(),
    }
completion = litellm.text_completion(
    model="text-completion-openai/dflash-demo", prompt="def ", max_tokens=5, **OPENAI
)
response = litellm.responses(
    model="openai/dflash-demo", input="hello", max_output_tokens=16, **OPENAI
)
anthropic = {"api_base": URL, "api_key": "none", "max_tokens": 200, "drop_params": True}
found["others"] = {
    "completion": completion.usage.completion_tokens,
    "response": response.usage.output_tokens,
    "ollama": whole("ollama_chat/dflash-demo", api_base=URL, max_tokens=5).message.content,
    "anthropic": whole("anthropic/dflash-demo", **{**anthropic, "max_tokens": 5}).message.content,
    "anthropic calls": calls(
        streamed("anthropic/dflash-demo", **anthropic, tools=[WEATHER], tool_choice="required")
    ),
}
print(json.dumps(found))
