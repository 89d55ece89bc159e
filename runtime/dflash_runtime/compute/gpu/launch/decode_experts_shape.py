"""Compile-time shape and tuning of ``experts_decode.cu``."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from dflash_adapters.quant import TensorType
from dflash_adapters.routing import Gating, RoutingRule
from dflash_adapters.spec import MoeLayer
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.launch.decode_arrays import (
    check_columns,
    check_tokens,
    team_lanes,
    units_of,
)
from dflash_runtime.compute.gpu.launch.layouts import FLOAT_TYPES
from dflash_runtime.compute.gpu.launch.mailbox_args import MOST_PEERS

EXPERTS_FILE = "experts_decode.cu"
GATES = {Gating.SOFTMAX: 0}
"""Numbered as in route.cuh."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Compile-time shape of the kernels."""

    num_tokens: int
    num_experts_used: int
    num_experts: int
    hidden_size: int
    ffn_size: int
    gate_type: TensorType
    up_type: TensorType
    down_type: TensorType
    has_vectors: bool = False
    """There are biases or scales."""
    gives_sums: bool = False
    """Down writes float64 sums instead of adding to a residual."""
    rule: RoutingRule | None = None
    """Rule by which the kernel chooses experts from logits; None: they are chosen before."""
    takes_request: bool = False
    """Gate and up read choice and rows from a mailbox's request."""

    def __post_init__(self) -> None:
        check_tokens(self.num_tokens)
        if not 1 <= self.num_experts_used <= self.num_experts:
            raise ValueError(f"K={self.num_experts_used} of E={self.num_experts} experts")
        if self.rule and self.rule.num_experts_used != self.num_experts_used:
            raise ValueError(f"K={self.num_experts_used}, but the rule says otherwise: {self.rule}")
        if self.takes_request and (self.rule or not self.gives_sums):
            raise ValueError("what a mailbox asks for is chosen, and answered with sums")
        check_columns(self.hidden_size, (self.gate_type, self.up_type))
        check_columns(self.ffn_size, (self.down_type,))

    @property
    def num_pairs(self) -> int:
        return self.num_tokens * self.num_experts_used

    @property
    def x_as_bytes(self) -> bool:
        """Whether gate or up multiply int8 rows."""
        return any(kind not in FLOAT_TYPES for kind in (self.gate_type, self.up_type))

    @property
    def x_as_floats(self) -> bool:
        """Whether gate or up multiply float32 rows."""
        return any(kind in FLOAT_TYPES for kind in (self.gate_type, self.up_type))

    @property
    def h_as_floats(self) -> bool:
        """Whether down multiplies float32 rows, or else int8."""
        return self.down_type in FLOAT_TYPES


def experts_shape(
    layer: MoeLayer,
    num_tokens: int,
    *,
    gives_sums: bool = False,
    rule: RoutingRule | None = None,
    takes_request: bool = False,
) -> ExpertsShape:
    """The shape of a layer of a model."""
    vectors = (part for each in layer.projections for part in (each.bias, each.scale))
    return ExpertsShape(
        num_tokens=num_tokens,
        num_experts_used=layer.num_experts_used,
        num_experts=layer.num_experts,
        hidden_size=layer.hidden_size,
        ffn_size=layer.ffn_size,
        gate_type=layer.gate.tensor_type,
        up_type=layer.up.tensor_type,
        down_type=layer.down.tensor_type,
        has_vectors=any(part is not None for part in vectors),
        gives_sums=gives_sums,
        rule=rule,
        takes_request=takes_request,
    )


@dataclass(frozen=True, slots=True)
class ExpertsTuning:
    """Teams of lanes and grids on a device; bits of a result depend on the two teams only."""

    gate_up_warps: int
    gate_up_team: int
    gate_up_rows: int
    gate_up_most_deep: int
    gate_up_min_blocks: int
    down_warps: int
    down_team: int
    down_tile: int
    down_group: int
    down_most_deep: int
    down_min_blocks: int
    down_guesses: bool = True
    """Down starts loading before it has checked the slots. Bits are the same either way."""


def default_tuning(shape: ExpertsShape, device: KernelDevice) -> ExpertsTuning:
    """Small blocks, several a multiprocessor, hide each other's barriers, and a block of down fits
    beside those of gate and up that still run. Does not depend on T.
    """
    lanes = device.lanes
    gate_team = min(
        team_lanes(units_of(kind, shape.hidden_size), lanes)
        for kind in (shape.gate_type, shape.up_type)
    )
    down_team = team_lanes(units_of(shape.down_type, shape.ffn_size), lanes)
    gate_warps = 256 // lanes
    teams = gate_warps * (lanes // gate_team)
    gate_rows = max(1, 16 // teams)  # a block gives whole granules
    # A third block needs few registers, which types with many bits do not leave.
    is_light = _is_light(shape.gate_type) and _is_light(shape.up_type)
    tile = 8
    items = tile * shape.num_experts_used
    down_warps = min(ceil(items * down_team / lanes), 256 // lanes)
    items_a_team = ceil(items / (down_warps * lanes // down_team))
    down_passes = ceil(units_of(shape.down_type, shape.ffn_size) / down_team)
    down_group = min(items_a_team, max(1, 4 // down_passes))
    # As above; a pass that lies within one block of the type needs few for addresses.
    is_small = down_group * down_passes <= 3 and (_is_light(shape.down_type) or down_team <= 4)
    return ExpertsTuning(
        gate_up_warps=gate_warps,
        gate_up_team=gate_team,
        gate_up_rows=gate_rows,
        gate_up_most_deep=max(1, 2 // gate_rows),
        gate_up_min_blocks=(3 if is_light else 2) if lanes == 32 else 1,
        down_warps=down_warps,
        down_team=down_team,
        down_tile=tile,
        down_group=down_group,
        down_most_deep=4,
        down_min_blocks=(3 if is_small else 2) if lanes == 32 else 1,
    )


def _is_light(kind: TensorType) -> bool:
    """Whether the type has few bits per weight."""
    return kind.layout.block_bytes <= 0.6 * kind.layout.block_elements


def experts_defines(shape: ExpertsShape, tuning: ExpertsTuning) -> dict[str, int | str]:
    """Defines of the kernel file."""
    rule = shape.rule
    return {
        "TOKENS": shape.num_tokens,
        "TOP_K": shape.num_experts_used,
        "EXPERTS": shape.num_experts,
        "MOST_PEERS": MOST_PEERS,
        "HIDDEN": shape.hidden_size,
        "FFN": shape.ffn_size,
        "TYPE_GATE": int(shape.gate_type),
        "TYPE_UP": int(shape.up_type),
        "TYPE_DOWN": int(shape.down_type),
        "VECTORS": int(shape.has_vectors),
        "SUMS": int(shape.gives_sums),
        "ROUTE": int(rule is not None),
        "MAIL": int(shape.takes_request),
        "NORMALISE": int(rule is not None and rule.normalise),
        "GATE": GATES[rule.gating] if rule else 0,
        "GATE_UP_WARPS": tuning.gate_up_warps,
        "GATE_UP_TEAM": tuning.gate_up_team,
        "GATE_UP_ROWS": tuning.gate_up_rows,
        "GATE_UP_MOST_DEEP": tuning.gate_up_most_deep,
        "GATE_UP_MIN_BLOCKS": tuning.gate_up_min_blocks,
        "DOWN_WARPS": tuning.down_warps,
        "DOWN_TEAM": tuning.down_team,
        "DOWN_TILE": tuning.down_tile,
        "DOWN_GROUP": tuning.down_group,
        "DOWN_MOST_DEEP": tuning.down_most_deep,
        "DOWN_MIN_BLOCKS": tuning.down_min_blocks,
        "GUESS": int(tuning.down_guesses),
    }
