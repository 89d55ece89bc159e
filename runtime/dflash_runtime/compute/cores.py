"""Which CPU cores this process may compute on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dflash_protocol.errors import SettingsError

_TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_cores(topology: Path = _TOPOLOGY) -> list[int]:
    """Processors that this process may run on, one of each physical core, ascending.

    A core's second hardware thread adds next to nothing to kernels that fill its units. Where the
    system has no topology, every processor counts as a core.
    """
    allowed = sorted(os.sched_getaffinity(0))
    by_core: dict[str, int] = {}
    for cpu in allowed:
        try:
            siblings = (topology / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        by_core.setdefault(siblings, cpu)
    return sorted(by_core.values())


def parse_cores(text: str) -> list[int]:
    """Parse a processor list such as ``0-3,8``.

    Raises: SettingsError if it is malformed, or names a processor that this process may not use.
    """
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        bounds = [first, last] if dash else [first, first]
        if not all(bound.isascii() and bound.isdigit() and len(bound) <= 5 for bound in bounds):
            raise SettingsError(f"cores {text!r}: expected numbers and ranges, as in 0-3,8")
        cores.update(range(int(bounds[0]), int(bounds[1]) + 1))
    missing = cores - os.sched_getaffinity(0)
    if missing or not cores:
        raise SettingsError(f"cores {text!r}: {_as_text(missing) or 'none'} cannot be used here")
    return sorted(cores)


def share_of_cores(cores: list[int], part_idx: int, num_parts: int) -> list[int]:
    """One of `num_parts` parts of the cores; with more parts than cores, parts share them."""
    first = len(cores) * part_idx // num_parts
    end = max(first + 1, len(cores) * (part_idx + 1) // num_parts)
    return cores[first:end]


def _as_text(cores: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cores)))
