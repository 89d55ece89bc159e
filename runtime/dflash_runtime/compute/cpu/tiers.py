"""Instruction-set tiers: which instructions the kernels' few special steps are built from.

A tier decides how bytes are multiplied, how many tokens share a panel and which instructions LLVM
may use; everything else is generic vector IR. Fixed once a process, before its first kernel is
compiled. Knows nothing of how a tier is proven to work, see tier_test.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import pairwise
from threading import RLock

from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import AUTO_TIER
from dflash_runtime.compute.cpu.untyped import config, cpu_target, llvm

_LOG = logging.getLogger(__name__)


class Tier(StrEnum):
    """Best first, of each machine."""

    AMX = "amx"
    """AVX512_VNNI, and tiles for 16 tokens at once: the same bits."""
    AVX512_VNNI = "avx512vnni"
    AVX_VNNI = "avxvnni"
    AVX2 = "avx2"
    NEON_DOT = "neondot"
    GENERIC = "generic"

    @property
    def has_wide_registers(self) -> bool:
        """32 registers of 512 bits."""
        return self in (Tier.AMX, Tier.AVX512_VNNI)

    @property
    def has_vpdpbusd(self) -> bool:
        """Unsigned times signed bytes, any of them, straight into 32 bits."""
        return self.has_wide_registers or self is Tier.AVX_VNNI

    @property
    def numerics(self) -> str:
        """Names what this tier decides about the bits of a result."""
        return (Tier.AVX512_VNNI if self is Tier.AMX else self).value


_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
_NEEDED = {  # features of the CPU: all names of one of the sets
    Tier.AMX: ((*_AVX512, "amx-tile", "amx-int8"),),
    Tier.AVX512_VNNI: (_AVX512,),
    Tier.AVX_VNNI: (("avx2", "fma", "avxvnni"), ("fma", *_AVX512)),
    Tier.AVX2: (("avx2", "fma"),),
    Tier.NEON_DOT: (("neon", "dotprod"),),
    Tier.GENERIC: ((),),
}

# What LLVM must not use: names, or beginnings of them with a star, and the exceptions. Features
# that would switch a forbidden one on again are forbidden too.
_FORBIDDEN: dict[Tier, tuple[tuple[str, ...], tuple[str, ...]]] = {
    Tier.AVX_VNNI: (("avx512*", "avx10*", "amx*", "evex512"), ()),
    Tier.AVX2: (("avx*", "amx*", "evex512"), ("avx", "avx2")),
    Tier.GENERIC: (
        ("avx*", "amx*", "evex512", "vaes", "sha512", "sm4", "dotprod", "i8mm", "sve*", "sme*"),
        ("avx",),
    ),
}

_lock = RLock()
_chosen: Tier | None = None


def offered_tiers(features: dict[str, bool]) -> list[Tier]:
    """What a CPU with these features has the instructions for, best first."""
    return [
        tier
        for tier, sets in _NEEDED.items()
        if any(all(features.get(name) for name in names) for names in sets)
    ]


def target_features(tier: Tier, features: dict[str, bool]) -> str:
    """The features LLVM may use for a tier on a CPU, in LLVM's notation."""
    forbidden, allowed = _FORBIDDEN.get(tier, ((), ()))
    if tier is Tier.AVX_VNNI and not features.get("avxvnni"):
        forbidden = ()  # here these very instructions are a part of AVX-512

    def is_forbidden(name: str) -> bool:
        return name not in allowed and any(
            name.startswith(each[:-1]) if each.endswith("*") else name == each for each in forbidden
        )

    return ",".join(
        f"{'+' if is_there and not is_forbidden(name) else '-'}{name}"
        for name, is_there in sorted(features.items())
    )


def host_features() -> dict[str, bool]:
    """Of this CPU; empty where LLVM cannot tell."""
    try:
        return dict(llvm.get_host_cpu_features())
    except RuntimeError:
        return {}


def current_tier() -> Tier:
    """The tier of this process; chosen automatically if nobody did before."""
    return _chosen or choose_tier(AUTO_TIER)


@contextmanager
def assumed(tier: Tier) -> Iterator[None]:
    """Inside, code is emitted for a tier that the process has not chosen."""
    global _chosen
    with _lock:
        before, _chosen = _chosen, tier
        try:
            yield
        finally:
            _chosen = before


def choose_tier(name: str) -> Tier:
    """Fix the tier of this process. ``auto`` agrees with whatever was chosen before.

    A tier that the CPU offers but that fails its test is replaced by the next one, with a warning.
    Raises: SettingsError if the CPU lacks the tier, or another was chosen before.
    """
    global _chosen
    with _lock:
        if _chosen is not None:
            if name not in (AUTO_TIER, _chosen.value):
                raise SettingsError(
                    f"CPU tier {name}: kernels of this process are made for {_chosen} already"
                )
            return _chosen
        features = host_features()
        offered = offered_tiers(features)
        if name != AUTO_TIER:
            if name not in (tier.value for tier in offered):
                known = ", ".join(offered)
                raise SettingsError(f"CPU tier {name}: this {platform.machine()} offers {known}")
            offered = offered[offered.index(Tier(name)) :]
        _chosen = _first_that_works(offered, features)
        _restrict_llvm(target_features(_chosen, features))
        return _chosen


def _first_that_works(offered: list[Tier], features: dict[str, bool]) -> Tier:
    # It is built of what asks this module for the tier.
    from dflash_runtime.compute.cpu.tier_test import why_not

    for tier, following in pairwise(offered):
        reason = why_not(tier, target_features(tier, features))
        if reason is None:
            return tier
        # docs: a slower instruction set is used; results stay right. Often an old LLVM
        _LOG.warning("CPU tier %s does not work here (%s); using %s", tier, reason, following)
    return offered[-1]  # generic: what it needs, every kernel needs


def _restrict_llvm(features: str) -> None:
    """Have numba generate code for these features, of kernels that are compiled from now on.

    Declaring a function is enough for numba to make its code generator, so that there is one
    already; it is replaced before it was used.
    """
    context = cpu_target.target_context
    if _enabled(context.codegen().magic_tuple()[2]) == _enabled(features):
        return
    config.CPU_FEATURES = features
    context._internal_codegen = type(context.codegen())("numba.exec")
    made_for = context.codegen().magic_tuple()[2]
    if _enabled(made_for) != _enabled(features):
        raise SettingsError("numba ignores the features that a CPU tier needs")


def _enabled(features: str) -> set[str]:
    return {name for name in features.split(",") if name.startswith("+")}
