"""Finds markers in a text that comes in pieces, and where a call ends."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache

from dflash_adapters.text.answers.tags import CallReader

_OPENING, _CLOSING = frozenset("[{("), frozenset("]})")
_ESCAPES = r"(?:\\.)+"


@cache
def marker_pattern(markers: frozenset[str], *, has_escapes: bool = False) -> re.Pattern[str]:
    r"""Finds the next marker; at a text's end also what may be a marker's beginning, as ``part``.

    No marker contains another. With `has_escapes` backslashes with the character after them are
    found too.
    """
    wholes = [_ESCAPES] * has_escapes + [re.escape(each) for each in sorted(markers)]
    parts = [r"\\"] * has_escapes + [_part(each) for each in sorted(markers) if len(each) > 1]
    pattern = "|".join([*wholes, rf"(?P<part>(?:{'|'.join(parts)})\Z)"] if parts else wholes)
    return re.compile(pattern or r"(?!)", re.DOTALL)


def _part(marker: str) -> str:
    """A pattern of the beginnings of a marker."""
    pattern = ""
    for character in reversed(marker[:-1]):
        pattern = re.escape(character) + (f"(?:{pattern})?" if pattern else "")
    return pattern


@dataclass(frozen=True, slots=True)
class Lead:
    """What has to follow the marker of a call, up to where quotes, brackets or the end may come."""

    whole: re.Pattern[str]
    """Matches leads."""
    partial: re.Pattern[str]
    """Matches all beginnings of leads, and of other texts only those below 1000 characters."""

    @classmethod
    def of(cls, whole: str, partial: str) -> Lead:
        """From regular expressions."""
        return cls(re.compile(whole), re.compile(partial))


@dataclass(frozen=True, slots=True)
class Quotes:
    """Markers around text that is not searched for ends, brackets and other calls."""

    pairs: tuple[tuple[str, str], ...] = ()
    has_escapes: bool = False
    """Whether backslashes escape characters between them."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a format writes calls: a marker, what has to follow it, and what ends it."""

    opens: str
    """The marker that a call begins with. "[": calls begin with a bracket, [ or {, that is part of
    them, where content would begin, or after another marker or call."""
    lead: Lead
    read: CallReader
    ends: str = ""
    """The marker that ends a call; none: it ends where the first bracket is closed."""
    quotes: Quotes = Quotes()
    inner: tuple[str, ...] = ()
    """Other special tokens within a call."""

    @property
    def is_bracket(self) -> bool:
        """Whether calls begin with a bracket instead of a marker."""
        return self.opens in _OPENING


class Scanned(Enum):
    """What a `CallScanner` found."""

    NOTHING = auto()
    END = auto()
    NO_CALL = auto()


class CallScanner:
    """Finds the end of one call. Each piece of its text is looked at once."""

    def __init__(
        self,
        syntax: CallSyntax,
        restarts: Iterable[str],
        aborts: Iterable[str],
        *,
        has_quotes: bool = True,
    ) -> None:
        """What is held is no call if one of `aborts` comes, or, not quoted, one of `restarts`."""
        self._ends = syntax.ends
        self._quotes = dict(syntax.quotes.pairs) if has_quotes else {}
        self._aborts = frozenset(aborts)
        brackets = frozenset() if syntax.ends else _OPENING | _CLOSING
        self._outside = marker_pattern(
            self._aborts.union({syntax.ends} - {""}, self._quotes, brackets, restarts)
        )
        self._inside = {
            closing: marker_pattern(self._aborts | {closing}, has_escapes=syntax.quotes.has_escapes)
            for closing in self._quotes.values()
        }
        self._closing = ""
        self._levels = int(syntax.is_bracket)

    def scan(self, text: str, at: int) -> tuple[int, Scanned]:
        """Search a text from a place on. Returns what was found, and the place after an end, before
        what shows that this is no call, or from which the search goes on with more text."""
        while True:
            pattern = self._inside[self._closing] if self._closing else self._outside
            found = pattern.search(text, at)
            if found is None:
                return len(text), Scanned.NOTHING
            if found.lastgroup is not None:
                return found.start(), Scanned.NOTHING
            marker, at = found[0], found.end()
            if marker in self._aborts:
                return found.start(), Scanned.NO_CALL
            if self._closing:
                if marker == self._closing:
                    self._closing = ""
            elif marker == self._ends:
                return at, Scanned.END
            elif marker in self._quotes:
                self._closing = self._quotes[marker]
            elif self._ends or (marker not in _OPENING and marker not in _CLOSING):
                return found.start(), Scanned.NO_CALL
            else:
                self._levels += 1 if marker in _OPENING else -1
                if self._levels <= 0:
                    return at, Scanned.END
