"""Parts of a long measurement, each with a deadline: what fails or takes too long is written down,
and the rest goes on.

Knows nothing of what is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

Result = dict[str, Any]


def say(text: str) -> None:
    """Prints progress."""
    print(text, file=sys.stderr, flush=True)


class Parts:
    """The parts of one run, which together must not take longer than `limit_s`."""

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = clock()
        self._limit_s = limit_s
        self.results: dict[str, Result] = {}
        """By name: ``seconds``, ``error`` if there was one, and what the part has found so far."""

    @property
    def left_s(self) -> float:
        return self._started_s + self._limit_s - self._clock()

    @property
    def failed(self) -> list[str]:
        """Parts that did not come to their end, or lost a side on the way."""
        return [name for name, each in self.results.items() if each.get("errors")]

    def run(self, name: str, limit_s: float, measure: Callable[[Result, float], None]) -> Result:
        """Have `measure` fill a result until a time of the clock, at which it must have ended.

        What it raises is kept as text: what it had found before counts.
        """
        result: Result = {"errors": []}
        self.results[name] = result
        started_s = self._clock()
        until_s = started_s + min(limit_s, self.left_s)
        say(f"[{started_s - self._started_s:5.0f} s] {name}: at most {until_s - started_s:.0f} s")
        if until_s <= started_s:
            result["errors"].append("no time was left for it")
        else:
            try:
                measure(result, until_s)
            except Exception as error:
                text = str(error) or type(error).__name__
                if text not in result["errors"]:
                    result["errors"].append(text)
        result["seconds"] = round(self._clock() - started_s, 1)
        for text in result["errors"]:
            say(f"{name}: {text}")
        return result
