"""Reading a JSON record strictly: every key known, every value of its type and within bounds."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

_LONGEST_TEXT = 4096
"""Options name their daemons, at most MOST_DAEMONS of up to 32 characters."""
MOST_BYTES = 8 << 20
_MOST_VALUES = 1 << 19
_MOST_LISTS = 1 << 17
_MOST_DIGITS = 4000
"""Of a whole number: Python converts 4,300 at most."""

Record = dict[str, Any]


def parsed(
    content: bytes, *, most_lists: int = _MOST_LISTS, most_values: int = _MOST_VALUES
) -> Any:
    """The value of a JSON text of bounded size. Raises: ValueError saying what is wrong."""
    if len(content) > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES >> 20} MiB")
    # Parsed objects take more memory than text: a list 64 bytes, a number or string 40 to 60.
    if content.count(b"[") + content.count(b"{") > most_lists:
        raise ValueError(f"more than {most_lists} lists and objects")
    if content.count(b",") > most_values:
        raise ValueError(f"more than {most_values} values")
    try:
        return json.loads(
            content,
            object_pairs_hook=_distinct,
            parse_constant=_no_number,
            parse_int=_bounded,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, line {error.lineno}") from None
    except RecursionError:
        raise ValueError("not JSON: too deep") from None
    except UnicodeDecodeError:
        raise ValueError("not JSON: not UTF-8") from None


def fields(value: Any, what: str, keys: Collection[str]) -> Record:
    """An object with exactly these keys. Raises: ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    for key in keys:
        if key not in value:
            raise ValueError(f"{what} lacks {key}")
    for key in value:
        if key not in keys:
            raise ValueError(f"{what} has an unknown key {shown(key)}")
    return value


def items(value: Any, what: str, most: int) -> list[Any]:
    """A list of at most so many values. Raises: ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"{what} is not a list")
    if len(value) > most:
        raise ValueError(f"{what} has {len(value)} values; at most {most} are read")
    return value


def is_whole(value: Any, smallest: int, largest: int) -> bool:
    """Whether it is a whole number within these bounds."""
    return type(value) is int and smallest <= value <= largest


def whole(value: Any, what: str, bounds: tuple[int, int]) -> int:
    """A whole number from one bound to the other. Raises: ValueError."""
    smallest, largest = bounds
    if not is_whole(value, smallest, largest):
        raise ValueError(f"{what} is {shown(value)}, must be {smallest} to {largest}")
    found: int = value
    return found


def number(value: Any, what: str, largest: float) -> float:
    """A number from 0. Raises: ValueError."""
    # NaN fails too; `math.isfinite` does not take all whole numbers.
    if type(value) not in (int, float) or not 0 <= value <= largest:
        raise ValueError(f"{what} is {shown(value)}, must be 0 to {largest:g}")
    return float(value)


def text(value: Any, what: str) -> str:
    """One printable line. Raises: ValueError."""
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT or not value.isprintable():
        raise ValueError(f"{what} is not a line of up to {_LONGEST_TEXT} characters")
    return value


def one_of(value: Any, what: str, known: Sequence[str]) -> str:
    """Raises: ValueError."""
    if value not in known or not isinstance(value, str):
        raise ValueError(f"{what} is {shown(value)}, must be one of {', '.join(known)}")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> Record:
    result: Record = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {shown(key)} occurs twice")
        result[key] = value
    return result


def _bounded(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"not JSON: a number of {len(digits)} digits")
    return int(digits)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def shown(value: Any) -> str:
    """A value, shortened to fit a line."""
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        return "a number beyond 64 bits"
    return ascii(value[:40] if isinstance(value, str) else value)
