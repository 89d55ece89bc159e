"""What a layer of a device's step takes if the processor computes some of its experts, as in an
engine: in passes through all layers of the model, whose experts lie in the host's memory.

Passes through a few layers would be too fast: they find experts, and the entries of their page
tables, in the processor's caches. The device has an expert of each layer, so that its steps run the
kernels of layers in which both have some: without any, they would ask and add by others.

What the processor counts as computing varies by a tenth from pass to pass on a machine that others
use too, and steps by as much; but not what is left of a step without it. So both are told apart.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Description
from dflash_adapters.registry import describe, read_spec
from dflash_adapters.spec import MoeLayer
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.compute import ComputeBackend, ExpertBank
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine.measuring.layers import trunk_bytes
from dflash_runtime.engine.measuring.loaded_layers import LoadedLayers
from dflash_runtime.engine.measuring.no_owners import AskedProcessor
from dflash_runtime.engine.measuring.passes import STEPS_IN_A_ROW, Passes
from dflash_runtime.engine.measuring.timing import Timer, medians
from dflash_runtime.experts.store import load_banks
from dflash_runtime.placement.box import AskedSpeed, Curve

_LEAST_SHARE = 0.02
"""Of the layers that have to ask, for passes to tell what asking takes."""
_NONE = 1 << 30
"""Every so many-th expert is none."""
_HERE = 0
"""The expert of each layer that the device has."""
_LONG = 2
"""Of the passes with parts of the experts, the first ones take long."""


@dataclass(frozen=True, slots=True, eq=False)
class AskedPasses:
    """Passes through half of the layers and through all of them, in which the processor computes
    every so many-th expert, the device one, and nothing computes the others."""

    ends: tuple[Passes, Passes]
    owners: tuple[AskedProcessor, AskedProcessor]

    def timers(self) -> list[Timer]:
        """Seconds of a step but for those in which the processor computes."""
        return [partial(_rest, *each) for each in zip(self.ends, self.owners, strict=True)]

    def begin_counts(self) -> None:
        """Count from now on."""
        for each in self.owners:
            each.begin_counts()


class AskedModel:
    """A model on a device with one expert a layer, and all experts in the mapped file for a
    processor.

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
        here = OwnedExperts.from_lists({each.layer_id: [_HERE] for each in self.layers})
        self._here = load_banks(backend, file, self._model.spec.moe, owned=here, read_now=True)

    @property
    def layers(self) -> tuple[MoeLayer, ...]:
        """Those with experts."""
        return self._model.spec.moe.layers

    def asked(self, every: int) -> AskedPasses:
        """`every`: the processor computes every so many-th expert of a layer, but the device's."""
        num_layers = len(self.description.layers)
        half, whole = (self._passes(num, every) for num in (num_layers // 2, num_layers))
        return AskedPasses((half[0], whole[0]), (half[1], whole[1]))

    def close(self) -> None:
        """Free all memory. Idempotent."""
        self._undo.close()
        self._banks.clear()
        vars(self).pop("_model", None)
        vars(self).pop("_cache", None)
        self._here.clear()

    def _passes(self, num_layers: int, every: int) -> tuple[Passes, AskedProcessor]:
        model = self._model.first_layers(num_layers)
        here, asked = {}, {}
        for layer in model.spec.moe.layers:
            ids = np.arange(layer.num_experts)
            here[layer.layer_id] = ids == _HERE
            asked[layer.layer_id] = ((ids + 1) % every == 0) & (ids != _HERE)
        banks = {layer_id: self._banks[layer_id] for layer_id in asked}
        owners = AskedProcessor(asked, banks, here=here)
        captured = self._backend.captured_step(
            model,
            self._cache,
            {layer_id: self._here[layer_id] for layer_id in here},
            remote=owners,
            check=lambda: None,
        )
        assert captured is not None
        self._undo.callback(captured.close)

        def no_experts(phase: object) -> None:
            raise NotImplementedError("steps of one token are recorded")

        # Its own tokens: experts that other passes have just read may be in the caches.
        random = np.random.default_rng((num_layers, every))
        passes = Passes(
            self._backend, model, self._cache, no_experts, captured, random, draws_tokens=True
        )
        return passes, owners


def _rest(passes: Passes, owners: AskedProcessor) -> tuple[float]:
    """See AskedPasses.timers."""
    before, seconds = owners.computed(), passes.seconds(1)
    num_steps, computing_s = np.subtract(owners.computed(), before).tolist()
    return (seconds - computing_s / max(1.0, num_steps),)


def _num_that_fit(file: GgufFile, description: Description, limit_bytes: int) -> int:
    """Layers whose weights with one expert, the largest layer's, have room besides both ends."""
    most = max(trunk_bytes(file, layer) for layer in description.layers)
    most += max(layer.expert_bytes for layer in read_spec(file).moe.layers)
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
    num_experts = min(layer.num_experts for layer in layers)
    parts = [loaded.asked(every) for every in _parts(num_used, num_experts)]
    # Passes that ask little are short and tell little: they get as much time as the long ones.
    turns = [parts[:_LONG], parts[_LONG:]] if parts[_LONG:] else [parts]
    more_s = [each for turn in turns for each in _more_s(turn, limit_s / len(turns))]
    trunks_s = sum(trunk.at(trunk_bytes(loaded.file, layer)) for layer in timed)
    asks = [
        Asks(*owners.counts(), (seconds - trunks_s) / len(layers), owners.mean_computing_s())
        for (_, owners), seconds in zip((part.owners for part in parts), more_s, strict=True)
    ]
    expert_bytes = float(np.mean([layer.expert_bytes for layer in layers]))
    beyond, computing = (
        Curve(tuple((num * expert_bytes, seconds) for num, seconds in points))
        for points in told(asks)
    )
    return AskedSpeed(beyond, computing)


def _more_s(parts: Sequence[AskedPasses], limit_s: float) -> list[float]:
    """What all layers take more than half of them but for computing, in seconds of each of the
    passes."""
    timers = [timer for part in parts for timer in part.timers()]

    def begin_counts() -> None:
        for part in parts:
            part.begin_counts()

    found = medians(timers, limit_s=limit_s, after_first=begin_counts)
    each: list[float] = np.diff(np.array(found).reshape(len(parts), 2))[:, 0].tolist()
    return each


def _parts(num_used: int, num_experts: int) -> tuple[int, ...]:
    """Every how many-th expert is asked: all; if a token has several, two of a layer on average, or
    one of two; then one: few take longer, each, than many; and none, which tells what layers take
    that ask for nothing. Fewer than one would be so few different experts that the processor finds
    them in its caches: every 32nd of 128 are 0.55 GB in all layers of the 30B shape."""
    if num_used == 1:
        return (1,)
    some = sorted({1, max(2, num_used // 2), min(num_used, num_experts)})
    return (*some, _NONE)


@dataclass(frozen=True, slots=True)
class Asks:
    """What passes tell, on average of a layer."""

    share_asking: float
    """Of the layers."""
    num_experts: float
    """That were asked for, those that asked for none included."""
    rest_s: float
    """Beyond its trunk, but for computing; those that asked for none included."""
    computing_s: float
    """Of those that asked."""


Points = list[tuple[float, float]]


def told(asks: Sequence[Asks]) -> tuple[Points, Points]:
    """What a layer that asks takes beyond its trunk, and what the processor counts of that, by how
    many experts it asks for on average, ascending.

    What is not computing is taken to be the same for any number of experts: it is told from all
    passes together, as where few layers ask noise is multiplied.
    `asks`: first of passes whose layers all ask, then of such as ask for fewer, perhaps for none.
    """
    none_s = next((each.rest_s for each in asks if not each.share_asking), 0.0)
    asking = [each for each in asks if each.share_asking >= _LEAST_SHARE]
    if not asking:
        return [(1.0, max(0.0, asks[0].rest_s))], [(1.0, 0.0)]
    rest_s = sum(each.rest_s - (1.0 - each.share_asking) * none_s for each in asking)
    rest_s = max(0.0, rest_s / sum(each.share_asking for each in asking))
    most_s, by_number = np.inf, dict[float, float]()
    for each in asking:  # fewer experts take no longer
        most_s = min(most_s, each.computing_s)
        by_number[each.num_experts / each.share_asking] = most_s
    computing = sorted(by_number.items())
    return [(num, rest_s + seconds) for num, seconds in computing], computing


def measure_unasked(
    loaded: LoadedLayers, processor: ComputeBackend, *, limit_s: float
) -> tuple[float, float]:
    """Seconds that a layer takes more, and a step, if all experts that are chosen are on the
    device, but the processor might be asked."""
    num_first, num_all = loaded.sampled.num_first, len(loaded.sampled.kinds[0].layer_ids)
    if not num_first:
        return 0.0, 0.0
    ends = num_first, num_all
    passes = [loaded.passes(num) for num in ends]
    passes += [loaded.unasked_passes(num, processor) for num in ends]
    found = medians([each.timer(1) for each in passes], limit_s=limit_s)
    plain_s, unasked_s = np.array(found).reshape(2, len(ends))
    more_s = unasked_s - plain_s
    layer_s = max(0.0, float(more_s[1] - more_s[0]) / (num_all - num_first))
    return layer_s, max(0.0, float(more_s[1]) - num_all * layer_s)
