"""Capabilities of a device by its architecture; they decide which kernels it gets.

A kernel that is unsafe or unknown on a device is left out because a line here says so.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, fields
from enum import StrEnum

from dflash_protocol.errors import SettingsError

_LOG = logging.getLogger(__name__)


class Vendor(StrEnum):
    """Whose driver and compiler a device needs; also the first part of its name, ``cuda:0``."""

    CUDA = "cuda"
    HIP = "hip"
    HOST = "host"
    """The emulation of the tests."""


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of one architecture. Kernels have a portable path beside each."""

    vendor: Vendor
    architecture: str
    """The compiler's name: ``sm_90a``, ``gfx1030``."""
    lanes: int
    """Lanes of a warp or wavefront."""
    dot4: bool = False
    """Dot product of four signed bytes in one instruction."""
    dependent_launch: bool = False
    """A kernel may begin while the one before it still runs."""
    clusters: bool = False
    """Clusters: blocks that access each other's shared memory."""
    mma: bool = False
    """Tensor cores: 16x8x16 products of halves by a warp, and loads of their fragments."""
    wgmma: bool = False
    """Products of four warps with operands in shared memory."""
    async_copy: bool = False
    """Asynchronous copies into shared memory that bypass registers."""
    redux: bool = False
    """Integer reductions of a warp in one instruction."""
    large_clusters: bool = False
    """Clusters of 16 blocks; without, at most 8."""

    def missing(self) -> tuple[str, ...]:
        """Capabilities that kernels use and this architecture lacks, by name."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name) is False)

    def log(self, device_name: str) -> None:
        """Log the architecture and what it lacks."""
        missing = ", ".join(self.missing()) or "nothing"
        # docs: what a GPU is and which instructions it lacks
        _LOG.info(
            "%s is %s with warps of %d lanes; kernels do without: %s",
            device_name,
            self.architecture,
            self.lanes,
            missing,
        )


_OLDEST_CUDA = (6, 1)
"""The first from which on all have dot products of bytes."""

# Instructions that came with a compute capability and stayed.
_CUDA_SINCE = {
    "dot4": (6, 1),
    "mma": (7, 5),
    "async_copy": (8, 0),
    "redux": (8, 0),
    "dependent_launch": (9, 0),
    "clusters": (9, 0),
}

_LARGE_CLUSTERS = (9, 10)

# gfx9 has wavefronts of 64 lanes, gfx10 and later of 32 unless asked otherwise.
_GFX = re.compile(r"gfx(9|1[0-9])([0-9a-f]{2})")
_GFX_DOT4 = frozenset(
    f"gfx{number}"
    for number in (
        *("906", "908", "90a", "940", "941", "942"),
        *("1011", "1012", "1030", "1031", "1032", "1033", "1034", "1035", "1036"),
    )
)
"""``v_dot4_i32_i8``. gfx11 and gfx12 have another instruction in its place."""
_GFX_DOT4_MIXED = ("gfx11", "gfx12")
"""``v_dot4_i32_iu8``, whose operands say of which sign they are."""


def cuda_capabilities(major: int, minor: int) -> Capabilities:
    """Capabilities of a compute capability.

    Raises: SettingsError if it is older than our kernels can use.
    """
    if (major, minor) < _OLDEST_CUDA:
        raise SettingsError(
            f"compute capability {major}.{minor} is too old, {_OLDEST_CUDA[0]}."
            f"{_OLDEST_CUDA[1]} or newer is needed"
        )
    has = {name: (major, minor) >= since for name, since in _CUDA_SINCE.items()}
    wgmma = major == 9  # later architectures have others in its place
    return Capabilities(
        vendor=Vendor.CUDA,
        architecture=f"sm_{major}{minor}" + ("a" if wgmma else ""),
        lanes=32,
        wgmma=wgmma,
        large_clusters=major in _LARGE_CLUSTERS,
        **has,
    )


def hip_capabilities(architecture: str) -> Capabilities:
    """Capabilities of an AMD architecture by the driver's name, ``gfx90a:sramecc+:xnack-``.

    Raises: SettingsError if it is not known.
    """
    name = architecture.split(":")[0]
    match = _GFX.fullmatch(name)
    if match is None:
        raise SettingsError(f"GPU architecture {architecture[:40]!r} is not known")
    return Capabilities(
        vendor=Vendor.HIP,
        architecture=name,
        lanes=64 if match[1] == "9" else 32,
        # Of the others our kernels have only NVIDIA's forms.
        dot4=name in _GFX_DOT4 or name.startswith(_GFX_DOT4_MIXED),
    )
