"""llama4: Llama 4 Scout and Maverick, their text parts.

Pre-norm transformer. Three of four layers see the last 8192 positions at most, those of their own
chunk, with rotation of interleaved pairs and then, in Scout, heads divided by their root mean
square; the fourth sees everything, without positions, with queries that grow with their position.
FFNs are routed, in some models in every other layer only: one expert is chosen by its logit, what
it is given is multiplied by the sigmoid of that, and a shared expert is added.

Source: Meta's Llama 4 model cards and llama.cpp's graph of the same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_adapters.blocks import (
    Ends,
    EndsPlan,
    Ffn,
    FfnPlan,
    Linear,
    LinearPlan,
    Qkv,
    QkvPlan,
    model_spec,
    plan_ends,
    plan_ffn,
    plan_linear,
    plan_qkv,
    plan_shared_expert,
)
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.keys import (
    ROPE_FREQS,
    BaseConfig,
    Heads,
    Keys,
    RopeKeys,
    read_attention_scale,
    read_base,
    read_heads,
    read_rope,
    read_rope_factors,
    require_dim,
)
from dflash_adapters.ops import Gating, KvCache, MoeBlock, OnLayer, Ops, RoutingRule, nobody_looks
from dflash_adapters.rope import AttentionTemperature, RopePairing
from dflash_adapters.routed_experts import ExpertSizes, plan_experts
from dflash_adapters.spec import CAUSAL, Mask, ModelSpec, MoeLayer
from dflash_adapters.tensors import Tensors
from dflash_protocol.ids import I32Array

A = TypeVar("A")

_CHUNK = 8192
_PERIOD = 4
"""The last layer of so many sees everything."""
_SLOPE = 0.1
"""Of the temperature, by which queries of layers that see everything grow from chunk to chunk."""
_UNNORMED_EXPERTS = 128
"""Experts of Maverick, whose heads are not normed."""

_CHOICE = RoutingRule(1, Gating.SOFTMAX_WEIGHT, normalise=False)
"""A weight of 1: what experts give is added as it is."""
_SHARE = RoutingRule(1, Gating.SIGMOID, normalise=False, selects_by_logits=True)


@dataclass(frozen=True, slots=True)
class _RoutedPlan:
    router: LinearPlan
    experts: MoeLayer
    shared: FfnPlan


@dataclass(frozen=True, slots=True)
class _LayerPlan:
    prefix: str
    is_chunked: bool
    qkv: QkvPlan
    output: LinearPlan
    ffn: FfnPlan | _RoutedPlan


@dataclass(frozen=True, slots=True)
class _Plan:
    base: BaseConfig
    heads: Heads
    rope: RopeKeys
    attention_scale: float
    ends: EndsPlan
    layers: list[_LayerPlan]


def _plan(file: GgufFile) -> _Plan:
    keys, tensors = Keys(file), Tensors(file)
    base = read_base(keys)
    heads = read_heads(keys, base.hidden_size)
    require_dim(keys, "rope.dimension_count", heads.dim)
    keys.require("expert_used_count", 1, default=1)
    keys.require("attention.sliding_window_pattern", _PERIOD, default=_PERIOD)
    window = "attention.sliding_window"
    if keys.has(window) and keys.count(window) == 0:
        raise keys.unsupported(window, "attention to everything in every layer is not known")
    ends = plan_ends(tensors, base.hidden_size, may_be_tied=True)
    layers = list(_layers(keys, tensors, base, heads))
    tensors.optional_f32(ROPE_FREQS, heads.dim // 2)
    tensors.refuse_others()
    swa_key = "rope.freq_base_swa"
    rope = RopeKeys(
        RopePairing.INTERLEAVED,
        heads.dim,
        base.context_length,
        base_key=swa_key if keys.has(swa_key) else "rope.freq_base",
    )
    read_rope(keys, rope)
    return _Plan(base, heads, rope, read_attention_scale(keys, heads.dim), ends, layers)


def _layers(keys: Keys, tensors: Tensors, base: BaseConfig, heads: Heads) -> Iterator[_LayerPlan]:
    hidden, step = base.hidden_size, keys.uint("interleave_moe_layer_step")
    ffn_size = keys.uint("expert_feed_forward_length")
    sizes = ExpertSizes(base.num_experts, base.num_experts_used, hidden, ffn_size)
    for layer_id in range(base.num_layers):
        prefix = f"blk.{layer_id}."
        qkv = plan_qkv(tensors, prefix, heads, hidden_size=hidden, may_have_bias=True)
        output = plan_linear(tensors, f"{prefix}attn_output", (hidden, heads.query_size))
        tensors.expect_vectors(prefix, attn_norm=hidden, ffn_norm=hidden)
        ffn: FfnPlan | _RoutedPlan
        if (layer_id + 1) % step:
            ffn = plan_ffn(
                tensors, prefix, hidden_size=hidden, ffn_size=keys.uint("feed_forward_length")
            )
        else:
            ffn = _RoutedPlan(
                plan_linear(tensors, f"{prefix}ffn_gate_inp", (base.num_experts, hidden)),
                plan_experts(tensors, layer_id, sizes),
                plan_shared_expert(
                    tensors, prefix, hidden_size=hidden, ffn_size=ffn_size, is_gated=False
                ),
            )
        yield _LayerPlan(prefix, (layer_id + 1) % _PERIOD != 0, qkv, output, ffn)


def read_spec(file: GgufFile) -> ModelSpec:
    """See registry.Adapter."""
    return _spec(file, _plan(file))


def _spec(file: GgufFile, plan: _Plan) -> ModelSpec:
    masks = [Mask(chunk=_CHUNK) if layer.is_chunked else CAUSAL for layer in plan.layers]
    return model_spec(
        file,
        plan.base,
        plan.ends,
        kv_layers=[plan.heads.kv_layer(mask) for mask in masks],
        experts=[each.ffn.experts for each in plan.layers if isinstance(each.ffn, _RoutedPlan)],
    )


def load(file: GgufFile, ops: Ops[A]) -> Llama4[A]:
    """See registry.Adapter."""
    return Llama4(file, ops)


class _Routed(Generic[A]):
    def __init__(self, file: GgufFile, ops: Ops[A], plan: _RoutedPlan) -> None:
        self.router = Linear(file, ops, plan.router)
        self.shared = Ffn(file, ops, plan.shared)


class _Layer(Generic[A]):
    def __init__(self, file: GgufFile, ops: Ops[A], plan: _LayerPlan) -> None:
        self.is_chunked = plan.is_chunked
        self.attn_norm = ops.load_vector(file, f"{plan.prefix}attn_norm.weight")
        self.ffn_norm = ops.load_vector(file, f"{plan.prefix}ffn_norm.weight")
        self.qkv = Qkv(file, ops, plan.qkv)
        self.output = Linear(file, ops, plan.output)
        self.ffn: Ffn[A] | _Routed[A] = (
            _Routed(file, ops, plan.ffn)
            if isinstance(plan.ffn, _RoutedPlan)
            else Ffn(file, ops, plan.ffn)
        )


class Llama4(Generic[A]):
    """The forward pass. Shapes as in ops.Model."""

    def __init__(self, file: GgufFile, ops: Ops[A]) -> None:
        plan = _plan(file)
        self.spec = _spec(file, plan)
        self._heads, self._rms_eps = plan.heads, plan.base.rms_eps
        self._scale = plan.attention_scale
        self._temperature = AttentionTemperature(_CHUNK, _SLOPE)
        self._norms_heads = plan.base.num_experts != _UNNORMED_EXPERTS
        self._rope = read_rope(Keys(file), plan.rope, read_rope_factors(file, plan.heads.dim))
        self._ops = ops
        self._ends = Ends(file, ops, plan.ends, rms_eps=self._rms_eps)
        self._layers = [_Layer(file, ops, layer) for layer in plan.layers]

    def forward(
        self,
        token_ids: I32Array,
        positions: I32Array,
        cache: KvCache,
        moe: MoeBlock[A],
        on_layer: OnLayer[A] = nobody_looks,
    ) -> A:
        ops, eps = self._ops, self._rms_eps
        x = self._ends.embed(token_ids)
        for layer_id, layer in enumerate(self._layers):
            h = ops.rms_norm(x, layer.attn_norm, eps)
            q, k, v = map(ops.split_heads, layer.qkv(h), self._heads.of_qkv)
            if layer.is_chunked:
                ops.norm_and_rotate(
                    q, k, positions, self._rope, eps=eps, norms_after=self._norms_heads
                )
            else:
                ops.scale_queries(q, positions, self._temperature)
            attended = ops.attention(q, k, v, cache, layer_id, positions, self._scale)
            x = layer.output(ops.merge_heads(attended), add=x)
            h = ops.rms_norm(x, layer.ffn_norm, eps)
            if isinstance(layer.ffn, Ffn):
                x = layer.ffn(h, add=x)
            else:
                logits = layer.ffn.router(h)
                topk_ids, ones = ops.route(logits, _CHOICE)
                _, shares = ops.route(logits, _SHARE)
                shared = layer.ffn.shared.begin(h)
                x = ops.add(x, moe(layer_id, ops.scale_rows(h, shares), topk_ids, ones), out=x)
                x = layer.ffn.shared.end(shared, add=x)
            on_layer(layer_id, x)
        return x

    def head(self, hidden: A) -> A:
        return self._ends.head(hidden)
