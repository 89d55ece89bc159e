"""Grammars of answers whose calls have to follow the schemas of their tools.

They are in llguidance's notation, which extends Lark's: ``%json`` is a schema, ``<[7]>`` the
control token 7, and a rule that is ``[lazy]`` ends as early as it can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dflash_adapters.text.answers.events import Tools
from dflash_adapters.text.answers.formats import AnswerFormat
from dflash_adapters.text.grammar import MOST_GRAMMAR_BYTES
from dflash_adapters.text.schema_checks import SPACE, check_cost
from dflash_adapters.text.schema_forms import in_one_form
from dflash_adapters.text.schema_rewrites import RewritingWork, rewritten
from dflash_protocol.errors import GrammarError


@dataclass(frozen=True, slots=True)
class _CallShape:
    """How calls are written: the marker `entry`, then each as its name between `opens` and
    `middle`, its arguments, and `closes`; behind the last one `after`. Between two is `between`,
    and behind the name what the regular expression `suffix` says."""

    entry: str
    opens: str
    middle: str
    closes: str
    between: str = ""
    after: str = ""
    suffix: str = ""


_SHAPES: Mapping[AnswerFormat, _CallShape] = {
    AnswerFormat.HERMES: _CallShape(
        "<tool_call>",
        '\n{"name": "',
        '", "arguments": ',
        "}\n</tool_call>",
        between="\n<tool_call>",
    ),
    AnswerFormat.DEEPSEEK_V3_1: _CallShape(
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581call\u2581begin\uff5c>",
        "<\uff5ctool\u2581sep\uff5c>",
        "<\uff5ctool\u2581call\u2581end\uff5c>",
        after="<\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
    AnswerFormat.KIMI_K2: _CallShape(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        after="<|tool_calls_section_end|>",
        suffix=":[0-9]{1,3}",
    ),
    AnswerFormat.MISTRAL: _CallShape("[TOOL_CALLS]", "", "[ARGS]", "", between="[TOOL_CALLS]"),
}
_MISTRAL_LIST = _CallShape(
    "[TOOL_CALLS][", '{"name": "', '", "arguments": ', "}", between=", ", after="]"
)
"""As the models without a token ``[ARGS]`` write them."""
ENFORCED_FORMATS = frozenset({*_SHAPES, AnswerFormat.HARMONY})
"""The formats whose calls can be made to follow schemas."""


def call_grammar(
    kind: AnswerFormat,
    tools: Tools,
    *,
    is_required: bool,
    is_single: bool,
    control_ids: Mapping[str, int],
    content: str | None = None,
) -> str:
    """A grammar for answers that may call these tools, each with arguments that follow its schema.

    `is_required`: the answer is nothing but calls; else text may stand before them, in which no
    call begins, or with `content`, which `json_rule` made, the answer is that instead of calls.
    `is_single`: at most one call. `control_ids`: control tokens by their spellings. `kind` is one
    of ENFORCED_FORMATS, and there is at least one tool.
    Raises: GrammarError for schemas that would take too long.
    """

    def written(text: str) -> str:
        return _written(text, control_ids)

    arguments = _arguments(tools)
    if kind is AnswerFormat.HARMONY:
        final = None if is_required else _final(content, written)
        has_preamble = is_required or content is None  # it would be content
        return _channels(arguments, final, has_preamble=has_preamble, written=written)
    shape = _SHAPES[kind]
    if kind is AnswerFormat.MISTRAL and "[ARGS]" not in control_ids:
        shape = _MISTRAL_LIST
    call = _any_call(arguments)
    suffix = f" /{shape.suffix}/ " if shape.suffix else " "
    more = "" if is_single else f"({written(shape.between)} ({call}))*"
    lines = ["%llguidance {}"]
    if is_required:
        lines.append(f"start: {written(shape.entry)} calls")
    elif content is not None:
        lines += [f"start: content | {written(shape.entry)} calls", f"content: {content}"]
    elif shape.entry in control_ids:
        lines += [f"start: TEXT ({written(shape.entry)} calls)?", "TEXT: /(.|\\n)*/"]
    else:
        lines += ["start: TEXT | until_calls calls", "TEXT: /(.|\\n)*/"]
        lines.append(f"until_calls[lazy]: TEXT {written(shape.entry)}")
    lines.append(f"calls: ({call}) {more} {written(shape.after)}")
    for each, (name, follows) in enumerate(arguments.items()):
        head = f"{written(shape.opens + name)}{suffix}{written(shape.middle)}"
        lines.append(f"call_{each}: {head} {follows} {written(shape.closes)}")
    return "\n".join(lines) + "\n"


def _channels(
    arguments: Mapping[str, str],
    final: str | None,
    *,
    has_preamble: bool,
    written: Callable[[str], str],
) -> str:
    """The same in messages, of which a call is the last one, or `final`. Reasoning may come first,
    and with `has_preamble` a text for the user."""
    ends = written("<|end|>")
    lazy = "" if ends.startswith("<[") else "[lazy]"  # a text cannot have control tokens
    first = "analysis? preamble?" if has_preamble else "analysis?"
    lines = [
        "%llguidance {}",
        f"start: {first} {'call' if final is None else '(call | final)'}",
        f"call: {_any_call(arguments)}",
        f"until_end{lazy}: TEXT {ends}",
        "TEXT: /(.|\\n)*/",
        "FINAL: /([^<]|<+[^<|])*<*/",  # without a marker
    ]
    for name, channel in (("analysis", "analysis"), ("preamble", "commentary")):
        head = written(f"<|channel|>{channel}<|message|>")
        lines.append(f"{name}: {head} until_end {written('<|start|>assistant')}")
    if final is not None:
        lines.append(f"final: {final}")
    for each, (name, follows) in enumerate(arguments.items()):
        head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        lines.append(f"call_{each}: {written(head)} {follows}")
    return "\n".join(lines) + "\n"


def _final(content: str | None, written: Callable[[str], str]) -> str:
    """The last message, if it is no call."""
    channel, message = written("<|channel|>final"), written("<|message|>")
    if content is None:
        return f"{channel} {message} FINAL"
    return f"{channel} ({written(' <|constrain|>json')})? {message} {content}"


def _any_call(arguments: Mapping[str, str]) -> str:
    return " | ".join(f"call_{each}" for each in range(len(arguments)))


def _arguments(tools: Tools) -> dict[str, str]:
    """What the arguments of each tool follow, by its name. Raises: GrammarError."""
    texts = [json.dumps(schema) for schema in tools.values()]
    if sum(map(len, texts)) > MOST_GRAMMAR_BYTES:
        raise GrammarError(f"the schemas of all tools have {MOST_GRAMMAR_BYTES:,} bytes at most")
    work, found = RewritingWork(), {}
    for name, schema in tools.items():
        plain = in_one_form(schema)
        check_cost(plain)
        options = {"whitespace_pattern": SPACE}
        found[name] = f"%json {json.dumps({**rewritten(plain, work), 'x-guidance': options})}"
    return found


def _written(text: str, control_ids: Mapping[str, int]) -> str:
    """A text whose control tokens are named by their ids."""
    spellings = sorted(control_ids, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, spellings))})", text) if spellings else [text]
    return " ".join(
        f"<[{control_ids[part]}]>" if part in control_ids else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )
