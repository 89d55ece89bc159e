"""The bodies of OpenAI's responses, as chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from dflash_runtime.serving.doors.responses_items import (
    ContentFields,
    Item,
    Items,
    chat_messages,
)
from dflash_runtime.serving.doors.responses_tools import FunctionFields
from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.requests import (
    ChatBody,
    OptionFields,
    RequestBody,
    body_of,
)
from dflash_runtime.serving.tools import Effort

NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}
"""Fields of chats as they are called here."""

_MOST_METADATA = 16


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


class TextFormat(_Part):
    """What the answer follows."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """The same as a chat's ``response_format``. Raises: ApiError if a schema is missing."""
        if self.type != "json_schema":
            return {"type": self.type}
        if self.schema_ is None:
            raise ApiError(400, "text: json_schema needs a schema", param="text")
        return {"type": "json_schema", "schema": self.schema_}


class TextConfig(_Part):
    """The form of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(_Part):
    """How much the model reasons. Reasoning is given as it is, not summarised."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(RequestBody, OptionFields, FunctionFields, ContentFields):
    """``/v1/responses``. Options beyond OpenAI's are those of chats."""

    model: str | None = None
    input: Items
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=100)] | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=_MOST_METADATA),
        ]
        | None
    ) = None
    chat_template_kwargs: dict[str, JsonValue] | None = None

    neutral: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "prompt": (),
        "stream_options": (
            {},
            {"include_obfuscation": False},
            {"include_obfuscation": True},
        ),
        "truncation": ("disabled",),
    }

    def chat(self, before: list[Item]) -> ChatBody:
        """The same as a chat, which goes on with the items `before`. Raises: ApiError."""
        fields: dict[str, Any] = {
            **self.options(),
            **self.functions(),
            "messages": chat_messages([*before, *self.input], instructions=self.instructions),
            "max_tokens": self.max_output_tokens,
            "stream": self.stream,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.has_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.text is not None and self.text.format is not None:
            if self.response_format is not None:
                raise ApiError(400, "text: response_format is given too", param="text")
            fields["response_format"] = self.text.format.for_chat()
        return body_of(ChatBody, fields)

    def echo(self) -> dict[str, Any]:
        """The fields that a response repeats."""
        text = {"format": {"type": "text"}} if self.text is None else self.text
        given = {
            "tools": self.tools or [],
            "tool_choice": self.tool_choice or "auto",
            "text": text,
            "reasoning": self.reasoning or {"effort": None, "summary": None},
        }
        return {
            "instructions": self.instructions,
            "metadata": self.metadata or {},
            "previous_response_id": self.previous_response_id,
            "store": self.store is not False,
            "max_output_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_logprobs": self.top_logprobs or 0,
            "truncation": "disabled",
            "background": False,
            **{name: _dumped(value) for name, value in given.items()},
        }


def _dumped(value: object) -> object:
    match value:
        case BaseModel():
            return value.model_dump(by_alias=True, exclude_none=True)
        case list():
            return [_dumped(each) for each in value]
    return value
