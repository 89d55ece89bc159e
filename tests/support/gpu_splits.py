"""A parent on a device and other owners of experts, all in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import describe
from dflash_adapters.spec import ModelSpec
from dflash_protocol.batch import Sums
from dflash_protocol.device import CPU
from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.ids import F32Array, I32Array, Phase
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime.compute import ComputeBackend, open_backend
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.model import Step, forward, run_to_end
from dflash_runtime.engine.heat_keeper import HeatKeeper
from dflash_runtime.engine.steps import Steps
from dflash_runtime.experts.compute import LocalExpertCompute, Ticket
from dflash_runtime.experts.offload import OffloadChoice, OffloadMode
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.experts.store import load_banks
from dflash_runtime.experts.telemetry import OwnerKind
from dflash_runtime.placement.heat import HalfLives, Heat, layers_of
from dflash_runtime.placement.split import LOCAL_OWNER, make_placement
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import MAX_CHUNK, SCRATCH_BYTES
from support.poison import Poison

Layers = Mapping[int, Sequence[int]]
"""Experts by layer id."""


class LostDaemon(LocalExpertCompute):
    """Accepts work and never finishes it."""

    def finish(self, ticket: Ticket, out: Sums) -> None:
        raise DaemonUnavailable("gone")


class Split:
    """Logits of one text with experts split among owners; buffers are poisoned before each chunk.

    The parent is called ``local``; an owner whose name begins with ``cpu`` computes on the CPU, one
    whose name begins with ``lost`` is lost, and each of the others has a device of its own.
    """

    def __init__(
        self,
        undo: contextlib.ExitStack,
        path: Path,
        owners: Mapping[str, Layers],
        *,
        ids: I32Array,
        chunks: Sequence[int],
        new_device: Callable[[contextlib.ExitStack], KernelDevice] | None = None,
        overlapped_from: int = MAX_CHUNK + 1,
        offload: OffloadMode = OffloadMode.OFF,
        kv_type: KvType = KvType.F16,
        answering: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """`new_device` opens a device that `undo` closes; the default is an emulated one. With
        `offload` the parent has run its trial of copies. `answering`: see Placement.answering; all
        devices are of one class.

        Shapes: ids [T].
        """
        self.ids, self._chunks = ids, chunks
        self._undo, self._new_device, self._halved_from = undo, new_device, overlapped_from
        self._poisons: list[Poison] = []
        self.file = undo.enter_context(GgufFile.open(path))
        backend: Any = self._new_backend()  # its arrays are not numpy's
        model = backend.load_model(self.file, describe(self.file))
        self.spec: ModelSpec = model.spec
        spec = self.spec
        self._vocab_size = spec.vocab_size
        owned = {name: OwnedExperts.from_lists(layers) for name, layers in owners.items()}
        self.placement: Placement = replace(
            make_placement(spec.moe, owned),
            answering={
                layer: np.array(each, np.int32) for layer, each in (answering or {}).items()
            },
            numeric_classes={name: "cpu" if name.startswith("cpu") else "gpu" for name in owned},
        )
        computes, self._local_banks, device_owner = [], {}, None
        for index, (name, each) in enumerate(owned.items()):
            kind, compute, of = OwnerKind.DAEMON, LocalExpertCompute, backend
            if name == LOCAL_OWNER:
                kind, device_owner = OwnerKind.LOCAL, index
            else:
                of = self._cpu_backend() if name.startswith("cpu") else self._new_backend()
                compute = LostDaemon if name.startswith("lost") else compute
            banks = load_banks(of, self.file, spec.moe, owned=each, read_now=True)
            if name == LOCAL_OWNER:
                self._local_banks = banks
            computes.append(compute(kind, banks))
        self.runtime = MoeExpertComputeRuntime(
            self.placement,
            computes,
            fallback=None,
            device_owner=device_owner,
            offload=OffloadChoice(offload, frozenset(self.placement.experts_per_layer)),
        )
        self._backend, self._model = backend, model
        self._cache = backend.new_cache(spec, ids.size, kv_type)
        self.steps = Steps(
            self.file,
            model,
            self._cache,
            backend=backend,
            runtime=self.runtime,
            local_banks=self._local_banks,
            num_positions=ids.size,
            heat=HeatKeeper(Heat(layers_of(spec.moe), HalfLives())),
        )
        undo.callback(self._end)
        if offload is not OffloadMode.OFF:
            self.steps.try_out()
        for poison in self._poisons:
            poison.begin()

    def logits(self) -> F32Array:
        """Logits of every position, computed chunk by chunk. Shapes: result [T, V]."""
        run = self.steps.begin()
        out = np.empty((self.ids.size, self._vocab_size), np.float32)
        for first, last in self.steps.chunks(self.ids.size, self._chunks):
            self.spoil()
            hidden = self.steps.forward(run, self.ids[first:last], first)
            self.steps.all_logits(hidden, out[first:last])
        return out

    def captured_logits(self) -> F32Array:
        """Logits of the last two positions, each computed by a captured step."""
        captured = self.steps.captured(self.steps.begin())
        assert captured is not None
        rows = []
        for position in range(self.ids.size - 2, self.ids.size):
            self.spoil()
            captured.begin(int(self.ids[position]), position)
            captured.start()
            rows.append(captured.logits())
            assert captured.token(position + 1) == rows[-1].argmax()
        return np.array(rows)

    def verified_logits(self, first: int, sizes: Sequence[int]) -> F32Array:
        """Logits from position `first` on, in steps of several tokens, as drafts are verified."""
        moe = self._backend.moe(self._local_banks, Phase.VERIFY, self.runtime)
        rows = []
        for size in sizes:
            self.spoil()
            tokens = self.ids[first : first + size]
            step = Step.of_chunk(tokens, first, self._cache, Phase.VERIFY)
            hidden = run_to_end(forward(self._model, step, moe))
            rows.append(self._backend.to_host(self._model.head(hidden)))
            first += size
        return np.concatenate(rows)

    def _new_backend(self) -> CupyBackend:
        device = EmulatedDevice() if self._new_device is None else self._new_device(self._undo)
        self._poisons.append(Poison(device))
        self._undo.callback(self._poisons[-1].close)
        backend = CupyBackend(
            device,
            max_chunk=MAX_CHUNK,
            scratch_bytes=SCRATCH_BYTES,
            overlapped_from=self._halved_from,
        )
        self._undo.callback(backend.close)
        return backend

    def _cpu_backend(self) -> ComputeBackend:
        backend = open_backend(CPU, num_threads=1)
        self._undo.callback(backend.close)
        return backend

    def spoil(self) -> None:
        """Poison all result buffers."""
        for poison in self._poisons:
            poison.again()

    def _end(self) -> None:
        self.steps.end()
        del self._backend, self._model, self._cache, self._local_banks
