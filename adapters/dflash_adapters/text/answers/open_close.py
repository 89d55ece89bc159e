"""Formats whose tags are written with tokens of their own: Kimi K3 and MiniMax M3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_adapters.text.answers.calls import json_value, sound_call
from dflash_adapters.text.answers.events import ToolCall, Tools
from dflash_adapters.text.answers.leads import NAME, NAME_PART, SPACE
from dflash_adapters.text.answers.marked import MarkedFormat
from dflash_adapters.text.answers.scanning import CallSyntax, Lead, Quotes
from dflash_adapters.text.answers.typed import is_of_type, typed

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"


def _opening(tag: str) -> str:
    return f"{_OPEN}{tag}{_SEP}"


def _closing(tag: str) -> str:
    return f"{_CLOSE}{tag}{_SEP}"


_KIMI_HEAD = re.compile(rf'({NAME})"(?: index="[0-9]{{1,9}}")?<\|sep\|>')
_KIMI_ARGUMENT = re.compile(
    rf'{SPACE}<\|open\|>(?:argument key="(?P<key>[^"]*)" type="(?P<type>[a-z]{{1,20}})"'
    r'|(?P<json>json) type="object")<\|sep\|>'
    rf"(?P<value>.*?)<\|close\|>(?:argument|json)<\|sep\|>{SPACE}",
    re.DOTALL,
)


def _attribute(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


def _kimi_calls(text: str, tools: Tools) -> list[ToolCall]:
    """A call: its name, and arguments one by one, or all of them as JSON."""
    head = _KIMI_HEAD.match(text)
    if head is None:
        raise ValueError("a call has no name")
    name, at = _attribute(head[1]), head.end()
    end = len(text.rstrip(" \t\r\n"))
    arguments: dict[str, Any] = {}
    while at < end:
        found = _KIMI_ARGUMENT.match(text, at)
        if found is None:
            raise ValueError(f"no argument at {at}")
        at, value = found.end(), found["value"]
        if found["json"]:
            whole = json_value(value)
            if not isinstance(whole, dict):
                raise ValueError("arguments are no object")
            arguments.update(whole)
        else:
            is_text = found["type"] == "string"
            arguments[_attribute(found["key"])] = value if is_text else json_value(value)
    return [sound_call(name, arguments, tools)]


KIMI_K3 = MarkedFormat(
    think=(_opening("think"), _closing("think")),
    call=CallSyntax(
        f'{_OPEN}call tool="',
        Lead.of(
            rf'(?={NAME}"(?: index="[0-9]{{1,9}}")?<\|sep\|>)',
            rf'{NAME_PART}(?:"(?: [a-z="0-9]{{0,20}})?(?:<[|sep]{{0,6}})?)?',
        ),
        _kimi_calls,
        ends=_closing("call"),
        quotes=Quotes(
            (
                (f"{_OPEN}argument key=", _closing("argument")),
                (f"{_OPEN}json type=", _closing("json")),
            )
        ),
        inner=(_OPEN, _CLOSE, _SEP),
    ),
    before=(_opening("tools"),),
    after=(_closing("tools"),),
    around=(_opening("response"), _closing("response"), _closing("message")),
)

_NS = "]<]minimax[>["
_NS_TAG = re.compile(re.escape(_NS) + r"<(/?)([^<>/\n]{1,128})>")
_ITEM = "item"


@dataclass(slots=True)
class _Element:
    """An element that is being read: what is in it so far."""

    name: str
    schema: Mapping[str, Any]
    """Of an object that has the element as its property."""
    text: str = ""
    children: list[tuple[str, Any]] = field(default_factory=list)

    def inner_schema(self) -> Mapping[str, Any]:
        """The schema of an object that has the children as properties."""
        properties = self.schema.get("properties")
        own = properties.get(self.name) if isinstance(properties, Mapping) else None
        if not isinstance(own, Mapping):
            return {}
        items = own.get("items")
        return {"properties": {_ITEM: items}} if isinstance(items, Mapping) else own

    def value(self) -> Any:
        """What the element stands for."""
        if not self.children:
            for kind, empty in (("array", []), ("object", {})):
                if not self.text.strip() and is_of_type(self.schema, self.name, kind):
                    return empty
            return typed(self.text, self.schema, self.name)
        if self.text.strip():
            raise ValueError("text between elements")
        is_object = is_of_type(self.schema, self.name, "object")
        if not is_object and all(name == _ITEM for name, _ in self.children):
            return [value for _, value in self.children]
        return dict(self.children)


def _minimax_calls(text: str, tools: Tools) -> list[ToolCall]:
    """A call: its name, and an element for each argument, with elements in it."""
    name, _, body = text.partition('">')
    root = _Element("", {"properties": {"": tools.get(name, {})}})
    opened, at = [root], 0
    for found in _NS_TAG.finditer(body):
        opened[-1].text += body[at : found.start()]
        at = found.end()
        if not found[1]:
            opened.append(_Element(found[2], opened[-1].inner_schema()))
        elif len(opened) == 1 or opened[-1].name != found[2]:
            raise ValueError("an element is closed that is not open")
        else:
            closed = opened.pop()
            opened[-1].children.append((closed.name, closed.value()))
    if len(opened) > 1 or (root.text + body[at:]).strip():
        raise ValueError("an element is not closed, or text is around elements")
    return [sound_call(name, dict(root.children), tools)]


MINIMAX_M3 = MarkedFormat(
    think=("<mm:think>", "</mm:think>"),
    call=CallSyntax(
        f'{_NS}<invoke name="',
        Lead.of(f'(?={NAME}">)', f'{NAME_PART}"?'),
        _minimax_calls,
        ends=f"{_NS}</invoke>",
        inner=(_NS,),
    ),
    before=(f"{_NS}<tool_call>",),
    after=(f"{_NS}</tool_call>",),
)
