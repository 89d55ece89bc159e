"""Shows a talk with the demo model that chats: an answer, one after reasoning, and a call.

python -m demo.chat.show
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from demo.chat.evaluate import answer
from demo.chat.talks import Answer, Asked, Message, user
from dflash_adapters.text.answers import (
    AnswerFormat,
    Content,
    Reasoning,
    ToolCall,
    answer_parser,
)
from dflash_runtime import Engine

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GET_TIME: Message = {
    "type": "function",
    "function": {"name": "get_time", "description": "Current time in a city", "parameters": CITY},
}


def said(engine: Engine, messages: list[Message], tools: list[Message]) -> list[ToolCall]:
    """Print an answer by its parts, add it to the messages, and return its calls."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    parser = answer_parser(AnswerFormat.HERMES, tools=schemas)
    text = answer(engine, Asked("shown", messages, tools, Answer()), 120)
    calls: list[ToolCall] = []
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for event in (*parser.push(text), *parser.finish()):
        match event:
            case Reasoning(words):
                print(f"  (thinks) {words}")
            case Content(words):
                print(f"model: {words}")
                message["content"] += words
            case ToolCall(name, arguments):
                print(f"  (calls) {name}({arguments})")
                function = {"name": name, "arguments": arguments}
                message.setdefault("tool_calls", []).append({"function": function})
                calls.append(event)
    messages.append(message)
    return calls


def main() -> None:
    """Four questions, the last with a tool."""
    here = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(prog="python -m demo.chat.show")
    parser.add_argument("--model", type=Path, default=here / "dflash-demo-chat.gguf")
    args = parser.parse_args()
    with Engine.open(args.model) as engine:
        for text, tools in (
            ("Hello!", []),
            ("What is the capital of Norway?", []),
            ("What is 27 + 45?", []),
            ("What time is it in Oslo?", [GET_TIME]),
        ):
            print(f"user: {text}")
            messages = [user(text)]
            if said(engine, messages, tools):
                result = json.dumps({"time": "14:05"})
                print(f"  (tool) {result}")
                messages.append({"role": "tool", "content": result})
                said(engine, messages, tools)


if __name__ == "__main__":
    main()
