"""The daemon's model: its metadata, and the loaded experts of the placements in use."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

from dflash_adapters.gguf.file import FileChange, GgufFile
from dflash_adapters.gguf.weight_check import WeightCheck
from dflash_adapters.registry import read_spec
from dflash_protocol.errors import DaemonUnavailable, DeviceOutOfMemory
from dflash_protocol.placement import OwnedExperts
from dflash_protocol.wire.messages import COMPARING, MEASURING
from dflash_runtime.compute import DAEMON_MEMORY_ADVICE, ComputeBackend
from dflash_runtime.compute.backend import ExpertMemory
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.memory import is_in_memory, process_room
from dflash_runtime.compute.room import Room
from dflash_runtime.experts.brought import SharedRoom
from dflash_runtime.experts.speed_trial import KindSpeed, measure_kinds
from dflash_runtime.experts.store import (
    ExpertStore,
    HeldPlacement,
    expert_tensor_types,
    load_banks,
    measure_pairs_per_second,
    trial_pass,
)
from dflash_runtime.placement.footprint import Memory, footprint
from dflash_runtime.placement.host_context import (
    require_daemon_room,
    room_in_daemon,
    spare_bytes,
)

_LOG = logging.getLogger(__name__)

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with a stage, its steps done, and its total steps."""


def _ignore(stage: str, num_done: int, num_total: int) -> None:
    """The OnProgress that does nothing."""


class ExpertHost:
    """A model whose metadata are read at once and whose experts are loaded by placement.

    Raises: ModelFileError; SettingsError if this process can have too little memory.
    `weights` computes digests of the file and caches them in `cache_dir` (see `cache_folder`).
    On a processor experts that do not fit into memory, of which they have `most_bytes` at most,
    come from the disk when they are used.
    Owns: the file, a thread that hashes it, the backend, and memory for these experts.
    """

    def __init__(
        self,
        model_path: Path,
        backend: ComputeBackend,
        cache_dir: str | None = None,
        *,
        most_bytes: int | None = None,
    ) -> None:
        room = None
        self._file = GgufFile.open(model_path)
        try:
            self.spec = read_spec(self._file)
            if backend.is_host:
                found = footprint(self._file, self.spec, Memory.HOST)
                require_daemon_room(found, backend.chunking.preferred)
                if not any(is_in_memory(path) for path in self._file.shard_paths):
                    room = _room_of(found, backend.chunking.preferred, most_bytes)
            self.identity = self._file.identity()
            self.weights = WeightCheck(self._file, self.spec.moe, cache_dir)
            self.weights.start()
        except BaseException:
            self._file.close()
            raise
        self.backend = backend
        self.store = ExpertStore(backend, self._file, self.spec.moe, room=room)
        self._is_compiled = False
        self._has_threads = False
        self._load_lock = threading.Lock()
        self._speeds: dict[int, KindSpeed] = {}
        self._waiting: list[OnProgress] = []
        """Callbacks of all threads that wait for kernels to be compiled."""
        self._is_cancelled = False

    @property
    def experts_per_layer(self) -> dict[int, int]:
        return {layer.layer_id: layer.num_experts for layer in self.spec.moe.layers}

    @property
    def max_experts_used(self) -> int:
        return max(layer.num_experts_used for layer in self.spec.moe.layers)

    @property
    def model_path(self) -> Path:
        return self._file.path

    def file_change(self) -> FileChange | None:
        """How the model's file has changed since it was opened; checks the file at each call."""
        return self._file.watch.change()

    def require_unwritten(self) -> None:
        """Raises: ModelFileError if the file's bytes may no longer be those that were opened.

        It may take as long as hashing some of them.
        """
        self._file.require_unwritten()

    def poll(self) -> float:
        """`require_unwritten`, at most every tenth of a second. Returns when the next call will
        check again, by the monotonic clock."""
        return self._file.watch.poll()

    def warm_up(self, on_progress: OnProgress = _ignore) -> None:
        """Compile every kernel that the file's experts need, and run it once.

        Loads one expert of each layer and drops it again, unless experts are loaded already, whose
        kernels have run then. Thread-safe.
        Raises: DaemonUnavailable if cancelled.
        """
        with self._reporting(on_progress), self._load_lock:
            self._compile()
            if self.store.num_experts:
                return
            moe, backend = self.spec.moe, self.backend
            probe = OwnedExperts.from_lists({layer.layer_id: [0] for layer in moe.layers})
            banks = load_banks(backend, self._file, moe, owned=probe, read_now=False)
            measure_pairs_per_second(banks.values(), batches=backend.trial_batches)
            for layer in moe.layers:
                backend.drop_experts(self._file, layer, probe.by_layer[layer.layer_id])

    def speeds(self, on_progress: OnProgress = _ignore) -> dict[int, KindSpeed]:
        """How fast each kind of layer's experts are computed here, by the kind's first layer;
        measured once, unless there was no memory for it. Thread-safe.

        Raises: DaemonUnavailable if cancelled.
        """

        def on_trial(num_done: int, num_total: int) -> None:
            self._require_not_cancelled()
            on_progress(MEASURING, num_done, num_total)

        with self._reporting(on_progress), self._load_lock:
            self._compile()
            if not any(each.one_s for each in self._speeds.values()):
                self.backend.choose_threads(self._file, None)
                self._speeds = measure_kinds(self.store, self.backend, on_progress=on_trial)
            return self._speeds

    def memory(self) -> ExpertMemory:
        """Memory for experts of this model. Raises: UnsupportedModel, DeviceUnavailable."""
        found = self.backend.expert_memory(self._file, self.spec.moe.layers)
        return self.store.allowed(found)

    def look_after_disk(self) -> None:
        """Of placements whose experts come from the disk, share the memory among those in use, and
        say if reads have failed. To be called now and then, by any thread; may wait for a batch."""
        if self._load_lock.acquire(blocking=False):
            try:
                self.store.balance()
                for arena in self.store.arenas():
                    arena.warn()
            finally:
                self._load_lock.release()

    def on_disk(self) -> str:
        """How many experts come from the disk when they are used; empty if none do."""
        found = [each.stats() for each in self.store.arenas()]
        if not found:
            return ""
        slots, read = (sum(getattr(each, of) for each in found) for of in ("num_slots", "missed"))
        return f"memory for {slots} experts, {read} uses read from the disk"

    def give_back(self) -> None:
        """Drop experts that no placement in use needs, and return their memory to the device's
        driver; not while experts are loaded. By any thread. Raises: DeviceUnavailable."""
        if self._load_lock.acquire(blocking=False):
            try:
                self.store.give_back()
            finally:
                self._load_lock.release()

    def keep(self, owned: OwnedExperts, on_progress: OnProgress = _ignore) -> None:
        """Load experts and keep them until the host is closed. Raises: as `load`."""
        self.store.keep(self.load(owned, on_progress))

    def load(self, owned: OwnedExperts, on_progress: OnProgress = _ignore) -> HeldPlacement:
        """Load experts until `release`; returns when every kernel that they need has run once.

        Experts that are loaded already are shared; those that no placement uses are dropped.
        Thread-safe.
        Raises: DaemonUnavailable if cancelled; DeviceOutOfMemory.
        """

        def on_layer(num_done: int, num_total: int) -> None:
            self._require_not_cancelled()
            on_progress("load", num_done, num_total)

        with self._reporting(on_progress), self._load_lock:
            self._compile()
            is_there = self.store.holds(owned)
            try:
                held = self.store.hold(owned, on_layer)
            except DeviceOutOfMemory as error:
                kept = "; it keeps the experts of its --placement" if self.store.is_kept else ""
                raise error.with_advice(DAEMON_MEMORY_ADVICE + kept) from error
            if not self._has_threads:  # no parent has asked for anything yet
                self._has_threads = True
                one_pass = None if held.arena is not None else trial_pass(held.banks)
                self.backend.choose_threads(self._file, one_pass)
        if not is_there:
            # docs: a parent came with a placement that the daemon did not have; those of its own
            # `--placement` are never dropped
            _LOG.info(
                "placement %s: %d experts kept, %d loaded, %d dropped",
                *(owned.fingerprint[:16], held.num_kept, held.num_loaded, held.num_dropped),
            )
        return held

    def answer(self, owned: OwnedExperts, nonce: bytes | None, on_progress: OnProgress) -> str:
        """Digest of the blocks of these experts that `nonce` selects.

        None means that the parent has the same file: returns "", and only records hashes of blocks
        to detect later changes.
        Raises: ModelFileError if the file was written to; DaemonUnavailable if cancelled.
        """

        def on_group(num_done: int, num_total: int) -> None:
            self._require_not_cancelled()
            on_progress(COMPARING, num_done, num_total)

        if nonce is not None:
            return self.weights.answer(owned, nonce, on_group)
        self.weights.remember(owned)
        return ""

    def _compile(self) -> None:
        """Compile the kernels once; call with the lock. Raises: DaemonUnavailable if cancelled."""

        def on_progress(num_done: int, num_total: int) -> None:
            self._require_not_cancelled()
            for tell in self._waiting.copy():
                tell("compile", num_done, num_total)

        if not self._is_compiled:
            on_progress(0, 1)
            types = expert_tensor_types(self.spec.moe)
            self.backend.warm_up(types, on_progress=on_progress)
            self._is_compiled = True

    @contextmanager
    def _reporting(self, on_progress: OnProgress) -> Iterator[None]:
        """Within this context, call `on_progress` as kernels are compiled, by any thread."""
        self._waiting.append(on_progress)
        try:
            yield
        finally:
            self._waiting.remove(on_progress)

    def _require_not_cancelled(self) -> None:
        if self._is_cancelled:
            raise DaemonUnavailable("stopped while loading")

    def release(self, held: HeldPlacement) -> None:
        """Release a placement; its experts stay until another placement is loaded."""
        self.store.release(held)

    def cancel_loading(self) -> None:
        """Make present and later calls of `load` raise DaemonUnavailable."""
        self._is_cancelled = True

    def close(self) -> None:
        self.weights.close()
        self.store.close()
        self.backend.close()
        self._file.close()


def _room_of(found: Room, chunk: int, most_bytes: int | None) -> SharedRoom:
    room_for = partial(room_in_daemon, found, chunk, most_bytes=most_bytes)
    if most_bytes is not None:
        needs = found.needs(num_positions=0, kv_type=KvType.F16, chunk=chunk, is_parent=False)
        # Plans count what the process needs beside its experts.
        return SharedRoom(room_for, most_bytes=most_bytes + needs.total)
    return SharedRoom(room_for, lambda: spare_bytes(process_room()))
