"""What was asked for explicitly: obeyed and priced, never changed in silence."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from dflash_adapters.spec import ModelSpec, MoeSpec
from dflash_protocol.device import Device, DeviceKind
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import I64Array
from dflash_protocol.placement import Placement
from dflash_protocol.settings import Settings
from dflash_protocol.settings.kinds import shown
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.placement.cost import LOCAL
from dflash_runtime.placement.situation import PlannedRequest
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER

UNASKED = -1
"""In an assignment: an expert whose owner the plan may choose."""

_LONGEST_PATTERN = 200


class MoeMode(StrEnum):
    """The ways to place experts, the simplest first: of predictions that are nearly equal the
    simpler way is taken."""

    RESIDENT = "resident"
    """All on the parent's device."""
    CPU_MOE = "cpu-moe"
    """Trunk and shared experts on the device, all routed ones on the processor."""
    REMOTE = "remote"
    """All routed experts in daemons."""
    LAYERS = "layers"
    """Each layer's experts on the device, or elsewhere: the fewest crossings."""
    HOT = "hot"
    """The hottest experts of all layers on the device."""
    MIXED = "mixed"
    """Whole layers, and the hottest experts of the others."""


@dataclass(frozen=True, slots=True)
class ExpertWishes:
    """Where routed experts are to be computed."""

    cpu_moe: bool | None = None
    """All on the processor; False: never by the automatic rule."""
    num_cpu_moe_layers: int | None = None
    """Those of so many first layers on the processor, the others on the device."""
    overrides: tuple[tuple[str, str], ...] = ()
    """Patterns of tensor names, each with an owner, the first that matches counts; other layers'
    experts on the device."""
    num_local: int | None = None
    """So many of each layer on the parent's device, the hottest ones."""
    mode: MoeMode | None = None
    placement: Placement | None = None

    @property
    def names_places(self) -> bool:
        """Whether it says where experts are to be, not only in which way they are to be placed."""
        return bool(self.cpu_moe) or replace(self, mode=None, cpu_moe=None) != ExpertWishes()

    def names_some_of(self, daemon_names: Collection[str]) -> bool:
        """Whether some of these daemons are to have experts."""
        is_named = any(owner in daemon_names for _, owner in self.overrides)
        return is_named or (self.mode is MoeMode.REMOTE and bool(daemon_names))


@dataclass(frozen=True, slots=True)
class Wishes:
    """Settings that were given; None = the plan chooses."""

    device: Device | None = None
    context: int | None = None
    kv_type: KvType | None = None
    chunk: int | None = None
    num_gpu_layers: int | None = None
    """As llama.cpp's ``-ngl``: 0 = on the processor, all of them = on a device."""
    expert_budget_bytes: int | None = None
    """For experts on the parent's device."""
    expert_budget_percent: int | None = None
    """Of the bytes of all experts, on the parent's device."""
    device_memory_bytes: int | None = None
    """What may be used of the parent's device in all."""
    host_memory_bytes: int | None = None
    offloads_prompts: bool = True
    """Whether the device may compute the processors' experts of prompts."""
    fits: bool = True
    """Whether what was not asked for is chosen so that it fits; else it is what it would be without
    a plan."""
    experts: ExpertWishes = field(default_factory=ExpertWishes)


def wishes_of(settings: Settings) -> Wishes:
    """What settings ask for."""
    mib = 1 << 20

    def num_bytes(num_mib: int | None) -> int | None:
        return None if num_mib is None else num_mib * mib

    return Wishes(
        device=settings.device,
        context=settings.context,
        kv_type=None if settings.kv_type == "auto" else KvType(settings.kv_type),
        num_gpu_layers=settings.gpu_layers,
        expert_budget_bytes=num_bytes(settings.expert_budget_mb),
        expert_budget_percent=settings.expert_budget_pct,
        device_memory_bytes=num_bytes(settings.device_memory_mb),
        host_memory_bytes=num_bytes(settings.host_memory_mb),
        offloads_prompts=settings.prefill_offload != "off",
        fits=settings.fit == "on",
        experts=ExpertWishes(
            settings.cpu_moe,
            settings.n_cpu_moe,
            settings.override_tensor,
            settings.local_experts,
            None if settings.moe_mode == "auto" else MoeMode(settings.moe_mode),
        ),
    )


def request_of(settings: Settings) -> PlannedRequest:
    """The request to plan for."""
    prompt, _, written = settings.plan_for.partition(":")
    return PlannedRequest(int(prompt), int(written))


def check_wishes(wishes: Wishes, spec: ModelSpec) -> None:
    """Raises: SettingsError naming two wishes that contradict, or one that the model cannot
    have."""
    check_context(wishes.context, spec)
    experts = wishes.experts
    given = _given(
        ("--placement", experts.placement is not None),
        ("--cpu-moe", experts.cpu_moe is True),
        ("--n-cpu-moe", experts.num_cpu_moe_layers is not None),
        ("-ot", bool(experts.overrides)),
        ("--local-experts", experts.num_local is not None),
        ("--moe-mode", experts.mode is not None),
    )
    if given == ["--cpu-moe", "--moe-mode"] and experts.mode is MoeMode.CPU_MOE:
        given = given[:1]
    if len(given) > 1:
        raise SettingsError(
            f"{given[0]} and {given[1]} both say where experts are computed; give one of them"
        )
    if experts.cpu_moe is False and experts.mode is MoeMode.CPU_MOE:
        raise SettingsError("--cpu-moe=0 and --moe-mode=cpu-moe contradict each other")
    if wishes.expert_budget_bytes is not None and wishes.expert_budget_percent is not None:
        raise SettingsError(
            "--expert-budget-mb and --expert-budget-pct both say how much memory experts get; give "
            "one of them"
        )
    _check_layers_on_device(wishes, spec.num_layers)
    if experts.num_cpu_moe_layers is not None and experts.num_cpu_moe_layers < 0:
        raise SettingsError(f"--n-cpu-moe={experts.num_cpu_moe_layers}: must be 0 or more")
    if experts.num_local is not None:
        for layer in spec.moe.layers:
            if not 0 <= experts.num_local <= layer.num_experts:
                raise SettingsError(
                    f"{experts.num_local} local experts asked for; layer {layer.layer_id} has "
                    f"{layer.num_experts}"
                )
    for name, value in (
        ("--expert-budget-mb", wishes.expert_budget_bytes),
        ("--expert-budget-pct", wishes.expert_budget_percent),
        ("--device-memory-mb", wishes.device_memory_bytes),
        ("--host-memory-mb", wishes.host_memory_bytes),
    ):
        if value is not None and value < 0:
            raise SettingsError(f"{name} is negative")


def check_context(context: int | None, spec: ModelSpec) -> None:
    """Raises: SettingsError for more positions than the model was made for."""
    if context is not None and context > spec.context_length:
        raise SettingsError(
            f"context={context}: the model was made for up to {spec.context_length}"
        )


def _given(*flags: tuple[str, bool]) -> list[str]:
    return [flag for flag, is_given in flags if is_given]


def planned_flags(wishes: Wishes) -> list[str]:
    """The settings given of experts' places that only a plan obeys."""
    experts = wishes.experts
    return _given(
        ("--cpu-moe", experts.cpu_moe is True),
        ("--n-cpu-moe", experts.num_cpu_moe_layers is not None),
        ("-ot", bool(experts.overrides)),
        ("--moe-mode", experts.mode is not None),
        ("--expert-budget-mb", wishes.expert_budget_bytes is not None),
        ("--expert-budget-pct", wishes.expert_budget_percent is not None),
        ("--device-memory-mb", wishes.device_memory_bytes is not None),
    )


def check_unplanned(wishes: Wishes, instead: str) -> None:
    """Raises: SettingsError naming a setting that only a plan obeys, and the one, `instead`, with
    which there is none."""
    for flag in planned_flags(wishes):
        raise SettingsError(f"{flag} and {instead}: where experts are is not planned then")


def check_on_processor(wishes: Wishes, reason: str, *, has_daemons: bool) -> None:
    """`reason`: the setting by which the parent computes on the processor, or why it does.

    Raises: SettingsError for a wish that makes no sense there.
    """
    if wishes.device_memory_bytes is not None:
        raise SettingsError(
            f"--device-memory-mb and {reason}: memory of the processor is --host-memory-mb"
        )
    is_whole = wishes.experts.mode in (None, MoeMode.RESIDENT, MoeMode.CPU_MOE)
    flags = _given(
        (f"--moe-mode={wishes.experts.mode}", not is_whole),
        ("--expert-budget-mb", wishes.expert_budget_bytes is not None),
        ("--expert-budget-pct", wishes.expert_budget_percent is not None),
    )
    if flags and not has_daemons:
        raise SettingsError(
            f"{flags[0]} and {reason}: without a daemon the processor computes all experts"
        )


def _check_layers_on_device(wishes: Wishes, num_layers: int) -> None:
    asked = wishes.num_gpu_layers
    if asked is None:
        return
    if asked < 0 or 0 < asked < num_layers:
        raise SettingsError(
            f"-ngl {asked}: the model's {num_layers} layers are computed on one device, all or "
            f"none; to keep the experts of some layers in the processor's memory, use --n-cpu-moe "
            f"{max(0, num_layers - max(asked, 0))}"
        )
    if wishes.device is None:
        return
    is_host = wishes.device.kind is DeviceKind.CPU
    if is_host != (asked == 0):
        raise SettingsError(f"-ngl {asked} and --device={wishes.device} contradict each other")


def assigned(
    wishes: ExpertWishes,
    moe: MoeSpec,
    *,
    side_names: Sequence[str],
    device: Device,
    hottest: I64Array,
    is_obeyed: bool = True,
) -> I64Array | None:
    """The owners that were asked for, as indices of `side_names`, UNASKED where a plan may choose;
    None without such wishes.

    `is_obeyed`: whether every owner of a placement has to be there; else a plan may choose.
    Shapes: hottest [L, E], expert ids by heat; result the same. Raises: SettingsError if a wish
    names an owner, or tensors, that there are not.
    """
    index_of = {name: index for index, name in enumerate(side_names)}
    owners = np.full(hottest.shape, LOCAL, np.int64)
    host = LOCAL if device.kind is DeviceKind.CPU else index_of.get(HOST_OWNER, -1)
    if wishes.placement is not None:
        return _placed(wishes.placement, moe, index_of, owners, is_obeyed=is_obeyed)
    if wishes.cpu_moe or wishes.num_cpu_moe_layers is not None:
        flag = "--cpu-moe" if wishes.cpu_moe else "--n-cpu-moe"
        if host < 0:
            raise SettingsError(f"{flag}: the processor's speed was not measured")
        first = wishes.num_cpu_moe_layers
        # As llama.cpp counts them: layers of the model, dense ones too.
        rows = [wishes.cpu_moe or each.layer_id < (first or 0) for each in moe.layers]
        owners[np.array(rows, np.bool_)] = host
        return owners
    if wishes.overrides:
        return _overridden(wishes.overrides, moe, index_of, owners, device=device)
    if wishes.num_local is not None:
        owners[:] = UNASKED
        np.put_along_axis(owners, hottest[:, : wishes.num_local], LOCAL, axis=1)
        return owners
    return None


def check_overrides(
    wishes: ExpertWishes, moe: MoeSpec, *, side_names: Sequence[str], device: Device
) -> None:
    """Raises: SettingsError if an override names an owner, or tensors, that there are not."""
    if wishes.overrides:
        shape = len(moe.layers), max(layer.num_experts for layer in moe.layers)
        index_of = {name: index for index, name in enumerate(side_names)}
        _overridden(wishes.overrides, moe, index_of, np.zeros(shape, np.int64), device=device)


def _placed(
    placement: Placement,
    moe: MoeSpec,
    index_of: Mapping[str, int],
    owners: I64Array,
    *,
    is_obeyed: bool,
) -> I64Array:
    sizes = {each.layer_id: each.num_experts for each in moe.layers}
    if dict(placement.experts_per_layer) != sizes:
        raise SettingsError("the placement is of another model: its layers have other experts")
    for name, owned in zip(placement.owner_names, placement.owners, strict=True):
        if is_obeyed and name not in index_of and owned.num_experts:
            raise SettingsError(f"the placement has an unknown owner {shown(name)}")
    for row, layer in enumerate(moe.layers):
        of_name = np.array([index_of.get(name, UNASKED) for name in placement.owner_names])
        indices = placement.routing[layer.layer_id].owner_index
        owners[row, : layer.num_experts] = of_name[indices]
    return owners


def _overridden(
    overrides: Sequence[tuple[str, str]],
    moe: MoeSpec,
    index_of: Mapping[str, int],
    owners: I64Array,
    *,
    device: Device,
) -> I64Array:
    patterns = [
        (text, _compiled(text), _owner_named(text, owner, index_of, device))
        for text, owner in overrides
    ]
    matched = set()
    for row, layer in enumerate(moe.layers):
        found: dict[str, int | None] = {}
        for name in sorted(n for each in layer.projections for n in each.tensor_names):
            found[name] = None
            for text, pattern, owner in patterns:
                if pattern.search(name):
                    matched.add(text)
                    found[name] = owner
                    break
        if len(set(found.values())) > 1:
            odd = [name for name, owner in found.items() if owner != found[next(iter(found))]]
            raise SettingsError(
                f"-ot: layer {layer.layer_id}'s experts are computed in one place, but "
                f"{shown(next(iter(found)))} and {shown(odd[0])} got two"
            )
        owner_index = next(iter(found.values()))
        owners[row] = LOCAL if owner_index is None else owner_index
    for text, _, _ in patterns:
        if text not in matched:
            raise SettingsError(f"-ot {shown(text)} matches no tensor of experts")
    return owners


def _compiled(text: str) -> re.Pattern[str]:
    if len(text) > _LONGEST_PATTERN:
        raise SettingsError(f"-ot {shown(text)}: longer than {_LONGEST_PATTERN} characters")
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise SettingsError(f"-ot {shown(text)}: {error}") from None


def _owner_named(text: str, owner: str, index_of: Mapping[str, int], device: Device) -> int:
    """The owner of a name, as ours (``host``, a daemon's) or llama.cpp's (``CPU``, ``CUDA0``)."""
    if owner in index_of:
        return index_of[owner]
    name = owner.casefold()
    if name == "cpu":
        name = LOCAL_OWNER if device.kind is DeviceKind.CPU else HOST_OWNER
    elif name in (str(device), str(device).replace(":", ""), f"rocm{device.index}"):
        name = LOCAL_OWNER
    if name not in index_of:
        ours = {LOCAL_OWNER: str(device), HOST_OWNER: "cpu"}
        known = ", ".join(ours.get(each, each) for each in index_of)
        raise SettingsError(f"-ot {shown(text)}={shown(owner)}: owners are {known}")
    return index_of[name]
