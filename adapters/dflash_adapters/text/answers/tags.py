"""Calls whose arguments stand between tags, one after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from dflash_adapters.text.answers.calls import json_value, sound_call
from dflash_adapters.text.answers.events import ToolCall, Tools
from dflash_adapters.text.answers.typed import typed

CallReader = Callable[[str, Tools], list[ToolCall]]
"""Reads the calls that a text between the markers of a call consists of, with the offered tools.
Raises ValueError or RecursionError if it is not sound."""

_SPACE = " \t\r\n"
_NAME = re.compile(r'[ \t\r\n]*([^ \t\r\n<>"]+)[ \t\r\n]*(?:"?>)?')


def tagged_call(argument: re.Pattern[str], *, trims_line: bool = False) -> CallReader:
    """A reader of texts of a name, and after it, with only space between them, arguments.

    `argument` matches one, with groups ``key`` and ``value``, and perhaps ``is_text``: "true" or
    "false" if the format says whether the value is text (or JSON). The name ends at the first
    character that a name cannot have; ``">`` and ``>`` are skipped after it. With `trims_line` a
    value has a line break at both ends that does not belong to it.
    """

    def read(text: str, tools: Tools) -> list[ToolCall]:
        name, at = _name(text)
        arguments: dict[str, Any] = {}
        for found in _each(argument, text, at):
            key, value = found["key"].strip(_SPACE), found["value"]
            if trims_line:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = _value(value, found, tools.get(name, {}), key)
        return [sound_call(name, arguments, tools)]

    return read


def _name(text: str) -> tuple[str, int]:
    """The name at the beginning of a text, and where the text after it begins."""
    found = _NAME.match(text)
    if found is None:
        raise ValueError("a call has no name")
    return found[1], found.end()


def _each(argument: re.Pattern[str], text: str, at: int) -> Iterator[re.Match[str]]:
    end = len(text.rstrip(_SPACE))
    while at < end:
        found = argument.match(text, at)
        if found is None:
            raise ValueError(f"no argument at {at}")
        yield found
        at = found.end()


def _value(text: str, found: re.Match[str], parameters: Any, key: str) -> Any:
    is_text = found.groupdict().get("is_text")
    if is_text == "true":
        return text
    if is_text == "false":
        try:
            return json_value(text)
        except (ValueError, RecursionError):
            pass  # as without the attribute
    return typed(text, parameters, key)
