"""What one rendering of a chat template may make, and how long it may take.

Knows nothing of Jinja's workings.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from jinja2.exceptions import SecurityError

# What a template may make beyond a multiple of what the caller passed in, in characters and items.
_VALUE_ALLOWANCE, _VALUE_MULTIPLE = 1 << 20, 4
_TOTAL_ALLOWANCE, _TOTAL_MULTIPLE = 1 << 23, 64
_ITEM_WEIGHT = 4  # of every value besides its characters: weighing takes time for each
_MAX_DEPTH = 64


class Budget:
    """What is left of one rendering's allowance."""

    def __init__(self, inputs: Any, deadline_s: float) -> None:
        """Start the clock. Raises: SecurityError if the inputs are nested too deeply."""
        weight = _weigh(inputs, 1 << 62, 0)
        self._max_weight = _VALUE_ALLOWANCE + _VALUE_MULTIPLE * weight
        self._left = _TOTAL_ALLOWANCE + _TOTAL_MULTIPLE * weight
        self._ends_at = time.monotonic() + deadline_s

    def charge(self, amount: int) -> None:
        """Raises: SecurityError if nothing is left, or no time."""
        self._left -= amount
        if self._left < 0:
            raise SecurityError("the template makes too much text or loops too often")
        if time.monotonic() > self._ends_at:
            raise SecurityError("the template takes too long")

    def check(self, weight: int) -> None:
        """Raises: SecurityError if a value of this weight must not be made."""
        if weight > self._max_weight:
            raise SecurityError("the template makes too large a value")

    def measure(self, value: Any) -> int:
        """Weight of a value that may be made.

        Raises: SecurityError if it may not.
        """
        weight = _weigh(value, self._max_weight, 0)
        self.check(weight)
        return weight

    def admit(self, value: Any) -> Any:
        """Charge for a value that was just made, and return it.

        What it refers to has been charged before.
        """
        self.measure(value)
        self.charge(1 + (len(value) if isinstance(value, Collection) else 0))
        return value


def _weigh(value: Any, limit: int, depth: int) -> int:
    """Characters and items in a value, each as often as it occurs; stops counting past `limit`."""
    if isinstance(value, str):
        return _ITEM_WEIGHT + len(value)
    if isinstance(value, int):
        return _ITEM_WEIGHT + value.bit_length() // 8
    if isinstance(value, range):
        return _ITEM_WEIGHT + len(value)
    if not isinstance(value, Collection):
        return _ITEM_WEIGHT
    if depth >= _MAX_DEPTH:
        raise SecurityError("a value is nested too deeply")
    items = (x for pair in value.items() for x in pair) if isinstance(value, dict) else value
    weight = _ITEM_WEIGHT
    for item in items:
        weight += _weigh(item, limit, depth + 1)
        if weight > limit:
            break
    return weight
