"""Whether other programs need a device's memory: what is said of it, look after look."""

from __future__ import annotations

LOOK_S = 1.0
"""Between two looks at the device's free memory."""
CALM_S = 10.0
"""Memory has to be free for so long before experts take it again."""
_LOW, _ENOUGH = 0.5, 0.75
"""Of what is to stay free: if less is free than the first share, another program has taken some;
own work takes a little. As much as the second share stays when experts take memory again."""
_MOST_DOUBLED = 5
"""How often what is given back at a look is doubled, while looks find it taken."""
_LEAST_BYTES = 1 << 20
"""Free memory beyond what is to stay free that is worth taking."""


def is_short(free_bytes: int, stays_free_bytes: int) -> bool:
    """Whether another program has taken what is to stay free."""
    return free_bytes < _LOW * stays_free_bytes


def spare_bytes(free_bytes: int, stays_free_bytes: int) -> int:
    """What experts may take of free memory, of which so much is to stay free."""
    return max(0, free_bytes - int(_ENOUGH * stays_free_bytes))


class Shortage:
    """Looks one after the other that find too little free."""

    def __init__(self) -> None:
        self._num_low = 0

    def missing_bytes(self, free_bytes: int, stays_free_bytes: int) -> int:
        """A look: what is to be given back; 0 if enough is free. A program that waits for more than
        was given back has taken that at once: it is twice as much each time."""
        if not is_short(free_bytes, stays_free_bytes):
            self._num_low = 0
            return 0
        missing = (stays_free_bytes - free_bytes) << min(self._num_low, _MOST_DOUBLED)
        self._num_low += 1
        return missing


class Calm:
    """How long there has been memory to take again."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def end(self) -> None:
        """Something was given back, or has changed."""
        self._since_s = None

    def may_take(self, spare_bytes: int, wanted_bytes: int, *, now_s: float) -> int:
        """A look: what of the spare memory is taken now, no more than is wanted; 0: nothing yet."""
        more_bytes = min(spare_bytes, wanted_bytes)
        if wanted_bytes <= 0 or more_bytes < min(_LEAST_BYTES, wanted_bytes):
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s >= CALM_S:
            self._since_s = None
            return more_bytes
        return 0
