"""What a chunk of a prompt takes on a device beyond its parts if the processor computes some of its
experts: in passes through layers that lack a few of theirs."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import numpy as np

from dflash_adapters.spec import MoeSpec
from dflash_protocol.ids import Phase
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.compute import ComputeBackend
from dflash_runtime.compute.gpu.experts.experts import CupyExpertBank
from dflash_runtime.compute.gpu.experts.moe import DeviceMoe, HostRoute
from dflash_runtime.engine.measuring.layers import trunk_bytes
from dflash_runtime.engine.measuring.loaded_layers import LoadedLayers
from dflash_runtime.engine.measuring.timing import TimeLeft, Timer, medians
from dflash_runtime.experts.compute import LocalExpertCompute
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.experts.store import load_banks
from dflash_runtime.experts.telemetry import OwnerKind
from dflash_runtime.placement.box import Curve, DeviceSpeed, LinkSpeed
from dflash_runtime.placement.speeds import ChunkParts, Side, at_rows
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER, make_placement

_CHUNK_ROWS = 512
_ASKED_EVERY = 32
"""One of so many experts is the processor's: it needs about as long as the device."""


class AskedChunks:
    """Chunks through both numbers of layers, whose last few experts `processor` computes. Used by
    one thread; owns what `close` releases."""

    def __init__(self, loaded: LoadedLayers, processor: ComputeBackend) -> None:
        """Raises: as load_banks; DeviceOutOfMemory."""
        kind = loaded.sampled.kinds[0]
        gpu: Any = loaded.backend  # its rows are of another type than a host's
        self.ends = loaded.sampled.num_first, len(kind.layer_ids)
        layers = tuple(
            each for each in loaded.spec.moe.layers if each.layer_id < len(kind.layer_ids)
        )
        self.num_asked = max(1, min(layer.num_experts for layer in layers) // _ASKED_EVERY)
        firsts = {each.layer_id: each.num_experts - self.num_asked for each in layers}
        here = OwnedExperts.from_lists({key: range(first) for key, first in firsts.items()})
        there = OwnedExperts.from_lists(
            {each.layer_id: range(firsts[each.layer_id], each.num_experts) for each in layers}
        )
        moe = MoeSpec(layers)
        banks = load_banks(processor, loaded.file, moe, owned=there, read_now=True)
        self._runtime = MoeExpertComputeRuntime(
            make_placement(moe, {LOCAL_OWNER: here, HOST_OWNER: there}),
            [
                LocalExpertCompute(OwnerKind.LOCAL, dict(loaded.banks)),
                LocalExpertCompute(OwnerKind.LOCAL, banks),
            ],
            fallback=None,
            device_owner=0,
        )
        self._layers = {}
        for layer_id, first in firsts.items():
            bank = loaded.banks[layer_id]
            assert isinstance(bank, CupyExpertBank)
            mask = np.arange(bank.layer.num_experts) < first
            self._layers[layer_id] = bank.by_global.only(gpu.device, mask)
        route = partial(HostRoute, gpu.ops, phase=Phase.PREFILL, remote=self._runtime)
        moe_of = DeviceMoe(lambda layer_id: route(layer_id, self._layers[layer_id]))
        self._passes = [loaded.chunk_passes(num, moe_of) for num in self.ends]

    def timers(self, rows: int) -> list[Timer]:
        """A chunk's, through both numbers of layers."""
        return [passes.timer(rows) for passes in self._passes]

    def close(self) -> None:
        """Idempotent."""
        self._runtime.close()
        self._layers.clear()


def measure_asked_chunks(
    loaded: LoadedLayers,
    processor: ComputeBackend,
    *,
    device: DeviceSpeed,
    host: DeviceSpeed,
    limit_s: float,
) -> LinkSpeed:
    """The link to the processor: what a layer of a chunk takes more than its trunk and the slower
    of both sides, by the rows that cross.

    `device`, `host`: how fast these layers are on either side. Raises: as AskedChunks.
    """
    kind, chunk = loaded.sampled.kinds[0], loaded.backend.chunking.preferred
    left, sizes = TimeLeft(limit_s), sorted({min(_CHUNK_ROWS, chunk), chunk})
    described = loaded.sampled.description.layers[: len(kind.layer_ids)]
    trunk = np.array([np.mean([trunk_bytes(loaded.file, each) for each in described])])
    layers = loaded.spec.moe.layers[: len(kind.layer_ids)]
    size = np.array([np.mean([layer.expert_bytes for layer in layers])])
    num_used = float(np.mean([layer.num_experts_used for layer in layers]))
    parts = ChunkParts.of(host.experts, MoeSpec(layers))
    sides = Side(LOCAL_OWNER, device.experts), Side(HOST_OWNER, host.experts, chunks=parts)
    points = []
    with contextlib.closing(AskedChunks(loaded, processor)) as asked:
        share = asked.num_asked / float(np.mean([layer.num_experts for layer in layers]))
        distinct = np.array([float(asked.num_asked)])
        for index, rows in enumerate(sizes):
            found = medians(asked.timers(rows), limit_s=left.share(1.0 / (len(sizes) - index)))
            num_first, num_all = asked.ends
            layer_s = (found[1][0] - found[0][0]) / (num_all - num_first)
            pairs = rows * num_used * np.array([1.0 - share, share])
            slowest_s = max(
                sides[0].chunk_s(rows, pairs[:1], size).item(),
                sides[1].chunk_s(rows, pairs[1:], size, distinct=distinct).item(),
            )
            trunk_s = at_rows(device.trunk, rows, trunk).item()
            crossing = rows * -np.expm1(-pairs[1] / rows)
            points.append((float(crossing), max(0.0, layer_s - trunk_s - slowest_s)))
    return LinkSpeed(HOST_OWNER, step=Curve(((1.0, 0.0),)), chunk=Curve(tuple(points)))
