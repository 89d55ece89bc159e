"""The fields of OpenAI's responses about functions that a model may call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from dflash_runtime.serving.tools import MOST_TOOLS


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


class FunctionTool(_Part):
    """A function that a model may call; the tools of OpenAI's servers have other types."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None

    def for_chat(self) -> dict[str, Any]:
        """The same as a chat's tool."""
        function = self.model_dump(include={"name", "description", "parameters", "strict"})
        return {"type": "function", "function": function}


class FunctionChoice(_Part):
    """One function, by its name."""

    type: Literal["function"]
    name: str


class FunctionFields(BaseModel):
    """Which functions there are, and which are to be called."""

    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None

    def functions(self) -> dict[str, Any]:
        """The same as fields of a chat."""
        choice: object = self.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        return {
            "tools": None if self.tools is None else [tool.for_chat() for tool in self.tools],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
