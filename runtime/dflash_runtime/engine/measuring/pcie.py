"""The PCIe link of a device as it is now, from Linux's sysfs."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_DEVICES = Path("sys/bus/pci/devices")
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_LONGEST = 64
_BUS_ID = re.compile(r"(?:([0-9a-f]+):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE)


def pcie_link(bus_id: str, root: Path = Path("/")) -> str:
    """As in ``gen 4 x8 of gen 5 x16``: current of possible; one of them if they agree. Empty if
    unknown. Links slow down while they are idle. `bus_id`: as drivers name a device."""
    matched = _BUS_ID.fullmatch(bus_id.strip())
    if matched is None:
        return ""
    domain = int(matched[1] or "0", 16)
    folder = root / _DEVICES / f"{domain:04x}:{matched[2].lower()}"
    now, most = (_state(folder, kind) for kind in ("current", "max"))
    if not now or not most or now == most:
        return now or most
    return f"{now} of {most}"


def _state(folder: Path, kind: str) -> str:
    speed, width = (_text(folder / f"{kind}_link_{what}") for what in ("speed", "width"))
    rate = re.match(r"(\d{1,3}(?:\.\d)?) GT/s", speed)
    if rate is None or not width.isascii() or not width.isdigit() or not 0 < int(width) <= 64:
        return ""
    generation = _GENERATIONS.get(float(rate[1]))
    return "" if generation is None else f"gen {generation} x{int(width)}"


def _text(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(_LONGEST).decode("ascii", "replace").strip()
    return ""
