"""Emulates a GPU, for tests of kernels and of the code that launches them."""

from support.emulated_device.emulated_device import EmulatedDevice, KernelFailure

__all__ = ["EmulatedDevice", "KernelFailure"]
