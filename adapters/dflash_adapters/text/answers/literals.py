"""Values and calls as Python writes them, and as Gemma does: literals, and nothing is evaluated.

A value is a number, a constant of Python's or JSON's, a string between ``'``, ``"`` or Gemma's
``<|"|>``, a list, a tuple (read as a list) or an object, whose keys may stand without quotes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

_MOST_LEVELS = 64

GEMMA_QUOTE = '<|"|>'
_SPACE = re.compile(r"[ \t\r\n]*")
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_WORD = re.compile(r"[^ \t\r\n:=,(){}\[\]<>\"']+")
_NUMBER = re.compile(r"[-+]?(?:\d+(?P<real>\.\d*)?|(?P<point>\.\d+))(?P<power>[eE][-+]?\d+)?")
_STRINGS = {
    '"': re.compile(r'"((?:[^"\\]++|\\.)*+)"', re.DOTALL),
    "'": re.compile(r"'((?:[^'\\]++|\\.)*+)'", re.DOTALL),
}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""} | {
    character: character for character in "\\'\"/"
}
_CONSTANTS = {
    **{"True": True, "true": True, "False": False, "false": False},
    **{"None": None, "null": None},
}

_T = TypeVar("_T")


def literal(text: str) -> Any:
    """The value that a text consists of.

    Raises: ValueError if it is no value, or has more than 64 levels.
    """
    return _whole(text, LiteralReader.value)


def literal_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of calls like ``[f(a=1), g(b="x")]``; of one, also without brackets.

    Raises: ValueError if the text is nothing else, a call has arguments without names, or values
    have more than 64 levels.
    """
    return _whole(text, LiteralReader.calls)


def _whole(text: str, read: Callable[[LiteralReader], _T]) -> _T:
    reader = LiteralReader(text)
    found = read(reader)
    reader.check_end()
    return found


class LiteralReader:
    """Reads values from a text, one after the other. Methods raise ValueError where none is."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._levels = 0
        self._ends_in_comma = False
        """Whether what `_until` read last does."""

    def check_end(self) -> None:
        """Raises: ValueError if anything is left."""
        self._skip_space()
        if self._at < len(self._text):
            raise ValueError(f"unexpected text at {self._at}")

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """A list of calls, or one call without a list around it."""
        return self._until("]", self._call) if self._accept("[") else [self._call()]

    def value(self) -> Any:
        """One value."""
        self._levels += 1
        if self._levels > _MOST_LEVELS:
            raise ValueError("too many levels")
        found = self._value()
        self._levels -= 1
        return found

    def _value(self) -> Any:
        if self._accept("{"):
            return dict(self._until("}", lambda: self._pair(":")))
        if self._accept("["):
            return self._until("]", self.value)
        if self._accept("("):
            found = self._until(")", self.value)
            return found if len(found) != 1 or self._ends_in_comma else found[0]
        if (string := self._string()) is not None:
            return string
        if number := self._match(_NUMBER):
            is_real = number["real"] or number["point"] or number["power"]
            return float(number[0]) if is_real else int(number[0])
        word = self._match(_WORD)
        if word is None or word[0] not in _CONSTANTS:
            raise ValueError(f"no value at {self._at}")
        return _CONSTANTS[word[0]]

    def _call(self) -> tuple[str, dict[str, Any]]:
        name = self._match(_NAME)
        if name is None or not self._accept("("):
            raise ValueError(f"no call at {self._at}")
        return name[0], dict(self._until(")", lambda: self._pair("=")))

    def _pair(self, separator: str) -> tuple[str, Any]:
        key = self._string()
        if key is None:
            word = self._match(_WORD)
            key = word[0] if word else None
        if key is None or not self._accept(separator):
            raise ValueError(f"no key at {self._at}")
        return key, self.value()

    def _until(self, closing: str, read: Callable[[], _T]) -> list[_T]:
        """What stands between commas before a closing bracket; the last comma may be spare."""
        found: list[_T] = []
        has_comma = False
        while not self._accept(closing):
            if found and not has_comma:
                raise ValueError(f"no comma at {self._at}")
            found.append(read())
            has_comma = self._accept(",")
        self._ends_in_comma = has_comma
        return found

    def _string(self) -> str | None:
        if self._accept(GEMMA_QUOTE):
            end = self._text.find(GEMMA_QUOTE, self._at)
            if end < 0:
                raise ValueError("a string has no end")
            found, self._at = self._text[self._at : end], end + len(GEMMA_QUOTE)
            return found
        pattern = _STRINGS.get(self._text[self._at : self._at + 1])
        if pattern is None:
            return None
        string = self._match(pattern)
        if string is None:
            raise ValueError("a string has no end")
        return _ESCAPE.sub(_unescaped, string[1])

    def _accept(self, token: str) -> bool:
        """Whether the text goes on with a token, which is then skipped, as is space before it."""
        self._skip_space()
        if not self._text.startswith(token, self._at):
            return False
        self._at += len(token)
        return True

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self._skip_space()
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _skip_space(self) -> None:
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space else self._at


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if code is not None:
        return chr(min(int(code, 16), sys.maxunicode + 1))  # ValueError beyond Unicode
    return _ESCAPED.get(escape[4], escape[0])
