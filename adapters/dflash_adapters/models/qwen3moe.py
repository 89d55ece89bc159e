"""qwen3moe: Qwen3-30B-A3B, Qwen3-Coder-30B-A3B and their finetunes.

Pre-norm transformer; grouped-query attention with a norm over each head of q and k; every layer's
FFN is a routed mixture: softmax over all experts, top-k, weights renormalised, no shared expert.

Source: the Qwen3 technical report (arXiv 2505.09388) and llama.cpp's graph of the same name.
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
    read_expert_ffn_size,
    read_heads,
    require_dim,
)
from dflash_adapters.keys import read_rope as read_rope_keys
from dflash_adapters.ops import Gating, KvCache, MoeBlock, OnLayer, Ops, RoutingRule, nobody_looks
from dflash_adapters.rope import RopePairing, RopeTable
from dflash_adapters.routed_experts import ExpertSizes, plan_experts
from dflash_adapters.spec import ModelSpec, MoeLayer
from dflash_adapters.tensors import Tensors
from dflash_protocol.ids import I32Array

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Config:
    """The metadata keys this architecture is made of."""

    base: BaseConfig
    heads: Heads
    ffn_size: int


def read_config(file: GgufFile) -> Config:
    """Raises: ModelFileError for a missing or impossible key, UnsupportedModel for a setting that
    this adapter does not compute."""
    keys = Keys(file)
    base = read_base(keys)
    heads = read_heads(keys, base.hidden_size)
    require_dim(keys, "rope.dimension_count", heads.dim)
    return Config(base, heads, read_expert_ffn_size(keys, base.num_experts_used))


def read_rope(file: GgufFile, config: Config) -> RopeTable:
    """Rotary table with the file's context scaling, if any."""
    rope = RopeKeys(RopePairing.HALF_SPLIT, config.heads.dim, config.base.context_length)
    return read_rope_keys(Keys(file), rope)


@dataclass(frozen=True, slots=True)
class _LayerPlan:
    prefix: str
    qkv: QkvPlan
    output: LinearPlan
    router: LinearPlan
    experts: MoeLayer


@dataclass(frozen=True, slots=True)
class _Plan:
    config: Config
    ends: EndsPlan
    layers: list[_LayerPlan]


def _plan(file: GgufFile) -> _Plan:
    config, tensors = read_config(file), Tensors(file)
    base, heads = config.base, config.heads
    hidden = base.hidden_size
    sizes = ExpertSizes(base.num_experts, base.num_experts_used, hidden, config.ffn_size)
    ends = plan_ends(tensors, hidden, may_be_tied=True)
    layers = []
    for layer_id in range(base.num_layers):
        prefix = f"blk.{layer_id}."
        tensors.expect_vectors(prefix, attn_norm=hidden, ffn_norm=hidden)
        layers.append(
            _LayerPlan(
                prefix,
                plan_qkv(tensors, prefix, heads, hidden_size=hidden),
                plan_linear(tensors, f"{prefix}attn_output", (hidden, heads.query_size)),
                plan_linear(tensors, f"{prefix}ffn_gate_inp", (base.num_experts, hidden)),
                plan_experts(tensors, layer_id, sizes),
            )
        )
        tensors.expect_vectors(prefix, attn_q_norm=heads.dim, attn_k_norm=heads.dim)
    tensors.refuse_others()
    return _Plan(config, ends, layers)


def read_spec(file: GgufFile) -> ModelSpec:
    """See registry.Adapter."""
    plan = _plan(file)
    read_rope(file, plan.config)
    return model_spec(
        file,
        plan.config.base,
        plan.ends,
        kv_layers=[plan.config.heads.kv_layer()] * len(plan.layers),
        experts=[layer.experts for layer in plan.layers],
    )


def load(file: GgufFile, ops: Ops[A]) -> Qwen3Moe[A]:
    """See registry.Adapter."""
    return Qwen3Moe(file, ops)


class _Layer(Generic[A]):
    def __init__(self, file: GgufFile, ops: Ops[A], plan: _LayerPlan) -> None:
        def vector(name: str) -> A:
            return ops.load_vector(file, f"{plan.prefix}{name}.weight")

        self.attn_norm, self.ffn_norm = vector("attn_norm"), vector("ffn_norm")
        self.q_norm, self.k_norm = vector("attn_q_norm"), vector("attn_k_norm")
        self.qkv = Qkv(file, ops, plan.qkv)
        self.output = Linear(file, ops, plan.output)
        self.router = Linear(file, ops, plan.router)


class Qwen3Moe(Generic[A]):
    """The forward pass. Shapes as in ops.Model."""

    def __init__(self, file: GgufFile, ops: Ops[A]) -> None:
        plan = _plan(file)
        config = plan.config
        self.spec = read_spec(file)
        self._heads, self._rms_eps = config.heads, config.base.rms_eps
        self._rope = read_rope(file, config)
        self._rule = RoutingRule(config.base.num_experts_used, Gating.SOFTMAX, normalise=True)
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
            ops.norm_and_rotate(
                q,
                k,
                positions,
                self._rope,
                q_weight=layer.q_norm,
                k_weight=layer.k_norm,
                eps=eps,
            )
            attended = ops.attention(q, k, v, cache, layer_id, positions, scale)
            x = layer.output(ops.merge_heads(attended), add=x)
            h = ops.rms_norm(x, layer.ffn_norm, eps)
            topk_ids, topk_weights = ops.route(layer.router(h), self._rule)
            x = ops.add(x, moe(layer_id, h, topk_ids, topk_weights), out=x)
            on_layer(layer_id, x)
        return x

    def head(self, hidden: A) -> A:
        return self._ends.head(hidden)
