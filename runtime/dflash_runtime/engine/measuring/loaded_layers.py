"""A few layers of a model on one backend, to be timed with all or some of their experts."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Tensor, parts_of
from dflash_adapters.spec import ModelSpec
from dflash_protocol.ids import AnyArray
from dflash_runtime.compute import ComputeBackend, ExpertBank
from dflash_runtime.compute.backend import CapturedStep, RemoteExperts
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.model import Model
from dflash_runtime.engine.measuring.layers import SampledLayers, with_experts_used
from dflash_runtime.engine.measuring.no_owners import AskedProcessor, NoOwners
from dflash_runtime.engine.measuring.passes import Passes
from dflash_runtime.experts.compute import LocalExpertCompute
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.experts.telemetry import OwnerKind
from dflash_runtime.placement.split import even_split

_READ_BYTES = 64 << 20
"""Bytes of a tensor that are read before the time is looked at."""

Experts = Mapping[int, npt.NDArray[np.bool_]]
"""Masks of experts by layer id. Shapes: each [E]."""


@dataclass(frozen=True, slots=True, eq=False)
class SomeExperts:
    """Passes through the layers of the first kind with fewer pairs for each token."""

    passes: Passes
    num_pairs: Callable[[], float]
    """Pairs of a token in a layer, on average; asked after the passes with all experts."""


class LoadedLayers:
    """Sampled layers with all their experts, and the cache of one sequence.

    Used by one thread. Owns: all of it, until `close`; the backend is the caller's.
    """

    def __init__(
        self,
        backend: ComputeBackend,
        file: GgufFile,
        sampled: SampledLayers,
        *,
        num_positions: int,
        kv_type: KvType,
    ) -> None:
        """Raises: as ComputeBackend.load_model, load_experts and new_cache."""
        self.backend, self.file, self.sampled = backend, file, sampled
        self._undo = contextlib.ExitStack()
        self._model = backend.load_model(file, sampled.description)
        self._banks = self._load_experts(self._model.spec)
        self._cache = backend.new_cache(self._model.spec, num_positions, kv_type)
        self._counts: dict[int, npt.NDArray[np.int64]] = {}

    @property
    def spec(self) -> ModelSpec:
        """Of the sampled layers."""
        return self._model.spec

    @property
    def model(self) -> Model[AnyArray, Any]:
        return self._model

    @property
    def banks(self) -> Mapping[int, ExpertBank]:
        return self._banks

    def read(self, limit_s: float) -> None:
        """Read the weights of the host's layers, so that no pass waits for the disk, unless that
        takes longer."""
        end_s, file = time.perf_counter() + limit_s, self.file
        for tensor in parts_of(self.sampled.description):
            if isinstance(tensor, Tensor):
                weights = file.tensor_bytes(tensor.name)
                for first in range(0, weights.size, _READ_BYTES):
                    if time.perf_counter() > end_s:
                        return
                    weights[first : first + _READ_BYTES : mmap.PAGESIZE].sum()

    def passes(self, num_layers: int) -> Passes:
        """Passes through the first layers, with all experts."""
        model = self._model.first_layers(num_layers)
        owners = NoOwners(_all_of(model))
        return self._passes(model, self._banks, self._captured(model, self._banks, owners))

    def host_passes(self, num_layers: int) -> Passes:
        """The same of a device, with a stop in each layer in which the host could ask for experts,
        but asks for none."""
        model = self._model.first_layers(num_layers)
        here = {layer_id: mask.copy() for layer_id, mask in _all_of(model).items()}
        for mask in here.values():
            mask[-1] = False
        captured = self._captured(model, self._banks, NoOwners(here))
        return self._passes(model, self._banks, captured, here)

    def mail_passes(self, num_layers: int, processor: ComputeBackend) -> Iterator[Passes]:
        """Passes whose steps ask the processor for some experts through a mailbox: where the device
        has others, and where it has none."""
        model = self._model.first_layers(num_layers)
        for has_device in (True, False):
            asked = {layer_id: mask.copy() for layer_id, mask in _all_of(model).items()}
            for mask in asked.values():
                mask[-1] = not has_device
            here = {layer_id: ~mask for layer_id, mask in asked.items()} if has_device else None
            yield self._mail_passes(model, processor, asked, here)

    def unasked_passes(self, num_layers: int, processor: ComputeBackend) -> Passes:
        """Passes whose steps could ask the processor through a mailbox, but do not: the device has
        all experts but one, which is left out."""
        model = self._model.first_layers(num_layers)
        here = {layer_id: mask.copy() for layer_id, mask in _all_of(model).items()}
        for mask in here.values():
            mask[-1] = False
        none = {layer_id: np.zeros_like(mask) for layer_id, mask in here.items()}
        return self._mail_passes(model, processor, none, here)

    def _mail_passes(
        self,
        model: Model[AnyArray, Any],
        processor: ComputeBackend,
        asked: Experts,
        here: Experts | None,
    ) -> Passes:
        """`asked`, `here`: experts that the processor and the device compute."""
        banks = {
            layer_id: processor.bank_beside(self.backend.numeric_class, bank)
            for layer_id, bank in self._load_experts(model.spec, processor).items()
        }
        owners = AskedProcessor(asked, banks, here=here)
        captured = self._captured(model, {} if here is None else self._banks, owners)
        return Passes(self.backend, model, self._cache, lambda phase: None, captured)

    def chunk_passes(self, num_layers: int, experts: Any) -> Passes:
        """Chunks through the first layers, which call these routed experts."""
        model = self._model.first_layers(num_layers)
        return Passes(self.backend, model, self._cache, lambda phase: experts, None)

    def some_experts(self) -> Sequence[SomeExperts]:
        """Passes with fewer pairs, fewest first; none if a token has a single expert, on the
        host."""
        num_layers = len(self.sampled.kinds[0].layer_ids)
        layers = [each for each in self.spec.moe.layers if each.layer_id < num_layers]
        if self.backend.is_host:
            num_used = min(layer.num_experts_used for layer in layers)
            fewer = sorted({max(1, num_used // 4), max(1, num_used // 2)} - {num_used})
            return [self._with_used(num, num_layers) for num in fewer]
        one = {layer.layer_id: _mask(layer.num_experts, (0,)) for layer in layers}
        half = {
            layer.layer_id: _mask(
                layer.num_experts, range(layer.layer_id % 2, layer.num_experts, 2)
            )
            for layer in layers
        }
        return [self._with_resident(each, num_layers) for each in (one, half)]

    def note_selections(self) -> None:
        """Remember which experts a device's passes have chosen."""
        for (_, layer_id), counts in self.backend.take_selections(self._banks).items():
            self._counts[layer_id] = self._counts.get(layer_id, 0) + counts

    def close(self) -> None:
        """Free all memory. Idempotent."""
        if "_model" not in vars(self):
            return
        self._undo.close()
        layers = self.spec.moe.layers
        del self._model, self._cache, self._banks
        for layer in layers:
            ids = np.arange(layer.num_experts, dtype=np.int32)
            self.backend.drop_experts(self.file, layer, ids)

    def _load_experts(
        self, spec: ModelSpec, backend: ComputeBackend | None = None
    ) -> dict[int, ExpertBank]:
        """Of all layers, by this backend or another one."""
        backend = self.backend if backend is None else backend
        return {
            layer.layer_id: backend.load_experts(
                self.file, layer, np.arange(layer.num_experts, dtype=np.int32)
            )
            for layer in spec.moe.layers
        }

    def _passes(
        self,
        model: Model[AnyArray, Any],
        banks: Mapping[int, ExpertBank],
        captured: CapturedStep | None,
        here: Experts | None = None,
    ) -> Passes:
        if here is None and model.spec.moe.layers:
            owners: RemoteExperts = self._owners(model, banks)
        else:
            owners = NoOwners(here or {})
        some = {layer.layer_id: banks[layer.layer_id] for layer in model.spec.moe.layers}
        moe = self.backend.moe
        experts_of = cache(lambda phase: moe(some, phase, owners))
        return Passes(self.backend, model, self._cache, experts_of, captured)

    def _owners(
        self, model: Model[AnyArray, Any], banks: Mapping[int, ExpertBank]
    ) -> MoeExpertComputeRuntime:
        """The boundary that an engine without daemons has."""
        some = {layer.layer_id: banks[layer.layer_id] for layer in model.spec.moe.layers}
        runtime = MoeExpertComputeRuntime(
            even_split(model.spec.moe, [], None),
            [LocalExpertCompute(OwnerKind.LOCAL, some)],
            fallback=None,
            device_owner=None if self.backend.is_host else 0,
        )
        self._undo.callback(runtime.close)
        return runtime

    def _captured(
        self, model: Model[AnyArray, Any], banks: Mapping[int, ExpertBank], owners: NoOwners
    ) -> CapturedStep | None:
        ids = [layer.layer_id for layer in model.spec.moe.layers]
        some = {layer_id: banks[layer_id] for layer_id in ids if layer_id in banks}
        captured = self.backend.captured_step(
            model, self._cache, some, remote=owners, check=lambda: None
        )
        if captured is not None:
            self._undo.callback(captured.close)
        return captured

    def _with_used(self, num_used: int, num_layers: int) -> SomeExperts:
        """The first layers of a model whose tokens choose fewer experts."""
        description = with_experts_used(self.sampled.description, num_used)
        model = self.backend.load_model(self.file, description).first_layers(num_layers)
        banks = self._load_experts(model.spec)
        captured = self._captured(model, banks, NoOwners(_all_of(model)))
        passes = self._passes(model, banks, captured)
        return SomeExperts(passes, lambda: float(num_used))

    def _with_resident(self, here: Experts, num_layers: int) -> SomeExperts:
        """The first layers on a device that has only some of their experts; the others' pairs are
        left out."""
        from dflash_runtime.engine.measuring.partial_experts import PartialExperts

        model = self._model.first_layers(num_layers)
        gpu: Any = self.backend  # its rows are of another type than a host's
        partial_experts = PartialExperts(gpu, self._banks, here)
        captured = partial_experts.captured_step(model, self._cache)
        self._undo.callback(captured.close)
        experts_of = cache(partial_experts.moe)
        passes = Passes(self.backend, model, self._cache, experts_of, captured)
        return SomeExperts(passes, lambda: self._pairs_here(here))

    def _pairs_here(self, here: Experts) -> float:
        """Pairs of a token in a layer whose experts are `here`, as they were chosen so far."""
        pairs = []
        for layer in self.spec.moe.layers:
            if layer.layer_id in here:
                mask, counts = here[layer.layer_id], self._counts.get(layer.layer_id)
                share = float(mask.mean())
                if counts is not None and counts.any():
                    share = float(counts[mask].sum() / counts.sum())
                pairs.append(layer.num_experts_used * share)
        return float(np.mean(pairs))


def _all_of(model: Model[AnyArray, Any]) -> dict[int, npt.NDArray[np.bool_]]:
    return {layer.layer_id: np.ones(layer.num_experts, np.bool_) for layer in model.spec.moe.layers}


def _mask(num_experts: int, ids: Sequence[int]) -> npt.NDArray[np.bool_]:
    mask = np.zeros(num_experts, np.bool_)
    mask[list(ids)] = True
    return mask
