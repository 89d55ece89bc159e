"""Why there is no plan that keeps to what was asked for: a line that names the settings which are
the reason, and what would fit."""

from __future__ import annotations

import numpy as np

from dflash_protocol.ids import I64Array
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.placement.cost import LOCAL
from dflash_runtime.placement.options import ParentOptions
from dflash_runtime.placement.plan import PlanRefused, RoomStatus
from dflash_runtime.placement.split import HOST_OWNER
from dflash_runtime.placement.wishes import MoeMode

_ROUND_CONTEXT = 256


def no_context(options: ParentOptions, context: int, chunk: int) -> PlanRefused:
    """The smallest context that may be chosen has no room, even with all experts elsewhere."""
    first = options.kv_type
    fitting = []
    for kv_type in first.and_smaller:
        largest = _largest_context(options, kv_type, chunk)
        if largest:
            fitting.append((kv_type, largest))
    needs = options.rest_bytes(context, chunk, _others(options))
    advice = " or ".join(f"--context {size} with --kv-type {kv_type}" for kv_type, size in fitting)
    memory = f"{_gib(options.free_bytes())}{_memory_asked(options)}"
    return PlanRefused(
        f"{options.parent.device}: the model without its experts and a context of {context:,} "
        f"({first}) take {_gib(needs)} GiB of {memory}; "
        f"{advice + ' would fit' if advice else 'no context fits'}",
        RoomStatus.BUDGET_EXHAUSTED,
        tuple(fitting),
    )


def no_room(options: ParentOptions, context: int, chunk: int) -> PlanRefused:
    """All owners together have no room for the experts, or those of the way that was asked for."""
    mode = options.wishes.experts.mode
    owners, others = range(len(options.sides)), _others(options)
    if (
        mode is None
        and others
        and options.rest_bytes(context, chunk, others) > options.free_bytes()
    ):
        return no_context(options, context, chunk)
    daemons = [index for index in others if options.sides[index].name in options.daemons]
    ways = {
        MoeMode.RESIDENT: [LOCAL],
        MoeMode.REMOTE: daemons,
        MoeMode.CPU_MOE: [index for index in others if options.sides[index].name == HOST_OWNER],
    }
    rooms = []
    for index in owners if mode is None else ways.get(mode, owners):
        name = str(options.parent.device) if index == LOCAL else options.sides[index].name
        group = () if mode is MoeMode.RESIDENT else others
        here = options.expert_limit(context, chunk, group)
        limit = options.limit_of(index, chunk) if index else here
        much = "any number" if np.isinf(limit) else f"{_gib(limit)} GiB"
        rooms.append(f"{much} on {name}{_asked(options, index, limit)}")
    every = options.used_bytes(options.resident(), LOCAL)
    why = f"the experts take {_gib(every)} GiB, and there is room for {', '.join(rooms)}"
    if mode is MoeMode.REMOTE and not daemons:
        why = "there is no daemon"
    asked = "" if mode is None else f"no --moe-mode={mode} with a context of {context:,}: "
    return PlanRefused(f"{options.parent.device}: {asked}{why}", RoomStatus.BUDGET_EXHAUSTED)


def no_place(options: ParentOptions, asked: I64Array, *, context: int, chunk: int) -> PlanRefused:
    """Experts do not fit where they were asked for. Shape: asked [L, E], UNASKED where the plan may
    choose."""
    excess = ""
    used = options.used_bytes(asked, LOCAL)
    left = options.expert_limit(context, chunk, _others(options))
    if used > left:
        why = _asked(options, LOCAL, left) or f" beside a context of {context:,}"
        excess = (
            f": they take {_gib(used)} GiB of {options.parent.device}, which has "
            f"{_gib(left)} GiB for experts{why}{_fewer_layers(options, asked, left)}"
        )
    for index in _others(options):
        used, most = options.used_bytes(asked, index), options.asked_limit(index)
        if used > most:
            excess = (
                f": they take {used / 2**20:,.0f} MiB of daemon {options.sides[index].name}, whose "
                f"budget is {most / 2**20:,.0f}"
            )
    return PlanRefused(
        f"{options.parent.device}: no room for experts where they were asked for{excess}",
        RoomStatus.BUDGET_EXHAUSTED,
    )


def _others(options: ParentOptions) -> range:
    """All owners but the parent's device."""
    return range(1, len(options.sides))


def _asked(options: ParentOptions, index: int, limit: float) -> str:
    """The setting that is the reason for an owner's limit, in brackets; empty if none is."""
    wishes = options.wishes
    if index == LOCAL and limit == options.asked_limit(LOCAL) < np.inf:
        if wishes.expert_budget_percent is not None:
            return f" (--expert-budget-pct {wishes.expert_budget_percent})"
        return f" (--expert-budget-mb {(wishes.expert_budget_bytes or 0) >> 20})"
    if index == LOCAL:
        return _memory_asked(options)
    if options.sides[index].name == HOST_OWNER and limit == wishes.host_memory_bytes:
        return f" (--host-memory-mb {limit / 2**20:.0f})"
    if options.sides[index].name in options.daemons and limit == options.asked_limit(index):
        return " (its budget)"
    return ""


def _memory_asked(options: ParentOptions) -> str:
    """The setting that bounds the memory of the parent's device, in brackets."""
    wishes, is_host = options.wishes, options.parent.is_host
    asked = wishes.host_memory_bytes if is_host else wishes.device_memory_bytes
    if asked is None or asked > options.parent.free_bytes:
        return ""
    return f" (--{'host' if is_host else 'device'}-memory-mb {asked >> 20})"


def _fewer_layers(options: ParentOptions, asked: I64Array, left: float) -> str:
    """The smallest --n-cpu-moe that fits, as advice."""
    arrays = options.arrays
    here = ((asked == LOCAL) & arrays.exists).sum(axis=1)
    if left >= 0 and (here == arrays.num_experts).any() and len(options.sides) > 1:
        after = np.cumsum((arrays.num_experts * options.expert_bytes[LOCAL])[::-1])[::-1]
        fits = np.flatnonzero(after <= left)
        first = arrays.layer_ids[fits[0]] if fits.size else arrays.layer_ids[-1] + 1
        return f"; --n-cpu-moe {int(first)} would fit"
    return ""


def _largest_context(options: ParentOptions, kv_type: KvType, chunk: int) -> int:
    """The largest context that leaves room for everything but experts; 0 if none does."""

    def fits(context: int) -> bool:
        needs = options.rest_bytes(context, chunk, _others(options), kv_type=kv_type)
        return needs <= options.free_bytes()

    most = options.situation.spec.context_length
    if options.wishes.context is not None:
        most = min(most, options.wishes.context)
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low if low < _ROUND_CONTEXT or low == most else low // _ROUND_CONTEXT * _ROUND_CONTEXT


def _gib(num_bytes: float) -> str:
    return f"{max(0.0, num_bytes) / 2**30:.2f}"
