"""Texts as a hostile file or peer would have them, and what must not come of them."""

from __future__ import annotations

import re

FORGED = "FORGED"
"""Begins a line that the text would make for itself."""
HOSTILE = (
    "A\x1b[2J\x1b]0;title\x07"
    + "".join(f"{end}{FORGED} " for end in ("\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"))
    + "\x00\x7f\x9b31m\u202e\u2066\u200b\ufeff\U000e0041 [bold]%s{}"
)
"""Valid UTF-8: what clears a screen, sets a title, colours, turns text round or is not seen; and
each character at which some program ends a line."""
HOSTILE_LONG = HOSTILE + "b" * 100_000

_LINE_ENDS = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def assert_harmless(said: str, *, longest_line: int = 5000) -> None:
    """Nothing of `HOSTILE` does what it would in a terminal or a log."""
    odd = {character for character in said if not (character.isprintable() or character == "\n")}
    assert not odd, (odd, said[:2000])
    lines = _LINE_ENDS.split(said)
    assert not [line for line in lines if line.startswith(FORGED)], said
    assert max(map(len, lines)) <= longest_line
