"""Atomic operations on words that threads share: aligned int64.

Everything is sequentially consistent unless its name says relaxed: where it matters the cost is the
same, and it is easier to reason about.
"""

from __future__ import annotations

from typing import Any

from dflash_runtime.compute.cpu.simd.types import I64, i64, primitive, void
from dflash_runtime.compute.cpu.simd.untyped import types

_ALIGNMENT = 8
_ORDERED, _RELAXED = "seq_cst", "monotonic"


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@primitive(i64, i64)
def atomic_load(builder: Any, address: Any) -> Any:
    return builder.load_atomic(_word(builder, address), _ORDERED, _ALIGNMENT)


@primitive(void, i64, i64)
def atomic_store(builder: Any, address: Any, value: Any) -> None:
    builder.store_atomic(value, _word(builder, address), _ORDERED, _ALIGNMENT)


@primitive(i64, i64, i64)
def atomic_add(builder: Any, address: Any, value: Any) -> Any:
    """Returns the previous value."""
    return builder.atomic_rmw("add", _word(builder, address), value, _ORDERED)


@primitive(i64, i64, i64)
def atomic_and(builder: Any, address: Any, mask: Any) -> Any:
    """Returns the previous value."""
    return builder.atomic_rmw("and", _word(builder, address), mask, _ORDERED)


@primitive(i64, i64, i64)
def atomic_or(builder: Any, address: Any, mask: Any) -> Any:
    """Returns the previous value."""
    return builder.atomic_rmw("or", _word(builder, address), mask, _ORDERED)


@primitive(types.boolean, i64, i64, i64)
def atomic_replace(builder: Any, address: Any, expected: Any, value: Any) -> Any:
    """Compare and swap: store `value` if the word is `expected`; returns whether it was."""
    result = builder.cmpxchg(_word(builder, address), expected, value, _ORDERED, _ORDERED)
    return builder.extract_value(result, 1)


@primitive(i64, i64)
def relaxed_load(builder: Any, address: Any) -> Any:
    return builder.load_atomic(_word(builder, address), _RELAXED, _ALIGNMENT)


@primitive(void, i64, i64)
def relaxed_store(builder: Any, address: Any, value: Any) -> None:
    builder.store_atomic(value, _word(builder, address), _RELAXED, _ALIGNMENT)


@primitive(i64, i64, i64)
def relaxed_add(builder: Any, address: Any, value: Any) -> Any:
    """Returns the previous value."""
    return builder.atomic_rmw("add", _word(builder, address), value, _RELAXED)
