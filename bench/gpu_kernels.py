"""The kernels of a decode step: what each takes, what it reads, and how fast that is.

A step is captured and replayed without the host in between. A kernel's time is what the step gains
when that kernel is left out of the capture; what the step takes beyond the sum of these is
overlap and gaps between kernels, which no single one has. A kernel's weights are found by the
addresses that it is given.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench.gpu_parts import Result, say
from bench.sides import Side

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import describe, read_spec
from dflash_protocol.device import Device, parse_device
from dflash_protocol.ids import Phase
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.gpu.device.device import KernelDevice, address
from dflash_runtime.compute.gpu.launch.layouts import DeviceMatrix
from dflash_runtime.compute.gpu.run.captured_step import GraphStep
from dflash_runtime.compute.gpu.run.step_path import LocalPath
from dflash_runtime.compute.kv_cache import KvType

_ROUNDS = 7
_STEPS = 64
_EMBEDDING = "embed"
"""The kernel that reads one row of a matrix."""


@dataclass(frozen=True, slots=True)
class Read:
    """What one kernel reads of one array: a tensor, and bytes a step."""

    tensor: str
    weight_bytes: float = 0.0
    cache_bytes_per_position: float = 0.0


class StepModel:
    """A file on a device, all of it, with the arrays that its steps read."""

    def __init__(self, path: Path, device: Device | KernelDevice, *, context: int) -> None:
        """Raises: DeviceUnavailable, ModelFileError."""
        self.backend = backend = CupyBackend(device)
        self.file = GgufFile.open(path)
        self.spec = read_spec(self.file)
        self.reads: dict[int, Read] = {}
        self._note_matrices(backend.loader)
        self.model = backend.load_model(self.file, describe(self.file))
        self.banks = {
            layer.layer_id: backend.load_experts(
                self.file, layer, np.arange(layer.num_experts, dtype=np.int32)
            )
            for layer in self.spec.moe.layers
        }
        self.cache = backend.new_cache(self.spec, context, KvType.F16)
        self._note_experts()
        self._note_cache()
        backend.device.synchronize()

    def captured(self) -> GraphStep:
        """A new step, captured once it is started."""
        moe = self.backend.moe(self.banks, Phase.DECODE, None)
        return GraphStep(self.backend.ops, self.model, self.cache, home=LocalPath(moe))

    def close(self) -> None:
        """Give the file back, and the device if it was opened here."""
        self.backend.close()
        self.file.close()

    def _note_matrices(self, loader: Any) -> None:
        """Have every matrix that the adapter loads noted with its name."""
        load = loader.load_matrix

        def load_and_note(file: GgufFile, tensor_name: str) -> DeviceMatrix:
            matrix: DeviceMatrix = load(file, tensor_name)
            read = Read(role_of(tensor_name), weight_bytes=matrix.weights.nbytes)
            self.reads[address(matrix.weights)] = read
            return matrix

        loader.load_matrix = load_and_note

    def _note_experts(self) -> None:
        for layer in self.spec.moe.layers:
            used = layer.num_experts_used / layer.num_experts
            matrices = self.banks[layer.layer_id].by_global.weights
            for projection, weights in zip(layer.projections, matrices, strict=True):
                self.reads[address(weights)] = Read(
                    role_of(projection.tensor_name), weight_bytes=used * weights.nbytes
                )

    def _note_cache(self) -> None:
        for layer in self.cache.layers:
            for name, rows in (("keys", layer.keys), ("values", layer.values)):
                self.reads[address(rows.elements)] = Read(
                    name, cache_bytes_per_position=rows.elements.nbytes / self.cache.capacity
                )


def measure_kernels(
    result: Result, until_s: float, *, path: Path, device: str, contexts: Sequence[int]
) -> None:
    """Fill `result` with the kernels of a step at each of these contexts, and what they gain."""
    entries: list[dict[str, Any]] = []
    with Side("kernels", KernelBench, path, device, context=max(contexts), until_s=until_s) as side:
        for context in contexts:
            launches = side.call("launches", context)
            whole_s = side.call("step_s", context)
            kernels: list[dict[str, Any]] = []
            entries.append({"context": context, "step_s": whole_s, "kernels": kernels})
            for label, launch in launches.items():
                gained_s = whole_s - side.call("step_s", context, label)
                kernels.append({"label": label, **launch, "gained_s": gained_s})
                say(f"at {context}: {label} {1e6 * gained_s:.0f} us a step")
            # Only what is whole adds up.
            result["contexts"] = list(entries)


def role_of(tensor_name: str) -> str:
    """``blk.7.attn_q.weight``: ``attn_q``."""
    parts = tensor_name.removesuffix(".weight").split(".")
    return parts[-1]


def pointers(args: ctypes.Structure) -> Iterator[int]:
    """All addresses in a kernel's argument, those of structures and arrays within it too."""
    for name, kind, *_ in args._fields_:
        value = getattr(args, name)
        if isinstance(value, ctypes.Structure):
            yield from pointers(value)
        elif isinstance(value, ctypes.Array):
            yield from (each for each in value if each)
        elif kind is ctypes.c_void_p and value:
            yield value


@dataclass(slots=True)
class Launches:
    """One kernel with one grid for tensors of one kind: how often a step has it, and what all of
    these read."""

    kernel: str
    tensors: str
    count: int = 0
    weight_bytes: float = 0.0
    cache_bytes_per_position: float = 0.0


class LeftOut:
    """Notes what is captured on a device, and leaves launches of one label out of it."""

    def __init__(self, device: KernelDevice, reads: dict[int, Read]) -> None:
        given: Any = device
        self._device = given
        self._launch, self._capture = given.launch, given.capture
        self._reads = reads
        self._is_capturing = False
        self.label = ""
        self.launches: dict[str, Launches] = {}
        given.launch, given.capture = self.launch, self.capture

    def capture(self, record: Callable[[], None]) -> Any:
        """As KernelDevice.capture."""
        self._is_capturing = True
        try:
            return self._capture(record)
        finally:
            self._is_capturing = False

    def launch(self, kernel: Any, grid: Any, block: int, args: Any, **options: Any) -> None:
        """As KernelDevice.launch."""
        reads = [self._reads[each] for each in pointers(args) if each in self._reads]
        tensors = " + ".join(dict.fromkeys(read.tensor for read in reads))
        label = f"{kernel.name} {grid[0]}x{grid[1]} of {block}: {tensors}".removesuffix(": ")
        if self._is_capturing and not self.label:
            noted = self.launches.setdefault(label, Launches(kernel.name, tensors))
            noted.count += 1
            if kernel.name != _EMBEDDING:
                noted.weight_bytes += sum(read.weight_bytes for read in reads)
                noted.cache_bytes_per_position += sum(
                    read.cache_bytes_per_position for read in reads
                )
        if label != self.label:
            self._launch(kernel, grid, block, args, **options)

    def close(self) -> None:
        """Leave the device as it was."""
        del self._device.launch, self._device.capture


class KernelBench:
    """Steps of a whole model, and of one from which a kernel is missing.

    Owns: the model, until it is closed.
    """

    def __init__(self, path: Path, device: str | KernelDevice, *, context: int) -> None:
        """`context` is the most positions. Raises: DflashError."""
        which = parse_device(device) if isinstance(device, str) else device
        self._model = StepModel(path, which, context=context + 2 * _STEPS)
        self._left_out = LeftOut(self._model.backend.device, self._model.reads)

    def launches(self, context: int) -> dict[str, dict[str, Any]]:
        """By label, in order: kernel, launches a step, tensors and bytes that these read."""
        self._left_out.launches.clear()
        self._step_s(context, num_steps=1, rounds=0)
        return {
            label: {
                "kernel": each.kernel,
                "reads": each.tensors,
                "count": each.count,
                "weight_bytes": each.weight_bytes,
                "cache_bytes": each.cache_bytes_per_position * context,
            }
            for label, each in self._left_out.launches.items()
        }

    def step_s(self, context: int, without: str = "") -> float:
        """Time of a step at this context, without launches of that label."""
        self._left_out.label = without
        try:
            return self._step_s(context, num_steps=_STEPS, rounds=_ROUNDS)
        finally:
            self._left_out.label = ""

    def close(self) -> None:
        """Once."""
        self._left_out.close()
        self._model.close()

    def _step_s(self, context: int, *, num_steps: int, rounds: int) -> float:
        device, step = self._model.backend.device, self._model.captured()
        times = []
        for _ in range(rounds + 1):
            step.begin(1, context)
            device.synchronize()
            started_s = time.perf_counter()
            for _ in range(num_steps):
                step.start()
            device.synchronize()
            times.append((time.perf_counter() - started_s) / num_steps)
        step.close()
        return statistics.median(times[1:] or times)
