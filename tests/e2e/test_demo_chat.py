"""The demo's chat template through the server, with OpenAI's client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from demo.chat.template import TEMPLATE

from support.random_models import Qwen3MoeShape, write_qwen3moe
from support.serving import running_server

pytestmark = pytest.mark.e2e

GET_TIME: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Current time in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def test_a_tool_is_called_and_its_result_is_read_back(tmp_path: Path) -> None:
    shape = Qwen3MoeShape(
        num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300, context_length=1024
    )
    model = write_qwen3moe(tmp_path / "random.gguf", shape, seed=1, tokenizer="bytes")
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    tool = json.loads(json.dumps(GET_TIME))
    tool["function"]["parameters"]["properties"]["city"] = {"enum": ["Oslo", "Rome"]}
    tool["function"]["parameters"]["additionalProperties"] = False
    asked: list[Any] = [{"role": "user", "content": "What time is it in Oslo?"}]
    with (
        running_server(model, "--chat-template-file", str(template)) as server,
        server.client() as client,
    ):
        answer = client.chat.completions.create(
            model="any",
            messages=asked,
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=200,
        ).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.tool_calls is not None
        [call] = answer.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "get_time"
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        result = {"role": "tool", "tool_call_id": call.id, "content": "14:05"}
        talk: list[Any] = [*asked, answer.message.model_dump(exclude_none=True), result]
        again = client.chat.completions.create(
            model="any",
            messages=talk,
            tools=[tool],
            max_tokens=4,
        )
        assert again.usage is not None
        assert again.usage.prompt_tokens > 300  # bytes: both turns, the tool and its result
