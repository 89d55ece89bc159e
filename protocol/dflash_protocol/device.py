"""Names of devices: ``cpu``, ``cuda:0``, ``hip:1``. Whether one exists is not checked here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

MAX_DEVICE_INDEX = 1023

_WRITTEN = re.compile(r"([a-z]{1,8})(?::([0-9]{1,4}))?", re.ASCII)


class DeviceKind(StrEnum):
    """The programming interface of a device."""

    CPU = "cpu"
    CUDA = "cuda"
    HIP = "hip"


DEVICES_ALLOWED = "cpu, cuda:N or hip:N"


@dataclass(frozen=True, slots=True)
class Device:
    """A device; `index` is among those of its kind that the process sees, always 0 for the cpu."""

    kind: DeviceKind
    index: int = 0

    def __str__(self) -> str:
        """The name that `parse_device` reads."""
        return self.kind.value if self.kind is DeviceKind.CPU else f"{self.kind.value}:{self.index}"


CPU = Device(DeviceKind.CPU)


def parse_device(text: str, *, default_index: int = 0) -> Device:
    """Parse a device's name; `default_index` is used if it has no index.

    Raises: ValueError that completes ``must be …``.
    """
    match = _WRITTEN.fullmatch(text)
    if match is None or match[1] not in list(DeviceKind):
        raise ValueError(f"must be {DEVICES_ALLOWED}")
    kind = DeviceKind(match[1])
    if kind is DeviceKind.CPU:
        if match[2] is not None:
            raise ValueError(f"must be {DEVICES_ALLOWED}: there is one cpu")
        return CPU
    index = default_index if match[2] is None else int(match[2])
    if index > MAX_DEVICE_INDEX:
        raise ValueError(f"must be {DEVICES_ALLOWED}, N up to {MAX_DEVICE_INDEX}")
    return Device(kind, index)
