"""Grammars of answers whose calls have to follow the schemas of their tools.

They are in llguidance's notation, which extends Lark's: ``%json`` is a schema, ``<[7]>`` the
control token 7, and a rule that is ``[lazy]`` ends as early as it can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_adapters.text.answers.events import Tools
from dflash_adapters.text.answers.formats import AnswerFormat
from dflash_adapters.text.schema_checks import SPACE, check_cost, has_disjoint_alternatives


@dataclass(frozen=True, slots=True)
class _CallShape:
    """How calls are written: the marker `entry`, then each as its name between `opens` and
    `middle`, its arguments, and `closes`; behind the last one `after`. Between two is `between`."""

    entry: str
    opens: str
    middle: str
    closes: str
    between: str = ""
    after: str = ""


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
}
ENFORCED_FORMATS = frozenset(_SHAPES)
"""The formats whose calls can be made to follow schemas."""


def call_grammar(
    kind: AnswerFormat,
    tools: Tools,
    *,
    is_required: bool,
    is_single: bool,
    control_ids: Mapping[str, int],
) -> str:
    """A grammar for answers that may call these tools, each with arguments that follow its schema.

    `is_required`: the answer is nothing but calls; else text may stand before them, in which no
    call begins. `is_single`: at most one call. `control_ids`: control tokens by their spellings.
    `kind` is one of ENFORCED_FORMATS, and there is at least one tool.
    Raises: GrammarError for a schema that would take too long.
    """

    def written(text: str) -> str:
        return _written(text, control_ids)

    shape = _SHAPES[kind]
    call = " | ".join(f"call_{each}" for each in range(len(tools)))
    more = "" if is_single else f"({written(shape.between)} ({call}))*"
    lines = ["%llguidance {}"]
    if is_required:
        lines.append(f"start: {written(shape.entry)} calls")
    elif shape.entry in control_ids:
        lines += [f"start: TEXT ({written(shape.entry)} calls)?", "TEXT: /(.|\\n)*/"]
    else:
        lines += ["start: TEXT | until_calls calls", "TEXT: /(.|\\n)*/"]
        lines.append(f"until_calls[lazy]: TEXT {written(shape.entry)}")
    lines.append(f"calls: ({call}) {more} {written(shape.after)}")
    for each, (name, schema) in enumerate(tools.items()):
        check_cost(schema)
        options = {"whitespace_pattern": SPACE, "coerce_one_of": has_disjoint_alternatives(schema)}
        arguments = json.dumps({**schema, "x-guidance": options})
        head = written(shape.opens + name + shape.middle)
        lines.append(f"call_{each}: {head} %json {arguments} {written(shape.closes)}")
    return "\n".join(lines) + "\n"


def _written(text: str, control_ids: Mapping[str, int]) -> str:
    """A text whose control tokens are named by their ids."""
    spellings = sorted(control_ids, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, spellings))})", text) if spellings else [text]
    return " ".join(
        f"<[{control_ids[part]}]>" if part in control_ids else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )
