"""Anthropic's bodies as chats: system prompt, content blocks, tools and thinking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.requests import (
    MOST_MESSAGES,
    MOST_STOPS,
    ChatBody,
    OptionFields,
    RequestBody,
    Stop,
    body_of,
)
from dflash_runtime.serving.tools import MOST_TOOLS, thinking_variables

NAMES: Mapping[str, str] = {
    "parallel_tool_calls": "tool_choice",
    "stop": "stop_sequences",
}
"""Fields of chats as they are called here."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


class _Block(_Part):
    cache_control: JsonValue = None
    """Prefixes are cached anyway."""


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[JsonValue], Field(max_length=0)] | None = None


def _blocks(content: object) -> object:
    """A text stands for a block of text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


# fail_fast: errors cost more than items.
Texts = Annotated[list[TextBlock], Field(fail_fast=True), BeforeValidator(_blocks)]


class ThinkingBlock(_Part):
    """Reasoning of an earlier answer; its signature, which we leave empty, is not read."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(_Block):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]
    caller: JsonValue = None


class ToolResultBlock(_Block):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


_SIDES: Mapping[str, tuple[type, ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class AnthropicMessage(_Part):
    """One message of either side."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(fail_fast=True), BeforeValidator(_blocks)]

    @model_validator(mode="after")
    def _sides(self) -> Self:
        for block in self.content:
            if not isinstance(block, _SIDES[self.role]):
                raise ValueError(f"{block.type} is not for the role {self.role}")
        return self

    def for_chat(self) -> list[dict[str, Any]]:
        """The same as messages of a chat: results of tools are messages of their own."""
        if self.role == "assistant":
            return [self._assistants()]
        messages: list[dict[str, Any]] = []
        for block in self.content:
            match block:
                case ToolResultBlock():
                    message: dict[str, Any] = {
                        "role": "tool",
                        "tool_call_id": block.tool_use_id,
                        "content": _text(block.content or []),
                    }
                    if block.is_error:
                        message["is_error"] = True
                    messages.append(message)
                case TextBlock() if messages and messages[-1]["role"] == self.role:
                    messages[-1]["content"] += block.text
                case TextBlock():
                    messages.append({"role": self.role, "content": block.text})
        return messages or [{"role": self.role, "content": ""}]

    def _assistants(self) -> dict[str, Any]:
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        calls = [
            {
                "id": block.id,
                "type": "function",
                "function": {"name": block.name, "arguments": block.input},
            }
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": _text(texts)}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return message


class OfferedTool(_Block):
    """A tool of the client; those of Anthropic's servers have other types."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, JsonValue]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """Calls come once they are complete."""
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Annotated[list[JsonValue], Field(max_length=0)] | None = None

    def for_chat(self) -> dict[str, Any]:
        """The same as a chat's tool."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        return {"type": "function", "function": function}


class ToolChoice(_Part):
    """Which tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """The same as fields of a chat. Raises: ApiError if a tool's name is missing."""
        choice: object = {"auto": "auto", "any": "required", "none": "none"}.get(self.type)
        if self.type == "tool":
            if self.name is None:
                raise ApiError(400, "tool_choice: tool needs a name", param="tool_choice")
            choice = {"type": "function", "function": {"name": self.name}}
        fields: dict[str, Any] = {"tool_choice": choice}
        if self.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
        return fields


class Thinking(_Part):
    """Whether the model reasons first. The budget is no bound of its own: ``max_tokens`` is."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    def variables(self, template: str) -> dict[str, JsonValue]:
        """Variables of the chat template. Raises: ApiError if it cannot do that."""
        if self.type == "adaptive":
            return {}
        return thinking_variables(template, thinks=self.type == "enabled", field="thinking")


class OutputFormat(_Part):
    """What the answer follows."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, JsonValue], Field(alias="schema")]


class OutputConfig(_Part):
    """How much the model reasons, and what its answer follows."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(RequestBody, OptionFields):
    """``/v1/messages/count_tokens``. Options beyond Anthropic's are those of chats."""

    model: str | None = None
    messages: Annotated[
        list[AnthropicMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    ]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    system: Texts | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = (
        None
    )
    tools: Annotated[list[OfferedTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None

    ignored = frozenset({"cache_control", "diagnostics", "user_profile_id"})
    neutral: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {
        "container": (),
        "context_management": (
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "inference_geo": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }

    def chat(self, template: str) -> ChatBody:
        """The same as a chat. Raises: ApiError."""
        if self.messages[-1].role == "assistant":
            raise ApiError(
                400,
                "messages: the last one is the assistant's: to go on with it is not supported",
                param="messages",
                code="unsupported_value",
            )
        messages = [each for message in self.messages for each in message.for_chat()]
        if self.system:
            messages.insert(0, {"role": "system", "content": _text(self.system)})
        variables = {} if self.thinking is None else self.thinking.variables(template)
        fields: dict[str, Any] = {
            **self.options(),
            "messages": messages,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "chat_template_kwargs": {**variables, **(self.chat_template_kwargs or {})} or None,
        }
        if self.tools:
            fields["tools"] = [tool.for_chat() for tool in self.tools]
        if self.tool_choice is not None:
            fields |= self.tool_choice.for_chat()
        if self.thinking is not None and self.thinking.display == "omitted":
            fields["include_reasoning"] = False
        return body_of(ChatBody, {**fields, **self._output()})

    def _output(self) -> dict[str, Any]:
        if self.output_config is None:
            return {}
        fields: dict[str, Any] = {"reasoning_effort": self.output_config.effort}
        if (form := self.output_config.format) is not None:
            if self.response_format is not None:
                raise ApiError(
                    400, "output_config: response_format is given too", param="output_config"
                )
            fields["response_format"] = {"type": "json_schema", "schema": form.schema_}
        return fields


class MessagesBody(CountBody):
    """``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]


def _text(blocks: list[TextBlock]) -> str:
    return "".join(block.text for block in blocks)
