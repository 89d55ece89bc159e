"""What a layer of a device's step takes if the processor computes some of its experts, as in an
engine: in passes through all layers of the model, whose experts lie in the host's memory.

Passes through a few layers would be too fast: they find experts, and the entries of their page
tables, in the processor's caches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Description
from dflash_adapters.registry import describe, read_spec
from dflash_adapters.spec import MoeLayer
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.compute import ComputeBackend, ExpertBank
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine.measuring.layers import trunk_bytes
from dflash_runtime.engine.measuring.no_owners import AskedProcessor
from dflash_runtime.engine.measuring.passes import STEPS_IN_A_ROW, Passes
from dflash_runtime.engine.measuring.timing import medians
from dflash_runtime.experts.store import load_banks
from dflash_runtime.placement.box import AskedSpeed, Curve

_LEAST_WEIGHT = 0.05
"""Of what few experts tell of the cost of asking for any."""


@dataclass(frozen=True, slots=True, eq=False)
class AskedPasses:
    """Passes through half of the layers and through all of them, in which the processor computes
    every so many-th expert, and nothing computes the others."""

    ends: tuple[Passes, Passes]
    owners: AskedProcessor
    """Of the passes through all layers."""


class AskedModel:
    """A model on a device without its experts, and the experts in the mapped file for a processor.

    Used by one thread. Owns: the model there, until `close`; both backends are the caller's.
    """

    def __init__(
        self,
        backend: ComputeBackend,
        processor: ComputeBackend,
        file: GgufFile,
        *,
        kv_type: KvType,
        limit_bytes: int,
        limit_s: float,
    ) -> None:
        """From the first on, as many layers as have room in `limit_bytes` of the device, and as are
        read within `limit_s`; two at least, if there are two.

        Raises: as ComputeBackend.load_model, load_experts and new_cache; DeviceOutOfMemory.
        """
        self._undo = contextlib.ExitStack()
        self._backend, self.file = backend, file
        whole = describe(file)
        num_fitting = _num_that_fit(file, whole, limit_bytes)
        self._banks = {
            layer_id: processor.bank_beside(backend.numeric_class, bank)
            for layer_id, bank in _banks_read(processor, file, num_fitting, limit_s).items()
        }
        num_layers = max(min(2, len(whole.layers)), 1 + max(self._banks, default=-1))
        self.description = replace(
            whole, layers=whole.layers[:num_layers], left_out=(*whole.left_out, "")
        )
        self._model = backend.load_model(file, self.description)
        num_positions = min(whole.context_length, 4 * STEPS_IN_A_ROW)
        self._cache = backend.new_cache(self._model.spec, num_positions, kv_type)

    @property
    def layers(self) -> tuple[MoeLayer, ...]:
        """Those with experts."""
        return self._model.spec.moe.layers

    def asked(self, every: int) -> AskedPasses:
        """`every`: the processor computes every so many-th expert of a layer."""
        num_layers = len(self.description.layers)
        half, whole = (self._passes(num, every) for num in (num_layers // 2, num_layers))
        return AskedPasses((half[0], whole[0]), whole[1])

    def close(self) -> None:
        """Free all memory. Idempotent."""
        self._undo.close()
        self._banks.clear()
        vars(self).pop("_model", None)
        vars(self).pop("_cache", None)

    def _passes(self, num_layers: int, every: int) -> tuple[Passes, AskedProcessor]:
        model = self._model.first_layers(num_layers)
        masks = {
            layer.layer_id: np.arange(layer.num_experts) % every == 0
            for layer in model.spec.moe.layers
        }
        owners = AskedProcessor(masks, {layer_id: self._banks[layer_id] for layer_id in masks})
        captured = self._backend.captured_step(
            model, self._cache, {}, remote=owners, check=lambda: None
        )
        assert captured is not None
        self._undo.callback(captured.close)

        def no_experts(phase: object) -> None:
            raise NotImplementedError("steps of one token are recorded")

        # Its own tokens: experts that other passes have just read may be in the caches.
        random = np.random.default_rng((num_layers, every))
        return Passes(self._backend, model, self._cache, no_experts, captured, random), owners


def _num_that_fit(file: GgufFile, description: Description, limit_bytes: int) -> int:
    """Layers whose weights without experts, the largest layer's, have room besides both ends."""
    most = max(trunk_bytes(file, layer) for layer in description.layers)
    ends = sum(
        file.tensor(name).num_bytes
        for name in {description.ends.embedding.name, description.ends.head.weight.name}
    )
    return max(2, min(len(description.layers), (limit_bytes - ends) // max(1, most)))


def _banks_read(
    processor: ComputeBackend, file: GgufFile, num_layers: int, limit_s: float
) -> dict[int, ExpertBank]:
    """The banks of layers below `num_layers`, read now, so that no pass waits for the disk; of the
    first two however long that takes."""
    spec, banks = read_spec(file).moe, dict[int, ExpertBank]()
    end_s = time.perf_counter() + limit_s
    for layer in spec.layers:
        if layer.layer_id >= num_layers or (len(banks) >= 2 and time.perf_counter() > end_s):
            break
        owned = OwnedExperts.from_lists({layer.layer_id: range(layer.num_experts)})
        banks |= load_banks(processor, file, spec, owned=owned, read_now=True)
    return banks


def measure_asked(loaded: AskedModel, *, trunk: Curve, limit_s: float) -> AskedSpeed | None:
    """What a layer takes beyond its trunk, from one to all of a token's experts. None if there are
    too few layers with experts.

    `trunk`: seconds of a layer without experts, by bytes.
    """
    half = len(loaded.description.layers) // 2
    timed = loaded.description.layers[half:]
    layers = [layer for layer in loaded.layers if layer.layer_id >= half]
    if not layers:
        return None
    num_used = min(layer.num_experts_used for layer in layers)
    parts = [loaded.asked(every) for every in _parts(num_used)]
    timers = [passes.timer(1) for part in parts for passes in part.ends]

    def begin_counts() -> None:
        for part in parts:
            part.owners.begin_counts()

    found = medians(timers, limit_s=limit_s, after_first=begin_counts)
    times = np.array(found).reshape(len(parts), 2)
    trunks_s = sum(trunk.at(trunk_bytes(loaded.file, layer)) for layer in timed)
    beyond_s = (np.diff(times)[:, 0] - trunks_s) / len(layers)
    expert_bytes = float(np.mean([layer.expert_bytes for layer in layers]))
    beyond = _curve(parts, np.maximum(beyond_s, 0.0).tolist(), expert_bytes)
    return AskedSpeed(beyond, _computing(parts, expert_bytes))


def _parts(num_used: int) -> tuple[int, ...]:
    """Every how many-th expert is asked: first all; then, if a token has several, one of a layer on
    average. Layers that ask any then ask one or two, as with the hottest experts on the device: few
    take longer, each, than many."""
    return (1, num_used) if num_used > 1 else (1,)


def _curve(parts: Sequence[AskedPasses], beyond_s: Sequence[float], expert_bytes: float) -> Curve:
    """From one expert to all of a token's."""
    all_s, (_, num_all) = beyond_s[0], parts[0].owners.counts()
    if len(parts) == 1 or num_all <= 1.0:
        return Curve(((expert_bytes, all_s),))
    share, num_few = parts[1].owners.counts()
    one_s = time_of_one(all_s, beyond_s[1], share_asking=share, num_few=num_few, num_all=num_all)
    return Curve(((expert_bytes, one_s), (num_all * expert_bytes, all_s)))


def _computing(parts: Sequence[AskedPasses], expert_bytes: float) -> Curve:
    """What layers that ask counted as computing."""
    points = dict[float, float]()
    for part in parts:
        num_experts, seconds = part.owners.mean_ask()
        if num_experts > 0.0:
            points[num_experts * expert_bytes] = seconds
    return Curve(tuple(sorted(points.items())) or ((expert_bytes, 0.0),))


def time_of_one(
    all_s: float, few_s: float, *, share_asking: float, num_few: float, num_all: float
) -> float:
    """What one asked expert takes, if each further one takes as much again as another, and the
    first something more: ``all_s = any_s + slope * num_all`` for layers that ask all of a token's
    experts, and ``few_s = share_asking * any_s + slope * num_few`` for layers that ask some of them
    with this share, `num_few` on average."""
    weight, any_s = share_asking - num_few / num_all, 0.0
    if weight > _LEAST_WEIGHT:
        any_s = min(all_s, max(0.0, (few_s - num_few / num_all * all_s) / weight))
    return any_s + (all_s - any_s) / num_all
