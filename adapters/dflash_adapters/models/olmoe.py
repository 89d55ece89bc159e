"""olmoe: OLMoE-1B-7B and its finetunes.

Pre-norm transformer; q and k are normed over their full width before they are split into heads;
every layer's FFN is a routed mixture: softmax over all experts, top-k, weights as they are, no
shared expert. What the file calls the FFN's width is that of one expert.

Source: Muennighoff et al. 2024 (arXiv 2409.02060) and llama.cpp's graph of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_adapters.blocks import (
    Ends,
    EndsPlan,
    Linear,
    LinearPlan,
    Qkv,
    QkvPlan,
    model_spec,
    plan_ends,
    plan_linear,
    plan_qkv,
)
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.keys import (
    BaseConfig,
    Heads,
    Keys,
    RopeKeys,
    read_base,
    read_heads,
    read_rope,
    require_dim,
)
from dflash_adapters.ops import Gating, KvCache, MoeBlock, OnLayer, Ops, RoutingRule, nobody_looks
from dflash_adapters.rope import RopePairing, RopeTable
from dflash_adapters.routed_experts import ExpertSizes, plan_experts
from dflash_adapters.spec import ModelSpec, MoeLayer
from dflash_adapters.tensors import Tensors
from dflash_protocol.ids import I32Array

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class _LayerPlan:
    prefix: str
    qkv: QkvPlan
    output: LinearPlan
    router: LinearPlan
    experts: MoeLayer


@dataclass(frozen=True, slots=True)
class _Plan:
    base: BaseConfig
    heads: Heads
    rope: RopeTable
    ends: EndsPlan
    layers: list[_LayerPlan]


def _plan(file: GgufFile) -> _Plan:
    keys, tensors = Keys(file), Tensors(file)
    base = read_base(keys)
    hidden = base.hidden_size
    heads = read_heads(keys, hidden)
    require_dim(keys, "rope.dimension_count", heads.dim)
    keys.require("attention.clamp_kqv", 0.0, default=0.0)
    ffn_size = keys.uint("feed_forward_length")
    sizes = ExpertSizes(base.num_experts, base.num_experts_used, hidden, ffn_size)
    ends = plan_ends(tensors, hidden, may_be_tied=False)
    layers = []
    for layer_id in range(base.num_layers):
        prefix = f"blk.{layer_id}."
        layers.append(
            _LayerPlan(
                prefix,
                plan_qkv(tensors, prefix, heads, hidden_size=hidden, may_have_bias=True),
                plan_linear(tensors, f"{prefix}attn_output", (hidden, heads.query_size)),
                plan_linear(tensors, f"{prefix}ffn_gate_inp", (base.num_experts, hidden)),
                plan_experts(tensors, layer_id, sizes),
            )
        )
        tensors.expect_vectors(prefix, attn_norm=hidden, ffn_norm=hidden)
        tensors.expect_vectors(prefix, attn_q_norm=heads.query_size, attn_k_norm=heads.kv_size)
    tensors.refuse_others()
    rope = RopeKeys(RopePairing.HALF_SPLIT, heads.dim, base.context_length)
    return _Plan(base, heads, read_rope(keys, rope), ends, layers)


def read_spec(file: GgufFile) -> ModelSpec:
    """See registry.Adapter."""
    return _spec(file, _plan(file))


def _spec(file: GgufFile, plan: _Plan) -> ModelSpec:
    return model_spec(
        file,
        plan.base,
        plan.ends,
        kv_layers=[plan.heads.kv_layer()] * len(plan.layers),
        experts=[layer.experts for layer in plan.layers],
    )


def load(file: GgufFile, ops: Ops[A]) -> Olmoe[A]:
    """See registry.Adapter."""
    return Olmoe(file, ops)


class _Layer(Generic[A]):
    def __init__(self, file: GgufFile, ops: Ops[A], plan: _LayerPlan) -> None:
        def vector(name: str) -> A:
            return ops.load_vector(file, f"{plan.prefix}{name}.weight")

        self.attn_norm, self.ffn_norm = vector("attn_norm"), vector("ffn_norm")
        self.q_norm, self.k_norm = vector("attn_q_norm"), vector("attn_k_norm")
        self.qkv = Qkv(file, ops, plan.qkv)
        self.output = Linear(file, ops, plan.output)
        self.router = Linear(file, ops, plan.router)


class Olmoe(Generic[A]):
    """The forward pass. Shapes as in ops.Model."""

    def __init__(self, file: GgufFile, ops: Ops[A]) -> None:
        plan = _plan(file)
        self.spec = _spec(file, plan)
        self._heads, self._rope, self._rms_eps = plan.heads, plan.rope, plan.base.rms_eps
        self._rule = RoutingRule(plan.base.num_experts_used, Gating.SOFTMAX, normalise=False)
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
        scale = self._heads.dim**-0.5
        x = self._ends.embed(token_ids)
        for layer_id, layer in enumerate(self._layers):
            q, k, v = layer.qkv(ops.rms_norm(x, layer.attn_norm, eps))
            q, k = ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)
            q, k, v = map(ops.split_heads, (q, k, v), self._heads.of_qkv)
            ops.norm_and_rotate(q, k, positions, self._rope)
            attended = ops.attention(q, k, v, cache, layer_id, positions, scale)
            x = layer.output(ops.merge_heads(attended), add=x)
            h = ops.rms_norm(x, layer.ffn_norm, eps)
            topk_ids, topk_weights = ops.route(layer.router(h), self._rule)
            x = ops.add(x, moe(layer_id, h, topk_ids, topk_weights), out=x)
            on_layer(layer_id, x)
        return x

    def head(self, hidden: A) -> A:
        return self._ends.head(hidden)
