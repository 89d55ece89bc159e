"""Says whether answers are right, and counts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from demo.chat.talks import Asked
from demo.chat.template import END

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_TAG = re.compile(r"</?(?:think|tool_call|tool_response)>")


def is_right(asked: Asked, text: str) -> bool:
    """Whether a text, without its end, is a right answer.

    The tool that was meant is called with the right arguments and nothing else is said; or the
    answer has its key word, and no marker. Reasoning is there if it was asked for, and closed.
    """
    expected = asked.answer
    text = text.removesuffix(END)
    if expected.reasoning:
        reasoning, closes, text = text.partition("\n</think>\n\n")
        if not closes or not reasoning.startswith("<think>\n"):
            return False
    if expected.call is None:
        return expected.key in text and _TAG.search(text) is None
    found = _CALL.fullmatch(text)
    return found is not None and _call(found[1]) == expected.call


def _call(text: str) -> tuple[Any, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return (value.get("name"), value.get("arguments")) if isinstance(value, dict) else None


def kind_of(asked: Asked) -> str:
    """What is counted together: the kind of the talk, and whether this answer is a call."""
    return "call" if asked.answer.call is not None else asked.kind


def counts(answers: Iterable[tuple[Asked, str]]) -> dict[str, str]:
    """Right answers of all, by kind, with the sum last."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for asked, text in answers:
        for kind in (kind_of(asked), "all"):
            total[kind] += 1
            right[kind] += is_right(asked, text)
    kinds = [*sorted(total.keys() - {"all"}), "all"]
    return {kind: f"{right[kind]}/{total[kind]}" for kind in kinds}
