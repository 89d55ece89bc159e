"""Plans how a model is opened: gathers what the planner reads, and applies what it decides.

A plan is made where there is something to decide: a GPU is there, and the settings do not say where
experts are. It needs a box, which is measured once for a machine and kept. Where everything fits
one GPU with memory of its own, nothing is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import describe
from dflash_adapters.spec import ModelSpec
from dflash_protocol.device import CPU, Device, DeviceKind
from dflash_protocol.errors import DflashError, SettingsError, UnsupportedModel
from dflash_protocol.ids import Phase
from dflash_protocol.placement import Placement
from dflash_protocol.settings import Settings
from dflash_protocol.wire.messages import Offer
from dflash_runtime.compute.gpu.chunk_room import GPU_CHUNKS
from dflash_runtime.compute.gpu.device.devices import GpuDescription
from dflash_runtime.compute.host import PREFILL_CHUNK
from dflash_runtime.compute.kv_cache import chosen_kv_type
from dflash_runtime.compute.memory import host_memory
from dflash_runtime.compute.room import Room
from dflash_runtime.compute.step_slots import SLOTS
from dflash_runtime.engine.daemon_offers import (
    OwnProcessor,
    are_unlike,
    daemons_of,
    is_any_slower,
    offer_of_gpu,
    times_of,
    with_daemons,
)
from dflash_runtime.engine.kept_files import PLAN_SUFFIX, kept_places
from dflash_runtime.engine.kept_plan import (
    KeptPlan,
    digest_of_wishes,
    gain_of,
)
from dflash_runtime.engine.measuring.layers import head_bytes
from dflash_runtime.engine.measuring.machine import (
    box_of_machine,
    devices_to_measure,
    gpus_of_machine,
)
from dflash_runtime.engine.saved_plan import saved_plan
from dflash_runtime.experts.daemons.data_path import may_mail
from dflash_runtime.experts.offload import OffloadMode
from dflash_runtime.placement.box import Box, LinkSpeed
from dflash_runtime.placement.budgets import ExpertBudget
from dflash_runtime.placement.footprint import Memory, Request, footprint
from dflash_runtime.placement.heat import Heat
from dflash_runtime.placement.moves import MovePrices, move_prices
from dflash_runtime.placement.plan import Alternative, Plan, PlanRefused
from dflash_runtime.placement.plan_record import RecordOf
from dflash_runtime.placement.planner import contexts_of, plan, unplanned_context
from dflash_runtime.placement.situation import (
    ExpertShares,
    ParentDevice,
    Situation,
)
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER, even_split
from dflash_runtime.placement.wishes import (
    ExpertWishes,
    MoeMode,
    Wishes,
    check_on_processor,
    check_overrides,
    check_unplanned,
    check_wishes,
    planned_flags,
    request_of,
    wishes_of,
)

_LOG = logging.getLogger(__name__)

WORTH = 1.05
"""Predicted gain that is worth another placement than an even split."""

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Planned:
    """How a model is to be opened."""

    settings: Settings
    """With the device, and what else was decided."""
    placement: Placement | None = None
    """None: it is not planned."""
    chunk: int | None = None
    """Most tokens of a prompt chunk; None: the backend's own."""
    prompts_here: frozenset[int] | None = None
    """See Plan.prompts_here; None: nothing was planned."""
    plan: Plan | None = None
    move_prices: MovePrices | None = None
    """Of moving experts while serving; None: they stay where they are."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a plan must obey: settings, and what is decided already."""

    settings: Settings
    wishes: Wishes
    budgets: Mapping[str, ExpertBudget]
    """The most that daemons get of experts, by name."""
    offers: Mapping[str, Offer] = field(default_factory=dict)
    """Of the daemons that are connected."""
    chunk: int | None = None
    """Of the device that is open already."""

    def on_processor(self, settings: Settings, spec: ModelSpec) -> _Asked:
        """The same of a parent on the processor."""
        context = unplanned_context(spec, self.settings.context)
        return replace(self, settings=replace(settings, device=CPU, context=context))


class Planning:
    """What a plan of one opening is made from. Used by one thread."""

    def __init__(
        self,
        file: GgufFile,
        spec: ModelSpec,
        settings: Settings,
        *,
        heat: Heat,
        on_progress: OnProgress,
        budgets: Mapping[str, ExpertBudget] | None = None,
        keeps_plan: bool = True,
    ) -> None:
        """`budgets`: the most that daemons get of experts, by name. `keeps_plan`: for the next
        start."""
        self._file, self._spec, self._heat = file, spec, heat
        self._on_progress = on_progress
        self._asked = _Asked(settings, wishes_of(settings), budgets or {})
        self._box: Box | None = None
        self._described: list[GpuDescription] | None = None
        """All GPUs, before anything was taken of their memory."""
        self._numeric_class = ""
        """Of the device, once it is open."""
        self._links: Mapping[str, LinkSpeed] = {}
        """Those that were timed, by daemon."""
        self._daemon_names: Sequence[str] = ()
        self._keeps_plan = keeps_plan

    def before_daemons(self, daemon_names: Sequence[str]) -> Planned:
        """Choose the device, and what goes there if there are no daemons.

        Raises: SettingsError if what was asked for does not fit.
        """
        settings, wishes = self._asked.settings, self._asked.wishes
        check_wishes(wishes, self._spec)
        self._daemon_names, num_daemons = daemon_names, len(daemon_names)
        if settings.plan:
            if not wishes.fits:
                raise SettingsError("--fit=off and --plan contradict each other")
            check_unplanned(wishes, "--plan")
            if settings.local_experts is not None:
                raise SettingsError("--local-experts and --plan both say where experts are")
            return self._read(Path(settings.plan), daemon_names)
        if wishes.num_gpu_layers == 0:
            settings = replace(settings, device=CPU)
        if not wishes.fits:
            check_unplanned(wishes, "--fit=off")
            return Planned(settings)
        is_on_host = settings.device is not None and settings.device.kind is DeviceKind.CPU
        gpus = [] if is_on_host else self._gpus(settings)
        if not gpus:
            if wishes.num_gpu_layers:
                raise SettingsError(f"-ngl {wishes.num_gpu_layers}: there is no GPU to compute on")
            reason = "--device=cpu" if is_on_host else "no GPU"
            reason = "-ngl 0" if wishes.num_gpu_layers == 0 else reason
            check_on_processor(wishes, reason, has_daemons=bool(daemon_names))
            owners = (LOCAL_OWNER, *daemon_names)
            check_overrides(wishes.experts, self._spec.moe, side_names=owners, device=CPU)
            return Planned(settings)
        only = gpus[0] if len(gpus) == 1 and not self._asks_for_experts else None
        if only is not None and not only.memory.is_shared_with_host:
            context = self._resident_context(only, settings)
            if context is not None:
                settings = replace(settings, device=only.device)
                if not num_daemons:
                    return Planned(replace(settings, context=context))
        if settings.local_experts is not None and not self._asks_for_experts:
            return Planned(
                settings if settings.device else replace(settings, device=gpus[0].device)
            )
        asked = self._asked
        if wishes.experts.names_some_of(daemon_names):
            owners = (LOCAL_OWNER, HOST_OWNER, *daemon_names)
            device = gpus[0].device
            check_overrides(wishes.experts, self._spec.moe, side_names=owners, device=device)
            # The device and the context are chosen now, and what daemons get once they are there.
            asked = replace(asked, wishes=replace(wishes, experts=ExpertWishes()))
        try:
            situation = self._situation(asked, gpus)
            found = self._plan(asked, situation)
        except SettingsError:
            raise
        except DflashError as error:
            if settings.device is not None or planned_flags(wishes):
                raise
            _log_why_on_host(error)
            return Planned(settings)
        if isinstance(found, PlanRefused) and num_daemons and settings.device is not None:
            return Planned(settings)  # it may be different with them
        if isinstance(found, Plan) and not num_daemons:
            found = self._kept_or(found, asked, situation)
        planned = self._applied(_accepted(found), asked, situation)
        if num_daemons:  # they have not said yet what they have
            return replace(planned, placement=None, prompts_here=None)
        return planned

    @property
    def _asks_for_experts(self) -> bool:
        """Whether settings say more of experts' places than how many of a layer are local."""
        wishes = self._asked.wishes
        budgets = (
            wishes.expert_budget_bytes,
            wishes.expert_budget_percent,
            wishes.device_memory_bytes,
        )
        asked = replace(wishes.experts, num_local=None)
        return asked != ExpertWishes() or any(each is not None for each in budgets)

    def _read(self, path: Path, daemon_names: Sequence[str]) -> Planned:
        """A plan that was saved: see `saved_plan`."""
        of = self._record_of(daemon_names)
        found = saved_plan(path, of, self._file, settings=self._asked.settings)
        return self._applied(found, self._asked)

    def _record_of(self, daemon_names: Sequence[str], box_key: str | None = None) -> RecordOf:
        return RecordOf(
            self._file.identity(),
            {layer.layer_id: layer.num_experts for layer in self._spec.moe.layers},
            (LOCAL_OWNER, HOST_OWNER, *daemon_names),
            box_key,
        )

    def priced(self, settings: Settings, placement: Placement, offers: Mapping[str, Offer]) -> Plan:
        """What is done without a plan: the settings' device has all experts, or the placement says
        who has them. Raises: as `plan`."""
        wishes, slots = self._asked.wishes, settings.moe_cache_slots or 0
        settings = replace(settings, device=settings.device or CPU, moe_cache_slots=slots)
        gpus, is_whole = self._gpus(settings), placement.owner_names == (LOCAL_OWNER,)
        if not (gpus and is_whole and wishes.fits):
            wishes = replace(wishes, fits=False, experts=ExpertWishes(placement=placement))
        asked = replace(self._asked, settings=settings, wishes=wishes, offers=offers)
        return _accepted(self._plan(asked, self._situation(asked, gpus)))

    def with_daemons(
        self,
        planned: Planned,
        offers: Mapping[str, Offer],
        links: Mapping[str, LinkSpeed],
        *,
        numeric_class: str,
        own: OwnProcessor,
    ) -> Planned:
        """Decide where experts live, on the device that was chosen before, which is of this class.
        `links`: those that were timed, by daemon.

        Raises: SettingsError if what was asked for does not fit.
        """
        self._numeric_class, self._links = numeric_class, links
        asked = replace(self._asked, offers=offers)
        settings, wishes = planned.settings, asked.wishes
        is_asked = settings.local_experts is not None and not self._asks_for_experts
        is_asked = is_asked or bool(settings.plan) or not wishes.fits
        if not is_asked:
            planned = replace(planned, plan=None)  # which was made without daemons
        is_on_host = settings.device is None or settings.device.kind is DeviceKind.CPU
        asks = bool(planned_flags(wishes) or asked.budgets)
        if is_asked or not (offers or asks):
            return planned
        if is_on_host and asks:
            return self._as_asked(planned, asked)
        if is_on_host:
            return self._beside_processor(planned, asked, own)
        gpus = self._gpus(settings)
        if not gpus:
            return planned
        asked = replace(asked, settings=settings, chunk=planned.chunk)
        situation = self._situation(asked, gpus)
        found = self._kept_or(_accepted(self._plan(asked, situation)), asked, situation)
        return self._applied(found, asked, situation)

    def prompts_here(
        self, settings: Settings, placement: Placement, offers: Mapping[str, Offer]
    ) -> frozenset[int]:
        """See Plan.prompts_here, for a placement that was asked for: none if it cannot be priced.

        `settings` name the device.
        """
        on_cpu = (
            owned.num_experts and (name not in offers or offers[name].device == str(CPU))
            for name, owned in zip(placement.owner_names, placement.owners, strict=True)
            if name != LOCAL_OWNER
        )
        if settings.device is None or settings.device.kind is DeviceKind.CPU or not any(on_cpu):
            return frozenset()
        if settings.prefill_offload != OffloadMode.AUTO:
            return frozenset()
        try:
            if not self._gpus(settings):
                return frozenset()
            return frozenset(self.priced(settings, placement, offers).prompts_here)
        except DflashError as error:
            # docs: where experts were asked for is obeyed; owners of this process and daemons
            # compute their experts of prompts, as nothing says that copies are faster
            _LOG.warning("the placement that was asked for is not priced: %s", str(error))
            return frozenset()

    def _beside_processor(self, planned: Planned, asked: _Asked, own: OwnProcessor) -> Planned:
        """Where experts live if the parent computes on the processor: an even split among daemons,
        unless they are unlike, or slower than the parent, and another placement is predicted to be
        faster by WORTH.

        Daemons that are alike are on the parent's cores, mostly, where a split gains nothing.
        """
        offers, settings = asked.offers, asked.settings
        if len(offers) < len(self._daemon_names):
            return planned
        # How late a daemon of this machine answers says how busy that is.
        far = {name: x for name, x in self._links.items() if name not in own.neighbours}
        # Most need not be compared with the parent: they are fast enough for any.
        times = times_of(offers, far)
        is_slower = is_any_slower(times, 0.0) and is_any_slower(times, own.step_s())
        if not (are_unlike(times) or is_slower):
            return planned
        asked = asked.on_processor(planned.settings, self._spec)
        try:
            found = self._without(own.sharing(offers), asked)
            even = ExpertWishes(
                placement=even_split(self._spec.moe, [*offers], None, offers=offers)
            )
            # Priced even where a daemon on a processor has less memory than its share.
            wishes = replace(asked.wishes, fits=False, experts=even)
            split = self._plan_on_processor(replace(asked, wishes=wishes))
        except DflashError as error:
            # docs: the processor could not be measured, or offers were not understood: daemons get
            # equal shares
            _LOG.warning("nothing is planned: %s", str(error))
            return planned
        if isinstance(found, PlanRefused) or isinstance(split, PlanRefused):
            return planned
        if gain_of(found.forecast, split.forecast, request_of(settings)) < WORTH:
            return planned
        return replace(planned, placement=found.placement, plan=found)

    def _without(self, names: Collection[str], asked: _Asked) -> Plan | PlanRefused:
        """A plan that gives these daemons nothing; if that is not possible, any."""
        if not names:
            return self._plan_on_processor(asked)
        none = dict.fromkeys(names, ExpertBudget(0))
        found = self._plan_on_processor(replace(asked, budgets={**asked.budgets, **none}))
        if isinstance(found, PlanRefused):
            return self._plan_on_processor(asked)
        of_devices = (
            each if each.name in asked.budgets else replace(each, limit_bytes=None)
            for each in found.budgets
        )
        return replace(found, budgets=tuple(of_devices))

    def _as_asked(self, planned: Planned, asked: _Asked) -> Planned:
        """Where settings place experts beside a parent on the processor.

        Raises: SettingsError if that is not possible.
        """
        asked, wishes = asked.on_processor(planned.settings, self._spec), asked.wishes
        if wishes.experts.mode is MoeMode.CPU_MOE:
            wishes = replace(wishes, experts=ExpertWishes(cpu_moe=True))
        found = _accepted(self._plan_on_processor(replace(asked, wishes=wishes)))
        return replace(planned, placement=found.placement, plan=found)

    def _gpus(self, settings: Settings) -> list[GpuDescription]:
        """GPUs that may be the parent's."""
        if self._described is None:
            self._described = gpus_of_machine()
        devices = devices_to_measure(settings, self._described)
        found = [gpu for gpu in self._described if gpu.device in devices]
        if found and settings.device is None:
            try:
                _ = self._on_gpu
            except UnsupportedModel as error:
                _log_why_on_host(error)
                return []
        return found

    @cached_property
    def _on_gpu(self) -> Room:
        """The model on a GPU. Raises: UnsupportedModel if there are no kernels for it."""
        slots = self._asked.settings.moe_cache_slots or 0
        return footprint(self._file, self._spec, Memory.GPU, cache_slots=slots)

    @cached_property
    def _with_slots(self) -> Room:
        """The same with SLOTS for steps."""
        return footprint(self._file, self._spec, Memory.GPU, cache_slots=SLOTS)

    def _slots_of(self, asked: _Asked, box: Box, gpu: GpuDescription) -> list[tuple[int, Room]]:
        """How many slots steps may have on a GPU, and the model there."""
        slots, name = asked.settings.moe_cache_slots, str(gpu.device)
        found = [(slots or 0, self._on_gpu)]
        copies, layers = box.copies.get(name), self._spec.moe.layers
        if (
            slots is None
            and not self._daemon_names
            and not asked.offers
            and not gpu.memory.is_shared_with_host
            and name in box.host_asked
            and copies is not None
            and copies.kernel_reads
            and not any(each.bias or each.scale for layer in layers for each in layer.projections)
            and min(layer.num_experts for layer in layers) > SLOTS
            and self._file.size_bytes < self._lockable_bytes()
        ):
            found.append((SLOTS, self._with_slots))
        return found

    def _lockable_bytes(self) -> int:
        """Of pages of the file, which slots of steps have locked."""
        free_bytes, asked_bytes = host_memory().free_bytes, self._asked.wishes.host_memory_bytes
        return free_bytes if asked_bytes is None else min(free_bytes, asked_bytes)

    def _resident_context(self, gpu: GpuDescription, settings: Settings) -> int | None:
        """The largest context with which the whole model fits there, with the usual chunks; None if
        it does not with any."""
        spec = self._spec
        if settings.local_experts is not None:
            return None
        request = Request(
            chosen_kv_type(settings.kv_type, spec),
            GPU_CHUNKS[0],
            {layer.layer_id: layer.num_experts for layer in spec.moe.layers},
        )
        for context in contexts_of(spec, request_of(settings), settings.context):
            if request.num_bytes(self._on_gpu, context) <= gpu.memory.room_bytes:
                return context
        return None

    def _kept_or(self, new: Plan, asked: _Asked, situation: Situation) -> Plan:
        """The plan that is kept, unless the new one gains enough: see KeptPlan.or_new."""
        wishes, settings, offers = self._wishes_of(asked), asked.settings, asked.offers
        kept = KeptPlan(
            kept_places(self._file.path, settings, PLAN_SUFFIX),
            self._record_of([*offers], new.origin.box_key),
            digest_of_wishes(
                wishes,
                request_of(settings),
                offers,
                budgets=asked.budgets,
                cache_slots=settings.moe_cache_slots,
            ),
        )
        return kept.or_new(new, situation, wishes, keeps=self._keeps_plan)

    def _wishes_of(self, asked: _Asked) -> Wishes:
        """The wishes, with what is decided already."""
        settings = asked.settings
        return replace(
            asked.wishes,
            device=settings.device,
            context=settings.context,
            kv_type=chosen_kv_type(settings.kv_type, self._spec),
            chunk=asked.chunk,
        )

    def _plan_on_processor(self, asked: _Asked) -> Plan | PlanRefused:
        return self._plan(asked, self._situation(asked, []))

    def _plan(self, asked: _Asked, situation: Situation) -> Plan | PlanRefused:
        found = plan(situation, self._wishes_of(asked))
        if isinstance(found, PlanRefused):
            return found
        away = [
            Alternative(f"daemon {name}", str(found.setup.device), None, "not connected")
            for name in self._daemon_names
            if name not in asked.offers
        ]
        others = [
            *away,
            *self._unusable(asked.settings),
            *self._with_other_gpus(found, asked, situation),
        ]
        return replace(found, alternatives=(*found.alternatives, *others))

    def _with_other_gpus(
        self, found: Plan, asked: _Asked, situation: Situation
    ) -> list[Alternative]:
        """What a daemon on each other GPU of this machine would bring, where it is worth it."""
        device, alternatives = found.setup.device, list[Alternative]()
        if device.kind is DeviceKind.CPU or found.share_here >= 1.0 or self._asks_for_experts:
            return []
        taken = {str(device), *(offer.device for offer in asked.offers.values())}
        of_daemon = footprint(self._file, self._spec, Memory.GPU).needs(
            num_positions=0, kv_type=found.setup.kv_type, chunk=found.setup.chunk, is_parent=False
        )
        gpus = {gpu.device: gpu for gpu in self._described or []}
        for other, gpu in gpus.items():
            speed = situation.box.devices.get(str(other))
            if str(other) in taken or speed is None or gpu.memory.is_shared_with_host:
                continue
            offer = offer_of_gpu(
                other,
                speed,
                self._spec,
                free_bytes=max(0, gpu.memory.room_bytes - of_daemon.total),
                can_mail=other.kind is device.kind,
            )
            setup = replace(asked.settings, device=device, context=found.setup.context)
            beside = replace(asked, settings=setup, offers={**asked.offers, str(other): offer})
            better = plan(self._situation(beside, [gpus[device]]), self._wishes_of(beside))
            if isinstance(better, PlanRefused):
                continue
            if gain_of(better.forecast, found.forecast, request_of(asked.settings)) >= WORTH:
                name = f"--daemon {other}"
                alternatives.append(Alternative(name, str(device), better.forecast, "not given"))
        return alternatives

    def _unusable(self, settings: Settings) -> list[Alternative]:
        """GPUs that could be the parent's, had this Python their libraries."""
        if self._asked.wishes.device is not None or not self._described:
            return []
        usable = devices_to_measure(replace(settings, device=None), self._described)
        return [
            Alternative("any", str(gpu.device), None, gpu.why_not or _as_daemon(gpu.device))
            for gpu in self._described
            if gpu.device not in usable
        ]

    def _situation(self, asked: _Asked, gpus: Sequence[GpuDescription]) -> Situation:
        settings, offers, spec = asked.settings, asked.offers, self._spec
        if self._box is None:
            self._box = box_of_machine(self._file, settings, on_progress=self._on_progress)
        box = self._box
        mails = may_mail(settings) and (settings.device or CPU).kind is not DeviceKind.CPU
        on_host = of_daemons = footprint(self._file, spec, Memory.HOST)
        if any(offer.device != str(CPU) for offer in offers.values()):
            of_daemons = footprint(self._file, spec, Memory.GPU)
        parents = [
            ParentDevice(
                gpu.device,
                gpu.memory.room_bytes,
                on_gpu,
                GPU_CHUNKS,
                shares_host_memory=gpu.memory.is_shared_with_host,
                numeric_class=self._numeric_class if gpu.device == settings.device else "",
                cache_slots=slots,
            )
            for gpu in gpus
            for slots, on_gpu in self._slots_of(asked, box, gpu)
        ]
        host_bytes = host_memory().free_bytes
        parents.append(ParentDevice(CPU, host_bytes, on_host, (PREFILL_CHUNK,)))
        return Situation(
            self._file.identity(),
            spec,
            head_bytes(self._file, describe(self._file)),
            with_daemons(box, spec, offers, timed=self._links, mails=mails),
            tuple(parents),
            daemons_of(offers, settings, on_host=on_host, on_gpu=of_daemons, budgets=asked.budgets),
            host_bytes,
            _shares(self._heat, spec),
            request_of(settings),
            settings.swap_max,
        )

    def _applied(self, found: Plan, asked: _Asked, situation: Situation | None = None) -> Planned:
        """`situation`: what it was made from; None for a plan that was read, which is obeyed."""
        setup = found.setup
        settings = replace(
            asked.settings,
            device=setup.device,
            context=setup.context,
            kv_type=setup.kv_type.value,
            moe_cache_slots=setup.cache_slots,
        )
        is_on_gpu = setup.device.kind is not DeviceKind.CPU
        if not is_on_gpu:
            return Planned(settings, found.placement, plan=found)
        prompts_here = frozenset(found.prompts_here)
        prices = None
        if situation is not None and HOST_OWNER in found.placement.owner_names:
            [parent] = (
                each
                for each in situation.of_device(setup.device)
                if each.cache_slots == setup.cache_slots
            )
            prompt_s = 1.0 / max(found.forecast.prompt_512, 1e-9)
            prices = move_prices(situation, parent, prompt_s=prompt_s)
        return Planned(settings, found.placement, setup.chunk, prompts_here, found, prices)


def _accepted(found: Plan | PlanRefused) -> Plan:
    """Raises: SettingsError if there is no plan that keeps to what was asked for."""
    if isinstance(found, PlanRefused):
        raise SettingsError(found.reason)
    return found


def _as_daemon(device: Device) -> str:
    """How a GPU is used that another Python can drive."""
    return (
        f"this Python cannot use it; [[daemon]] with device = '{device}' and launcher = "
        "'a Python that can' adds it (`dflash-moe doctor` says more)"
    )


def _log_why_on_host(error: DflashError) -> None:
    # docs: a GPU is there, but cannot be measured, or has no kernels for the model; it is computed
    # on the processor. `--device cuda:0` makes it an error
    _LOG.warning("computing on the processor: %s", str(error))


def _shares(heat: Heat, spec: ModelSpec) -> ExpertShares:
    layer_ids = [layer.layer_id for layer in spec.moe.layers]
    return ExpertShares(
        {each: heat.probabilities(Phase.DECODE, each) for each in layer_ids},
        {each: heat.probabilities(Phase.PREFILL, each) for each in layer_ids},
        heat.num_tokens(),
    )
