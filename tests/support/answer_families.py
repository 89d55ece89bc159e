"""How each family of models writes an answer, as its chat template renders one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_adapters.text.answers import (
    AnswerEvent,
    AnswerFormat,
    Content,
    Reasoning,
    ToolCall,
    answer_parser,
)

Call = tuple[str, dict[str, Any]]
TOOLS: dict[str, dict[str, Any]] = {
    "size": {
        "type": "object",
        "properties": {"of": {"type": "string"}, "n": {"type": "array"}, "deep": {}},
    },
    "Sky.look": {"type": "object", "properties": {"up": {"type": "boolean"}}},
    "now": {"type": "object", "properties": {}},
}
SIZE: Call = ("size", {"of": 'a "ß"\n<b>', "n": [1, 2.5]})
LOOK: Call = ("Sky.look", {"up": True})
NOW: Call = ("now", {})


@dataclass(frozen=True)
class Family:
    """How one format renders the parts of an answer."""

    name: str
    kind: AnswerFormat
    calls: Callable[[Sequence[Call]], str]
    """Several calls that follow each other."""
    think: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    call_ids: Callable[[int, str], str | None] = lambda place, name: None
    broken: str = ""
    """What looks like a call of `now`, and is none."""
    content: tuple[str, str] = ("", "")
    """What is around content."""
    has_reasoning: bool = True

    def answer(self, parts: Iterable[Reasoning | Content | Sequence[Call]]) -> str:
        """The text of an answer."""
        text = ""
        for part in parts:
            match part:
                case Reasoning(words):
                    text += self.think[0] + words + self.think[1]
                case Content(words):
                    text += self.content[0] + words + self.content[1]
                case _:
                    text += self.calls(part)
        return text

    def expected(self, calls: Sequence[Call]) -> list[ToolCall]:
        """What the calls are parsed to."""
        return [
            ToolCall(name, dumped(arguments), self.call_ids(place, name))
            for place, (name, arguments) in enumerate(calls)
        ]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def parsed(
    kind: AnswerFormat,
    pieces: Iterable[str],
    tools: Mapping[str, Mapping[str, Any]] = TOOLS,
    *,
    starts_in_reasoning: bool = False,
) -> list[AnswerEvent]:
    """All events of an answer, texts of the same kind joined."""
    parser = answer_parser(kind, tools=tools, starts_in_reasoning=starts_in_reasoning)
    events: list[AnswerEvent] = []
    for piece in pieces:
        add(events, parser.push(piece))
    add(events, parser.finish())
    return events


def add(events: list[AnswerEvent], more: Iterable[AnswerEvent]) -> None:
    """Append events, texts of the same kind joined."""
    for event in more:
        last = events[-1] if events else None
        if isinstance(event, Content) and isinstance(last, Content):
            events[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            events[-1] = Reasoning(last.text + event.text)
        else:
            events.append(event)


def _each(separator: str, render: Callable[[str, dict[str, Any]], str]) -> Any:
    return lambda calls: separator.join(render(*call) for call in calls)


def _within(opening: str, closing: str, inner: Any) -> Any:
    return lambda calls: opening + inner(calls) + closing


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def _hermes(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {dumped(arguments)}}}\n</tool_call>'


def _qwen3_coder(name: str, arguments: dict[str, Any]) -> str:
    lines = [f"<tool_call>\n<function={name}>"]
    for key, value in arguments.items():
        shown = str(value) if isinstance(value, bool | None) else _text(value)
        lines.append(f"<parameter={key}>\n{shown}\n</parameter>")
    return "\n".join([*lines, "</function>\n</tool_call>"])


def _glm(name: str, arguments: dict[str, Any]) -> str:
    lines = [f"<tool_call>{name}"]
    for key, value in arguments.items():
        lines.append(f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>")
    return "\n".join([*lines, "</tool_call>"])


def _laguna(name: str, arguments: dict[str, Any]) -> str:
    return _glm(name, arguments).replace("</arg_key>\n", "</arg_key>").replace("\n</tool", "</tool")


def _python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _json_call(name: str, arguments: dict[str, Any]) -> str:
    return dumped({"name": name, "parameters": arguments})


def _mistral_list(calls: Sequence[Call]) -> str:
    items = [
        {"name": name, "arguments": arguments, "id": f"id{place}"}
        for place, (name, arguments) in enumerate(calls)
    ]
    return "[TOOL_CALLS]" + dumped(items)


def _mistral_ids(calls: Sequence[Call]) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]id{place}[ARGS]{dumped(arguments)}"
        for place, (name, arguments) in enumerate(calls)
    )


def _harmony(name: str, arguments: dict[str, Any]) -> str:
    return (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
        f"<|message|>{dumped(arguments)}<|call|>"
    )


def _harmony_first(name: str, arguments: dict[str, Any]) -> str:
    return (
        f"<|start|>assistant to=functions.{name}<|channel|>commentary json"
        f"<|message|>{dumped(arguments)}<|call|>"
    )


def deepseek(name: str, arguments: dict[str, Any]) -> str:
    bar, call = "\uff5c", "tool\u2581call"
    return (
        f"<{bar}{call}\u2581begin{bar}>{name}<{bar}tool\u2581sep{bar}>{dumped(arguments)}"
        f"<{bar}{call}\u2581end{bar}>"
    )


def _dsml(name: str, arguments: dict[str, Any]) -> str:
    lines = [f'<\uff5cDSML\uff5cinvoke name="{name}">']
    for key, value in arguments.items():
        is_text = dumped(isinstance(value, str))
        lines.append(
            f'<\uff5cDSML\uff5cparameter name="{key}" string="{is_text}">{_text(value)}'
            "</\uff5cDSML\uff5cparameter>"
        )
    return "\n".join([*lines, "</\uff5cDSML\uff5cinvoke>\n"])


def _kimi(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>"
        f"{dumped(arguments)}<|tool_call_end|>"
        for place, (name, arguments) in enumerate(calls)
    )


def _minimax(name: str, arguments: dict[str, Any]) -> str:
    lines = [f'<invoke name="{name}">']
    for key, value in arguments.items():
        lines.append(f'<parameter name="{key}">{_text(value)}</parameter>')
    return "\n".join([*lines, "</invoke>\n"])


def _seed(name: str, arguments: dict[str, Any]) -> str:
    lines = [f"<seed:tool_call>\n<function={name}>"]
    lines += [f"<parameter={key}>{_text(value)}</parameter>" for key, value in arguments.items()]
    return "\n".join([*lines, "</function>\n</seed:tool_call>"])


def _cohere(calls: Sequence[Call]) -> str:
    items = ",\n".join(
        f'    {{"tool_call_id": "id{place}", "tool_name": "{name}", "parameters": {dumped(given)}}}'
        for place, (name, given) in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n{items}\n]<|END_ACTION|>"


def _kimi_k3(calls: Sequence[Call]) -> str:
    text = ""
    for place, (name, arguments) in enumerate(calls):
        text += f'<|open|>call tool="{name}" index="{place + 1}"<|sep|>'
        for key, value in arguments.items():
            kinds = {str: "string", bool: "boolean", list: "array", dict: "object"}
            kind = kinds.get(type(value), "number")
            text += f'<|open|>argument key="{key}" type="{kind}"<|sep|>{_text(value)}'
            text += "<|close|>argument<|sep|>"
        text += "<|close|>call<|sep|>"
    return text


_NS = "]<]minimax[>["


def _minimax_m3(name: str, arguments: dict[str, Any]) -> str:
    inner = "".join(f"{_NS}<{key}>{_element(v)}{_NS}</{key}>" for key, v in arguments.items())
    return f'{_NS}<invoke name="{name}">{inner}{_NS}</invoke>\n'


def _element(value: Any) -> str:
    match value:
        case dict():
            return "".join(f"{_NS}<{k}>{_element(v)}{_NS}</{k}>" for k, v in value.items())
        case list():
            return "".join(f"{_NS}<item>{_element(each)}{_NS}</item>" for each in value)
    return _text(value)


def _gemma(name: str, arguments: dict[str, Any]) -> str:
    pairs = ",".join(f"{key}:{_gemma_value(value)}" for key, value in arguments.items())
    return f"<|tool_call>call:{name}{{{pairs}}}<tool_call|>"


def _gemma_value(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(_gemma_value, value))}]"
        case dict():
            pairs = [f'<|"|>{key}<|"|>:{_gemma_value(each)}' for key, each in value.items()]
            return f"{{{','.join(pairs)}}}"
    return dumped(value)


def _listed(calls: Sequence[Call]) -> str:
    return f"[{', '.join(_python(*call) for call in calls)}]"


_DSML_CALLS = ("\n\n<\uff5cDSML\uff5ctool_calls>\n", "</\uff5cDSML\uff5ctool_calls>")
_DEEPSEEK_CALLS = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
_KIMI_CALLS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_MINIMAX_CALLS = ("\n<minimax:tool_call>\n", "</minimax:tool_call>")
_THOUGHT = ("<|channel|>analysis<|message|>", "<|end|>")
_FINAL = ("<|start|>assistant<|channel|>final<|message|>", "<|end|>")


def _numbered(place: int, name: str) -> str:
    return f"id{place}"


FAMILIES = (
    Family(
        "hermes",
        AnswerFormat.HERMES,
        _each("\n", _hermes),
        broken='<tool_call>\n{"name": "now", "arguments": {]}\n</tool_call>',
    ),
    Family(
        "qwen3-coder",
        AnswerFormat.QWEN3_CODER,
        _within("\n\n", "\n", _each("\n", _qwen3_coder)),
        broken="<tool_call>\n<function=now>\nat once\n</function>\n</tool_call>",
    ),
    Family(
        "glm",
        AnswerFormat.GLM,
        _each("\n", _glm),
        think=("\n<think>", "</think>\n"),
        broken="<tool_call>now\n<arg_value>1</arg_value>\n</tool_call>",
    ),
    Family(
        "laguna",
        AnswerFormat.GLM,
        _each("", _laguna),
        think=("<think>", "</think>"),
        broken="<tool_call>now<arg_key>a</arg_key></tool_call>",
    ),
    Family(
        "llama4",
        AnswerFormat.LLAMA4,
        _within("<|python_start|>", "<|python_end|>", _listed),
        broken="<|python_start|>[now(later)]<|python_end|>",
        has_reasoning=False,
    ),
    Family(
        "llama4-json",
        AnswerFormat.LLAMA4,
        _within("<|python_start|><|python_end|>", "", _each("", _json_call)),
        broken='<|python_start|>{"name": "now", "parameters": 1}',
        has_reasoning=False,
    ),
    Family(
        "mistral-list",
        AnswerFormat.MISTRAL,
        _mistral_list,
        think=("[THINK]", "[/THINK]"),
        call_ids=_numbered,
        broken='[TOOL_CALLS][{"name": "now", "arguments": []}]',
    ),
    Family(
        "mistral",
        AnswerFormat.MISTRAL,
        _mistral_ids,
        think=("[THINK]", "[/THINK]"),
        call_ids=_numbered,
        broken="[TOOL_CALLS]now[ARGS]{1}",
    ),
    Family(
        "harmony",
        AnswerFormat.HARMONY,
        _each("", _harmony),
        think=_THOUGHT,
        content=_FINAL,
        broken="<|start|>assistant<|channel|>commentary to=functions.now<|message|>{]}<|call|>",
    ),
    Family(
        "harmony-first",
        AnswerFormat.HARMONY,
        _each("", _harmony_first),
        think=_THOUGHT,
        content=_FINAL,
        broken="<|start|>assistant to=functions.now<|channel|>commentary<|message|>no<|call|>",
    ),
    Family(
        "deepseek-v3.1",
        AnswerFormat.DEEPSEEK_V3_1,
        _within(*_DEEPSEEK_CALLS, _each("", deepseek)),
        think=("<think>", "</think>"),
        broken=deepseek("now", {}).replace("{}", "{,}"),
    ),
    Family(
        "deepseek-v4",
        AnswerFormat.DEEPSEEK_V4,
        _within(*_DSML_CALLS, _each("", _dsml)),
        think=("<think>", "</think>"),
        broken=_dsml("now", {}).replace(">\n<", ">\nat once<").strip(),
    ),
    Family(
        "kimi-k2",
        AnswerFormat.KIMI_K2,
        _within(*_KIMI_CALLS, _kimi),
        think=("<think>", "</think>"),
        call_ids=lambda place, name: f"functions.{name}:{place}",
        broken="<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{1}<|tool_call_end|>",
    ),
    Family(
        "minimax-m2",
        AnswerFormat.MINIMAX_M2,
        _within(*_MINIMAX_CALLS, _each("", _minimax)),
        broken='<invoke name="now">\nat once\n</invoke>',
    ),
    Family(
        "lfm2",
        AnswerFormat.LFM2,
        _within("<|tool_call_start|>", "<|tool_call_end|>", _listed),
        think=("<think>", "</think>"),
        broken="<|tool_call_start|>[now(1)]<|tool_call_end|>",
    ),
    Family(
        "gemma4",
        AnswerFormat.GEMMA4,
        _each("", _gemma),
        think=("<|channel>thought\n", "\n<channel|>"),
        broken="<|tool_call>call:now{a}<tool_call|>",
    ),
    Family(
        "llama3",
        AnswerFormat.LLAMA3,
        _within("<|python_tag|>", "", _each("", _json_call)),
        broken='<|python_tag|>{"name": "now", "parameters": 1}',
        has_reasoning=False,
    ),
    Family(
        "cohere",
        AnswerFormat.COHERE,
        _cohere,
        think=("<|START_THINKING|>", "<|END_THINKING|>"),
        content=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        call_ids=_numbered,
        broken='<|START_ACTION|>[{"tool_name": "now", "parameters": []}]<|END_ACTION|>',
    ),
    Family(
        "seed-oss",
        AnswerFormat.SEED_OSS,
        _each("\n", _seed),
        think=("<seed:think>", "</seed:think>\n"),
        broken="<seed:tool_call>\n<function=now>\nat once\n</function>\n</seed:tool_call>",
    ),
    Family(
        "kimi-k3",
        AnswerFormat.KIMI_K3,
        _within("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", _kimi_k3),
        think=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        content=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        broken='<|open|>call tool="now" index="1"<|sep|>at once<|close|>call<|sep|>',
    ),
    Family(
        "minimax-m3",
        AnswerFormat.MINIMAX_M3,
        _within(f"{_NS}<tool_call>\n", f"{_NS}</tool_call>", _each("", _minimax_m3)),
        think=("<mm:think>", "</mm:think>"),
        broken=f'{_NS}<invoke name="now">at once{_NS}</invoke>',
    ),
)
