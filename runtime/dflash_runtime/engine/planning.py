"""Plans how a model is opened: gathers what the planner reads, and applies what it decides.

A plan is made where there is something to decide: a GPU is there, and the settings do not say where
experts are. It needs a box, which is measured once for a machine and kept. Where everything fits
one GPU with memory of its own, nothing is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import describe, read_spec
from dflash_adapters.spec import ModelSpec
from dflash_protocol.device import CPU, DeviceKind, parse_device
from dflash_protocol.errors import DflashError, SettingsError, UnsupportedModel
from dflash_protocol.ids import Phase
from dflash_protocol.placement import Placement
from dflash_protocol.process.text_files import file_error, read_file
from dflash_protocol.settings import Settings
from dflash_protocol.wire.messages import Offer
from dflash_runtime.compute.gpu.chunk_room import MAX_CHUNK
from dflash_runtime.compute.gpu.device.devices import GpuDescription
from dflash_runtime.compute.host import PREFILL_CHUNK
from dflash_runtime.compute.kv_cache import KvType, chosen_kv_type
from dflash_runtime.compute.memory import host_memory
from dflash_runtime.engine.demo_model import chosen_model_path
from dflash_runtime.engine.heat_keeper import open_heat
from dflash_runtime.engine.measuring.layers import head_bytes
from dflash_runtime.engine.measuring.machine import (
    box_of_machine,
    devices_to_measure,
    gpus_of_machine,
)
from dflash_runtime.experts.offload import OffloadMode
from dflash_runtime.placement.box import Box, Curve, DeviceSpeed, LinkSpeed
from dflash_runtime.placement.footprint import Footprint, Memory, Request, footprint
from dflash_runtime.placement.heat import Heat
from dflash_runtime.placement.plan import Plan, PlanRefused
from dflash_runtime.placement.plan_record import RecordOf, from_json
from dflash_runtime.placement.plan_text import plan_text
from dflash_runtime.placement.planner import UNPLANNED_CONTEXT, plan
from dflash_runtime.placement.situation import (
    ExpertDaemon,
    ExpertShares,
    ParentDevice,
    Situation,
)
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER
from dflash_runtime.placement.wishes import ExpertWishes, check_wishes, request_of, wishes_of

_LOG = logging.getLogger(__name__)

GPU_CHUNKS = tuple(MAX_CHUNK >> halvings for halvings in range(4))
"""Sizes of prompt chunks on a GPU, the preferred one first."""

_PLAN_BYTES = 16 << 20

_STEP_LINK_S = 25e-6
"""A request of a step to a daemon of this machine through shared memory, where it was not measured:
a round trip, and waking (bench.ipc_round_trip)."""
_MAIL_LINK_S = 7e-6
"""The same through a mailbox."""
_LINK_BYTES_PER_S = 5e9

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
    """See Plan.prompts_here; None: decided as prompts come."""
    plan: Plan | None = None


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
    ) -> None:
        self._file, self._spec, self._settings, self._heat = file, spec, settings, heat
        self._on_progress = on_progress
        self._box: Box | None = None
        self._described: list[GpuDescription] | None = None
        """All GPUs, before anything was taken of their memory."""
        self._wishes = wishes_of(settings)

    def before_daemons(self, daemon_names: Sequence[str]) -> Planned:
        """Choose the device, and what goes there if there are no daemons.

        Raises: SettingsError if what was asked for does not fit.
        """
        settings, wishes = self._settings, self._wishes
        check_wishes(wishes, num_layers=self._spec.num_layers, moe=self._spec.moe)
        if settings.plan:
            return self._read(Path(settings.plan), daemon_names)
        num_daemons = len(daemon_names)
        if wishes.num_gpu_layers == 0:
            settings = replace(settings, device=CPU)
        if not wishes.fits:
            return Planned(settings)
        is_on_host = settings.device is not None and settings.device.kind is DeviceKind.CPU
        gpus = [] if is_on_host else self._gpus()
        if not gpus:
            if wishes.num_gpu_layers:
                raise SettingsError(f"-ngl {wishes.num_gpu_layers}: there is no GPU to compute on")
            return Planned(settings)
        only = gpus[0] if len(gpus) == 1 and not self._asks_for_experts else None
        if only is not None and not only.memory.is_shared_with_host and self._fits(only):
            settings = replace(settings, device=only.device)
            if not num_daemons:
                return Planned(settings)
        if settings.local_experts is not None and not self._asks_for_experts:
            return Planned(
                settings if settings.device else replace(settings, device=gpus[0].device)
            )
        try:
            found = self._plan(gpus, {})
        except SettingsError:
            raise
        except DflashError as error:
            if settings.device is not None:
                raise
            _log_why_on_host(error)
            return Planned(settings)
        if isinstance(found, PlanRefused) and num_daemons and settings.device is not None:
            return Planned(settings)  # it may be different with them
        planned = self._applied(_accepted(found))
        if num_daemons:  # they have not said yet what they have
            return replace(planned, placement=None, prompts_here=None)
        return planned

    @property
    def _asks_for_experts(self) -> bool:
        """Whether settings say more of experts' places than how many of a layer are local."""
        wishes = self._wishes
        budgets = (
            wishes.expert_budget_bytes,
            wishes.expert_budget_percent,
            wishes.device_memory_bytes,
        )
        asked = replace(wishes.experts, num_local=None)
        return asked != ExpertWishes() or any(each is not None for each in budgets)

    def _read(self, path: Path, daemon_names: Sequence[str]) -> Planned:
        """A plan that was saved. Raises: SettingsError if it is of another model, or damaged."""
        content = read_file("plan", path, limit_bytes=_PLAN_BYTES)
        of = RecordOf(
            self._file.identity(),
            {layer.layer_id: layer.num_experts for layer in self._spec.moe.layers},
            (LOCAL_OWNER, HOST_OWNER, *daemon_names),
        )
        try:
            return self._applied(from_json(content, of))
        except SettingsError as error:
            raise file_error("plan", path, str(error).removeprefix("plan: ")) from error

    def alone(self) -> Plan:
        """A plan without daemons. Raises: SettingsError if what was asked for does not fit."""
        return _accepted(self._plan(self._gpus(), {}))

    def with_daemons(self, planned: Planned, offers: Mapping[str, Offer]) -> Planned:
        """Decide where experts live, on the device that was chosen before.

        Raises: SettingsError if what was asked for does not fit.
        """
        settings = planned.settings
        is_asked = settings.local_experts is not None and not self._asks_for_experts
        is_asked = is_asked or bool(settings.plan) or not self._wishes.fits
        is_on_host = settings.device is None or settings.device.kind is DeviceKind.CPU
        if is_asked or is_on_host or not offers or not self._gpus():
            return planned
        self._settings = settings
        return self._applied(_accepted(self._plan(self._gpus(), offers, chunk=planned.chunk)))

    def _gpus(self) -> list[GpuDescription]:
        """GPUs that may be the parent's."""
        if self._described is None:
            self._described = gpus_of_machine()
        devices = devices_to_measure(self._settings, self._described)
        found = [gpu for gpu in self._described if gpu.device in devices]
        if found and self._settings.device is None:
            try:
                _ = self._on_gpu
            except UnsupportedModel as error:
                _log_why_on_host(error)
                return []
        return found

    @cached_property
    def _on_gpu(self) -> Footprint:
        """The model on a GPU. Raises: UnsupportedModel if there are no kernels for it."""
        return footprint(self._file, self._spec, Memory.GPU)

    def _fits(self, gpu: GpuDescription) -> bool:
        """Whether the whole model fits there, with the usual context and chunks."""
        settings, spec = self._settings, self._spec
        if settings.local_experts is not None:
            return False
        num_positions = settings.context or min(spec.context_length, UNPLANNED_CONTEXT)
        request = Request(
            self.kv_type,
            GPU_CHUNKS[0],
            {layer.layer_id: layer.num_experts for layer in spec.moe.layers},
        )
        return request.num_bytes(self._on_gpu, num_positions) <= gpu.memory.room_bytes

    @property
    def kv_type(self) -> KvType:
        """The type of keys and values."""
        return chosen_kv_type(self._settings.kv_type, self._spec)

    def _plan(
        self,
        gpus: Sequence[GpuDescription],
        offers: Mapping[str, Offer],
        *,
        chunk: int | None = None,
    ) -> Plan | PlanRefused:
        settings, spec = self._settings, self._spec
        if self._box is None:
            self._box = box_of_machine(self._file, settings, on_progress=self._on_progress)
        box = self._box
        on_host = on_gpu = footprint(self._file, spec, Memory.HOST)
        if gpus or any(offer.device != str(CPU) for offer in offers.values()):
            on_gpu = self._on_gpu
        parents = [
            ParentDevice(
                gpu.device,
                gpu.memory.room_bytes,
                on_gpu,
                GPU_CHUNKS,
                shares_host_memory=gpu.memory.is_shared_with_host,
                copies_bytes=on_gpu.offload_bytes,
            )
            for gpu in gpus
        ]
        host_bytes = host_memory().free_bytes
        parents.append(ParentDevice(CPU, host_bytes, on_host, (PREFILL_CHUNK,)))
        situation = Situation(
            self._file.identity(),
            spec,
            head_bytes(self._file, describe(self._file)),
            _with_links(box, spec, offers),
            tuple(parents),
            tuple(_daemon(name, offer, on_host, on_gpu) for name, offer in offers.items()),
            host_bytes,
            _shares(self._heat, spec),
            request_of(settings),
        )
        wishes = replace(
            self._wishes,
            device=settings.device,
            context=settings.context,
            kv_type=self.kv_type,
            chunk=chunk,
        )
        return plan(situation, wishes)

    def _applied(self, found: Plan) -> Planned:
        # docs: where the experts are computed, what each device's memory is used for, and how fast
        # that should be; `dflash-moe plan` says the same without loading the model
        _LOG.info("plan:\n%s", plan_text(found).rstrip())
        setup = found.setup
        settings = replace(
            self._settings,
            device=setup.device,
            context=setup.context,
            kv_type=setup.kv_type.value,
        )
        is_on_gpu = setup.device.kind is not DeviceKind.CPU
        if not is_on_gpu:
            return Planned(settings, plan=found)
        is_left = settings.prefill_offload == OffloadMode.AUTO
        prompts_here = frozenset(found.prompts_here) if is_left else None
        return Planned(settings, found.placement, setup.chunk, prompts_here, found)


def _accepted(found: Plan | PlanRefused) -> Plan:
    """Raises: SettingsError if there is no plan that keeps to what was asked for."""
    if isinstance(found, PlanRefused):
        raise SettingsError(found.reason)
    return found


def _log_why_on_host(error: DflashError) -> None:
    # docs: a GPU is there, but cannot be measured, or has no kernels for the model; it is computed
    # on the processor. `--device cuda:0` makes it an error
    _LOG.warning("computing on the processor: %s", str(error))


def plan_of_file(settings: Settings, *, on_progress: OnProgress) -> Plan:
    """What would be decided for the settings' model, without loading it.

    Raises: SettingsError, ModelFileError, DeviceUnavailable.
    """
    with GgufFile.open(chosen_model_path(settings)) as file:
        spec = read_spec(file)
        heat = open_heat(file, spec, settings)
        try:
            known = heat.for_planning()
            return Planning(file, spec, settings, heat=known, on_progress=on_progress).alone()
        finally:
            heat.close()


def _shares(heat: Heat, spec: ModelSpec) -> ExpertShares:
    layer_ids = [layer.layer_id for layer in spec.moe.layers]
    return ExpertShares(
        {each: heat.probabilities(Phase.DECODE, each) for each in layer_ids},
        {each: heat.probabilities(Phase.PREFILL, each) for each in layer_ids},
        heat.num_tokens(),
    )


def _daemon(name: str, offer: Offer, on_host: Footprint, on_gpu: Footprint) -> ExpertDaemon:
    device = parse_device(offer.device, default_index=0)
    is_on_gpu = device.kind is not DeviceKind.CPU
    # What it holds of this model may be dropped for what it gets.
    free_bytes = offer.free_bytes + offer.held_bytes
    return ExpertDaemon(name, device, free_bytes, on_gpu if is_on_gpu else on_host)


def _with_links(box: Box, spec: ModelSpec, offers: Mapping[str, Offer]) -> Box:
    """The box with the speeds that daemons have told, and links as they usually are where they were
    not measured."""
    devices, links = dict(box.devices), dict(box.links)
    rates = [copies.to_host for copies in box.copies.values() if copies.to_host]
    if rates and HOST_OWNER not in links:
        # Rows of a chunk go to the host, and sums return, through memory that is not locked.
        row_s = 12 * spec.hidden_size / min(rates)
        chunk = Curve(((0, 0.0), (4096, 4096 * row_s)))
        links[HOST_OWNER] = LinkSpeed(HOST_OWNER, step=Curve(((1, 0.0),)), chunk=chunk)
    for name, offer in offers.items():
        speed = _speed_of(name, spec, offer)
        if speed is None:
            continue
        devices[name] = speed
        if name not in links:
            row_s = 12 * spec.hidden_size / _LINK_BYTES_PER_S  # float32 there, float64 back
            link_s = _MAIL_LINK_S if offer.can_mail else _STEP_LINK_S
            links[name] = LinkSpeed(
                name,
                step=Curve(((1, link_s + row_s),)),
                chunk=Curve(((1, link_s + row_s), (4096, link_s + 4096 * row_s))),
                by_device=offer.can_mail,
            )
    return replace(box, devices=devices, links=links)


def _speed_of(name: str, spec: ModelSpec, offer: Offer) -> DeviceSpeed | None:
    """A daemon's speed from what it has measured of its first layer; None if it did not."""
    if not offer.layer_ids or not offer.used_s[0]:
        return None
    layer = spec.moe.by_layer_id[offer.layer_ids[0]]
    num_used, num_bytes = layer.num_experts_used, float(layer.expert_bytes)
    points = [(num_used * num_bytes, offer.used_s[0])]
    if num_used > 1 and 0 < offer.one_s[0] < offer.used_s[0]:
        points.insert(0, (num_bytes, offer.one_s[0]))
    experts = {1: Curve(tuple(points))}
    if offer.chunk_tokens > 1 and offer.chunk_pairs_per_s[0]:
        pairs = offer.chunk_tokens * num_used
        chunk_s = pairs / offer.chunk_pairs_per_s[0]
        experts[offer.chunk_tokens] = Curve(((0.0, 0.0), (pairs * num_bytes, chunk_s)))
    return DeviceSpeed(name, experts)
