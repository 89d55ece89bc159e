"""What an assignment of experts is called, in plans and where they are shown."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_protocol.ids import I64Array
from dflash_runtime.placement.cost import LOCAL, ExpertArrays
from dflash_runtime.placement.speeds import Side
from dflash_runtime.placement.split import HOST_OWNER
from dflash_runtime.placement.wishes import MoeMode


def named(
    owners: I64Array, arrays: ExpertArrays, sides: Sequence[Side], *, is_host: bool
) -> tuple[MoeMode, str]:
    """The mode and name of an assignment.

    `is_host`: whether the parent computes on the processor. Shapes: owners [L, E], indices of
    `sides`.
    """
    here = (owners == LOCAL) & arrays.exists
    others = [i for i in range(1, len(sides)) if ((owners == i) & arrays.exists).any()]
    if not others:
        return MoeMode.RESIDENT, "CPU alone" if is_host else "resident"
    names = " + ".join("CPU" if sides[i].name == HOST_OWNER else sides[i].name for i in others)
    if not here.any():
        if all(sides[index].name == HOST_OWNER for index in others):
            return MoeMode.CPU_MOE, "CPU-MoE"
        return MoeMode.REMOTE, f"all experts in {names}"
    whole = (here == arrays.exists).all(axis=1)
    if (whole | ~here.any(axis=1)).all():
        on_cpu = all(sides[index].is_cpu for index in others)
        kind = "whole layers" if on_cpu else "front-loaded"
        return MoeMode.LAYERS, kind if names == "CPU" else f"{kind} + {names}"
    first = "CPU" if is_host else "hot"
    if whole.any():
        return MoeMode.MIXED, f"whole layers + {first} + {names}"
    return MoeMode.HOT, f"{first} + {names}"
