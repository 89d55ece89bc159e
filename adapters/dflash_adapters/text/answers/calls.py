"""From names and arguments to calls; arguments and calls written as JSON.

What is no sound call raises a ValueError, or a RecursionError: the parser of the answer turns it
into content.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from dflash_adapters.text.answers.events import ToolCall, Tools


def sound_call(name: str, arguments: Any, tools: Tools, *, call_id: str | None = None) -> ToolCall:
    """A call of one of the tools.

    Raises: ValueError if there is no such tool, or the arguments are not an object that JSON has;
    RecursionError if they are nested too deeply.
    """
    if name not in tools or not isinstance(arguments, dict):
        raise ValueError("no call of an offered tool")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ToolCall(name, _well_formed(text), None if call_id is None else _well_formed(call_id))


def json_value(text: str) -> Any:
    """A JSON value; control characters may stand in its strings, where models often write them.

    Raises: ValueError if it is none; RecursionError if it is nested too deeply.
    """
    return json.loads(text, strict=False, parse_constant=_refuse_constant)


def json_calls(
    text: str,
    tools: Tools,
    *,
    has_ids: bool = False,
    name_key: str = "name",
    id_key: str = "id",
) -> list[ToolCall]:
    """Calls written as an object with `name` and `arguments` (or `parameters`), or a list of these.
    Name and, if it `has_ids`, identifier may have other keys.

    Raises: ValueError, RecursionError: see `sound_call` and `json_value`.
    """
    value = json_value(text)
    return [_json_call(each, tools, name_key, id_key if has_ids else "") for each in _listed(value)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _json_call(value: Any, tools: Tools, name_key: str, id_key: str) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get(name_key), str):
        raise ValueError("a call has no name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # as OpenAI's interface has them
        arguments = json_value(arguments)
    call_id = value.get(id_key) if id_key else None
    return sound_call(
        value[name_key], arguments, tools, call_id=call_id if isinstance(call_id, str) else None
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _well_formed(text: str) -> str:
    """The text with surrogates joined to characters, and lone ones replaced."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
