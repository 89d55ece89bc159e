"""Decides how a model is opened, before anything is loaded: `open_model` goes on from there, and
`dflash-moe plan` says it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.weight_check import WeightCheck
from dflash_adapters.keys import YARN_KEYS
from dflash_adapters.library.finding import model_file
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import ModelSpec
from dflash_protocol.device import CPU, DeviceKind
from dflash_protocol.endpoint import Endpoint, parse_endpoint
from dflash_protocol.errors import SettingsError
from dflash_protocol.placement import OwnedExperts, Placement, read_owned_experts
from dflash_protocol.settings import Settings
from dflash_protocol.settings.kinds import DaemonSetting
from dflash_protocol.wire.messages import Offer
from dflash_runtime.compute import BackendName, ComputeBackend, open_backend
from dflash_runtime.compute.host import PREFILL_CHUNK
from dflash_runtime.compute.kv_cache import chosen_kv_type
from dflash_runtime.compute.slot_pins import WarmPins
from dflash_runtime.engine.daemon_offers import OwnProcessor
from dflash_runtime.engine.demo_model import chosen_model_path
from dflash_runtime.engine.heat_keeper import HeatKeeper, open_heat
from dflash_runtime.engine.planning import Planned, Planning
from dflash_runtime.experts.daemons.connecting import Connected, connect
from dflash_runtime.experts.daemons.launching import (
    DaemonChoice,
    budgets_of,
    choose_daemons,
    daemon_names,
    names_here,
)
from dflash_runtime.experts.daemons.supervisor import ProgressCallback
from dflash_runtime.experts.speed_trial import own_step_s
from dflash_runtime.placement.budgets import check_given
from dflash_runtime.placement.footprint import Memory, Request, footprint
from dflash_runtime.placement.host_context import context_on_host
from dflash_runtime.placement.plan import Plan
from dflash_runtime.placement.planner import unplanned_context
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER, even_split
from dflash_runtime.placement.wishes import check_context, check_unplanned, check_wishes, wishes_of


@dataclass(frozen=True, slots=True)
class Decision:
    """How a model is to be opened, before its daemons have said what they have."""

    file: GgufFile
    spec: ModelSpec
    settings: Settings
    """With the device that was chosen."""
    heat: HeatKeeper
    choices: Sequence[DaemonChoice]
    endpoints: Sequence[Endpoint]
    planning: Planning
    planned: Planned
    given: Placement | None
    """A caller's placement, or the plan's; None: daemons get equal shares."""
    owned: OwnedExperts | None
    """The parent's experts of a placement file."""
    is_fixed: bool
    """Whether nothing is planned: the backend is named, or where experts are."""
    num_positions: int

    @property
    def names(self) -> list[str]:
        """The daemons'."""
        return daemon_names(self.choices, self.endpoints)

    @property
    def is_on_device(self) -> bool:
        """Whether the parent computes on a GPU."""
        return (self.settings.device or CPU).kind is not DeviceKind.CPU

    def placement(self, offers: Mapping[str, Offer] | None = None) -> Placement:
        """Where experts live if daemons change nothing; `offers`: theirs, once they have any.

        Raises: SettingsError if experts have no owner, or daemons too little room.
        """
        if self.given is not None:
            return self.given
        return even_split(
            self.spec.moe,
            self.names,
            self.settings.local_experts,
            offers=offers,
            budgets=None if offers is None else budgets_of(self.choices),
            has_host=self.is_on_device,
            owned=self.owned,
        )

    def open_backend(self) -> ComputeBackend:
        """The parent's. Raises: DeviceUnavailable."""
        settings = self.settings
        return open_backend(
            settings.device,
            backend=BackendName(settings.backend),
            num_threads=settings.threads or None,
            cpu_tier=settings.cpu_tier,
            cache_dir=settings.cache_dir,
            max_chunk=self.planned.chunk,
            cache_slots=settings.moe_cache_slots or 0,
            slot_pins=WarmPins(settings.moe_warmpin, settings.moe_warmpin_after),
        )


@dataclass(frozen=True, slots=True)
class Answered:
    """What daemons have said, and what was decided then."""

    weights: WeightCheck
    connected: Connected
    planned: Planned
    placement: Placement


def decide(
    undo: contextlib.ExitStack,
    path: str | Path | None,
    settings: Settings,
    *,
    daemons: Sequence[DaemonSetting | str],
    placement: Placement | None = None,
    keeps_plan: bool = True,
    on_progress: ProgressCallback | None = None,
) -> Decision:
    """Check all that was asked for, and choose what was not; `undo` closes the file.

    Raises: SettingsError, ModelFileError, DeviceUnavailable.
    """
    choices = choose_daemons(daemons, settings)
    endpoints = [parse_endpoint(each) for each in settings.connect]
    file = undo.enter_context(
        GgufFile.open(chosen_model_path(settings) if path is None else model_file(path))
    )
    if settings.yarn == "llama.cpp":
        file.ignore(f"{file.architecture}.{key}" for key in YARN_KEYS)
    spec = read_spec(file)
    check_context(settings.context, spec)
    heat = open_heat(file, spec, settings)
    undo.callback(heat.close)
    names, budgets = daemon_names(choices, endpoints), budgets_of(choices)
    owned: OwnedExperts | None = None
    if settings.placement and placement is None:
        owned = _owned_in(Path(settings.placement), spec, settings)
    report = on_progress or (lambda owner, stage, num_done, num_total: None)
    planning = Planning(
        file,
        spec,
        settings,
        heat=heat.for_planning(),
        on_progress=lambda what, *progress: report("parent", f"measure {what}", *progress),
        budgets=budgets,
        keeps_plan=keeps_plan,
    )
    planned = Planned(settings)
    has_backend = settings.backend != BackendName.AUTO
    is_fixed = has_backend or owned is not None or placement is not None
    if has_backend:
        settings = _unplanned(settings, spec, f"--backend={settings.backend}")
    elif owned is not None:
        settings = _unplanned(settings, spec, "--placement")
    elif placement is None:
        planned = planning.before_daemons(names)
        settings, placement = planned.settings, planned.placement
    kv_type = chosen_kv_type(settings.kv_type, spec)
    num_positions = unplanned_context(spec, settings.context)
    found = Decision(
        file, spec, settings, heat, choices, endpoints, planning, planned, placement, owned,
        is_fixed, num_positions,
    )  # fmt: skip
    # A first one, so that wishes are checked before anything is started.
    first = found.placement()
    ours = {LOCAL_OWNER, HOST_OWNER} if found.is_on_device else {LOCAL_OWNER}
    strangers = {*first.owner_names}.difference(names, ours)
    if strangers:
        raise SettingsError(f"the placement has unknown owners: {sorted(strangers)}")
    if placement is not None:
        check_given(placement, budgets, spec.moe)
    if found.is_on_device:  # it checks its own memory
        return found
    num_positions = context_on_host(
        footprint(file, spec, Memory.HOST),
        Request(kv_type, PREFILL_CHUNK),
        num_positions=num_positions,
        most=spec.context_length,
        is_asked=settings.context is not None,
        most_bytes=wishes_of(settings).host_memory_bytes,
        num_daemons=len(choices),
    )
    return replace(found, num_positions=num_positions)


def ask_daemons(
    undo: contextlib.ExitStack,
    decision: Decision,
    backend: ComputeBackend,
    *,
    tolerates_absent: bool,
    on_progress: ProgressCallback | None = None,
) -> Answered:
    """Start or find the daemons, and decide with what they say; `undo` closes them.

    Raises: SettingsError, DaemonUnavailable, HandshakeRefused.
    """
    file, spec, settings, names = decision.file, decision.spec, decision.settings, decision.names
    weights = WeightCheck(file, spec.moe, settings.cache_dir)
    undo.callback(weights.close)
    connected = connect(
        undo,
        file,
        spec,
        backend=backend,
        weights=weights,
        choices=decision.choices,
        endpoints=decision.endpoints,
        settings=settings,
        tolerates_absent=tolerates_absent,
        on_progress=on_progress,
    )
    planned = decision.planned
    if names and not decision.is_fixed:
        planned = decision.planning.with_daemons(
            planned,
            connected.offers,
            connected.timed_links(spec, settings),
            numeric_class=backend.numeric_class,
            own=OwnProcessor(
                partial(own_step_s, backend, file, spec.moe),
                backend.num_threads,
                names_here(names, len(decision.choices), decision.endpoints),
            ),
        )
    placement = planned.placement
    if placement is None:
        placement = decision.placement(connected.offers)
    return Answered(weights, connected, planned, placement)


def plan_of_file(settings: Settings, *, on_progress: ProgressCallback | None = None) -> Plan:
    """How the settings' model would be opened, as planned, or else as it is priced; its daemons
    are asked, and nothing is loaded. One that is not there is named.

    Raises: SettingsError, ModelFileError, DeviceUnavailable, DaemonUnavailable.
    """
    with contextlib.ExitStack() as undo:
        decision = decide(
            undo,
            None,
            settings,
            daemons=settings.daemons,
            keeps_plan=False,
            on_progress=on_progress,
        )
        planned, placement = decision.planned, decision.placement()
        offers: Mapping[str, Offer] = {}
        if decision.names:
            backend = decision.open_backend()
            undo.callback(backend.close)
            asked = ask_daemons(undo, decision, backend, tolerates_absent=True)
            planned, placement, offers = asked.planned, asked.placement, asked.connected.offers
        found = planned.plan if offers else decision.planned.plan
        if found is not None:
            return found
        settings = replace(decision.settings, context=decision.num_positions)
        return decision.planning.priced(settings, placement, offers)


def _owned_in(path: Path, spec: ModelSpec, settings: Settings) -> OwnedExperts:
    """The experts of a placement file. Raises: SettingsError if another setting says it, too."""
    if settings.local_experts is not None:
        raise SettingsError("--placement and --local-experts both say where experts are computed")
    if settings.plan:
        raise SettingsError("--placement and --plan both say where experts are computed")
    return read_owned_experts(path, {x.layer_id: x.num_experts for x in spec.moe.layers})


def _unplanned(settings: Settings, spec: ModelSpec, instead: str) -> Settings:
    """The settings with the device that they mean, where `instead` is why nothing is planned.

    Raises: SettingsError if one of them needs a plan, or two contradict.
    """
    wishes = wishes_of(settings)
    check_unplanned(wishes, instead)
    check_wishes(wishes, spec)
    if wishes.num_gpu_layers and settings.device is None:
        raise SettingsError(f"-ngl {wishes.num_gpu_layers} and {instead}: name a GPU (--device)")
    return replace(settings, device=CPU) if wishes.num_gpu_layers == 0 else settings
