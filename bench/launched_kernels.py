"""Kernels that real models compile, with the defines of their launches.

Recorded by constructing what launches them, on a device that only notes what it is asked to
compile. Qwen3-30B-A3B and Qwen3.6-35B-A3B, with the types of Q4_K_M: heads of 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.kernel_variants import KernelVariant, LabellingDevice

from dflash_adapters.quant import TensorType
from dflash_adapters.rope import RopePairing
from dflash_adapters.routing import Gating, RoutingRule
from dflash_adapters.spec import DeltaShape, KvLayer
from dflash_runtime.compute.gpu.device.capabilities import Capabilities
from dflash_runtime.compute.gpu.launch.decode_experts import DecodeExperts, ExpertsShape, ExpertsUse
from dflash_runtime.compute.gpu.launch.decode_linear import (
    DecodeLinear,
    DecodeRouter,
    LinearInput,
    LinearShape,
    RouterShape,
)
from dflash_runtime.compute.gpu.launch.decode_tokens import (
    ArgmaxLogits,
    Embed,
    QuantiseRows,
    RowChange,
)
from dflash_runtime.compute.gpu.launch.prefill_experts import ExpertKernels
from dflash_runtime.compute.gpu.launch.prefill_operands import products_of
from dflash_runtime.compute.gpu.launch.sample_tokens import SampleTokens
from dflash_runtime.compute.gpu.layers.attention import DecodeAttention, PrefillAttention
from dflash_runtime.compute.gpu.layers.attention_plan import AttentionShape, DecodePlan
from dflash_runtime.compute.gpu.layers.attention_tree import TreeAttention
from dflash_runtime.compute.gpu.layers.delta import DeltaChunk, DeltaPlan, DeltaStep, DeltaTree
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.compute.step_order import MOST_TOKENS

_HIDDEN, _FFN, _EXPERTS, _USED, _VOCABULARY = 2048, 768, 128, 8, 151_936
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 4, 128
_DELTA_HEADS = (16, 32)
"""Numbers of key and value heads in the layers of Qwen3.6 without attention."""
_BUCKET = 4096

Q4, Q6, F32 = TensorType.Q4_K, TensorType.Q6_K, TensorType.F32


@dataclass(frozen=True)
class LaunchedKernel:
    """A file with the defines of a launch, and a label of its use."""

    variant: KernelVariant
    label: str


def launched_kernels(
    capabilities: Capabilities, num_multiprocessors: int
) -> tuple[LaunchedKernel, ...]:
    """Files with their defines on such a device."""
    device = LabellingDevice(capabilities, num_multiprocessors)
    for note in (_attention, _matrices, _experts, _deltas, _tokens):
        note(device)
    return tuple(LaunchedKernel(variant, label) for variant, label in device.noted.values())


def _attention(device: Any) -> None:
    for kv_type in (KvType.F16, KvType.Q8_0, KvType.F32):
        shape = AttentionShape(
            _HEADS,
            KvLayer(_KV_HEADS, _HEAD_DIM, _HEAD_DIM),
            kv_type,
            RopePairing.HALF_SPLIT,
            num_rotated=_HEAD_DIM,
            use_mma=device.capabilities.mma and kv_type is not KvType.F32,
        )
        for num_tokens in (1, 2, MOST_TOKENS):
            device.label = f"{kv_type} cache, {_tokens_of(num_tokens)}"
            DecodeAttention(device, DecodePlan(shape, num_tokens, _BUCKET, device.lanes))
        device.label = f"{kv_type} cache"
        TreeAttention(device, shape, _BUCKET)
        device.label = f"{kv_type} cache, chunks"
        prefill = PrefillAttention(device, shape)
        device.module("attention_prefill.cu", prefill.plan(512).defines())


def _matrices(device: Any) -> None:
    heads, kv_heads = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    for num_tokens in (1, MOST_TOKENS):
        for label, shape in (
            (
                "queries, keys, values",
                LinearShape(
                    _HIDDEN,
                    num_tokens,
                    ((Q4, heads), (Q4, kv_heads), (Q6, kv_heads)),
                    LinearInput.NORM,
                ),
            ),
            (
                "attention's output",
                LinearShape(heads, num_tokens, ((Q4, _HIDDEN),), LinearInput.QUANTISED, adds=True),
            ),
            (
                "head",
                LinearShape(
                    _HIDDEN, num_tokens, ((Q6, _VOCABULARY),), LinearInput.NORM, has_argmax=True
                ),
            ),
        ):
            device.label = f"{label}, {_tokens_of(num_tokens)}"
            DecodeLinear(device, shape)
        device.label = _tokens_of(num_tokens)
        DecodeRouter(device, RouterShape(num_tokens, _EXPERTS, _HIDDEN, F32))


def _experts(device: Any) -> None:
    rule = RoutingRule(num_experts_used=_USED, gating=Gating.SOFTMAX, normalise=True)
    for num_tokens in (1, MOST_TOKENS):
        sizes = (num_tokens, _USED, _EXPERTS, _HIDDEN, _FFN, Q4, Q4)
        for label, shape in (
            ("resident, down Q4_K", ExpertsShape(*sizes, Q4, rule=rule)),
            ("resident, down Q6_K", ExpertsShape(*sizes, Q6, rule=rule)),
            ("asking peers", ExpertsShape(*sizes, Q6, rule=rule, use=ExpertsUse.ASKS_PEERS)),
            ("daemon", ExpertsShape(*sizes, Q6, gives_sums=True)),
            ("mailbox", ExpertsShape(*sizes, Q6, gives_sums=True, use=ExpertsUse.TAKES_REQUEST)),
            ("fetched", ExpertsShape(*sizes, Q6, use=ExpertsUse.FETCHED)),
        ):
            device.label = f"{label}, {_tokens_of(num_tokens)}"
            DecodeExperts(device, shape)
    device.label = "chunks"
    kernels = ExpertKernels(device, products_of(device), hidden_size=_HIDDEN, ffn_size=_FFN)
    kernels.gate_up(1, 1)
    kernels.level(1)
    kernels.down(1)


def _deltas(device: Any) -> None:
    keys, values = _DELTA_HEADS
    plan = DeltaPlan(DeltaShape(keys, values, _HEAD_DIM, _HEAD_DIM), num_taps=4)
    for num_tokens in (1, MOST_TOKENS):
        device.label = _tokens_of(num_tokens)
        DeltaStep(device, plan, num_tokens)
    device.label = "trees"
    DeltaTree(device, plan)
    device.label = "chunks"
    DeltaChunk(device, plan)


def _tokens(device: Any) -> None:
    device.label = "Q4_K"
    Embed(device, Q4, rows=_VOCABULARY, columns=_HIDDEN)
    device.label = "1 token"
    ArgmaxLogits(device, num_tokens=1, advances=True)
    SampleTokens(device, vocab_size=_VOCABULARY)
    QuantiseRows(device, columns=_HIDDEN, change=RowChange.NORM)


def _tokens_of(number: int) -> str:
    return f"{number} token" + "s" * (number > 1)
