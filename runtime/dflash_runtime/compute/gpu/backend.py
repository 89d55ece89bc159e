"""The GPU backend: a device, its operations, and the experts on it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Description
from dflash_adapters.loading import model_spec
from dflash_adapters.quant import TensorType
from dflash_adapters.registry import describe
from dflash_adapters.spec import ModelSpec, MoeLayer
from dflash_protocol.batch import RoutedBatch
from dflash_protocol.device import Device
from dflash_protocol.errors import (
    DeviceOutOfMemory,
    DeviceUnavailable,
    SettingsError,
    UnsupportedModel,
)
from dflash_protocol.ids import F32Array, I32Array, I64Array, Phase
from dflash_protocol.numeric_class import in_step_order
from dflash_runtime.compute.backend import (
    Chunking,
    ExpertBank,
    ExpertMemory,
    MailedExperts,
    RemoteExperts,
    argmax_of,
    sums_of,
)
from dflash_runtime.compute.expert_arena import ArenaOptions, ExpertArena
from dflash_runtime.compute.gpu.chunk_room import GROUP_TOKENS, MAX_CHUNK, scratch_of_chunk
from dflash_runtime.compute.gpu.device.binary_cache import BinaryCache
from dflash_runtime.compute.gpu.device.cupy_device import CupyDevice
from dflash_runtime.compute.gpu.device.device import BlockArray, KernelDevice
from dflash_runtime.compute.gpu.device.devices import CONTEXT_BYTES, DeviceMemory
from dflash_runtime.compute.gpu.experts.experts import CapturedExperts, CupyExpertBank
from dflash_runtime.compute.gpu.experts.moe import DeviceMoe, HereRoute, HostRoute, Route
from dflash_runtime.compute.gpu.experts.offload import ExpertOffload
from dflash_runtime.compute.gpu.experts.offload_room import offload_bytes
from dflash_runtime.compute.gpu.experts.resizing import SlotRoom
from dflash_runtime.compute.gpu.experts.shared_slots import SharedSlots
from dflash_runtime.compute.gpu.experts.stage import DeviceStage, open_stage
from dflash_runtime.compute.gpu.launch.decode_arrays import STEP_SIZES
from dflash_runtime.compute.gpu.layers.kv_cache import DeviceKvCache
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer, load_resident
from dflash_runtime.compute.gpu.layers.rows import Rows
from dflash_runtime.compute.gpu.mailbox.mail import CupyMail
from dflash_runtime.compute.gpu.model.linear import DeviceLoader
from dflash_runtime.compute.gpu.model.model import GpuModel
from dflash_runtime.compute.gpu.ops.choice_notes import downloaded
from dflash_runtime.compute.gpu.ops.ops import GpuOps
from dflash_runtime.compute.gpu.room import (
    GpuRoom,
    expert_bytes,
    require_room,
    slots_beside,
    total_experts,
)
from dflash_runtime.compute.gpu.run.captured_step import GraphStep
from dflash_runtime.compute.gpu.run.host_path import HostPath
from dflash_runtime.compute.gpu.run.path_choice import MailboxSessions
from dflash_runtime.compute.gpu.run.step_path import LocalPath
from dflash_runtime.compute.gpu.transfers.file_copier import FileCopier
from dflash_runtime.compute.gpu.transfers.payload import PayloadMover
from dflash_runtime.compute.kv_cache import KvCache, KvType
from dflash_runtime.compute.model import Model
from dflash_runtime.compute.room import Needs
from dflash_runtime.compute.slot_pins import NO_PINS, WarmPins
from dflash_runtime.compute.step_order import MOST_TOKENS
from dflash_runtime.compute.thread_trial import OnePass

_LOG = logging.getLogger(__name__)

HALVED_FROM = 1536
"""Tokens from which on a chunk with remote experts is split into two overlapped halves. For fewer,
launching and converting matrices twice takes longer than waiting."""

_LEFT_BYTES = 256 << 20
"""Memory left free beside weights that need not be there, so that nothing else fails for lack of
it."""

KERNEL_VERSION = 3
"""Raise it with every change that changes bits."""


class CupyBackend:
    """Implements backend.ComputeBackend.

    One thread runs a model; other threads may load and use banks at the same time.
    Owns: the device if it has opened it, with all memory on it.
    """

    name = "cupy"
    is_host = False

    def __init__(
        self,
        device: Device | KernelDevice,
        *,
        max_chunk: int = MAX_CHUNK,
        scratch_bytes: int | None = None,
        overlapped_from: int = HALVED_FROM,
        group_tokens: int = GROUP_TOKENS,
        cache_slots: int = 0,
        slot_pins: WarmPins = NO_PINS,
        memory: Callable[[], DeviceMemory] | None = None,
        cache_dir: str | None = None,
    ) -> None:
        """`scratch_bytes` are for matrices as halves, by default what suits `max_chunk`.
        `cache_slots`, `slot_pins`: see `open_backend`.

        `memory` reports free memory; without it `require_room` checks nothing, unless the device
        is opened here. Its compiled kernels are cached in `cache_dir`, see `cache_folder`.

        Raises: DeviceUnavailable, KernelCompileError.
        """
        self._undo = contextlib.ExitStack()
        if isinstance(device, Device):
            opened = CupyDevice(device, cache=BinaryCache(cache_dir=cache_dir))
            self._undo.callback(opened.close)
            device, memory = opened, opened.memory
        self.device: KernelDevice = device
        own = f"cupy-{KERNEL_VERSION}/{device.capabilities.architecture}"
        self.numeric_class = in_step_order(own)
        # Fewer tokens are computed by step kernels, which have other bits.
        self.chunking = Chunking(
            max_chunk,
            max_chunk,
            invariant_from=MOST_TOKENS + 1,
            overlapped_from=max(overlapped_from, 2 * (MOST_TOKENS + 1)),
            grouped=group_tokens,
        )
        self._memory = memory
        self._lock = threading.RLock()
        try:
            self.ops = GpuOps(
                device,
                max_chunk=max_chunk,
                scratch_bytes=scratch_bytes or scratch_of_chunk(max_chunk),
                lock=self._lock,
            )
            self.ops.step_experts.cache_slots = cache_slots
            self.ops.step_experts.slot_pins = slot_pins
            self.loader = DeviceLoader(device, self.ops.chunks)
        except BaseException:
            self._undo.close()
            raise
        self.mail = CupyMail(device, self._lock)
        self._captured_experts = CapturedExperts(self.ops)
        self._offload: ExpertOffload | None = None
        self._room: GpuRoom | None = None
        """Of the model loaded last."""

    @property
    def answering(self) -> CupyMail:
        return self.mail

    @property
    def trial_batches(self) -> tuple[tuple[Phase, int], ...]:
        steps = ((Phase.DECODE, size) for size in STEP_SIZES)
        return (*steps, (Phase.PREFILL, self.chunking.preferred))

    @property
    def mover(self) -> PayloadMover:
        """Never None."""
        return self.ops.payload

    @property
    def device_name(self) -> str:
        return self.device.product_name

    @property
    def num_threads(self) -> int:
        return 1

    def device_memory(self) -> tuple[int, int] | None:
        memory = None if self._memory is None else self._memory()
        if memory is None or memory.is_shared_with_host:
            return None
        return memory.free_bytes, memory.stays_free_bytes

    def free_memory_bytes(self) -> int | None:
        """Without what stays free."""
        return None if self._memory is None else self._memory().room_bytes

    def expert_memory(self, file: GgufFile, layers: Iterable[MoeLayer]) -> ExpertMemory:
        """Without what stays free."""
        expert = {each.layer_id: expert_bytes(each) for each in layers}
        if self._memory is None:
            return ExpertMemory(0, 0, expert)
        with self._lock:
            self.device.trim()
        memory = self._memory()
        free_bytes = memory.room_bytes - self._work_bytes(self._needs(file))
        return ExpertMemory(max(0, free_bytes), memory.total_bytes, expert)

    def require_room(
        self,
        file: GgufFile,
        experts: Iterable[tuple[MoeLayer, int]],
        *,
        num_positions: int = 0,
        kv_type: KvType = KvType.F16,
        num_daemons: int = 0,
    ) -> None:
        """Raises: DeviceOutOfMemory, UnsupportedModel, SettingsError."""
        given = list(experts)
        needs = self._needs(
            file,
            num_positions=num_positions,
            kv_type=kv_type,
            num_remote_layers=sum(count < layer.num_experts for layer, count in given),
            num_daemons=num_daemons,
        )
        needed = {
            "experts": total_experts(given, self.ops.step_experts.cache_slots),
            "other weights": needs.weights,
            "keys and values": needs.cache,
            "work": self._work_bytes(needs),
        }
        if self._memory is not None:
            with self._lock:
                self.device.trim()
            require_room(self.device.name, self._memory(), needed)

    def _needs(
        self,
        file: GgufFile,
        *,
        num_positions: int = 0,
        kv_type: KvType = KvType.F16,
        num_remote_layers: int = 0,
        num_daemons: int = 0,
    ) -> Needs:
        """Of a parent, or, without positions, of a daemon. Raises: UnsupportedModel."""
        description = describe(file)
        return GpuRoom(file, model_spec(file, description), description).needs(
            num_positions=num_positions,
            kv_type=kv_type,
            chunk=self.chunking.preferred,
            scratch_bytes=self.ops.chunks.scratch_bytes,
            is_parent=num_positions > 0,
            num_remote_layers=num_remote_layers,
            num_daemons=num_daemons,
        )

    def _work_bytes(self, needs: Needs) -> int:
        """What computing is still to take. The context is open already; once there were chunks, all
        that they need is there too."""
        if self.ops.chunks.has_worked:
            return 0
        return needs.work + needs.recorded + needs.driver - CONTEXT_BYTES

    def load_experts(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> CupyExpertBank:
        """Raises: UnsupportedModel, DeviceOutOfMemory."""
        return self._bank(file, layer, global_expert_ids)

    def load_resizable(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> CupyExpertBank:
        """In layers that are whole, the device's steps know of no other owner: these are not
        resized. Raises: UnsupportedModel, DeviceOutOfMemory."""
        is_partial = 0 < global_expert_ids.size < layer.num_experts
        return self._bank(file, layer, global_expert_ids, blocks=[] if is_partial else None)

    def load_shared(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> CupyExpertBank:
        """Raises: UnsupportedModel, DeviceOutOfMemory."""
        return self._bank(file, layer, global_expert_ids, blocks=[], is_shared=True)

    def _bank(
        self,
        file: GgufFile,
        layer: MoeLayer,
        global_expert_ids: I32Array,
        *,
        blocks: list[BlockArray] | None = None,
        is_shared: bool = False,
    ) -> CupyExpertBank:
        """With `blocks`, the bank can be resized, or is shared."""
        cache_slots = 0 if is_shared else self.ops.step_experts.cache_slots
        num_more = slots_beside(layer, global_expert_ids.size, cache_slots)
        with self._lock:
            by_global, by_local = load_resident(
                self.device,
                self.loader.uploader,
                file,
                layer=layer,
                global_expert_ids=global_expert_ids,
                num_more=num_more,
                blocks=blocks,
            )
            self.ops.chunk_experts.expect(by_global)
        room: SlotRoom | None = None
        shared: SharedSlots | None = None
        if blocks is not None:
            slots = SlotRoom(layer, blocks, num_more, global_expert_ids.size)
            if is_shared:
                shared = SharedSlots(slots, self.mail.paused)
            else:
                room = slots
        return CupyExpertBank(
            self.ops,
            by_global,
            by_local,
            captured=self._captured_experts,
            uploader=self.loader.uploader,
            lock=self._lock,
            room=room,
            shared=shared,
        )

    def bring_experts(
        self,
        file: GgufFile,
        banks: Mapping[int, ExpertBank],
        options: ArenaOptions,
    ) -> ExpertArena | None:
        return None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            with self._lock:
                undo.enter_context(self.loader.uploader.copying())
            try:
                yield
            finally:
                with self._lock:
                    undo.close()

    def drop_experts(self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array) -> None:
        """A bank's memory is freed with it; this returns it to the driver."""
        with self._lock:
            self._captured_experts.forget_dropped()
            self.device.trim()

    def device_seconds(self, banks: Sequence[ExpertBank], batch: RoutedBatch) -> float:
        """Never None."""
        with self._lock:
            self.device.use()
            layers = [bank.captured_layer for bank in banks if isinstance(bank, CupyExpertBank)]
            if batch.phase is not Phase.PREFILL:
                return self._captured_experts.token_s(layers, batch.num_pairs)
            rows = self.mover.rows(self.device.upload(batch.rows.to_host()))
            placed = replace(batch, rows=rows)
            sums_of(banks[0], placed)  # allocates what is needed
            self.device.synchronize()
            begun_s = time.perf_counter()
            for bank in banks:
                sums_of(bank, placed)
            self.device.synchronize()
            return (time.perf_counter() - begun_s) / len(banks)

    def choose_threads(
        self, file: GgufFile, one_pass: OnePass | None, *, beside_device: bool = False
    ) -> None:
        """Do nothing: it has no threads of its own."""

    def to_host(self, rows: Rows) -> F32Array:
        array: F32Array = self.device.download(rows.array)
        return array

    def argmax(self, logits: Rows) -> I32Array:
        """For a step it is computed on the device, where logits stay."""
        if not logits.partials:
            return argmax_of(self.to_host(logits))
        token_ids = self.device.empty((logits.num_tokens,), np.int32)
        first = 0
        for partials in logits.partials:
            end = first + partials.shape[1]
            self.ops.write_argmax(partials, token_ids[first:end])
            first = end
        argmax: I32Array = self.device.download(token_ids)
        return argmax

    def joined(self, parts: Sequence[Rows]) -> Rows:
        num_tokens = sum(part.num_tokens for part in parts)
        kernels = self.ops.steps if num_tokens <= MOST_TOKENS else self.ops.chunks
        joined, first = kernels.rows(num_tokens, parts[0].columns), 0
        for part in parts:
            self.device.copy(joined.array[first : first + part.num_tokens], part.array)
            first += part.num_tokens
        return joined

    def load_model(self, file: GgufFile, description: Description) -> GpuModel:
        model = GpuModel(file, description, self.ops, loader=self.loader)
        self._room = GpuRoom(file, model.spec, description)
        self.loader.uploader.finish()
        self.device.trim()
        return model

    def new_cache(self, spec: ModelSpec, num_positions: int, kv_type: KvType) -> DeviceKvCache:
        return DeviceKvCache(
            self.device,
            spec.kv_layers,
            capacity=num_positions,
            kv_type=kv_type,
            recurrent=spec.recurrent_layers,
        )

    def class_beside(self, parent_class: str) -> str:
        del parent_class
        return self.numeric_class

    def bank_beside(self, parent_class: str, bank: ExpertBank) -> ExpertBank:
        """Always in step order."""
        del parent_class
        return bank

    def moe(
        self,
        banks: Mapping[int, ExpertBank],
        phase: Phase,
        remote: RemoteExperts | None,
        *,
        may_offload: bool = True,
    ) -> DeviceMoe:
        """Without `remote` all experts of the banks are used."""
        ops, resident = self.ops, self._resident(banks, remote)
        offload = self._offload if may_offload and phase is Phase.PREFILL else None

        def route_of(layer_id: int) -> Route:
            layer = resident.get(layer_id)
            if layer is not None and (remote is None or layer.is_whole):
                return HereRoute(ops, layer, phase, remote=remote)
            assert remote is not None
            return HostRoute(
                ops,
                layer_id,
                layer,
                phase=phase,
                remote=remote,
                offload=offload,
            )

        return DeviceMoe(route_of)

    def offload_prompts(
        self,
        file: GgufFile,
        layers: Iterable[MoeLayer],
        remote: RemoteExperts,
        *,
        arena: ExpertArena | None = None,
    ) -> None:
        self._close_offload()
        if not remote.may_offload:
            return
        local = ((layer, remote.local_experts_mask(layer.layer_id)) for layer in layers)
        missing = {layer.layer_id: (layer, ~mask) for layer, mask in local if not mask.all()}
        if not missing:
            return
        try:
            num_bytes = offload_bytes(
                (layer, int(experts.sum())) for layer, experts in missing.values()
            )
            if self._memory is not None:
                self.device.trim()
                needed = {"work": _LEFT_BYTES, "weights of prompts": num_bytes}
                require_room(self.device.name, self._memory(), needed)
            self._offload = ExpertOffload(
                self.ops,
                file,
                missing,
                uploader=self.loader.uploader,
                new_copier=partial(FileCopier, arena=arena),
            )
            if arena is not None:
                arena.before_close(self._close_offload)
            self._offload.prepare()
        except (DeviceUnavailable, SettingsError, UnsupportedModel) as error:
            self._close_offload()
            # docs (parent): there is no room on the device for parts of layers' experts beside all
            # else, or no memory can be locked, or no kernel reads them; prompts take as long as
            # their owners do
            _LOG.warning("no offload of remote experts in prompts: %s", str(error))
            remote.never_offload()
        else:
            # docs (parent): the memory on the device that is kept for weights of remote experts,
            # which it computes in prompts
            _LOG.info(
                "weights of prompts that are remote come through %.2f GiB on %s",
                num_bytes / 2**30,
                self.device.name,
            )

    def follow_owners(self, layer_ids: Iterable[int], remote: RemoteExperts) -> None:
        if self._offload is not None:
            self._offload.follow({each: ~remote.local_experts_mask(each) for each in layer_ids})

    def new_stage(
        self, file: GgufFile, layers: Sequence[MoeLayer], most: int
    ) -> DeviceStage | None:
        def require(num_bytes: int) -> None:
            if self._memory is not None:
                self.device.trim()
                needed = {"experts that are about to move": num_bytes}
                require_room(self.device.name, self._memory(), needed)

        return open_stage(self.device, file, layers, most=most, require_room=require)

    def compile_banks(
        self, banks: Mapping[int, ExpertBank], *, max_tokens: int, max_experts_used: int
    ) -> None:
        """Return None: kernels are launched by Python."""

    def _close_offload(self) -> None:
        if self._offload is not None:
            with contextlib.suppress(DeviceUnavailable):  # of a device that has failed
                self._offload.close()
            self._offload = None
            self.device.trim()

    @contextlib.contextmanager
    def noted_choices(
        self, experts: DeviceMoe
    ) -> Iterator[tuple[DeviceMoe, Callable[[], I32Array]]]:
        notes, device = self.ops.notes, self.device
        notes.begin()
        try:
            yield experts, lambda: downloaded(device, notes.end())
        finally:
            notes.end()

    def captured_step(
        self,
        model: Model[Any, Any],
        cache: KvCache,
        banks: Mapping[int, ExpertBank],
        *,
        remote: MailedExperts,
        check: Callable[[], None],
        keeps_choices: bool = False,
    ) -> GraphStep:
        """Never None."""
        assert isinstance(model, GpuModel)
        assert isinstance(cache, DeviceKvCache)
        resident = self._resident(banks, remote)
        layers = [resident.get(layer.layer_id) for layer in model.spec.moe.layers]
        num_remote = sum(layer is None or not layer.is_whole for layer in layers)
        self._reserve(model, cache, resident.values(), num_remote)
        if not num_remote:
            whole = self.moe(banks, Phase.DECODE, None)
            here = LocalPath(whole)
            return GraphStep(self.ops, model, cache, home=here, keeps_choices=keeps_choices)
        home = HostPath(self.ops, model.spec.moe, resident, remote=remote, check=check)
        with contextlib.ExitStack() as undo:
            undo.callback(home.close)
            sessions = MailboxSessions(
                self.ops,
                model.spec.moe,
                resident,
                remote=remote,
                home=home,
                keeper=self.mail.keeper,
                cache_slots=self.ops.step_experts.cache_slots,
                slot_pins=self.ops.step_experts.slot_pins,
            )
            undo.pop_all()
        return GraphStep(
            self.ops, model, cache, home=home, sessions=sessions, keeps_choices=keeps_choices
        )

    def _reserve(
        self,
        model: GpuModel,
        cache: DeviceKvCache,
        resident: Iterable[ResidentLayer],
        num_remote_layers: int,
    ) -> None:
        """Take the memory for chunks and steps: what is kept, and then the rest in one piece, which
        the device's pool cuts up as it is needed. Pieces of many sizes would add up to more.

        Raises: DeviceOutOfMemory.
        """
        chunks = self.ops.chunks
        for layer in resident:
            self.ops.chunk_experts.reserve(layer)
        if num_remote_layers:
            chunks.expect_floats(model.spec.hidden_size)
        chunks.reserve()
        assert self._room is not None  # the model is one that was loaded here
        passing_bytes = self._room.passing_bytes(
            num_positions=cache.capacity,
            kv_type=cache.kv_type,
            chunk=self.chunking.preferred,
            num_remote_layers=num_remote_layers,
            num_daemons=min(num_remote_layers, 1),
        )
        with contextlib.suppress(DeviceOutOfMemory):  # it may do with less
            self.device.empty(passing_bytes, np.uint8)

    def take_selections(self, banks: Mapping[int, ExpertBank]) -> dict[tuple[Phase, int], I64Array]:
        taken: dict[tuple[Phase, int], I64Array] = {}
        for layer_id, bank in banks.items():
            assert isinstance(bank, CupyExpertBank)
            counts = bank.by_global.take_selections(self.device)
            if counts is not None:
                taken[Phase.PREFILL, layer_id], taken[Phase.DECODE, layer_id] = counts
        return taken

    def _resident(
        self, banks: Mapping[int, ExpertBank], remote: RemoteExperts | None
    ) -> dict[int, ResidentLayer]:
        """The banks' experts that are computed here, by layer id."""
        resident: dict[int, ResidentLayer] = {}
        for layer_id, bank in banks.items():
            assert isinstance(bank, CupyExpertBank)  # another backend's are never given to this one
            layer: ResidentLayer | None = bank.by_global
            if remote is not None:
                layer = bank.by_global.only(self.device, remote.local_experts_mask(layer_id))
            if layer is not None:
                resident[layer_id] = layer
        return resident

    def warm_up(
        self,
        tensor_types: Iterable[TensorType],
        *,
        kv_type: KvType | None = None,
        is_recurrent: bool = False,
        asks_daemons: bool = False,
        beside_device: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Does nothing: kernels are compiled for a model's shapes when they are first used."""

    def spin_for(self, spin_s: float) -> None:
        """Does nothing: no thread spins."""

    def idle(self) -> None:
        """Does nothing: no thread spins."""

    def close(self) -> None:
        """Release the device, and all memory that nothing refers to any more."""
        with contextlib.suppress(DeviceUnavailable):  # a failed device is closed as well
            self.device.synchronize()
        self._close_offload()
        self._captured_experts.close()
        self.mail.close()
        with contextlib.suppress(DeviceUnavailable):
            self.ops.payload.close()
        del self.ops, self.loader, self._captured_experts
        self._undo.close()
