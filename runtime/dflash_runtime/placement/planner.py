"""The planner: from what there is and what was asked for to the fastest placement by prediction.

Pure and deterministic. Every option that fits is priced with each device as parent; of those within
`TIE` of the fastest the simplest is taken (see MoeMode for the order).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from dflash_adapters.spec import ModelSpec
from dflash_protocol.device import Device
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import I64Array
from dflash_runtime.compute.kv_cache import chosen_kv_type
from dflash_runtime.placement.cost import LOCAL
from dflash_runtime.placement.layer_split import best_layer_split
from dflash_runtime.placement.options import Option, ParentOptions
from dflash_runtime.placement.outcome import ParentChoice, forecast_of, plan_of
from dflash_runtime.placement.plan import (
    TIE,
    Alternative,
    Plan,
    PlanRefused,
    RoomStatus,
)
from dflash_runtime.placement.refusals import no_context, no_place, no_room
from dflash_runtime.placement.replicas import has_room, replicas_of, with_replicas
from dflash_runtime.placement.situation import (
    ParentDevice,
    PlannedRequest,
    Situation,
)
from dflash_runtime.placement.split import HOST_OWNER
from dflash_runtime.placement.wishes import UNASKED, MoeMode, Wishes, assigned, check_wishes

CPU_MOE_TIE = 1.04
"""The same for CPU-MoE where the device has room for less than half of the experts: what is gained
by moving few of them is most uncertain there."""

CONTEXT_COST = 0.9
"""A context that was not asked for may lower the predicted speed to this part of the speed with the
smallest one."""

SMALLEST_CONTEXT = 4096
"""Of contexts that are chosen, if the model's and the planned request allow it."""

UNPLANNED_CONTEXT = 32768
"""The context of a parent on the processor without a plan, and without --fit, of models that have
more."""

_MUCH = 1.25

_SLOTS_GAIN = 1.03
"""Slots of steps have to gain so much of the request: what they find was measured with few
routings."""

_NEAR = 1.35
"""Chunk sizes that are estimated to be slower by this are not priced."""
_MOST_NEAR, _MOST_NEAR_WITH_DAEMONS = 4, 2
"""How many are priced; with daemons each takes several times as long."""
_LONG_AGAIN = 0.2
"""Long prompts that are added to the request when a chunk size is chosen. A larger chunk takes the
memory of a few experts of thousands: predictions of steps are off by more. Nothing else makes long
prompts as much faster."""

Way: TypeAlias = tuple[float, ParentOptions, int, int]
"""Seconds of the planned request, and the options, context and chunk size that take so long."""

_SIMPLEST = list(MoeMode)


def plan(situation: Situation, wishes: Wishes | None = None) -> Plan | PlanRefused:
    """Decide where experts live, and how the model is opened.

    Raises: SettingsError if wishes contradict each other, the model, or the devices there are.
    """
    wishes = Wishes() if wishes is None else wishes
    spec = situation.spec
    check_wishes(wishes, spec)
    if any(each.num_experts and not each.expert_bytes for each in spec.moe.layers):
        return PlanRefused(
            "the size of the model's experts is not known", RoomStatus.UNKNOWN_EXPERT_SIZE
        )
    wishes = replace(wishes, kv_type=wishes.kv_type or chosen_kv_type("auto", spec))
    choices: list[ParentChoice] = []
    refused: list[PlanRefused] = []
    refusals: list[Alternative] = []
    for parent in _parents(situation, wishes):
        if str(parent.device) not in situation.box.devices:
            refusals.append(Alternative("any", str(parent.device), None, "not measured"))
            continue
        best_s = min((each.option.price.request_s for each in choices), default=np.inf)
        options = ParentOptions(situation, parent, wishes)
        found = _best_of_parent(options, wishes, best_s)
        if isinstance(found, PlanRefused) and situation.most_swaps:
            # Experts need not move: without memory for that, they stay where they are.
            still = replace(situation, most_swaps=0)
            options = ParentOptions(still, parent, wishes)
            found = _best_of_parent(options, wishes, best_s)
        if isinstance(found, ParentChoice):
            choices.append(found)
        elif not parent.cache_slots or len(situation.of_device(parent.device)) == 1:
            refused.append(found)
            refusals.append(Alternative("any", str(parent.device), None, "no room"))
    choices = _one_a_device(choices)
    if not choices:
        if refused:
            return refused[0]
        return PlanRefused("no device that could be used was measured", RoomStatus.EMPTY)
    replicated = _replicated(_simplest(choices), wishes)
    if isinstance(replicated, PlanRefused):
        return replicated
    chosen = replicated
    alternatives = [
        *_alternatives(chosen, choices),
        *_layer_split(situation, wishes, chosen),
        *refusals,
    ]
    return plan_of(situation, wishes, chosen, alternatives=tuple(alternatives))


def _one_a_device(choices: Sequence[ParentChoice]) -> list[ParentChoice]:
    """Of each device the choice without slots of steps, unless those with them gain enough."""
    best = dict[Device, ParentChoice]()
    for each in sorted(choices, key=lambda choice: choice.options.parent.cache_slots):
        device, now_s = each.options.parent.device, each.option.price.request_s
        before = best.get(device)
        if before is None or before.option.price.request_s > _SLOTS_GAIN * now_s:
            best[device] = each
    return [each for each in choices if best[each.options.parent.device] is each]


def _parents(situation: Situation, wishes: Wishes) -> list[ParentDevice]:
    """Devices that may be the parent's. Raises: SettingsError if the one asked for is not there."""
    found = list(situation.parents)
    if wishes.device is not None:
        found = [each for each in found if each.device == wishes.device]
        if not found:
            known = ", ".join(dict.fromkeys(str(each.device) for each in situation.parents))
            raise SettingsError(f"device={wishes.device}: devices here are {known}")
    elif wishes.num_gpu_layers is not None:
        wants_host = wishes.num_gpu_layers == 0
        found = [each for each in found if each.is_host == wants_host]
        if not found:
            raise SettingsError(f"-ngl {wishes.num_gpu_layers}: there is no such device")
    elif _needs_device(wishes) and any(not each.is_host for each in found):
        found = [each for each in found if not each.is_host]
    return found


def _needs_device(wishes: Wishes) -> bool:
    """Whether a wish speaks of experts that are not where the trunk is."""
    experts = wishes.experts
    return bool(
        experts.cpu_moe
        or experts.num_cpu_moe_layers is not None
        or experts.mode is MoeMode.CPU_MOE
        or wishes.device_memory_bytes is not None
        or wishes.expert_budget_bytes is not None
        or wishes.expert_budget_percent is not None
    )


def _best_of_parent(
    options: ParentOptions, wishes: Wishes, best_s: float
) -> ParentChoice | PlanRefused:
    """`best_s`: the request's time with the best parent so far; those that take much longer by
    estimate are not looked at closely."""
    side_names = [side.name for side in options.sides]
    asked = assigned(
        wishes.experts,
        options.situation.spec.moe,
        side_names=side_names,
        device=options.parent.device,
        hottest=options.arrays.hottest,
        is_obeyed=wishes.fits,
    )
    if not wishes.fits:
        return _unplanned(options, wishes, asked)
    situation = options.situation
    contexts = contexts_of(situation.spec, situation.request, wishes.context)
    chunks = _chunks(options, wishes)
    if not any(options.has_room(contexts[-1], chunk) for chunk in chunks):
        return no_context(options, contexts[-1], chunks[-1])
    # Copies of the processor's experts of prompts take memory from experts.
    both = [options, options.without_copies()] if options.copies_prompts else [options]
    if asked is not None:
        return _better([_asked_for(each, wishes, asked, contexts) for each in both])
    ways = []
    for each in reversed(both):  # of equal ones the first, without copies
        context = _chosen_context(each, contexts, chunks, much_s=_MUCH * best_s)
        if context is not None:
            ways += [(each.estimate(context, chunk), each, context, chunk) for chunk in chunks]
    ways = [way for way in ways if np.isfinite(way[0])]
    if not ways:
        return no_room(options, contexts[-1], chunks[-1])
    # Of equal ones the largest chunk: where weights are copied for prompts, each chunk copies all.
    ways.sort(key=lambda way: way[0])
    mode, is_slow = wishes.experts.mode, ways[0][0] > _MUCH * best_s
    if not is_slow:
        ways = _priced_ways(ways)
    # Estimates and prices are of the best option, whatever its mode, and of one group of owners.
    sees_both = mode or (options.daemons and not is_slow)
    if sees_both:
        best_of = dict[bool, Way]()
        for way in ways:
            best_of.setdefault(way[1] is options, way)
        ways = [*best_of.values()]
    found: list[ParentChoice | PlanRefused] = []
    for _, each, context, chunk in ways:
        found.append(_best_option(each, wishes, context, chunk, is_brief=is_slow and not mode))
        if isinstance(found[-1], ParentChoice) and not sees_both:
            break
    return _better(found)


def _best_option(
    options: ParentOptions, wishes: Wishes, context: int, chunk: int, *, is_brief: bool
) -> ParentChoice | PlanRefused:
    found = [
        each
        for each in options.options(context, chunk, is_brief=is_brief)
        if wishes.experts.mode in (None, each.mode)
        and not (wishes.experts.mode is MoeMode.REMOTE and _uses_processor(options, each))
        and not (wishes.experts.cpu_moe is False and each.mode is MoeMode.CPU_MOE)
    ]
    if not found:
        return no_room(options, context, chunk)
    best = _preferred(options, found, context, chunk)
    others = {each.name: each for each in sorted(found, key=lambda each: -each.price.request_s)}
    others.pop(best.name, None)
    kept = sorted(others.values(), key=lambda each: each.price.request_s)
    return ParentChoice(options, context, best, tuple(kept))


def _uses_processor(options: ParentOptions, option: Option) -> bool:
    """Whether the parent's processor has experts beside its device."""
    hosts = [index for index, side in enumerate(options.sides) if side.name == HOST_OWNER]
    return bool((np.isin(option.owners, hosts) & options.arrays.exists).any())


def _priced_ways(ways: Sequence[Way]) -> list[Way]:
    """Those ways, by estimate, in the order of the prices of their fastest options, as far as they
    are near the first; estimates are off by up to a third where few layers share few bytes. The
    chunk size of the first one is the best when long prompts count more (`_LONG_AGAIN`)."""
    most = _MOST_NEAR_WITH_DAEMONS if ways[0][1].daemons else _MOST_NEAR
    near = [way for way in ways if way[0] <= _NEAR * ways[0][0]][:most]
    priced = list[tuple[Way, float]]()
    for way in near:
        _, each, context, chunk = way
        prices = [option.price for option in each.options(context, chunk, is_brief=True)]
        fastest = min(prices, key=lambda price: price.request_s, default=None)
        price_s, long_s = np.inf, np.inf
        if fastest is not None:
            long = each.situation.request.long_prompt
            price_s, long_s = fastest.request_s, fastest.prompt_s[long]
        priced.append(((price_s, *way[1:]), long_s))
    priced.sort(key=lambda found: found[0][0])
    (_, fastest_options, *_), _ = priced[0]
    sizes = [found for found in priced if found[0][1] is fastest_options]
    first, _ = min(sizes, key=lambda found: found[0][0] + _LONG_AGAIN * found[1])
    others = [way for way, _ in priced if way is not first]
    return [first, *others, *ways[len(near) :]]


def _better(found: Sequence[ParentChoice | PlanRefused]) -> ParentChoice | PlanRefused:
    """The fastest choice, of equal ones the last; a refusal if there is none."""
    choices = [each for each in found if isinstance(each, ParentChoice)]
    if not choices:
        return found[0]
    return min(reversed(choices), key=lambda each: each.option.price.request_s)


def _preferred(options: ParentOptions, found: Sequence[Option], context: int, chunk: int) -> Option:
    """The simplest of the options that are about as fast as the fastest."""
    fastest = min(each.price.request_s for each in found)
    every = float((options.arrays.num_experts * options.expert_bytes[LOCAL]).sum())
    is_small = options.expert_limit(context, chunk) < 0.5 * every
    equal = [
        each
        for each in found
        if each.price.request_s
        <= fastest * (CPU_MOE_TIE if each.mode is MoeMode.CPU_MOE and is_small else TIE)
    ]
    return min(equal, key=lambda each: (_SIMPLEST.index(each.mode), each.price.request_s))


def _simplest(choices: Sequence[ParentChoice]) -> ParentChoice:
    """The parent that is fastest; of equal ones the first."""
    fastest = min(each.option.price.request_s for each in choices)
    return next(each for each in choices if each.option.price.request_s <= fastest * TIE)


def _replicated(chosen: ParentChoice, wishes: Wishes) -> ParentChoice | PlanRefused:
    """With second copies where they save time; where experts were asked for, with those alone that
    were asked for too."""
    options, option, context = chosen.options, chosen.option, chosen.context
    asked = wishes.experts.placement
    if not wishes.fits or (asked is None and wishes.experts.names_places):
        return chosen
    if asked is None:
        found = with_replicas(options, option, context)
    else:
        found = replicas_of(options, option, asked)
        if found is not None and not has_room(options, option, found, context=context):
            return PlanRefused(
                f"{options.parent.device}: no room for the second copies that were asked for",
                RoomStatus.BUDGET_EXHAUSTED,
            )
    if found is None:
        return chosen
    price = options.priced(found.answering, context, option.chunk).price
    return replace(chosen, option=replace(option, price=price), replicas=found)


def unplanned_context(spec: ModelSpec, asked: int | None) -> int:
    """The context without a plan: see UNPLANNED_CONTEXT."""
    return asked or min(spec.context_length, UNPLANNED_CONTEXT)


def contexts_of(spec: ModelSpec, request: PlannedRequest, asked: int | None) -> list[int]:
    """Contexts that may be chosen, the largest first: the one that was asked for, or the model's,
    and smaller ones that have room for the request."""
    if asked is not None:
        return [asked]
    largest = spec.context_length
    smallest = min(largest, max(SMALLEST_CONTEXT, request.prompt + request.written))
    found = [largest]
    while found[-1] > smallest:
        found.append(max(smallest, found[-1] // 2))
    return found


def _chunks(options: ParentOptions, wishes: Wishes) -> tuple[int, ...]:
    return options.parent.chunks if wishes.chunk is None else (wishes.chunk,)


def _chosen_context(
    options: ParentOptions, contexts: Sequence[int], chunks: Sequence[int], *, much_s: float
) -> int | None:
    """The largest context with which the planned request takes at most 1 / CONTEXT_COST of what it
    takes with the smallest; that one if it takes more than `much_s`. None if there is no room."""

    def seconds(context: int) -> float:
        # A chunk may have room without any experts, and not beside those that are elsewhere.
        times = (options.estimate(context, each) for each in chunks)
        return next((time_s for time_s in times if np.isfinite(time_s)), np.inf)

    # Speed falls with the context: the largest one that is fast enough is found by halving.
    smallest_s = seconds(contexts[-1])
    if np.isinf(smallest_s):
        return None
    if smallest_s > much_s:
        return contexts[-1]
    limit = smallest_s / CONTEXT_COST
    low, high = 0, len(contexts) - 1
    while low < high:
        middle = (low + high) // 2
        if seconds(contexts[middle]) <= limit:
            high = middle
        else:
            low = middle + 1
    return contexts[high]


def _asked_for(
    options: ParentOptions, wishes: Wishes, asked: I64Array, contexts: Sequence[int]
) -> ParentChoice | PlanRefused:
    """The assignment that was asked for, with the largest context and chunk that it leaves."""
    for context in contexts:
        for chunk in _chunks(options, wishes):
            owners: I64Array | None = asked
            if (asked == UNASKED).any():
                if not options.has_room(context, chunk):
                    continue
                owners = options.fixed_part(asked, context, chunk)
            if owners is not None and options.is_legal(owners, context, chunk):
                return ParentChoice(options, context, options.priced(owners, context, chunk), ())
    return no_place(options, asked, context=contexts[-1], chunk=_chunks(options, wishes)[-1])


def _unplanned(options: ParentOptions, wishes: Wishes, asked: I64Array | None) -> ParentChoice:
    """What a parent does without a plan: priced, whether it fits or not."""
    context = unplanned_context(options.situation.spec, wishes.context)
    chunk = _chunks(options, wishes)[0]
    owners = options.resident() if asked is None else asked
    if asked is None and options.daemons:
        remote = [i for i, side in enumerate(options.sides) if side.name in options.daemons]
        turns = np.array(remote)[np.arange(owners.shape[1]) % len(remote)]
        owners = np.where(options.arrays.exists, turns, LOCAL)
    if (owners == UNASKED).any():
        filled = options.fixed_part(owners, context, chunk)
        owners = np.where(owners == UNASKED, LOCAL, owners) if filled is None else filled
    return ParentChoice(options, context, options.priced(owners, context, chunk), ())


def _alternatives(chosen: ParentChoice, choices: Sequence[ParentChoice]) -> list[Alternative]:
    """The other options of the chosen parent, then the best of each other parent."""
    device = str(chosen.options.parent.device)
    found = [Alternative(each.name, device, forecast_of(each.price)) for each in chosen.others]
    for each in choices:
        if each is not chosen:
            name = str(each.options.parent.device)
            found.append(Alternative(each.option.name, name, forecast_of(each.option.price)))
    return found


def _layer_split(situation: Situation, wishes: Wishes, chosen: ParentChoice) -> list[Alternative]:
    """Another engine's split of all layers over two GPUs, if it would be faster."""
    option = chosen.option
    found = best_layer_split(
        situation, wishes, chosen.options, context=chosen.context, chunk=option.chunk
    )
    if found is None or found.forecast is None:
        return []
    return [found] if found.forecast.decode > TIE * forecast_of(option.price).decode else []
