"""Texts from a hostile file or peer, and a check that our output has made them harmless."""

from __future__ import annotations

import re

FORGED = "FORGED"
"""The beginning of a line that the text tries to forge."""
HOSTILE = (
    "A\x1b[2J\x1b]0;title\x07"
    + "".join(f"{end}{FORGED} " for end in ("\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"))
    + "\x00\x7f\x9b31m\u202e\u2066\u200b\ufeff\U000e0041 [bold]%s{}"
)
"""Valid UTF-8 that clears a screen, sets a title or colours, reverses or hides text; and every
character that some program treats as the end of a line."""
HOSTILE_LONG = HOSTILE + "b" * 100_000

_LINE_ENDS = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def assert_harmless(said: str, *, longest_line: int = 5000) -> None:
    """Check that nothing of `HOSTILE` would take effect in a terminal or a log."""
    odd = {character for character in said if not (character.isprintable() or character == "\n")}
    assert not odd, (odd, said[:2000])
    lines = _LINE_ENDS.split(said)
    assert not [line for line in lines if line.startswith(FORGED)], said
    assert max(map(len, lines)) <= longest_line
