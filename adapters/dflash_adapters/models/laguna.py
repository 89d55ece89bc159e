"""laguna: poolside's Laguna XS, S and M models.

Pre-norm transformer with more query heads in some layers than in others, and two kinds of
attention: over a sliding window, with plain rotation, or over everything, with YaRN and part of
each head rotated. What attention gives is multiplied by the softplus of a gate for each head, or
each element. The first layers have dense FFNs, the others a routed mixture: experts are chosen by
sigmoid and a bias, weighted by sigmoid alone, and a shared expert is added as it is.

Source: llama.cpp's graph of the same name. YaRN is what the file says: llama.cpp computes with
betas 32 and 1 whatever it says (see Settings.yarn).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    BaseConfig,
    Heads,
    Keys,
    RopeKeys,
    checked_heads,
    read_base,
    read_head_dim,
    read_rope,
)
from dflash_adapters.ops import (
    Gate,
    Gating,
    KvCache,
    MoeBlock,
    OnLayer,
    Ops,
    RoutingRule,
    nobody_looks,
)
from dflash_adapters.rope import RopePairing, RopeTable
from dflash_adapters.routed_experts import ExpertSizes, plan_experts
from dflash_adapters.spec import CAUSAL, Mask, ModelSpec, MoeLayer
from dflash_adapters.tensors import Tensors
from dflash_protocol.ids import I32Array

A = TypeVar("A")

_GATINGS = {
    0: Gating.SIGMOID,  # not said
    1: Gating.SOFTMAX,
    2: Gating.SIGMOID,
    3: Gating.SOFTMAX_WEIGHT,
    4: Gating.SQRT_SOFTPLUS,
}


@dataclass(frozen=True, slots=True)
class _RoutedPlan:
    router: LinearPlan
    bias: str
    experts: MoeLayer
    shared: FfnPlan


@dataclass(frozen=True, slots=True)
class _LayerPlan:
    prefix: str
    heads: Heads
    mask: Mask
    rope: RopeTable
    qkv: QkvPlan
    gate: LinearPlan
    output: LinearPlan
    ffn: FfnPlan | _RoutedPlan


@dataclass(frozen=True, slots=True)
class _Plan:
    base: BaseConfig
    rule: RoutingRule
    ends: EndsPlan
    layers: list[_LayerPlan]


def _plan(file: GgufFile) -> _Plan:
    keys, tensors = Keys(file), Tensors(file)
    base = read_base(keys)
    ends = plan_ends(tensors, base.hidden_size, may_be_tied=True)
    layers = list(_layers(keys, tensors, base))
    tensors.refuse_others()
    return _Plan(base, _read_rule(keys, base), ends, layers)


def _read_rule(keys: Keys, base: BaseConfig) -> RoutingRule:
    gating = keys.count("expert_gating_func")
    if gating not in _GATINGS:
        raise keys.unsupported("expert_gating_func", f"{gating} is not known")
    return RoutingRule(
        base.num_experts_used,
        _GATINGS[gating],
        normalise=keys.flag("expert_weights_norm", False),
        scale=keys.number("expert_weights_scale", 0.0) or 1.0,
    )


def _layers(keys: Keys, tensors: Tensors, base: BaseConfig) -> Iterator[_LayerPlan]:
    hidden = base.hidden_size
    ffn_size = keys.uint("expert_feed_forward_length")
    shared_size = keys.count("expert_shared_feed_forward_length")
    shared_size = shared_size or ffn_size * keys.uint("expert_shared_count", 1)
    sizes = ExpertSizes(base.num_experts, base.num_experts_used, hidden, ffn_size)
    num_dense = keys.count("leading_dense_block_count", None)
    num_heads = keys.uint_of_layer("attention.head_count", base.num_layers)
    num_kv_heads = keys.uint_of_layer("attention.head_count_kv", base.num_layers, num_heads)
    head_dim = read_head_dim(keys, hidden // num_heads(0))
    window, is_sliding = _read_window(keys, base.num_layers)
    ropes: dict[bool, RopeTable] = {}
    for layer_id in range(base.num_layers):
        prefix = f"blk.{layer_id}."
        heads = checked_heads(keys, Heads(num_heads(layer_id), num_kv_heads(layer_id), head_dim))
        qkv = plan_qkv(tensors, prefix, heads, hidden_size=hidden, may_have_bias=True)
        gate = f"{prefix}attn_gate"
        is_by_head = tensors.num_rows(f"{gate}.weight") == heads.num
        tensors.expect_vectors(prefix, attn_norm=hidden, ffn_norm=hidden)
        tensors.expect_vectors(prefix, attn_q_norm=head_dim, attn_k_norm=head_dim)
        ffn: FfnPlan | _RoutedPlan
        if layer_id < num_dense:
            ffn = plan_ffn(
                tensors, prefix, hidden_size=hidden, ffn_size=keys.uint("feed_forward_length")
            )
        else:
            bias = f"{prefix}exp_probs_b.bias"
            tensors.expect(bias, base.num_experts)
            ffn = _RoutedPlan(
                plan_linear(tensors, f"{prefix}ffn_gate_inp", (base.num_experts, hidden)),
                bias,
                plan_experts(tensors, layer_id, sizes),
                plan_shared_expert(
                    tensors, prefix, hidden_size=hidden, ffn_size=shared_size, is_gated=False
                ),
            )
        slides = is_sliding(layer_id)
        if slides not in ropes:
            ropes[slides] = _read_rope(keys, base, head_dim, slides=slides)
        yield _LayerPlan(
            prefix,
            heads,
            Mask(window=window) if slides else CAUSAL,
            ropes[slides],
            qkv,
            plan_linear(tensors, gate, (heads.num if is_by_head else heads.query_size, hidden)),
            plan_linear(tensors, f"{prefix}attn_output", (hidden, heads.query_size)),
            ffn,
        )


def _read_window(keys: Keys, num_layers: int) -> tuple[int, Callable[[int], bool]]:
    """Positions of the window, and by layer id whether it is one of those that have it."""
    window, key = keys.count("attention.sliding_window"), "attention.sliding_window_pattern"
    if not window:
        return 0, lambda layer_id: False
    if keys.file.is_array(keys.name(key)):
        return window, keys.file.get_bool_per_layer(keys.name(key), num_layers).__getitem__
    period = keys.count(key, 4)
    # The first of each period sees everything.
    return window, lambda layer_id: period == 0 or layer_id % period != 0


def _read_rope(keys: Keys, base: BaseConfig, head_dim: int, *, slides: bool) -> RopeTable:
    num_rotated = keys.uint("rope.dimension_count", head_dim)
    key = "rope.dimension_count_swa" if slides else "rope.dimension_count"
    num_rotated = keys.uint(key, num_rotated)
    if num_rotated > head_dim or num_rotated % 2:
        raise keys.wrong(key, f"{num_rotated} of {head_dim} cannot be rotated in pairs")
    base_key = "rope.freq_base"
    if slides and keys.has("rope.freq_base_swa"):
        base_key = "rope.freq_base_swa"
    rope = RopeKeys(
        RopePairing.HALF_SPLIT,
        num_rotated,
        base.context_length,
        base_key=base_key,
        is_scaled=not slides,
    )
    return read_rope(keys, rope)


def read_spec(file: GgufFile) -> ModelSpec:
    """See registry.Adapter."""
    return _spec(file, _plan(file))


def _spec(file: GgufFile, plan: _Plan) -> ModelSpec:
    return model_spec(
        file,
        plan.base,
        plan.ends,
        kv_layers=[layer.heads.kv_layer(layer.mask) for layer in plan.layers],
        experts=[each.ffn.experts for each in plan.layers if isinstance(each.ffn, _RoutedPlan)],
    )


def load(file: GgufFile, ops: Ops[A]) -> Laguna[A]:
    """See registry.Adapter."""
    return Laguna(file, ops)


class _Routed(Generic[A]):
    def __init__(self, file: GgufFile, ops: Ops[A], plan: _RoutedPlan) -> None:
        self.router = Linear(file, ops, plan.router)
        self.bias = ops.load_vector(file, plan.bias)
        self.shared = Ffn(file, ops, plan.shared)


class _Layer(Generic[A]):
    def __init__(self, file: GgufFile, ops: Ops[A], plan: _LayerPlan) -> None:
        def vector(name: str) -> A:
            return ops.load_vector(file, f"{plan.prefix}{name}.weight")

        self.heads, self.rope = plan.heads, plan.rope
        self.attn_norm, self.ffn_norm = vector("attn_norm"), vector("ffn_norm")
        self.q_norm, self.k_norm = vector("attn_q_norm"), vector("attn_k_norm")
        self.qkv = Qkv(file, ops, plan.qkv)
        self.gate = Linear(file, ops, plan.gate)
        self.output = Linear(file, ops, plan.output)
        self.ffn: Ffn[A] | _Routed[A] = (
            _Routed(file, ops, plan.ffn)
            if isinstance(plan.ffn, _RoutedPlan)
            else Ffn(file, ops, plan.ffn)
        )


class Laguna(Generic[A]):
    """The forward pass. Shapes as in ops.Model."""

    def __init__(self, file: GgufFile, ops: Ops[A]) -> None:
        plan = _plan(file)
        self.spec = _spec(file, plan)
        self._rms_eps, self._rule = plan.base.rms_eps, plan.rule
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
            q, k, v = map(ops.split_heads, layer.qkv(h), layer.heads.of_qkv)
            gate = layer.gate(h)
            ops.norm_and_rotate(
                q,
                k,
                positions,
                layer.rope,
                q_weight=layer.q_norm,
                k_weight=layer.k_norm,
                eps=eps,
            )
            scale = layer.heads.dim**-0.5
            attended = ops.merge_heads(ops.attention(q, k, v, cache, layer_id, positions, scale))
            gated = ops.gated(attended, gate, Gate.SOFTPLUS, out=attended)
            x = layer.output(gated, add=x)
            h = ops.rms_norm(x, layer.ffn_norm, eps)
            if isinstance(layer.ffn, Ffn):
                x = layer.ffn(h, add=x)
            else:
                routed = layer.ffn
                topk_ids, topk_weights = ops.route(routed.router(h), self._rule, bias=routed.bias)
                shared = routed.shared.begin(h)
                x = ops.add(x, moe(layer_id, h, topk_ids, topk_weights), out=x)
                x = routed.shared.end(shared, add=x)
            on_layer(layer_id, x)
        return x

    def head(self, hidden: A) -> A:
        return self._ends.head(hidden)
