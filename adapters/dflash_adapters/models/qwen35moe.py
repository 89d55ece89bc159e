"""qwen35moe: Qwen3.5-35B-A3B, Qwen3.6-35B-A3B, their larger siblings and finetunes.

Pre-norm transformer. Most layers mix tokens by a Gated DeltaNet: a causal convolution and the delta
rule, whose state is as large after many tokens as after few; some by attention whose result is
gated, and whose heads are rotated in part. Every layer's FFN is a routed mixture: softmax over all
experts, top-k, weights renormalised, and a shared expert times the share that a logit of its own
says. Blocks for predicting several tokens at once are left out.

Source: Yang et al. 2024 (arXiv 2412.06464) and llama.cpp's graph of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
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
    project,
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
from dflash_adapters.spec import DeltaShape, ModelSpec, MoeLayer, RecurrentLayer
from dflash_adapters.tensors import Tensors
from dflash_protocol.ids import I32Array

A = TypeVar("A")

_SECTIONS = "rope.dimension_sections"


@dataclass(frozen=True, slots=True)
class _AttentionPlan:
    qkv: QkvPlan
    """Queries are twice as wide as usual: each head's are followed by its gate."""
    output: LinearPlan


@dataclass(frozen=True, slots=True)
class _DeltaPlan:
    inputs: tuple[LinearPlan, ...]
    """Of the convolution, of the gate, and the logits alpha and beta."""
    output: LinearPlan


@dataclass(frozen=True, slots=True)
class _LayerPlan:
    prefix: str
    mixer: _AttentionPlan | _DeltaPlan
    router: LinearPlan
    experts: MoeLayer
    shared: FfnPlan


@dataclass(frozen=True, slots=True)
class _Plan:
    base: BaseConfig
    heads: Heads
    recurrent: RecurrentLayer
    rope: RopeTable
    ends: EndsPlan
    layers: list[_LayerPlan]


def _plan(file: GgufFile) -> _Plan:
    keys, tensors = Keys(file), Tensors(file)
    base = read_base(keys)
    num_blocks, num_left_out = base.num_layers, keys.count("nextn_predict_layers")
    if num_left_out >= num_blocks or num_left_out > len(file.tensors):
        raise keys.wrong("nextn_predict_layers", f"{num_left_out} of {num_blocks} blocks")
    base = replace(base, num_layers=num_blocks - num_left_out)
    hidden = base.hidden_size
    heads, recurrent = read_heads(keys, hidden), _read_recurrent(keys)
    ffn_size = read_expert_ffn_size(keys, base.num_experts_used)
    shared_key = "expert_shared_feed_forward_length"
    shared_size = keys.uint(shared_key if keys.has(shared_key) else "feed_forward_length")
    sizes = ExpertSizes(base.num_experts, base.num_experts_used, hidden, ffn_size)
    ends = plan_ends(tensors, hidden, may_be_tied=True)
    layers = []
    for layer_id, is_recurrent in enumerate(_are_recurrent(keys, base.num_layers, num_blocks)):
        prefix = f"blk.{layer_id}."
        if is_recurrent:
            mixer: _AttentionPlan | _DeltaPlan = _plan_delta(tensors, prefix, recurrent, hidden)
        else:
            mixer = _plan_attention(tensors, prefix, heads, hidden)
        layers.append(
            _LayerPlan(
                prefix,
                mixer,
                plan_linear(tensors, f"{prefix}ffn_gate_inp", (base.num_experts, hidden)),
                plan_experts(tensors, layer_id, sizes, may_be_merged=True),
                plan_shared_expert(
                    tensors, prefix, hidden_size=hidden, ffn_size=shared_size, is_gated=True
                ),
            )
        )
        tensors.expect_vectors(prefix, attn_norm=hidden, post_attention_norm=hidden)
    for block in range(base.num_layers, num_blocks):
        tensors.leave_out(f"blk.{block}.")
    tensors.refuse_others()
    return _Plan(base, heads, recurrent, _read_rope(keys, heads, base), ends, layers)


def _read_recurrent(keys: Keys) -> RecurrentLayer:
    """Raises: ModelFileError for numbers that contradict each other."""
    key_heads, value_heads = keys.uint("ssm.group_count"), keys.uint("ssm.time_step_rank")
    dim, inner = keys.uint("ssm.state_size"), keys.uint("ssm.inner_size")
    if value_heads % key_heads:
        reason = f"{value_heads} value heads cannot share {key_heads} key heads"
        raise keys.wrong("ssm.time_step_rank", reason)
    if inner != value_heads * dim:
        raise keys.wrong("ssm.inner_size", f"{inner} is not {value_heads} heads of {dim}")
    delta = DeltaShape(key_heads, value_heads, key_dim=dim, value_dim=dim)
    return RecurrentLayer(keys.uint("ssm.conv_kernel"), delta)


def _are_recurrent(keys: Keys, num_layers: int, num_blocks: int) -> Iterable[bool]:
    """For each layer: the others have attention."""
    key = "attention.recurrent_layers"
    if keys.has(key):
        if not keys.file.is_array(keys.name(key)):  # of how many, nobody has checked yet
            raise keys.wrong(key, "is not an array")
        return keys.file.get_bool_per_layer(keys.name(key), num_blocks)[:num_layers]
    interval = keys.uint("full_attention_interval", 4)
    return ((layer_id + 1) % interval != 0 for layer_id in range(num_layers))


def _read_rope(keys: Keys, heads: Heads, base: BaseConfig) -> RopeTable:
    """Of positions with several coordinates, which are all the same for text.

    Raises: ModelFileError; UnsupportedModel if some pair is turned by a coordinate that text has
    not.
    """
    num_rotated = keys.uint("rope.dimension_count", heads.dim)
    if num_rotated > heads.dim or num_rotated % 2:
        reason = f"{num_rotated} of {heads.dim} dimensions cannot be rotated in pairs"
        raise keys.wrong("rope.dimension_count", reason)
    sections = keys.file.get_uint_array(keys.name(_SECTIONS), maximum=1 << 16).tolist()
    total = sum(sections)
    if len(sections) != 4 or not total:
        raise keys.wrong(_SECTIONS, f"{sections} are not the sizes of four sections")
    for pair in range(num_rotated // 2):
        place = pair % total
        if place >= 3 * sections[place % 3]:
            raise keys.unsupported(
                _SECTIONS, f"pair {pair} is in none of the first three of {sections}"
            )
    return read_rope(keys, RopeKeys(RopePairing.HALF_SPLIT, num_rotated, base.context_length))


def _plan_attention(tensors: Tensors, prefix: str, heads: Heads, hidden: int) -> _AttentionPlan:
    tensors.expect_vectors(prefix, attn_q_norm=heads.dim, attn_k_norm=heads.dim)
    with_gates = replace(heads, num=2 * heads.num)
    return _AttentionPlan(
        plan_qkv(tensors, prefix, with_gates, hidden_size=hidden),
        plan_linear(tensors, f"{prefix}attn_output", (hidden, heads.query_size)),
    )


def _plan_delta(
    tensors: Tensors, prefix: str, recurrent: RecurrentLayer, hidden: int
) -> _DeltaPlan:
    delta = recurrent.delta
    heads, inner = delta.num_value_heads, delta.num_value_heads * delta.value_dim
    tensors.expect(f"{prefix}ssm_conv1d.weight", delta.num_channels, recurrent.conv_kernel)
    tensors.expect(f"{prefix}ssm_dt.bias", heads)
    tensors.expect(f"{prefix}ssm_a", heads)
    tensors.expect_vectors(prefix, ssm_norm=delta.value_dim)
    rows = {
        "attn_qkv": delta.num_channels,
        "attn_gate": inner,
        "ssm_alpha": heads,
        "ssm_beta": heads,
    }
    return _DeltaPlan(
        tuple(plan_linear(tensors, prefix + name, (size, hidden)) for name, size in rows.items()),
        plan_linear(tensors, f"{prefix}ssm_out", (hidden, inner)),
    )


def read_spec(file: GgufFile) -> ModelSpec:
    """See registry.Adapter."""
    return _spec(file, _plan(file))


def _spec(file: GgufFile, plan: _Plan) -> ModelSpec:
    num_recurrent = sum(isinstance(layer.mixer, _DeltaPlan) for layer in plan.layers)
    spec = model_spec(
        file,
        plan.base,
        plan.ends,
        kv_layers=[plan.heads.kv_layer()] * (len(plan.layers) - num_recurrent),
        experts=[layer.experts for layer in plan.layers],
    )
    return replace(spec, recurrent_layers=(plan.recurrent,) * num_recurrent)


def load(file: GgufFile, ops: Ops[A]) -> Qwen35Moe[A]:
    """See registry.Adapter."""
    return Qwen35Moe(file, ops)


class _Attention(Generic[A]):
    """Gated attention; `index` is that of its keys and values in the cache."""

    def __init__(self, file: GgufFile, ops: Ops[A], plan: _Plan, layer: _LayerPlan, index: int):
        assert isinstance(layer.mixer, _AttentionPlan)
        self._ops, self._index = ops, index
        self._heads, self._rope, self._rms_eps = plan.heads, plan.rope, plan.base.rms_eps
        self._qkv = Qkv(file, ops, layer.mixer.qkv)
        self._q_norm = ops.load_vector(file, f"{layer.prefix}attn_q_norm.weight")
        self._k_norm = ops.load_vector(file, f"{layer.prefix}attn_k_norm.weight")
        self._output = Linear(file, ops, layer.mixer.output)

    def __call__(self, h: A, positions: I32Array, cache: KvCache, *, add: A) -> A:
        """The result is added to `add`, in place. Shapes: h, add [T, H]."""
        ops, dim = self._ops, self._heads.dim
        both, k, v = map(ops.split_heads, self._qkv(h), self._heads.of_qkv)
        q, gate = ops.columns(both, 0, dim), ops.columns(both, dim, 2 * dim)
        ops.norm_and_rotate(
            q,
            k,
            positions,
            self._rope,
            q_weight=self._q_norm,
            k_weight=self._k_norm,
            eps=self._rms_eps,
        )
        attended = ops.attention(q, k, v, cache, self._index, positions, dim**-0.5)
        gated = ops.gated(ops.merge_heads(attended), ops.merge_heads(gate), Gate.SIGMOID)
        return self._output(gated, add=add)


class _DeltaNet(Generic[A]):
    """Gated DeltaNet; `index` is that of its state in the cache."""

    def __init__(self, file: GgufFile, ops: Ops[A], plan: _Plan, layer: _LayerPlan, index: int):
        assert isinstance(layer.mixer, _DeltaPlan)
        self._ops, self._index = ops, index
        self._shape, self._rms_eps = plan.recurrent.delta, plan.base.rms_eps
        self._inputs = [Linear(file, ops, each) for each in layer.mixer.inputs]
        self._conv = ops.load_vector(file, f"{layer.prefix}ssm_conv1d.weight")
        self._dt_bias = ops.load_vector(file, f"{layer.prefix}ssm_dt.bias")
        self._a = ops.load_vector(file, f"{layer.prefix}ssm_a")
        self._norm = ops.load_vector(file, f"{layer.prefix}ssm_norm.weight")
        self._output = Linear(file, ops, layer.mixer.output)

    def __call__(self, h: A, positions: I32Array, cache: KvCache, *, add: A) -> A:
        """The result is added to `add`, in place. Shapes: h, add [T, H]."""
        ops = self._ops
        mixed, gate, alpha, beta = project(ops, h, self._inputs)
        mixed = ops.causal_conv(mixed, self._conv, cache, self._index, positions)
        heads = ops.delta_rule(
            mixed,
            alpha,
            beta,
            self._shape,
            a=self._a,
            dt_bias=self._dt_bias,
            cache=cache,
            layer=self._index,
            positions=positions,
            eps=self._rms_eps,
        )
        normed = ops.merge_heads(ops.rms_norm(heads, self._norm, self._rms_eps))
        return self._output(ops.gated(normed, gate, Gate.SILU), add=add)


class _Layer(Generic[A]):
    def __init__(self, file: GgufFile, ops: Ops[A], plan: _Plan, layer: _LayerPlan, index: int):
        kind = _DeltaNet if isinstance(layer.mixer, _DeltaPlan) else _Attention
        self.mixer: _Attention[A] | _DeltaNet[A] = kind(file, ops, plan, layer, index)
        self.attn_norm = ops.load_vector(file, f"{layer.prefix}attn_norm.weight")
        self.ffn_norm = ops.load_vector(file, f"{layer.prefix}post_attention_norm.weight")
        self.router = Linear(file, ops, layer.router)
        self.shared = Ffn(file, ops, layer.shared)


class Qwen35Moe(Generic[A]):
    """The forward pass. Shapes as in ops.Model."""

    def __init__(self, file: GgufFile, ops: Ops[A]) -> None:
        plan = _plan(file)
        self.spec = _spec(file, plan)
        self._rms_eps = plan.base.rms_eps
        self._rule = RoutingRule(plan.base.num_experts_used, Gating.SOFTMAX, normalise=True)
        self._ops = ops
        self._ends = Ends(file, ops, plan.ends, rms_eps=self._rms_eps)
        self._layers: list[_Layer[A]] = []
        num_of_kind = {_AttentionPlan: 0, _DeltaPlan: 0}
        for layer in plan.layers:
            kind = type(layer.mixer)
            self._layers.append(_Layer(file, ops, plan, layer, num_of_kind[kind]))
            num_of_kind[kind] += 1

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
            x = layer.mixer(ops.rms_norm(x, layer.attn_norm, eps), positions, cache, add=x)
            h = ops.rms_norm(x, layer.ffn_norm, eps)
            topk_ids, topk_weights = ops.route(layer.router(h), self._rule)
            shared = layer.shared.begin(h)
            x = ops.add(x, moe(layer_id, h, topk_ids, topk_weights), out=x)
            x = layer.shared.end(shared, add=x)
            on_layer(layer_id, x)
        return x

    def head(self, hidden: A) -> A:
        return self._ends.head(hidden)
