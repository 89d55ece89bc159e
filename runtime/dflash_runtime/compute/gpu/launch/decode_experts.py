"""Launches of ``experts_decode.cu``: the routed experts of a decode step of 1 to 8 tokens.

The chosen experts and their slots are read or computed on the device; the host does not know them.
Pairs of experts that are not resident are left out of the result. A shape is what the kernels are
compiled for, a tuning how their work is cut on a device.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import Enum, auto
from math import ceil

import numpy as np

from dflash_adapters.quant import TensorType
from dflash_adapters.routing import Gating, RoutingRule
from dflash_adapters.spec import MoeLayer
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import (
    ArrayChecker,
    StepRows,
    check_columns,
    check_shared_bytes,
    check_tokens,
    meta_shape,
    staged_bytes,
)
from dflash_runtime.compute.gpu.launch.layouts import (
    ResidentExperts,
    ResidentMatrices,
    row_bytes,
)
from dflash_runtime.compute.mailbox_layout import CHECK_FACTOR
from dflash_runtime.compute.step_order import (
    FLOAT_TYPES,
    expert_sum_lanes,
    padded_columns,
    units_of,
)

MOST_PEERS = 7
"""Most daemons with a mailbox of one parent."""

Projection = kernel_struct("experts_decode.cu", "Projection")
Choices = kernel_struct("choices.cuh", "Choices")
GateUpArgs = kernel_struct("experts_decode.cu", "GateUpArgs", MOST_PEERS=MOST_PEERS)
DownArgs = kernel_struct("experts_decode.cu", "DownArgs", MOST_PEERS=MOST_PEERS)
MailArgs = kernel_struct("mailbox.cuh", "Mail", MOST_PEERS=MOST_PEERS)
"""One side's state and abort words, for all of its mailboxes."""
MailReplies = kernel_struct("mailbox.cuh", "MailReplies", MOST_PEERS=MOST_PEERS)
"""Peers' replies for a layer; none by default."""
MailPost = kernel_struct("mailbox_post.cuh", "MailPost", MOST_PEERS=MOST_PEERS)
"""What peers are asked for in a layer."""
FetchDecision = kernel_struct("fetch_decision.cuh", "FetchDecision")
FETCH_WORDS = ctypes.sizeof(FetchDecision) // 4
FetchCounts = kernel_struct("mailbox_post.cuh", "FetchCounts")
FETCH_COUNTS = ctypes.sizeof(FetchCounts) // 4
MailFetch = kernel_struct("mailbox_post.cuh", "MailFetch")
"""What of a layer is fetched over the bus; nothing by default."""
MailRequest = kernel_struct("mailbox_request.cuh", "MailRequest", MOST_PEERS=MOST_PEERS)
"""A parent's request for a layer, in our device's memory."""

GATES = {Gating.SOFTMAX: 0}
"""Numbered as in route.cuh."""


class ExpertsUse(Enum):
    """What gate and up do besides their products."""

    ALONE = auto()
    TAKES_REQUEST = auto()
    """Read choice and rows from a mailbox's request."""
    ASKS_PEERS = auto()
    """Some blocks ask peers for their pairs."""
    FETCHED = auto()
    """Only the pairs whose expert was fetched are computed."""


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
    use: ExpertsUse = ExpertsUse.ALONE

    def __post_init__(self) -> None:
        check_tokens(self.num_tokens)
        if not 1 <= self.num_experts_used <= self.num_experts:
            raise ValueError(f"K={self.num_experts_used} of E={self.num_experts} experts")
        if self.rule and self.rule.num_experts_used != self.num_experts_used:
            raise ValueError(f"K={self.num_experts_used}, but the rule says otherwise: {self.rule}")
        takes_request = self.use is ExpertsUse.TAKES_REQUEST
        if takes_request and (self.rule or not self.gives_sums):
            raise ValueError("what a mailbox asks for is chosen, and answered with sums")
        if self.use is ExpertsUse.FETCHED and self.rule:
            raise ValueError("an expert is fetched once it is chosen")
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
    use: ExpertsUse = ExpertsUse.ALONE,
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
        use=use,
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


def default_tuning(shape: ExpertsShape, device: KernelDevice) -> ExpertsTuning:
    """Small blocks, several a multiprocessor, hide each other's barriers, and a block of down fits
    beside those of gate and up that still run. Does not depend on T.
    """
    lanes = device.lanes
    gate_team, down_team = expert_sum_lanes(
        shape.gate_type,
        shape.up_type,
        shape.down_type,
        hidden_size=shape.hidden_size,
        ffn_size=shape.ffn_size,
    )
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


def _experts_defines(shape: ExpertsShape, tuning: ExpertsTuning) -> dict[str, int | str]:
    rule = shape.rule
    return {
        "TOKENS": shape.num_tokens,
        "TOP_K": shape.num_experts_used,
        "EXPERTS": shape.num_experts,
        "MOST_PEERS": MOST_PEERS,
        "CHECK_FACTOR": CHECK_FACTOR,
        "HIDDEN": shape.hidden_size,
        "FFN": shape.ffn_size,
        "TYPE_GATE": int(shape.gate_type),
        "TYPE_UP": int(shape.up_type),
        "TYPE_DOWN": int(shape.down_type),
        "VECTORS": int(shape.has_vectors),
        "SUMS": int(shape.gives_sums),
        "ROUTE": int(rule is not None),
        "MAIL": int(shape.use is ExpertsUse.TAKES_REQUEST),
        "POST": int(shape.use is ExpertsUse.ASKS_PEERS),
        "FETCHED": int(shape.use is ExpertsUse.FETCHED),
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
    }


@dataclass(frozen=True, slots=True)
class PeersPost:
    """What so many peers are asked for in a layer: a MailPost."""

    args: ctypes.Structure
    num_peers: int


@dataclass(frozen=True, slots=True)
class MailReply:
    """Device addresses of a mailbox's reply lines for the sums, and of the mailbox's state."""

    lines: int
    state: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen experts; or, with a rule in the shape, logits, from which these are written.

    `selections`: counts that the choice is added to, once. `slots`: the experts' slots, if known.
    Shapes: topk_ids [T, K] int32, negative for none; topk_weights [T, K] float32; logits [T, E];
    selections [E] uint32; slots [T, K] int32, negative for experts that are not resident.
    """

    topk_ids: DeviceArray
    topk_weights: DeviceArray
    logits: DeviceArray | None = None
    selections: DeviceArray | None = None
    slots: DeviceArray | None = None

    def __getitem__(self, tokens: slice) -> Choice:
        """The choice of some of the tokens, in place."""
        logits = None if self.logits is None else self.logits[tokens]
        slots = None if self.slots is None else self.slots[tokens]
        return Choice(
            self.topk_ids[tokens],
            self.topk_weights[tokens],
            logits,
            selections=self.selections,
            slots=slots,
        )


class DecodeExperts:
    """Launches both kernels, gate and up, then down, for one shape."""

    def __init__(
        self, device: KernelDevice, shape: ExpertsShape, tuning: ExpertsTuning | None = None
    ) -> None:
        """Raises: ValueError if the rows of a token's pairs do not fit a block's shared memory."""
        self.shape = shape
        self.tuning = default_tuning(shape, device) if tuning is None else tuning
        self._device = device
        self._arrays = ArrayChecker(device)
        self.pair_slots = device.empty((shape.num_tokens, shape.num_experts_used), np.int32)
        """Of the pairs of the last launch of gate and up. Shapes: [T, K]."""
        self._gate_up_bytes = check_shared_bytes(
            device,
            staged_bytes(
                1, shape.hidden_size, as_bytes=shape.x_as_bytes, as_floats=shape.x_as_floats
            ),
            f"a row of {shape.hidden_size}",
        )
        self._down_bytes = check_shared_bytes(
            device,
            staged_bytes(
                shape.num_experts_used,
                shape.ffn_size,
                as_bytes=not shape.h_as_floats,
                as_floats=shape.h_as_floats,
            ),
            f"{shape.num_experts_used} rows of {shape.ffn_size}",
        )
        module = device.module("experts_decode.cu", _experts_defines(shape, self.tuning))
        self._gate_up = module.kernel("experts_gate_up", GateUpArgs)
        self._down = module.kernel("experts_down", DownArgs)

    def hidden_rows(self) -> StepRows:
        """New arrays for the results of gate and up."""
        pairs, ffn_size, empty = self.shape.num_pairs, self.shape.ffn_size, self._device.empty
        if self.shape.h_as_floats:
            return StepRows(values=empty((pairs, ffn_size), np.float32))
        return StepRows(
            quants=empty((pairs, padded_columns(ffn_size)), np.int8),
            meta=empty(meta_shape(pairs, ffn_size), np.float32),
        )

    def launch_gate_up(
        self,
        experts: ResidentExperts,
        choice: Choice,
        x: StepRows | ctypes.Structure,
        hidden: StepRows,
        *,
        post: PeersPost | None = None,
        fetched: DeviceArray | None = None,
    ) -> None:
        """``hidden[pair] = activation(gate x, up x)``; zero for experts that are not resident.

        With a mailbox's request instead of rows, the pairs that it asks for are written to the
        choice. `post`: what peers are asked for, if the shape says so. `fetched`: what was fetched,
        if the shape is of that.
        Shapes: x rows T of H; hidden `hidden_rows`; fetched [FETCH_WORDS] int32.
        Raises: ValueError for an array that is missing, or not of this shape, type or device.
        """
        shape, tuning = self.shape, self.tuning
        gate, gate_slots = self._projection("gate", experts.gate, shape.gate_type)
        up, up_slots = self._projection("up", experts.up, shape.up_type)
        args = GateUpArgs(
            gate=gate,
            up=up,
            choices=self._choices(experts, choice, num_slots=min(gate_slots, up_slots)),
            form=(experts.activation_limit, experts.activation_alpha, experts.up_offset),
        )
        if isinstance(x, StepRows) == (shape.use is ExpertsUse.TAKES_REQUEST):
            raise ValueError("rows or a request, for which this was not compiled")
        if isinstance(x, StepRows):
            self._set_rows(args, x)
        else:
            args.request = x
        args.h_quants, args.h_meta, args.h = self._hidden(hidden)
        num_posts, num_pairs = 0, shape.num_pairs
        asks, is_fetched = post is not None, fetched is not None
        wanted = (shape.use is ExpertsUse.ASKS_PEERS, shape.use is ExpertsUse.FETCHED)
        if (asks, is_fetched) != wanted:
            raise ValueError("what peers are asked, or was fetched, was not compiled")
        if post is not None:
            args.post, args.num_posts = post.args, post.num_peers
            num_posts = post.num_peers
        if fetched is not None:
            args.fetched = self._arrays.address("fetched", fetched, np.int32, W=FETCH_WORDS)
            num_pairs = shape.num_tokens  # each has one such pair at most
        tile = tuning.gate_up_warps * (self._device.lanes // tuning.gate_up_team)
        num_tiles = ceil(shape.ffn_size / (tile * tuning.gate_up_rows))
        self._device.launch(
            self._gate_up,
            (num_posts + num_pairs * num_tiles, 1, 1),
            tuning.gate_up_warps * self._device.lanes,
            args,
            shared_bytes=self._gate_up_bytes,
            # Weights are read through the read-only path: what fetches them must have ended.
            overlaps_previous=fetched is None,
        )

    def _set_rows(self, args: ctypes.Structure, x: StepRows) -> None:
        shape, arrays = self.shape, self._arrays
        tokens, columns = shape.num_tokens, shape.hidden_size
        if shape.x_as_bytes:
            args.quants, args.meta = arrays.int8_rows(
                "x.", x.quants, x.meta, rows=tokens, columns=columns
            )
        if shape.x_as_floats:
            args.x = arrays.address("x.values", x.values, np.float32, T=tokens, H=columns)

    def launch_down(
        self,
        experts: ResidentExperts,
        choice: Choice,
        hidden: StepRows,
        out: DeviceArray | MailReply,
        *,
        replies: ctypes.Structure | None = None,
    ) -> None:
        """Add each token's terms, rounded once, to `out`; or write their float64 sums there, or to
        a mailbox.

        Call it after `launch_gate_up` of the same object and choice. With a residual, the peers'
        `replies` are added to the sums before these are rounded.
        Shapes: out [T, H] float32, or float64 if the shape gives sums.
        Raises: ValueError for an array that is missing, or not of this shape, type or device.
        """
        shape, tuning = self.shape, self.tuning
        down, num_slots = self._projection("down", experts.down, shape.down_type)
        args = DownArgs(down=down, choices=self._choices(experts, choice, num_slots=num_slots))
        args.h_quants, args.h_meta, args.h = self._hidden(hidden)
        dtype = np.float64 if shape.gives_sums else np.float32
        sizes = {"T": shape.num_tokens, "H": shape.hidden_size}
        if replies is not None:
            args.replies = replies
        if isinstance(out, MailReply):
            if not shape.gives_sums:
                raise ValueError("a mailbox takes sums, for which this was not compiled")
            args.reply, args.mail = out.lines, out.state
        elif shape.gives_sums:
            args.sums = self._arrays.address("out", out, dtype, **sizes)
        else:
            args.residual = self._arrays.address("out", out, dtype, **sizes)
        self._device.launch(
            self._down,
            (shape.num_tokens * ceil(shape.hidden_size / tuning.down_tile), 1, 1),
            tuning.down_warps * self._device.lanes,
            args,
            shared_bytes=self._down_bytes,
        )

    def _projection(
        self, name: str, of: ResidentMatrices, kind: TensorType
    ) -> tuple[ctypes.Structure, int]:
        """A projection as an argument of kernels, and its number of slots."""
        rows, columns = self.shape.ffn_size, self.shape.hidden_size
        if name == "down":
            rows, columns = columns, rows
        num_slots = of.weights.nbytes // (rows * row_bytes(kind, columns))
        if not self.shape.has_vectors and not (of.bias is None and of.scale is None):
            raise ValueError(f"{name} has a bias or scale, for which this was not compiled")
        arrays, num_experts = self._arrays, self.shape.num_experts
        projection = Projection(
            weights=arrays.weights(name, of.weights, kind, rows=num_slots * rows, columns=columns),
            bias=arrays.optional(f"{name}.bias", of.bias, np.float32, E=num_experts, rows=rows),
            scale=arrays.optional(f"{name}.scale", of.scale, np.float32, E=num_experts),
        )
        return projection, num_slots

    def _choices(
        self, experts: ResidentExperts, choice: Choice, *, num_slots: int
    ) -> ctypes.Structure:
        shape, arrays = self.shape, self._arrays
        tokens, num_experts = shape.num_tokens, shape.num_experts
        sizes = {"T": tokens, "K": shape.num_experts_used}
        slots = self.pair_slots if choice.slots is None else choice.slots
        choices = Choices(
            slot_of_expert=0
            if choice.slots is not None
            else arrays.address("slot_of_expert", experts.slot_of_expert, np.int32, E=num_experts),
            topk_ids=arrays.address("topk_ids", choice.topk_ids, np.int32, **sizes),
            topk_weights=arrays.address("topk_weights", choice.topk_weights, np.float32, **sizes),
            pair_slots=arrays.address("slots", slots, np.int32, **sizes),
            selections=arrays.optional("selections", choice.selections, np.uint32, E=num_experts),
            num_slots=num_slots,
        )
        if choice.slots is not None and (shape.rule or shape.use is ExpertsUse.TAKES_REQUEST):
            raise ValueError("slots are given of what is not chosen yet")
        if shape.rule is not None:
            choices.logits = arrays.address(
                "logits", choice.logits, np.float32, T=tokens, E=num_experts
            )
        return choices

    def _hidden(self, hidden: StepRows) -> tuple[int, int, int]:
        """Addresses of quants, meta and values; 0 for those that the shape does not have."""
        arrays, pairs, columns = self._arrays, self.shape.num_pairs, self.shape.ffn_size
        if self.shape.h_as_floats:
            values = arrays.address("hidden.values", hidden.values, np.float32, P=pairs, F=columns)
            return 0, 0, values
        quants, meta = arrays.int8_rows(
            "hidden.", hidden.quants, hidden.meta, rows=pairs, columns=columns
        )
        return quants, meta, 0
