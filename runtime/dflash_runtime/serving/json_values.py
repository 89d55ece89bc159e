"""How many values JSON has, found without parsing it, which holds the interpreter's lock."""

from __future__ import annotations

FEW_VALUES = 1 << 16
"""Parsing so many takes no long time."""

_BEFORE_VALUES = (b",", b"[", b"{")


def has_more_values(data: bytes, most: int) -> bool:
    """Whether JSON has more values than `most`, nested ones included. A string is one value,
    however long."""
    if sum(map(data.count, _BEFORE_VALUES)) <= most:
        return False
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 4 * most + 2:  # two for a name, two for its value, or for the only one
        return True
    beside_texts = b"".join(plain.split(b'"')[::2])
    return sum(map(beside_texts.count, _BEFORE_VALUES)) > most
