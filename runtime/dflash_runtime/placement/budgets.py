"""The most that each daemon gets of experts' weights, as it was configured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import SettingsError
from dflash_protocol.placement import Placement
from dflash_protocol.settings import DaemonSetting

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ExpertBudget:
    """At most so many MiB, or so many per cent of the bytes of all experts."""

    num_mib: int | None = None
    percent: int | None = None
    source: str = field(default="", compare=False, repr=False)
    """Where it was configured, for messages."""

    def most_bytes(self, every_bytes: int) -> int:
        """What it allows where all experts take `every_bytes`."""
        if self.num_mib is not None:
            return self.num_mib * MIB
        return every_bytes * (100 if self.percent is None else self.percent) // 100

    def __str__(self) -> str:
        if self.num_mib is not None:
            return f"at most {self.num_mib:,} MiB of experts"
        return f"at most {self.percent} % of the experts' bytes"


def budget_of(daemon: DaemonSetting) -> ExpertBudget | None:
    """A daemon's budget; None: only its memory limits what it gets."""
    num_mib, percent = daemon.expert_budget_mb, daemon.expert_budget_pct
    if num_mib is None and percent is None:
        return None
    key = "expert_budget_pct" if num_mib is None else "expert_budget_mb"
    return ExpertBudget(num_mib, percent, f"{daemon.source or 'daemon'}.{key}")


def check_given(placement: Placement, budgets: Mapping[str, ExpertBudget], moe: MoeSpec) -> None:
    """Raises: SettingsError if a placement that was given, not planned, exceeds a daemon's
    budget."""
    owned = dict(zip(placement.owner_names, placement.owners, strict=True))
    for name, budget in budgets.items():
        if name not in owned:
            continue
        used = sum(
            moe.by_layer_id[layer_id].expert_bytes * len(ids)
            for layer_id, ids in owned[name].by_layer.items()
        )
        most = budget.most_bytes(moe.expert_bytes_total)
        if used > most:
            raise SettingsError(
                f"{budget.source}: daemon {name} gets {budget}, but the placement or plan that was "
                f"given has {math.ceil(used / MIB):,} MiB there"
            )
