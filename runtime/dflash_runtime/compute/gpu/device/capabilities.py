"""What a device can do, by its architecture: the table that decides which kernels it is given.

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
    """Of one architecture. Kernels have a portable path beside each of these."""

    vendor: Vendor
    architecture: str
    """As its compiler names it: ``sm_90a``, ``gfx1030``."""
    lanes: int
    """Lanes of a warp or wavefront."""
    dot4: bool
    """Four products of signed bytes in one instruction."""
    dependent_launch: bool
    """A kernel may begin while the one before it still runs."""
    clusters: bool
    """Blocks that share their shared memory."""
    mma: bool
    """Matrix products of 16x8x16 halves by a warp, and what loads their fragments."""
    wgmma: bool
    """Products of four warps with operands in shared memory."""
    async_copy: bool
    """Copies into shared memory that pass no register."""
    redux: bool
    """Integer reductions of a warp in one instruction."""
    large_clusters: bool
    """Clusters of 16 blocks; others have at most 8."""

    def missing(self) -> tuple[str, ...]:
        """Names of what kernels use and this architecture lacks."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name) is False)

    def log(self, device_name: str) -> None:
        """Say what kernels will do without here."""
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
"""The first with products of bytes that every later one has too."""

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
    """Of a compute capability.

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
    """Of an AMD architecture as the driver names it, ``gfx90a:sramecc+:xnack-``.

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
        dot4=name in _GFX_DOT4 or name.startswith(_GFX_DOT4_MIXED),
        # Our kernels use NVIDIA's forms of these alone.
        dependent_launch=False,
        clusters=False,
        mma=False,
        wgmma=False,
        async_copy=False,
        redux=False,
        large_clusters=False,
    )
