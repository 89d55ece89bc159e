"""Words of messages that depend on what is told: nouns by number, names near to a wrong one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from dflash_protocol.settings.kinds import shown


def noun(number: int, singular: str) -> str:
    """What so many are called, for nouns whose plural has an ``s`` more."""
    return singular if number == 1 else singular + "s"


def unknown(what: str, name: str, known: Iterable[str], *, prefixes: Sequence[str] = ()) -> str:
    """What is said of a name that nothing has: the names that are nearest to it, at most three.

    `prefixes` are what many names begin with; they say nothing of how near two names are.
    """

    def own_part(name: str) -> str:
        for prefix in prefixes:
            name = name.removeprefix(prefix)
        return name.casefold()

    by_part = {own_part(each): each for each in known}
    near = [by_part[part] for part in get_close_matches(own_part(name), by_part)]
    advice = f"did you mean {' or '.join(near)}?" if near else "docs/operations.md lists them all"
    return f"unknown {what} {shown(name)}; {advice}"
