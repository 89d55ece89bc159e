"""The items of OpenAI's responses, as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, TypeAdapter

from dflash_runtime.serving.requests import MOST_MESSAGES, MOST_TOP_LOGPROBS

Status = Literal["in_progress", "completed", "incomplete"]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


class InputText(_Part):
    """Text that a client wrote."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: JsonValue = None
    """Prefixes are cached anyway."""


class OutputText(_Part):
    """Text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    logprobs: Annotated[JsonValue, Field(exclude=True)] = None
    """Not kept: no conversation needs them."""


def _texts(content: object) -> object:
    """A text stands for a part of text."""
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


# fail_fast: errors cost more than items.
Texts = Annotated[
    list[Annotated[InputText | OutputText, Field(discriminator="type")]],
    Field(fail_fast=True),
    BeforeValidator(_texts),
]


class _Item(_Part):
    id: str | None = None
    status: Status | None = None


class MessageItem(_Item):
    """A message of either side."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts
    phase: str | None = None


class CallItem(_Item):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    caller: JsonValue = None


class CallOutputItem(_Item):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Texts
    name: str | None = None
    caller: JsonValue = None


class ReasoningPart(_Part):
    """A part of reasoning, or of a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningParts = Annotated[list[ReasoningPart], Field(fail_fast=True)]


class ReasoningItem(_Item):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: ReasoningParts | None = None
    content: ReasoningParts | None = None
    encrypted_content: None = None


def _item(item: object) -> object:
    """An item without a type is a message."""
    if isinstance(item, dict) and "type" not in item and "role" in item:
        return {**item, "type": "message"}
    return item


def _items(items: object) -> object:
    """A text stands for a message of the user."""
    if isinstance(items, str):
        return [{"type": "message", "role": "user", "content": items}]
    return items


Item = Annotated[
    MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")
]
Items = Annotated[
    list[Annotated[Item, BeforeValidator(_item)]],
    Field(max_length=MOST_MESSAGES, fail_fast=True),
    BeforeValidator(_items),
]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(Items)
"""Reads and writes items as JSON."""


class ContentFields(BaseModel):
    """What an answer's items have besides text."""

    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = (
        None
    )
    """Reasoning is given as text."""
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether texts of the answer are to have log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


def chat_messages(items: Sequence[Item], *, instructions: str | None) -> list[dict[str, Any]]:
    """The same as messages of a chat. `instructions` and what developers say first are one message
    of the system; reasoning, text and calls that follow each other are one of the assistant."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        last = messages[-1] if messages else {"role": ""}
        match item:
            case MessageItem(role="assistant"):
                if last["role"] != "assistant" or last["content"] or "tool_calls" in last:
                    messages.append({"role": "assistant", "content": ""})
                messages[-1]["content"] = _text(item.content)
            case MessageItem(role="system" | "developer"):
                if len(messages) == 1 and last["role"] == "system":
                    last["content"] += "\n\n" + _text(item.content)
                else:
                    messages.append({"role": "system", "content": _text(item.content)})
            case MessageItem():
                messages.append({"role": "user", "content": _text(item.content)})
            case ReasoningItem():
                reasoning = "".join(part.text for part in item.content or item.summary or ())
                messages.append(
                    {"role": "assistant", "content": "", "reasoning_content": reasoning}
                )
            case CallItem():
                if last["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case CallOutputItem():
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": item.call_id,
                        "content": _text(item.output),
                    }
                )
    return messages


def _text(parts: Sequence[InputText | OutputText]) -> str:
    return "".join(part.text for part in parts)
