"""Instruction-set tiers: which instructions the kernels' few special steps are built from.

A tier decides how bytes are multiplied, how many tokens share a repacked tile and which
instructions LLVM may use; everything else is generic vector IR. This module says what each tier
needs of a CPU; compile.tiers chooses the one that a process uses.
"""

from __future__ import annotations

from enum import StrEnum

from dflash_runtime.compute.cpu.simd.untyped import llvm


class Tier(StrEnum):
    """Best first, for each machine."""

    AMX = "amx"
    """AVX512_VNNI, and tiles for 16 tokens at once: the same bits."""
    AVX512_VNNI = "avx512vnni"
    AVX_VNNI = "avxvnni"
    AVX2 = "avx2"
    NEON_DOT = "neondot"
    GENERIC = "generic"

    @property
    def has_wide_registers(self) -> bool:
        """Whether there are 32 registers of 512 bits."""
        return self in (Tier.AMX, Tier.AVX512_VNNI)

    @property
    def has_vpdpbusd(self) -> bool:
        """Whether any unsigned bytes can be multiplied by signed ones straight into 32-bit sums."""
        return self.has_wide_registers or self is Tier.AVX_VNNI

    @property
    def numerics(self) -> str:
        """Names the tier's part in a result's bits."""
        return (Tier.AVX512_VNNI if self is Tier.AMX else self).value


_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
_NEEDED = {  # CPU features: all of one of the sets
    Tier.AMX: ((*_AVX512, "amx-tile", "amx-int8"),),
    Tier.AVX512_VNNI: (_AVX512,),
    Tier.AVX_VNNI: (("avx2", "fma", "avxvnni"), ("fma", *_AVX512)),
    Tier.AVX2: (("avx2", "fma"),),
    Tier.NEON_DOT: (("neon", "dotprod"),),
    Tier.GENERIC: ((),),
}

# Features that LLVM must not use: names, or prefixes with a star; and exceptions. Features that
# would imply a forbidden one are forbidden too.
_FORBIDDEN: dict[Tier, tuple[tuple[str, ...], tuple[str, ...]]] = {
    Tier.AVX_VNNI: (("avx512*", "avx10*", "amx*", "evex512"), ()),
    Tier.AVX2: (("avx*", "amx*", "evex512"), ("avx", "avx2")),
    Tier.GENERIC: (
        ("avx*", "amx*", "evex512", "vaes", "sha512", "sm4", "dotprod", "i8mm", "sve*", "sme*"),
        ("avx",),
    ),
}


def offered_tiers(features: dict[str, bool]) -> list[Tier]:
    """Tiers that a CPU with these features has the instructions for, best first."""
    return [
        tier
        for tier, sets in _NEEDED.items()
        if any(all(features.get(name) for name in names) for names in sets)
    ]


def target_features(tier: Tier, features: dict[str, bool]) -> str:
    """Features that LLVM may use for a tier on a CPU, in LLVM's notation."""
    forbidden, allowed = _FORBIDDEN.get(tier, ((), ()))
    if tier is Tier.AVX_VNNI and not features.get("avxvnni"):
        forbidden = ()  # on this CPU these instructions are part of AVX-512

    def is_forbidden(name: str) -> bool:
        return name not in allowed and any(
            name.startswith(each[:-1]) if each.endswith("*") else name == each for each in forbidden
        )

    return ",".join(
        f"{'+' if is_there and not is_forbidden(name) else '-'}{name}"
        for name, is_there in sorted(features.items())
    )


_PREFETCH_INTO_L1 = frozenset({"znver5"})
"""LLVM's names of CPUs on which prefetches into L1 were measured to be quicker, by 5 %."""


def prefetch_level(cpu: str) -> int:
    """The cache, 1 or 2, into which a CPU prefetches what it will read from memory.

    A prefetch into L1 holds one of its miss buffers for the whole latency of memory: Zen 4 has 24,
    and 24 lines in 110 ns are 14 GB/s, half of what a core can read; Intel's cores have 10 to 16.
    """
    return 1 if cpu in _PREFETCH_INTO_L1 else 2


def host_cpu() -> str:
    """LLVM's name of this CPU."""
    return str(llvm.get_host_cpu_name())


def host_features() -> dict[str, bool]:
    """Features of this CPU; empty where LLVM cannot tell."""
    try:
        return dict(llvm.get_host_cpu_features())
    except RuntimeError:
        return {}
