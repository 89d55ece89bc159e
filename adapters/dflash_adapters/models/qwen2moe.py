"""qwen2moe: Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B and their finetunes.

Pre-norm transformer; biases of q, k and v; every layer's FFN is a routed mixture: softmax over all
experts, top-k, weights as they are, and a shared expert times the share that a logit of its own
says.

Source: the Qwen2 technical report (arXiv 2407.10671) and llama.cpp's graph of the same name.
"""

from __future__ import annotations

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
    plan_linear,
    plan_qkv,
    plan_shared_expert,
)
from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.keys import (
    BaseConfig,
    Heads,
    Keys,
    RopeKeys,
    read_base,
    read_expert_ffn_size,
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
    shared: FfnPlan


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
    ffn_size = read_expert_ffn_size(keys, base.num_experts_used)
    # Old converters gave all experts of a token, and the shared one, the same width.
    shared_key = "expert_shared_feed_forward_length"
    shared_size = keys.uint(shared_key if keys.has(shared_key) else "feed_forward_length")
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
                plan_shared_expert(
                    tensors, prefix, hidden_size=hidden, ffn_size=shared_size, is_gated=True
                ),
            )
        )
        tensors.expect_vectors(prefix, attn_norm=hidden, ffn_norm=hidden)
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


def load(file: GgufFile, ops: Ops[A]) -> Qwen2Moe[A]:
    """See registry.Adapter."""
    return Qwen2Moe(file, ops)


class _Layer(Generic[A]):
    def __init__(self, file: GgufFile, ops: Ops[A], plan: _LayerPlan) -> None:
        self.attn_norm = ops.load_vector(file, f"{plan.prefix}attn_norm.weight")
        self.ffn_norm = ops.load_vector(file, f"{plan.prefix}ffn_norm.weight")
        self.qkv = Qkv(file, ops, plan.qkv)
        self.output = Linear(file, ops, plan.output)
        self.router = Linear(file, ops, plan.router)
        self.shared = Ffn(file, ops, plan.shared)


class Qwen2Moe(Generic[A]):
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
            h = ops.rms_norm(x, layer.attn_norm, eps)
            q, k, v = map(ops.split_heads, layer.qkv(h), self._heads.of_qkv)
            ops.norm_and_rotate(q, k, positions, self._rope)
            attended = ops.attention(q, k, v, cache, layer_id, positions, scale)
            x = layer.output(ops.merge_heads(attended), add=x)
            h = ops.rms_norm(x, layer.ffn_norm, eps)
            topk_ids, topk_weights = ops.route(layer.router(h), self._rule)
            shared = layer.shared.begin(h)
            x = ops.add(x, moe(layer_id, h, topk_ids, topk_weights), out=x)
            x = layer.shared.end(shared, add=x)
            on_layer(layer_id, x)
        return x

    def head(self, hidden: A) -> A:
        return self._ends.head(hidden)
