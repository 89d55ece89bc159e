"""A launch that was prepared takes its arguments as they are when it is started."""

from __future__ import annotations

from dflash_runtime.compute.gpu.device.device import PreparedLaunch
from support.emulated_device import EmulatedDevice
from support.emulated_device.device_checks import CASES, SumArgs


def test_arguments_are_those_of_the_moment() -> None:
    device, launched = EmulatedDevice(), []

    class Noting(EmulatedDevice):
        def launch(self, kernel, grid, block, args, **options):  # type: ignore[no-untyped-def]
            launched.append((kernel, grid, block, bytes(args), options["shared_bytes"]))

    kernel, args = device.module(CASES, {}).kernel("sum_rows", SumArgs), SumArgs()
    launch = PreparedLaunch(kernel, (1, 2, 3), 64, args, shared_bytes=5)
    noting = Noting()
    launch.start(noting)
    name, _ = SumArgs._fields_[0][:2]
    setattr(args, name, 77)
    launch.start(noting)
    assert launched[0][:3] == launched[1][:3] == (kernel, (1, 2, 3), 64)
    assert launched[0][4] == 5
    assert launched[1][3] == bytes(args) != launched[0][3]
