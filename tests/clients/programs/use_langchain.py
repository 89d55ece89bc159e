"""langchain-openai; prints what it found as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

OPTIONS = {
    "base_url": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "model": "dflash-demo",
    "max_retries": 0,
    "timeout": 120,
}


class City(pydantic.BaseModel):
    """A city."""

    model_config = pydantic.ConfigDict(extra="forbid")
    is_large: bool
    district: str = pydantic.Field(max_length=5)


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: str = pydantic.Field(max_length=5)


def bound(model: Any) -> Any:
    return model.bind_tools([Weather], tool_choice="Weather", parallel_tool_calls=False)


chat = ChatOpenAI(**OPTIONS, max_tokens=200, seed=1, temperature=1)
short = ChatOpenAI(**OPTIONS, max_tokens=10, seed=1)
responses = ChatOpenAI(**OPTIONS, max_tokens=200, use_responses_api=True)
whole = short.invoke("hello")
asked = bound(chat).invoke("hello")
answer = ToolMessage("3", tool_call_id=asked.tool_calls[0]["id"])
then = short.bind_tools([Weather]).invoke([HumanMessage("hello"), asked, answer])
found = {
    "whole": whole.content,
    "usage": whole.usage_metadata["output_tokens"],
    "streamed": "".join(part.content for part in short.stream("hello")),
    "free": type(short.bind_tools([Weather]).invoke("hello")).__name__,
    "calls": asked.tool_calls,
    "any": chat.bind_tools([Weather], tool_choice="any", strict=True).invoke("hello").tool_calls,
    "then": then.response_metadata["finish_reason"],
    "cities": [
        chat.with_structured_output(City, method=method).invoke("hello").model_dump()
        for method in ("json_schema", "function_calling")
    ],
    "streamed city": list(chat.with_structured_output(City).stream("hello"))[-1].model_dump(),
    "responses": len(responses.invoke("hello").content),
    "responses calls": bound(responses).invoke("hello").tool_calls,
    "responses city": responses.with_structured_output(City).invoke("hello").model_dump(),
    "completions": OpenAI(**OPTIONS, max_tokens=5, batch_size=1).batch(["def ", "class "]),
}
print(json.dumps(found))
