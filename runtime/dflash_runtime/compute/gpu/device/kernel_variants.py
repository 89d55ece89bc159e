"""Representative variants of all kernels, for tools that check or compile all of them.

A module of this package that launches kernels exports ``KERNEL_VARIANTS``, a tuple of
KernelVariant that names each of its files at least once: small shapes that reach every branch of
the preprocessor and every weight type, since each is compiled for every architecture.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dflash_runtime.compute import gpu as package
from dflash_runtime.compute.gpu.device.capabilities import Capabilities
from dflash_runtime.compute.gpu.device.kernel_sources import KERNELS_FOLDER


@dataclass(frozen=True)
class KernelVariant:
    """One kernel file with the defines of one representative use."""

    file: str
    defines: Mapping[str, int | str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Fields of Capabilities that a device needs for it."""
    lanes: tuple[int, ...] = (32, 64)
    """Sizes of logical warps that it supports."""

    def why_not(self, capabilities: Capabilities, *, lanes: int) -> str | None:
        """Why a device cannot run it; None if it can."""
        missing = [name for name in self.needs if not getattr(capabilities, name)]
        if missing:
            return f"no {', '.join(missing)}"
        return None if lanes in self.lanes else f"logical warps of {lanes}"

    def __str__(self) -> str:
        return " ".join((self.file, *(f"{name}={value}" for name, value in self.defines.items())))


def all_variants() -> tuple[KernelVariant, ...]:
    """Variants of all modules of this package; importing them needs no GPU."""
    variants: list[KernelVariant] = []
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        variants += getattr(module, "KERNEL_VARIANTS", ())
    return tuple(variants)


def files_without_variant(variants: Iterable[KernelVariant]) -> list[str]:
    """Kernel files without a variant."""
    declared = {variant.file for variant in variants}
    return sorted({path.name for path in KERNELS_FOLDER.rglob("*.cu")} - declared)
