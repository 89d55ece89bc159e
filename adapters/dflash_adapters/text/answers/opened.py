"""Whether an answer begins within reasoning, since its prompt has opened that."""

from __future__ import annotations

_OPENED = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
}
"""What a prompt ends with if the answer begins within reasoning, and what then ends that."""


def closing_marker(rendered: str) -> str | None:
    """What ends the reasoning that a rendered prompt has opened; None: it has not."""
    end = rendered.rstrip()
    return next((_OPENED[each] for each in _OPENED if end.endswith(each)), None)
