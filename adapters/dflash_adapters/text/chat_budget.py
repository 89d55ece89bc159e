"""What one rendering of a chat template may make, and how long it may take.

Knows nothing of Jinja's workings.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from typing import Any

from jinja2.exceptions import SecurityError

# What a template may make beyond a multiple of what the caller passed in, in characters and items.
_VALUE_ALLOWANCE, _VALUE_MULTIPLE = 1 << 20, 4
_TOTAL_ALLOWANCE, _TOTAL_MULTIPLE = 1 << 23, 64
_ITEM_WEIGHT = 4  # of every value besides its characters: weighing takes time for each
_MAX_DEPTH = 64
_MAX_INT_BITS = 128
_COMPARED_AT_ONCE = 64  # of weight: comparing takes far less time than making


class Budget:
    """What is left of one rendering's allowance."""

    def __init__(self, inputs: Any, deadline_s: float) -> None:
        """Start the clock. Raises: SecurityError if the inputs are nested too deeply."""
        self._inputs = inputs
        # Weights of all containers in the inputs, by identity: templates ask for the number of
        # messages once a message, and must not have all of them weighed each time.
        self._known: dict[int, int] = {}
        self._max_weight = sys.maxsize
        weight = self._weigh(inputs, 0, self._known)
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
        """Characters and items in a value, each as often as it occurs.

        Raises: SecurityError if there are more than a value may have.
        """
        weight = self._weigh(value, 0, None)
        self.check(weight)
        return weight

    def admit(self, value: Any) -> Any:
        """Charge for a value that was just made, and return it.

        What it refers to has been charged before.
        """
        if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
            raise SecurityError("the template computes too large a number")
        self.measure(value)
        self.charge(1 + (len(value) if isinstance(value, Collection) else 0))
        return value

    def compare(self, value: Any) -> None:
        """Charge for a value that is compared or searched."""
        self.compare_often(self.measure(value), 1)

    def compare_often(self, weight: int, times: int) -> None:
        """Charge for comparing or copying what has this weight so many times."""
        self.charge(1 + weight * times // _COMPARED_AT_ONCE)

    def _weigh(self, value: Any, depth: int, record: dict[int, int] | None) -> int:
        """Weight of a value, or of enough of it to be too much."""
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
