"""The instruction-set tier of this process: chosen once, before its first kernel is compiled."""

from __future__ import annotations

import logging
import platform
from itertools import pairwise
from threading import RLock

from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import AUTO_TIER
from dflash_runtime.compute.cpu.compile.tier_test import why_not
from dflash_runtime.compute.cpu.simd.instruction_sets import (
    Tier,
    host_features,
    offered_tiers,
    target_features,
)
from dflash_runtime.compute.cpu.simd.untyped import config, cpu_target

_LOG = logging.getLogger(__name__)

_lock = RLock()
_chosen: Tier | None = None


def current_tier() -> Tier:
    """The tier of this process; chosen automatically unless it has been."""
    return _chosen or choose_tier(AUTO_TIER)


def choose_tier(name: str, cache_dir: str | None = None) -> Tier:
    """Set the tier of this process. ``auto`` accepts one that was chosen before.

    Test verdicts are kept in `cache_dir` (see `cache_folder`). A tier that the CPU offers but that
    fails its test is replaced by the next one, with a warning.
    Raises: SettingsError if the CPU lacks the tier, or another was chosen before.
    """
    global _chosen
    with _lock:
        if _chosen is not None:
            if name not in (AUTO_TIER, _chosen.value):
                raise SettingsError(f"CPU tier {name}: this process already uses {_chosen}")
            return _chosen
        features = host_features()
        offered = offered_tiers(features)
        if name != AUTO_TIER:
            if name not in (tier.value for tier in offered):
                known = ", ".join(offered)
                raise SettingsError(f"CPU tier {name}: this {platform.machine()} offers {known}")
            offered = offered[offered.index(Tier(name)) :]
        _chosen = _first_that_works(offered, features, cache_dir)
        _restrict_llvm(target_features(_chosen, features))
        return _chosen


def _first_that_works(
    offered: list[Tier], features: dict[str, bool], cache_dir: str | None
) -> Tier:
    for tier, following in pairwise(offered):
        reason = why_not(tier, target_features(tier, features), cache_dir)
        if reason is None:
            return tier
        # docs: a slower instruction set is used; results stay right. Often an old LLVM
        _LOG.warning("CPU tier %s does not work here (%s); using %s", tier, reason, following)
    return offered[-1]  # generic: it needs no more than any kernel


def _restrict_llvm(features: str) -> None:
    """Make numba generate code for these features in kernels compiled from now on.

    Numba creates its code generator when a function is declared, so that one exists already; it is
    replaced before it is used.
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
