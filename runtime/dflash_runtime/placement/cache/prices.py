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
    SLOTS_S,
    TrunkTimes,
    factor_beside_processor,
    host_side,
    local_side,
    with_one_read,
)


@dataclass(frozen=True, slots=True, eq=False)
class StepPrices:
    """Seconds of a step of a GPU that has a cache of experts, beside the processor, which computes
    what is not in it. Shapes: layers_s, slots_s [L, K + 1], by how many of a token's experts are
    missing."""

    trunk_s: float
    layers_s: F64Array
    bytes_per_s: float
    """Of copies to the GPU; infinite if they were not measured."""
    slots_s: F64Array | None
    """Of layers with slots of steps, which read one of two or more that are missing; None: it was
    not measured how fast."""

    def tokens_per_s(self, replay: Replay) -> float | None:
        """As `dflash-moe plan` predicts; None for slots of steps without `slots_s`. Experts that
        are brought otherwise cross the bus meanwhile, at most as fast as it is."""
        num_tokens = max(1, int(replay.num_missing[0].sum()))
        each_s, bus_s = self.layers_s, replay.brought_bytes / num_tokens / self.bytes_per_s
        if replay.step_slots is not None:
            if self.slots_s is None:
                return None
            each_s, bus_s = np.where(replay.step_slots[:, None] > 0, self.slots_s, each_s), 0.0
        layers_s = float((replay.num_missing * each_s).sum()) / num_tokens
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
    slots_s = None
    if copies.kernel_reads:
        left_s = with_one_read(there_s, sizes, copies.kernel_reads)
        slots_s = SLOTS_S + np.maximum(times, left_s)
    layers_s = np.maximum(times, there_s)
    trunk_s = trunk.step_s(position)
    if host.asked is not None:
        trunk_s += host.asked.step_s + used.size * host.asked.layer_s
    return StepPrices(trunk_s, layers_s, float(rate), slots_s)
