"""A plan: where each expert lives, with what was counted and predicted for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from dflash_adapters.spec import MoeSpec
from dflash_protocol.device import Device
from dflash_protocol.placement import Placement
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.placement.wishes import MoeMode

TIE = 1.03
"""Predictions that differ by less are equal; they are no better than that."""


class RoomStatus(StrEnum):
    """Whether the parent's device has room for enough experts."""

    OK = "ok"
    BELOW_RECOMMENDED = "below_recommended"
    """For less than twice those that a token uses."""
    BUDGET_EXHAUSTED = "budget_exhausted"
    """For none."""
    UNKNOWN_EXPERT_SIZE = "unknown_expert_size"
    EMPTY = "empty"
    """The model has no routed experts."""


@dataclass(frozen=True, slots=True)
class ExpertRoom:
    """How many experts the parent's device has room for."""

    status: RoomStatus
    had: int
    asked: int
    """How many were asked for; without a wish all."""
    recommended: int
    """Twice those that a token uses, of all layers."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What the parent opens its model with."""

    device: Device
    context: int
    """Positions of a sequence."""
    kv_type: KvType
    chunk: int
    """Most tokens of a prompt that are computed at once."""
    cache_slots: int = 0
    """Experts of each layer that steps keep on the device besides those that live there."""


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """What goes where on one device, in bytes."""

    name: str
    """The parent's device, ``host``, or a daemon's name."""
    free_bytes: int
    trunk_bytes: int
    cache_bytes: int
    work_bytes: int
    expert_bytes: int
    num_experts: int
    disk_bytes: int = 0
    """Of `expert_bytes`, what finds no room and is read from the disk when it is used."""
    num_replicas: int = 0
    """Of `num_experts`, second copies of what another device has."""
    limit_bytes: int | None = None
    """Most bytes of experts that were asked for; None: only memory limits them."""

    @property
    def bytes_by_use(self) -> dict[str, int]:
        """Bytes by ``free``, ``trunk``, ``cache``, ``work``, ``experts``, ``disk``."""
        return {
            "free": self.free_bytes,
            "trunk": self.trunk_bytes,
            "cache": self.cache_bytes,
            "work": self.work_bytes,
            "experts": self.expert_bytes,
            "disk": self.disk_bytes,
        }


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted speeds, in tokens a second."""

    decode: float
    prompt_512: float
    prompt_4096: float

    def prompt_s(self, num_tokens: int) -> float:
        """Seconds of a prompt. Between the two predicted lengths speeds are on a straight line of
        the logarithm; beyond, they are the nearer one's."""
        share = min(1.0, max(0.0, math.log2(num_tokens / 512) / math.log2(4096 / 512)))
        return num_tokens / (self.prompt_512 * (1.0 - share) + self.prompt_4096 * share)


@dataclass(frozen=True, slots=True)
class Alternative:
    """An option that was not chosen."""

    name: str
    device: str
    """The parent's."""
    forecast: Forecast | None
    """None if it is not possible."""
    why_not: str = ""
    """Why it cannot be chosen; empty if it is only slower."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a plan was made from."""

    model_identity: str
    box_key: str
    heat_tokens: int
    """Tokens whose selections were counted; 0: none."""
    asked: str = ""
    """Digest of what was asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What the planner decided."""

    origin: Origin
    setup: Setup
    placement: Placement
    """Owners: ``local`` (the parent's device), ``host`` (its processor), daemons by name."""
    prompts_here: tuple[int, ...]
    """Layers whose experts of processors the parent's device computes in prompts, with copies of
    their weights."""
    mode: MoeMode
    name: str
    """The chosen option, as shown."""
    forecast: Forecast
    share_here: float
    """The part of decode's selections that the parent's device computes."""
    budgets: tuple[DeviceBudget, ...]
    """The parent's device first."""
    room: ExpertRoom
    alternatives: tuple[Alternative, ...]
    reason: str
    """A line: why this option, and what became of a plan that was kept."""

    @property
    def num_experts(self) -> int:
        return sum(self.placement.experts_per_layer.values())


@dataclass(frozen=True, slots=True)
class PlanRefused:
    """There is no plan that keeps to what was asked for."""

    reason: str
    """One line, which names what would fit."""
    status: RoomStatus
    fitting: tuple[tuple[KvType, int], ...] = ()
    """KV types, the one asked for first, each with the largest context that fits."""


def recommended_experts(moe: MoeSpec) -> int:
    """Room for twice the experts that a token uses (at most all of them)."""
    return sum(min(each.num_experts, 2 * each.num_experts_used) for each in moe.layers)
