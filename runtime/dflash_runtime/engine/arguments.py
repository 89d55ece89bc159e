"""Checks of what a caller of the engine passes in; a wrong value is a one-line SettingsError."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TypeVar

import numpy as np

from dflash_protocol.errors import ContextExceeded, SettingsError
from dflash_protocol.ids import I32Array

C = TypeVar("C", bound=StrEnum)


def whole_number(name: str, value: object, *, smallest: int, largest: int = 1 << 31) -> int:
    """`value` as an int. Raises: SettingsError if it is not a whole number, or out of range."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise SettingsError(f"{name}={value!r}: must be a whole number") from None
    if not smallest <= number <= largest:
        allowed = f"{smallest} or more" if largest == 1 << 31 else f"from {smallest} to {largest}"
        raise SettingsError(f"{name}={value}: must be {allowed}")
    return number


def choice(kind: type[C], name: str, value: str) -> C:
    """The member of `kind`. Raises: SettingsError with the setting's name and allowed values."""
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(kind)
        raise SettingsError(f"{name}={value!r}: must be one of {allowed}") from None


def token_id_array(
    token_ids: Sequence[int], *, vocab_size: int, num_positions: int, model_positions: int
) -> I32Array:
    """Token ids as an array. Shapes: result [T] int32.

    Raises: SettingsError for the first that is not in the vocabulary; ContextExceeded for more than
    `num_positions`, saying that `model_positions` is the model's limit.
    """
    if hasattr(token_ids, "__len__") and len(token_ids) > num_positions:
        raise ContextExceeded(len(token_ids), num_positions, model_positions=model_positions)
    return index_array("token id", token_ids, smallest=0, largest=vocab_size - 1)


def index_array(what: str, indices: Collection[int], *, smallest: int, largest: int) -> I32Array:
    """Indices as an array; `what` names one in errors. Shapes: result [T] int32.

    Raises: SettingsError for the first that is not within ``smallest..largest``.
    """
    if isinstance(indices, str | bytes) or not hasattr(indices, "__len__"):
        raise SettingsError(f"{what}s must be a sequence of whole numbers")
    array = np.empty(len(indices), np.int32)
    for position, index in enumerate(indices):
        try:
            number = operator.index(index)
        except TypeError:
            raise SettingsError(
                f"{what} {index!r} at position {position} is no whole number"
            ) from None
        if not smallest <= number <= largest:
            raise SettingsError(
                f"{what} {number} at position {position} is not within {smallest}..{largest}"
            )
        array[position] = number
    return array


def chunk_bounds(
    num_tokens: int,
    chunk: int | Iterable[int] | None,
    default: int,
    *,
    smallest: int = 1,
    largest: int | None = None,
) -> Iterator[tuple[int, int]]:
    """Successive (first, last) of chunks that cover all tokens; the last size is repeated.

    A `chunk` above `largest` is split. If it is None, chunks have up to `default` tokens, and at
    least `smallest` unless there are fewer in all; `default` is at least twice `smallest`.
    """
    if chunk is None:
        first = 0
        while first < num_tokens:
            size = min(default, num_tokens - first)
            if 0 < num_tokens - first - size < smallest:
                size = num_tokens - first - smallest
            yield first, first + size
            first += size
        return
    sizes = iter(chunk if isinstance(chunk, Iterable) else [chunk])
    first, size = 0, 0
    while first < num_tokens:
        size = whole_number("chunk", next(sizes, size), smallest=1)
        last = min(first + size, num_tokens)
        for begin in range(first, last, largest or size):
            yield begin, min(begin + (largest or size), last)
        first = last
