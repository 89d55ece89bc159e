"""GBNF, llama.cpp's notation of grammars, in llguidance's, which extends Lark's.

A rule that needs no other, or only such, becomes a terminal, which llguidance matches as far as it
can; the others are its rules. Characters are written by their numbers, names anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from dflash_protocol.errors import GrammarError, one_line

_TOKEN = re.compile(
    r"""
      (?P<space> [ \t]+ | \#[^\r\n]* )
    | (?P<line> \r\n? | \n )
    | (?P<text> "(?:[^"\\]|\\.)*" )
    | (?P<set> \[(?:[^\]\\]|\\.)*\] )
    | (?P<name> [A-Za-z0-9_-]+ )
    | (?P<is> ::= )
    | (?P<repeat> [*+?] | \{\s*[0-9]{1,9}\s*(?:,\s*(?:[0-9]{1,9}\s*)?)?\} )
    | (?P<mark> [()|.] )
    """,
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"""\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(["\\\[\]nrt]))|([^\\])""",
    re.DOTALL,
)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_ROOT = "root"
_MOST_DEPTH = 100
_MOST_REPEATS = 10
_LONGEST_SHOWN = 40

_Part: TypeAlias = "str | _Name"


@dataclass(frozen=True, slots=True)
class _Name:
    """A rule, by its name in GBNF."""

    text: str


@dataclass(slots=True)
class _Parser:
    """Reads the tokens of a grammar once."""

    tokens: list[tuple[str, str]]
    place: int = 0
    depth: int = 0
    rules: dict[str, list[_Part]] = field(default_factory=dict)

    def parse(self) -> dict[str, list[_Part]]:
        """What each rule stands for; of rules with one name the last. Raises: GrammarError."""
        while self._skip(("space", "line")):
            kind, name = self._next()
            self._skip(("space",))
            if kind != "name" or self._next()[0] != "is":
                raise GrammarError(f"a rule is a name and ::=, unlike {_shown(name)}")
            self._skip(("space", "line"))
            self.rules[name] = self._alternatives()
            if self._skip(("space",)) and self._next()[0] != "line":
                raise GrammarError(f"rule {_shown(name)} ends before its line does")
        return self.rules

    def _skip(self, kinds: tuple[str, ...]) -> bool:
        """Whether anything follows these."""
        while self.place < len(self.tokens) and self.tokens[self.place][0] in kinds:
            self.place += 1
        return self.place < len(self.tokens)

    def _next(self) -> tuple[str, str]:
        if self.place == len(self.tokens):
            raise GrammarError("the grammar ends too soon")
        self.place += 1
        return self.tokens[self.place - 1]

    def _alternatives(self) -> list[_Part]:
        inside = ("space", "line") if self.depth else ("space",)
        parts, since = list[_Part](), 0
        """`since`: where the latest alternative begins."""
        while self._skip(inside):
            kind, text = self.tokens[self.place]
            if kind == "line" or text == ")":
                break
            self.place += 1
            if text == "|" and kind == "mark":
                parts += ["|"] if len(parts) > since else ['""', "|"]
                since = len(parts)
                self._skip(("space", "line"))
                continue
            part, num_repeats = self._part(kind, text), 0
            while self._skip(inside) and self.tokens[self.place][0] == "repeat":
                part = _repeated(part, self._next()[1])
                num_repeats += 1
                if num_repeats > _MOST_REPEATS:
                    raise GrammarError(f"a part is repeated more than {_MOST_REPEATS} times over")
            parts += part
        return parts if len(parts) > since else [*parts, '""']

    def _part(self, kind: str, text: str) -> list[_Part]:
        match kind:
            case "text":
                return [_literal(text)]
            case "set":
                return [_set(text)]
            case "name":
                return [_Name(text)]
        if text == ".":
            return [_ANY]
        if text != "(":
            raise GrammarError(f"nothing may begin with {_shown(text)}")
        if self.depth == _MOST_DEPTH:
            raise GrammarError(f"more than {_MOST_DEPTH} parentheses are open")
        self.depth += 1
        inner = self._alternatives()
        if self._next()[1] != ")":
            raise GrammarError("a parenthesis is not closed")
        self.depth -= 1
        return ["(", *inner, ")"]


def gbnf_to_lark(text: str) -> str:
    """Raises: GrammarError."""
    rules = _Parser(list(_tokens(text))).parse()
    if _ROOT not in rules:
        raise GrammarError("there is no rule named root")
    for parts in rules.values():
        for part in parts:
            if isinstance(part, _Name) and part.text not in rules:
                raise GrammarError(f"there is no rule named {_shown(part.text)}")
    names = _names(rules)
    lines = ["%llguidance {}"]
    for name, parts in rules.items():
        known = (names[part.text] if isinstance(part, _Name) else part for part in parts)
        lines.append(f"{names[name]}: {' '.join(known)}")
    return "\n".join(lines) + "\n"


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None or found.lastgroup is None:
            raise GrammarError(f"nothing may begin with {_shown(text[place:])}")
        yield found.lastgroup, found[0]
        place = found.end()


def _names(rules: dict[str, list[_Part]]) -> dict[str, str]:
    """Names in Lark, where terminals are upper case."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    num_needed = dict.fromkeys(rules, 0)
    """Rules that are not known to be terminals."""
    for name, parts in rules.items():
        for needed in {part.text for part in parts if isinstance(part, _Name)}:
            users[needed].append(name)
            num_needed[name] += 1
    terminals = [name for name, count in num_needed.items() if count == 0 and name != _ROOT]
    for terminal in terminals:  # which grow
        for user in users[terminal]:
            num_needed[user] -= 1
            if num_needed[user] == 0 and user != _ROOT:
                terminals.append(user)
    upper = set(terminals)
    found = {
        name: f"R_{place}" if name in upper else f"r_{place}" for place, name in enumerate(rules)
    }
    return found | {_ROOT: "start"}


def _repeated(part: list[_Part], operator: str) -> list[_Part]:
    if operator.startswith("{"):
        least, comma, most = operator[1:-1].replace(" ", "").partition(",")
        low, high = int(least), int(most.strip() or -1) if comma else int(least)
        if high == 0:
            return ['""']
        if 0 <= high < low:
            raise GrammarError(f"{operator} has a smaller number after a larger one")
        operator = "*" if (low, high) == (0, -1) else f"{{{low},{'' if high < 0 else high}}}"
    return ["(", *part, operator, ")"]


def _characters(text: str) -> Iterator[tuple[str, bool]]:
    """Characters, and whether they are escaped. Raises: GrammarError."""
    place = 0
    while place < len(text):
        found = _CHARACTER.match(text, place)
        if found is None:
            raise GrammarError(f"no escape: {_shown(text[place:])}")
        place = found.end()
        number = found[1] or found[2] or found[3]
        if number is None:
            yield _ESCAPED.get(found[4], found[4]) if found[4] else found[5], bool(found[4])
        elif int(number, 16) > 0x10FFFF or 0xD800 <= int(number, 16) <= 0xDFFF:
            raise GrammarError(f"no character: {_shown(found[0])}")
        else:
            yield chr(int(number, 16)), True


def _literal(text: str) -> str:
    written = json.dumps("".join(each for each, _ in _characters(text[1:-1])), ensure_ascii=False)
    return written.replace("\x7f", "\\u007f")


def _set(text: str) -> str:
    """A set of characters as a regular expression."""
    is_other = text.startswith("[^")
    characters = list(_characters(text[2 if is_other else 1 : -1]))
    if not characters:
        if is_other:
            return _ANY
        raise GrammarError("a set has no character")
    found, place = "", 0
    while place < len(characters):
        first = last = characters[place][0]
        place += 1
        if place + 1 < len(characters) and characters[place] == ("-", False):
            last = characters[place + 1][0]
            place += 2
        if last < first:
            raise GrammarError(f"a set has a range that ends before it begins: {_shown(text)}")
        found += f"\\x{{{ord(first):x}}}"
        found += f"-\\x{{{ord(last):x}}}" if last > first else ""
    return f"/[{'^' if is_other else ''}{found}]/"


_ANY = r"/[\x{0}-\x{10ffff}]/"


def _shown(text: str) -> str:
    return one_line(repr(text[:_LONGEST_SHOWN]), _LONGEST_SHOWN)
