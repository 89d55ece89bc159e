"""Tools that an answer may call, and reasoning: the fields of a chat's body, and its messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.json_values import FEW_VALUES, has_more_values

MOST_TOOLS = 512
_MOST_CALLS = 1024
_SWITCHES = {
    "enable_thinking": re.compile(r"enable_thinking"),
    "thinking": re.compile(r"\b(?:if|not|and|or) thinking\b|\bthinking is defined\b"),
}
"""Variables of chat templates that turn reasoning on and off, and how templates read them."""
_EFFORT = "reasoning_effort"
_REASONS = ("<think>", "[THINK]", "<|channel|>", _EFFORT)
"""What the template of a model that reasons has."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


class Function(_Part):
    """A function that a model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    """A JSON schema; None: no parameters."""
    strict: bool | None = None


class Tool(_Part):
    """An element of ``tools``."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Part):
    """A function by its name."""

    name: str


class NamedTool(_Part):
    """``tool_choice`` of one function."""

    type: Literal["function"]
    function: NamedFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """What an answer's calls follow: the schemas of their arguments, by the tools' names."""

    field: str
    """The field of the body that asks for it."""
    schemas: Mapping[str, Mapping[str, Any]]
    is_required: bool
    """The answer is nothing but calls."""
    is_single: bool


class ToolFields(BaseModel):
    """The fields of a chat's body about tools and reasoning."""

    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    """none: reasoning stays in the content, as the model writes it."""
    include_reasoning: bool | None = None

    def offered_tools(self) -> list[Tool]:
        """The tools that may be called. Raises: ApiError for what is wrong or not supported."""
        tools = self.tools or []
        names = [tool.function.name for tool in tools]
        if len({*names}) < len(names):
            raise _refused("tools", "two have the same name")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise _refused("tool_choice", "names none of the tools")
        if tools and self.reasoning_format == "none":
            raise _refused("reasoning_format", "'none' leaves calls undivided: not with tools")
        if choice == "required" and not tools:
            raise _refused("tool_choice", "there are no tools")
        return [] if choice == "none" else tools

    def call_rules(self, tools: list[Tool], *, beside: str | None = None) -> CallRules | None:
        """What calls of the offered tools have to follow; None: nothing. `beside` is the field with
        the schema of the content, if there is one."""
        choice, named = self.tool_choice, None
        if isinstance(choice, NamedTool):
            named = choice.function.name
        is_required, is_single = named is not None or choice == "required", named is not None
        is_single = is_single or self.parallel_tool_calls is False
        is_strict = any(tool.function.strict for tool in tools)
        fields = {
            "tool_choice": is_required,
            "tools": is_strict,
            "parallel_tool_calls": is_single,
            beside: beside is not None,
        }
        field = next((name for name, asks in fields.items() if asks), None)
        if not tools or field is None:
            return None
        schemas = {
            tool.function.name: tool.function.parameters or {}
            if is_required or tool.function.strict
            else {"type": "object"}
            for tool in tools
            if named in (None, tool.function.name)
        }
        return CallRules(field=field, schemas=schemas, is_required=is_required, is_single=is_single)

    def template_variables(self, template: str, tools: list[Tool]) -> dict[str, JsonValue]:
        """Variables of the chat template for tools and reasoning.

        Raises: ApiError if there are some that the template does not read.
        """
        variables: dict[str, JsonValue] = {}
        if tools:
            if "tools" not in template:
                raise _refused("tools", "this model's chat template has none")
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        effort = self.reasoning_effort
        if effort is not None:
            if not reads_effort(template):
                raise _refused("reasoning_effort", "this model's chat template does not read it")
            switch = None if _EFFORT in template else _switch(template)
            variables |= {_EFFORT: effort} if switch is None else {switch: effort != "none"}
        return variables


def can_reason(template: str) -> bool:
    """Whether a chat template shows that its model reasons."""
    return _switch(template) is not None or any(mark in template for mark in _REASONS)


def reads_effort(template: str) -> bool:
    """Whether a chat template reads how much its model is to reason, or at least whether."""
    return _EFFORT in template or _switch(template) is not None


def thinking_variables(template: str, *, thinks: bool, field: str) -> dict[str, JsonValue]:
    """Variables of the chat template that turn reasoning on or off, as the body's `field` asks.

    Raises: ApiError if the template cannot do that.
    """
    if (switch := _switch(template)) is not None:
        return {switch: thinks}
    if thinks != can_reason(template):
        raise _refused(
            field, f"this model's chat template cannot turn it {'on' if thinks else 'off'}"
        )
    return {}


def _switch(template: str) -> str | None:
    """The variable that turns reasoning on and off; None: there is none."""
    found = (name for name, is_read in _SWITCHES.items() if is_read.search(template))
    return next(found, None)


def parameters_of(tools: list[Tool]) -> dict[str, Mapping[str, Any]]:
    """The schemas of the tools' parameters by their names."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


def message_calls(calls: object) -> object:
    """The calls of an assistant's message as chat templates read them: arguments are objects, where
    clients send them as JSON texts. What is no list of calls stays as it is."""
    if not isinstance(calls, list) or len(calls) > _MOST_CALLS:
        return calls
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    texts = [each.get("arguments") for each in functions if isinstance(each, dict)]
    written = b",".join(each.encode(errors="replace") for each in texts if isinstance(each, str))
    return calls if has_more_values(written, FEW_VALUES) else [_call(call) for call in calls]


def _call(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(parsed, dict):
        return call
    return {**call, "function": {**function, "arguments": parsed}}


def _refused(field: str, why: str) -> ApiError:
    return ApiError(400, f"{field}: {why}", param=field, code="unsupported_value")
