"""Bodies of Ollama's interface, and what they are in `ChatBody` and `CompletionBody`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from dflash_runtime.serving.ollama_options import OllamaBody, refused
from dflash_runtime.serving.requests import MOST_MESSAGES, RequestBody


class OllamaMessage(BaseModel):
    """One message; extra fields go to the chat template."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | None = None
    thinking: str | None = None
    images: list[JsonValue] | None = None
    tool_calls: list[dict[str, JsonValue]] | None = None
    tool_name: str | None = None

    def of_ours(self) -> dict[str, Any]:
        """The same as a `ChatMessage`. Raises: ApiError for images."""
        _refuse_images("messages", self.images)
        message: dict[str, Any] = {**(self.model_extra or {}), "role": self.role}
        message["content"] = self.content or ""
        if self.thinking is not None:
            message["reasoning_content"] = self.thinking
        if self.tool_name is not None:
            message |= {"tool_name": self.tool_name, "name": self.tool_name}
        if self.tool_calls:
            message["tool_calls"] = [{"type": "function", **call} for call in self.tool_calls]
        return message


class OllamaChatBody(OllamaBody):
    """``/api/chat``."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MOST_MESSAGES, fail_fast=True)] = (
        Field(default_factory=list)
    )
    tools: list[dict[str, JsonValue]] | None = None

    def chat(self, template: str, num_positions: int) -> dict[str, Any]:
        """The fields of a `ChatBody`. Raises: ApiError."""
        found = {**self.generation(num_positions), **self.reasoning(template)}
        found["messages"] = [message.of_ours() for message in self.messages]
        if self.tools:
            found["tools"] = self.tools
        if self.logprobs:
            found |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return found


class OllamaGenerateBody(OllamaBody):
    """``/api/generate``."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: str | None = None
    suffix: str | None = None
    context: list[JsonValue] | None = None
    images: list[JsonValue] | None = None

    def check_fields(self) -> None:
        """Raises: ApiError for the first field that is not supported."""
        super().check_fields()
        for name in ("template", "suffix", "context"):
            if getattr(self, name):
                raise refused(name, "is not supported")
        _refuse_images("images", self.images)
        if self.raw and self.system:
            raise refused("system", "is no part of a raw prompt")

    def completion(self, num_positions: int) -> dict[str, Any]:
        """The fields of a `CompletionBody` whose prompt is raw. Raises: ApiError."""
        if self.think:
            raise refused("think", "is not supported with a raw prompt")
        found = {"prompt": self.prompt, **self.generation(num_positions)}
        found.setdefault("max_tokens", num_positions)
        if self.logprobs:
            found["logprobs"] = self.top_logprobs or 0
        return found

    def chat(self, template: str, num_positions: int) -> dict[str, Any]:
        """The fields of a `ChatBody` that asks the same. Raises: ApiError."""
        found = {**self.generation(num_positions), **self.reasoning(template)}
        system = [{"role": "system", "content": self.system}] if self.system else []
        found["messages"] = [*system, {"role": "user", "content": self.prompt}]
        if self.logprobs:
            found |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return found


class OllamaShowBody(RequestBody):
    """``/api/show``."""

    model: str | None = None
    name: str | None = None
    """What `model` was called once."""
    verbose: bool | None = None


def _refuse_images(field: str, images: list[JsonValue] | None) -> None:
    """Raises: ApiError if there are any."""
    if images:
        raise refused(field, "images are not supported")
