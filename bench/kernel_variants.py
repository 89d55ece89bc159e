"""Representative variants of all kernels: small shapes that reach every branch of the preprocessor
and every weight type, since each is compiled for every architecture.

They are noted by making, or calling, what launches them on devices that compile nothing. A kernel
file that is new needs a line here; `files_without_variant` finds those that have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from dflash_adapters.layers import Gate
from dflash_adapters.quant import TensorType
from dflash_adapters.rope import RopePairing
from dflash_adapters.routing import Gating, RoutingRule
from dflash_adapters.spec import (
    CAUSAL,
    Activation,
    DeltaShape,
    ExpertProjection,
    KvLayer,
    Mask,
    MoeLayer,
)
from dflash_runtime.compute.gpu.device.capabilities import (
    Capabilities,
    cuda_capabilities,
    hip_capabilities,
)
from dflash_runtime.compute.gpu.device.kernel_sources import (
    KERNELS_FOLDER,
    Defines,
    define_options,
)
from dflash_runtime.compute.gpu.device.noting_device import NotingDevice
from dflash_runtime.compute.gpu.launch.decode_experts import (
    MOST_PEERS,
    DecodeExperts,
    ExpertsShape,
    ExpertsTuning,
    ExpertsUse,
)
from dflash_runtime.compute.gpu.launch.decode_linear import (
    DecodeLinear,
    DecodeRouter,
    LinearInput,
    LinearShape,
    LinearTuning,
    RouterShape,
)
from dflash_runtime.compute.gpu.launch.decode_tokens import (
    ArgmaxLogits,
    Embed,
    QuantiseRows,
    Repack,
    RowChange,
)
from dflash_runtime.compute.gpu.launch.fetch_expert import FetchExpert
from dflash_runtime.compute.gpu.launch.layouts import FIELDS
from dflash_runtime.compute.gpu.launch.prefill_dense import DensePrefill
from dflash_runtime.compute.gpu.launch.prefill_experts import ExpertKernels
from dflash_runtime.compute.gpu.launch.prefill_groups import ExpertGroups
from dflash_runtime.compute.gpu.launch.prefill_operands import (
    FMA_TILE,
    TENSOR_PRODUCTS,
    ProductKind,
    Products,
    RowPreparer,
    WeightScratch,
)
from dflash_runtime.compute.gpu.launch.row_kernels import (
    ChooseExperts,
    ColumnsOf,
    Elementwise,
)
from dflash_runtime.compute.gpu.launch.sample_tokens import SampleTokens
from dflash_runtime.compute.gpu.layers.attention import DecodeAttention, PrefillAttention
from dflash_runtime.compute.gpu.layers.attention_plan import AttentionShape, DecodePlan
from dflash_runtime.compute.gpu.layers.attention_tree import TreeAttention
from dflash_runtime.compute.gpu.layers.delta import DeltaChunk, DeltaPlan, DeltaStep, DeltaTree
from dflash_runtime.compute.gpu.ops.choice_notes import ChoiceRows
from dflash_runtime.compute.gpu.transfers.exchange import Exchanger
from dflash_runtime.compute.gpu.transfers.payload_kernels import PayloadKernels
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.mailbox_layout import CHECK_FACTOR
from dflash_runtime.compute.step_order import MOST_TOKENS

Q4, Q5, Q6 = TensorType.Q4_K, TensorType.Q5_0, TensorType.Q6_K
F16, F32 = TensorType.F16, TensorType.F32


@dataclass(frozen=True)
class KernelVariant:
    """One kernel file with the defines of one representative use."""

    file: str
    defines: Mapping[str, int | str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Fields of Capabilities that a device needs for it."""
    lanes: tuple[int, ...] = (32, 64)
    """Sizes of logical warps that it supports."""

    def why_not(self, capabilities: Capabilities, *, lanes: int) -> str | None:
        """Why a device cannot run it; None if it can."""
        missing = [name for name in self.needs if not getattr(capabilities, name)]
        if missing:
            return f"no {', '.join(missing)}"
        return None if lanes in self.lanes else f"logical warps of {lanes}"

    def __str__(self) -> str:
        return " ".join((self.file, *(f"{name}={value}" for name, value in self.defines.items())))


Noted = dict[tuple[str, tuple[str, ...]], tuple[KernelVariant, str]]
"""By file and defines: a variant that was asked for, and the device's label at that time."""


class LabellingDevice(NotingDevice):
    """Notes what it is asked for."""

    def __init__(self, capabilities: Capabilities, num_multiprocessors: int) -> None:
        super().__init__(
            capabilities,
            lanes=capabilities.lanes,
            num_multiprocessors=num_multiprocessors,
            max_shared_bytes=64 * 1024,
            on_module=self._note,
        )
        self.label = ""
        self.noted: Noted = {}

    def _note(self, file: str, defines: Defines) -> None:
        self.noted[file, define_options(defines)] = KernelVariant(file, defines), self.label


@cache
def all_variants() -> tuple[KernelVariant, ...]:
    """What devices of 32 and of 64 lanes ask for, and one with tensor cores."""
    narrow, wide = _noted(hip_capabilities("gfx1030")), _noted(hip_capabilities("gfx906"))
    tensor = _noted(cuda_capabilities(9, 0))
    variants = []
    for key, (variant, _) in (narrow | wide | tensor).items():
        lanes = (32,) * (key in narrow or key in tensor) + (64,) * (key in wide)
        needs = () if key in narrow or key in wide else ("mma",)
        variants.append(KernelVariant(variant.file, variant.defines, needs, lanes))
    return tuple(variants)


def files_without_variant(variants: Iterable[KernelVariant]) -> list[str]:
    """Kernel files without a variant."""
    declared = {variant.file for variant in variants}
    return sorted({path.name for path in KERNELS_FOLDER.rglob("*.cu")} - declared)


def _noted(capabilities: Capabilities) -> Noted:
    device = LabellingDevice(capabilities, num_multiprocessors=40)
    for note in (_tokens, _rows, _linears, _experts, _chunks, _attention, _deltas, _transfers):
        note(device)
    return device.noted


def _tokens(device: Any) -> None:
    ArgmaxLogits(device, num_tokens=3, advances=True)
    for change in RowChange:
        QuantiseRows(device, columns=512, change=change)
    Embed(device, Q4, rows=10, columns=512)
    Embed(device, F16, rows=10, columns=96)
    Repack(device, Q6, columns=512)
    Repack(device, TensorType.MXFP4, columns=96)
    SampleTokens(device, vocab_size=1003)


def _rows(device: Any) -> None:
    x = np.zeros((1, 8), np.float32)
    for gate in Gate:
        Elementwise(device).gated(x, ColumnsOf.whole(x), gate, x)
    Elementwise(device).add_rows(x, x, x)
    for num_experts, rule in (
        (8, RoutingRule(2, Gating.SOFTMAX, normalise=True)),
        (8, RoutingRule(2, Gating.SIGMOID, True, scale=2.5, num_groups=4, num_groups_used=2)),
        (70, RoutingRule(3, Gating.SOFTMAX_WEIGHT, normalise=True)),
        (70, RoutingRule(3, Gating.SQRT_SOFTPLUS, normalise=True)),
    ):
        logits = np.zeros((1, num_experts), np.float32)
        weights = np.zeros((1, rule.num_experts_used), np.float32)
        ids = weights.view(np.int32)
        ChooseExperts(device).launch(rule, logits, bias=None, ids=ids, weights=weights)


def _linears(device: Any) -> None:
    small = LinearTuning(
        warps=4, team=8, row_warps=1, team_rows=2, most_deep=2, min_blocks=1, most_blocks=1 << 30
    )
    kinds = [kind for kind in FIELDS if kind not in (Q4, Q6, F32)]
    for shape in (
        LinearShape(512, 1, ((Q4, 64), (Q4, 16), (Q6, 16)), LinearInput.NORM),
        LinearShape(512, 8, ((Q4, 64),), LinearInput.QUANTISED, adds=True),
        LinearShape(512, 3, ((Q6, 100),), LinearInput.NORM, has_argmax=True),
        LinearShape(512, 2, ((Q6, 64),), LinearInput.SWIGLU, adds=True, is_gated=True),
        LinearShape(512, 2, ((F32, 8),), LinearInput.NORM, has_side=True),
        *(
            LinearShape(512, 1, tuple((kind, 16) for kind in kinds[i : i + 4]), LinearInput.PLAIN)
            for i in range(0, len(kinds), 4)
        ),
    ):
        DecodeLinear(device, shape, small)
    DecodeRouter(device, RouterShape(1, 8, 512, F32))
    DecodeRouter(device, RouterShape(3, 8, 1024, TensorType.BF16))


def _experts(device: Any) -> None:
    small = ExpertsTuning(
        gate_up_warps=4,
        gate_up_team=8,
        gate_up_rows=2,
        gate_up_most_deep=1,
        gate_up_min_blocks=1,
        down_warps=2,
        down_team=4,
        down_tile=4,
        down_group=1,
        down_most_deep=2,
        down_min_blocks=1,
    )
    rule = RoutingRule(num_experts_used=2, gating=Gating.SOFTMAX, normalise=True)
    mail: Any = {"gives_sums": True, "use": ExpertsUse.TAKES_REQUEST}
    for shape in (
        ExpertsShape(1, 2, 8, 512, 256, Q4, Q4, Q6, rule=rule),
        ExpertsShape(3, 2, 8, 512, 96, Q4, Q6, Q5, has_vectors=True, gives_sums=True),
        ExpertsShape(2, 2, 8, 64, 96, F16, F16, F16),
        ExpertsShape(1, 2, 8, 512, 256, Q4, Q4, Q6, **mail),
        ExpertsShape(1, 2, 8, 512, 256, Q4, Q4, Q6, rule=rule, use=ExpertsUse.ASKS_PEERS),
        ExpertsShape(3, 2, 8, 512, 96, Q4, Q6, Q5, use=ExpertsUse.ASKS_PEERS),
        ExpertsShape(1, 2, 8, 512, 256, Q4, Q4, Q6, use=ExpertsUse.FETCHED),
        ExpertsShape(3, 2, 8, 512, 96, Q4, Q6, Q5, has_vectors=True, use=ExpertsUse.FETCHED),
        ExpertsShape(3, 2, 8, 160, 96, Q5, F16, Q5, **mail),
    ):
        DecodeExperts(device, shape, small)
    FetchExpert(device, _layer(Q4, Q5, Q6))


def _layer(*types: TensorType) -> MoeLayer:
    sizes = (256, 512), (256, 512), (512, 256)
    gate, up, down = (
        ExpertProjection("", kind, *size, 0, 0, 0) for kind, size in zip(types, sizes, strict=True)
    )
    return MoeLayer(0, 8, 2, 512, 256, Activation.SWIGLU, gate, up, down)


def _chunks(device: Any) -> None:
    scratch = WeightScratch(device, 1)
    for kind in FIELDS:
        if kind is not F32:
            scratch.prepare(kind, 512 if kind.layout.block_elements > 64 else 448)
    for parts in (1, 2):
        RowPreparer(device, columns=2080, max_rows=1, parts=parts)
    ExpertGroups(device, num_experts=128, max_pairs=1, tile_rows=128)
    all_products = [Products(ProductKind.HALF, FMA_TILE)]
    if device.capabilities.mma:
        all_products += TENSOR_PRODUCTS
    for products in all_products:
        dense = DensePrefill(device, products=products, scratch=scratch)
        for kind in (TensorType.Q8_0, F16, F32):
            dense.prepare(kind, 96)
    for products in all_products:
        kernels = ExpertKernels(device, products, hidden_size=96, ffn_size=160)
        kernels.combine()
        for parts in (0, 1, 2):
            kernels.gate_up(parts, parts)
            kernels.level(parts)
            kernels.down(parts)
    if device.capabilities.mma:
        kernels = ExpertKernels(device, TENSOR_PRODUCTS[0], hidden_size=512, ffn_size=512)
        kernels.gate_up(1, 1, Q4)
        kernels.down(1, TensorType.Q8_0)


def _attention(device: Any) -> None:
    """Small heads, since all loops over them are unrolled."""
    for kv_type, num_tokens, has_all in (
        (KvType.F32, 1, False),
        (KvType.F16, 3, True),
        (KvType.Q8_0, 1, False),
    ):
        mask = Mask(window=60, chunk=100) if has_all else CAUSAL
        shape = AttentionShape(
            16,
            KvLayer(num_heads=2, key_dim=48, value_dim=32, mask=mask),
            kv_type,
            RopePairing.INTERLEAVED if num_tokens == 3 else RopePairing.HALF_SPLIT,
            num_rotated=0 if has_all else 32,
            use_mma=device.capabilities.mma and kv_type is not KvType.F32,
            is_tempered=has_all,
            has_sinks=has_all,
            window_rows=100 if has_all else 0,
        )
        DecodeAttention(device, DecodePlan(shape, num_tokens, 1024, device.lanes))
        PrefillAttention(device, shape).scratch_bytes(1)
        TreeAttention(device, shape, 1024)


def _deltas(device: Any) -> None:
    for plan in (
        DeltaPlan(DeltaShape(2, 4, 128, 128), num_taps=4),
        DeltaPlan(DeltaShape(2, 6, 40, 24, is_tiled=False), num_taps=3),
    ):
        DeltaStep(device, plan, 2)
        DeltaChunk(device, plan)
        DeltaTree(device, plan)


def _transfers(device: Any) -> None:
    Exchanger(device)
    ChoiceRows(device, num_layers=2, num_columns=6, num_positions=10)
    PayloadKernels(device, device)
    checks = {"CHECK_FACTOR": CHECK_FACTOR}
    threads = {**checks, "THREADS": 512, "MOST_PEERS": MOST_PEERS}
    chosen = {**threads, "TOP_K": 3, "EXPERTS": 70}
    for tokens, route in ((1, 0), (1, 1), (MOST_TOKENS, 1)):
        sizes = {"TOKENS": tokens, "HIDDEN": 96, "ROUTE": route, "NORMALISE": 1, "GATE": 0}
        device.module("mailbox_parent.cu", {**chosen, **sizes, "ADD_THREADS": 256})
    for tokens in (1, MOST_TOKENS):
        device.module("mailbox_daemon.cu", {**chosen, "TOKENS": tokens})
    device.module("mailbox_begin.cu", checks)
    for is_echo in (0, 1):
        device.module("mailbox_probe.cu", {**threads, "IS_ECHO": is_echo})
