"""What steps would take on a measured machine with what a cache has found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_protocol.ids import F64Array
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.placement.box import CopySpeed
from dflash_runtime.placement.cache.simulation import Replay
from dflash_runtime.placement.situation import ParentDevice, Situation
from dflash_runtime.placement.speeds import (
    TrunkTimes,
    factor_beside_processor,
    host_side,
    local_side,
)


@dataclass(frozen=True, slots=True, eq=False)
class StepPrices:
    """Seconds of a step of a GPU that has a cache of experts, beside the processor, which computes
    what is not in it. Shapes: layers_s [L, K + 1], by how many of a token's experts are missing."""

    trunk_s: float
    layers_s: F64Array
    bytes_per_s: float
    """Of copies to the GPU; infinite if they were not measured."""

    def tokens_per_s(self, replay: Replay) -> float:
        """As `dflash-moe plan` predicts. Experts that are brought cross the bus meanwhile, at most
        as fast as it is."""
        num_tokens = max(1, int(replay.num_missing[0].sum()))
        layers_s = float((replay.num_missing * self.layers_s).sum()) / num_tokens
        bus_s = replay.brought_bytes / num_tokens / self.bytes_per_s
        return 1.0 / max(self.trunk_s + layers_s, bus_s)


def step_prices(
    situation: Situation, parent: ParentDevice, *, kv_type: KvType, position: int
) -> StepPrices:
    """`position`: tokens before those that are written.

    Raises: ValueError if the processor was not measured beside this device, or the device was not.
    """
    box, device, moe = situation.box, str(parent.device), situation.spec.moe
    host = host_side(situation, parent)
    if host is None or device not in box.devices:
        raise ValueError(f"{device} and the processor beside it were not measured")
    sizes = np.array([layer.expert_bytes for layer in moe.layers], np.float64)
    used = np.array([layer.num_experts_used for layer in moe.layers])
    most = int(used.max())
    here_s = local_side(situation, parent).step_s(sizes, most)
    there_s = host.step_s(sizes, most)
    beside = factor_beside_processor(box, device)
    missing, rows = np.arange(most + 1), np.arange(used.size)[:, None]
    found = np.maximum(used[:, None] - missing, 0)
    times = here_s[rows, found] * np.where(missing > 0, beside, 1.0)
    trunk = TrunkTimes.of(situation, parent, kv_type)
    copies = box.copies.get(device, CopySpeed(device))
    rate = max(copies.from_locked, copies.from_page_cache) or np.inf
    return StepPrices(trunk.step_s(position), np.maximum(times, there_s), float(rate))
