"""The GPU that tests run on, if there is one."""

from __future__ import annotations

import pytest

from dflash_protocol.device import Device, DeviceKind
from dflash_protocol.errors import DflashError
from dflash_runtime.compute.cupy.cupy_device import CupyDevice


def first_gpu() -> Device:
    """Of either vendor; skips the test if CuPy cannot use one."""
    reasons = []
    for kind in (DeviceKind.CUDA, DeviceKind.HIP):
        device = Device(kind, 0)
        try:
            CupyDevice(device).close()
        except DflashError as error:
            reasons.append(str(error))
        else:
            return device
    pytest.skip("; ".join(reasons))
