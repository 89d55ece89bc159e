"""The memory and time budget of one rendering of a chat template."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from typing import Any

from jinja2.exceptions import SecurityError

# Limits in characters and items: a constant, plus a multiple of the caller's inputs.
_VALUE_ALLOWANCE, _VALUE_MULTIPLE = 1 << 20, 4
_TOTAL_ALLOWANCE, _TOTAL_MULTIPLE = 1 << 23, 64
_ITEM_WEIGHT = 4  # of every value besides its characters, for the time to weigh it
_MAX_DEPTH = 64
_MAX_INT_BITS = 128
_COMPARED_AT_ONCE = 64  # weight compared for one unit: comparing is much faster than making


class Budget:
    """The remaining budget of one rendering; the clock starts with its construction.

    The weight of a value is its characters and items, nested ones included.
    """

    def __init__(self, inputs: Any, deadline_s: float) -> None:
        """Raises: SecurityError if the inputs are nested too deeply."""
        self._inputs = inputs
        # Cached weights of all containers in the inputs, by identity: templates use the list of
        # messages once a message.
        self._known: dict[int, int] = {}
        self._max_weight = sys.maxsize
        weight = self._weigh(inputs, 0, self._known)
        self._max_weight = _VALUE_ALLOWANCE + _VALUE_MULTIPLE * weight
        self._left = _TOTAL_ALLOWANCE + _TOTAL_MULTIPLE * weight
        self._ends_at = time.monotonic() + deadline_s

    def charge(self, amount: int) -> None:
        """Raises: SecurityError if the budget or the time is used up."""
        self._left -= amount
        if self._left < 0:
            raise SecurityError("the template makes too much text or loops too often")
        if time.monotonic() > self._ends_at:
            raise SecurityError("the template takes too long")

    def check(self, weight: int) -> None:
        """Raises: SecurityError if a value of this weight would be too large."""
        if weight > self._max_weight:
            raise SecurityError("the template makes too large a value")

    def measure(self, value: Any) -> int:
        """The weight of a value. Raises: SecurityError if it is too large."""
        weight = self._weigh(value, 0, None)
        self.check(weight)
        return weight

    def admit(self, value: Any) -> Any:
        """Charge for a value that was just made, without its parts, and return it."""
        if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
            raise SecurityError("the template computes too large a number")
        self.measure(value)
        self.charge(1 + (len(value) if isinstance(value, Collection) else 0))
        return value

    def compare(self, value: Any) -> None:
        """Charge for a value that is compared or searched."""
        self.compare_often(self.measure(value), 1)

    def compare_often(self, weight: int, times: int) -> None:
        """Charge for comparing or copying a value of this weight `times` times."""
        self.charge(1 + weight * times // _COMPARED_AT_ONCE)

    def _weigh(self, value: Any, depth: int, record: dict[int, int] | None) -> int:
        """Weight of a value, or of enough of it to exceed the limit."""
        if isinstance(value, (str, range)):
            return _ITEM_WEIGHT + len(value)
        if isinstance(value, int):
            return _ITEM_WEIGHT + value.bit_length() // 8
        if not isinstance(value, Collection):
            return _ITEM_WEIGHT
        if (known := self._known.get(id(value))) is not None:
            return known
        if depth >= _MAX_DEPTH:
            raise SecurityError("a value is nested too deeply")
        items = (x for pair in value.items() for x in pair) if isinstance(value, dict) else value
        weight = _ITEM_WEIGHT
        for item in items:
            weight += self._weigh(item, depth + 1, record)
            if weight > self._max_weight:
                break
        if record is not None:
            record[id(value)] = weight
        return weight
