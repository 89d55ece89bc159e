"""qwen3moe: Qwen3-30B-A3B, Qwen3-Coder-30B-A3B and their finetunes.

Pre-norm transformer; grouped-query attention with a norm over each head of q and k; every layer's
FFN is a routed mixture: softmax over all experts, top-k, weights renormalised, no shared expert.

Source: the Qwen3 technical report (arXiv 2505.09388) and llama.cpp's graph of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.moe_spec import Activation, KvLayer, ModelSpec, MoeLayer, MoeSpec
from dflash_adapters.ops import Gating, KvCache, Matrix, MoeBlock, Ops, RoutingRule
from dflash_adapters.rope import RopePairing, RopeTable, YarnScaling, rope_table
from dflash_adapters.tensors import (
    all_matrices_f32,
    expect_tensor,
    refuse_other_tensors,
    stacked_experts,
)
from dflash_protocol.errors import ModelFileError, UnsupportedModel
from dflash_protocol.ids import I32Array

A = TypeVar("A")

_ARCH = "qwen3moe"


@dataclass(frozen=True, slots=True)
class Config:
    """The metadata keys this architecture is made of."""

    num_layers: int
    context_length: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    num_experts: int
    num_experts_used: int
    ffn_size: int


def read_config(file: GgufFile) -> Config:
    """Raises: ModelFileError for a missing or impossible key, UnsupportedModel for a setting that
    this adapter does not compute."""

    def uint(key: str, default: int | None = None) -> int:
        full = f"{_ARCH}.{key}"
        value = file.get_uint(full) if default is None else file.get_uint(full, default)
        if not 0 < value < 1 << 31:
            raise ModelFileError(f"{value} is out of range", path=file.path, field=full)
        return value

    hidden_size = uint("embedding_length")
    num_heads = uint("attention.head_count")
    num_experts_used = uint("expert_used_count")
    # Old converters left these out; the defaults are those of llama.cpp's loader.
    head_dim = uint("attention.key_length", max(1, hidden_size // num_heads))
    ffn_key = f"{_ARCH}.expert_feed_forward_length"
    ffn_size = (
        uint("expert_feed_forward_length")
        if file.has(ffn_key)
        else max(1, uint("feed_forward_length") // num_experts_used)
    )
    config = Config(
        num_layers=uint("block_count"),
        context_length=uint("context_length"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=uint("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_eps=file.get_float(f"{_ARCH}.attention.layer_norm_rms_epsilon"),
        num_experts=uint("expert_count"),
        num_experts_used=num_experts_used,
        ffn_size=ffn_size,
    )
    if not 0.0 < config.rms_eps < 1.0:
        raise ModelFileError(
            f"{config.rms_eps} is out of range",
            path=file.path,
            field=f"{_ARCH}.attention.layer_norm_rms_epsilon",
        )
    if config.num_heads % config.num_kv_heads:
        raise ModelFileError(
            f"{config.num_heads} heads cannot share {config.num_kv_heads} key/value heads",
            path=file.path,
            field=f"{_ARCH}.attention.head_count_kv",
        )
    if config.num_experts_used > config.num_experts:
        raise ModelFileError(
            f"{num_experts_used} experts used of {config.num_experts}",
            path=file.path,
            field=f"{_ARCH}.expert_used_count",
        )
    for key in ("attention.value_length", "rope.dimension_count"):
        if uint(key, head_dim) != head_dim:
            raise UnsupportedModel(
                f"differs from attention.key_length {head_dim}",
                path=file.path,
                field=f"{_ARCH}.{key}",
            )
    if head_dim % 2:
        raise UnsupportedModel(
            "odd head dimension", path=file.path, field=f"{_ARCH}.attention.key_length"
        )
    return config


def read_rope(file: GgufFile, config: Config) -> RopeTable:
    """Rotary table with the file's context scaling, if any."""
    base = file.get_float(f"{_ARCH}.rope.freq_base", 10000.0)
    kind = file.get_str(f"{_ARCH}.rope.scaling.type", "none")
    factor = file.get_float(f"{_ARCH}.rope.scaling.factor", 1.0)
    for key, is_sound in (("freq_base", 1.0 < base < 1e12), ("scaling.factor", factor >= 1.0)):
        if not is_sound:
            raise ModelFileError("out of range", path=file.path, field=f"{_ARCH}.rope.{key}")
    if file.get_float(f"{_ARCH}.rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            "only 1 is known", path=file.path, field=f"{_ARCH}.rope.scaling.attn_factor"
        )
    linear_factor, yarn = 1.0, None
    if kind == "linear":
        linear_factor = factor
    elif kind == "yarn":
        original = file.get_uint(
            f"{_ARCH}.rope.scaling.original_context_length", config.context_length, minimum=1
        )
        yarn = YarnScaling(factor, original)
    elif kind != "none":
        raise UnsupportedModel(
            f"rope scaling {kind!r}", path=file.path, field=f"{_ARCH}.rope.scaling.type"
        )
    return rope_table(
        RopePairing.HALF_SPLIT, config.head_dim, base, linear_factor=linear_factor, yarn=yarn
    )


def read_spec(file: GgufFile) -> ModelSpec:
    """See registry.Adapter."""
    config = read_config(file)
    hidden, head_dim = config.hidden_size, config.head_dim
    query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    vocab_size = file.tensor("token_embd.weight").num_rows
    known = set()

    def check(name: str, *shape: int) -> None:
        expect_tensor(file, name, shape)
        known.add(name)

    check("token_embd.weight", vocab_size, hidden)
    check("output_norm.weight", hidden)
    check(_output_name(file), vocab_size, hidden)
    layers = []
    for layer_id in range(config.num_layers):
        prefix = f"blk.{layer_id}."
        for name, shape in (
            ("attn_norm", (hidden,)),
            ("attn_q", (query_size, hidden)),
            ("attn_k", (kv_size, hidden)),
            ("attn_v", (kv_size, hidden)),
            ("attn_q_norm", (head_dim,)),
            ("attn_k_norm", (head_dim,)),
            ("attn_output", (hidden, query_size)),
            ("ffn_norm", (hidden,)),
            ("ffn_gate_inp", (config.num_experts, hidden)),
        ):
            check(f"{prefix}{name}.weight", *shape)
        gate, up, down = (
            stacked_experts(
                file,
                f"{prefix}ffn_{name}_exps.weight",
                num_experts=config.num_experts,
                rows=rows,
                columns=columns,
            )
            for name, rows, columns in (
                ("gate", config.ffn_size, hidden),
                ("up", config.ffn_size, hidden),
                ("down", hidden, config.ffn_size),
            )
        )
        known |= {gate.tensor_name, up.tensor_name, down.tensor_name}
        layers.append(
            MoeLayer(
                layer_id=layer_id,
                num_experts=config.num_experts,
                num_experts_used=config.num_experts_used,
                hidden_size=hidden,
                ffn_size=config.ffn_size,
                activation=Activation.SWIGLU,
                gate=gate,
                up=up,
                down=down,
            )
        )
    refuse_other_tensors(file, known)
    read_rope(file, config)
    return ModelSpec(
        architecture=_ARCH,
        name=file.get_str("general.name", file.path.stem),
        num_layers=config.num_layers,
        hidden_size=hidden,
        vocab_size=vocab_size,
        context_length=config.context_length,
        kv_layers=(KvLayer(config.num_kv_heads, head_dim, head_dim),) * config.num_layers,
        all_matrices_f32=all_matrices_f32(file),
        moe=MoeSpec(tuple(layers)),
    )


def load(file: GgufFile, ops: Ops[A]) -> Qwen3Moe[A]:
    """See registry.Adapter."""
    return Qwen3Moe(file, ops)


@dataclass(frozen=True, slots=True)
class _Layer(Generic[A]):
    attn_norm: A
    q: Matrix
    k: Matrix
    v: Matrix
    q_norm: A
    k_norm: A
    output: Matrix
    ffn_norm: A
    router: Matrix


class Qwen3Moe(Generic[A]):
    """The forward pass. Shapes as in ops.Model."""

    def __init__(self, file: GgufFile, ops: Ops[A]) -> None:
        self.spec = read_spec(file)
        self._config = read_config(file)
        self._rope = read_rope(file, self._config)
        self._rule = RoutingRule(self._config.num_experts_used, Gating.SOFTMAX, normalise=True)
        self._ops = ops
        self._token_embd = ops.load_matrix(file, "token_embd.weight")
        self._output_norm = ops.load_vector(file, "output_norm.weight")
        self._output = ops.load_matrix(file, _output_name(file))
        self._layers = [
            _load_layer(file, ops, layer_id) for layer_id in range(self._config.num_layers)
        ]

    def forward(
        self, token_ids: I32Array, positions: I32Array, cache: KvCache, moe: MoeBlock[A]
    ) -> A:
        ops, config = self._ops, self._config
        scale = config.head_dim**-0.5
        x = ops.embed(self._token_embd, token_ids)
        for layer_id, layer in enumerate(self._layers):
            h = ops.rms_norm(x, layer.attn_norm, config.rms_eps)
            projected = ops.project(h, (layer.q, layer.k, layer.v))
            heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
            q, k, v = map(ops.split_heads, projected, heads)
            ops.norm_and_rotate(
                q,
                k,
                positions,
                self._rope,
                q_weight=layer.q_norm,
                k_weight=layer.k_norm,
                eps=config.rms_eps,
            )
            attended = ops.attention(q, k, v, cache, layer_id, positions, scale)
            x = ops.linear(ops.merge_heads(attended), layer.output, out=x, add=x)
            h = ops.rms_norm(x, layer.ffn_norm, config.rms_eps)
            topk_ids, topk_weights = ops.route(ops.linear(h, layer.router), self._rule)
            x = ops.add(x, moe(layer_id, h, topk_ids, topk_weights), out=x)
        return x

    def head(self, hidden: A) -> A:
        normed = self._ops.rms_norm(hidden, self._output_norm, self._config.rms_eps)
        return self._ops.linear(normed, self._output)


def _output_name(file: GgufFile) -> str:
    """The head's tensor; a file without one ties it to the embedding."""
    return "output.weight" if "output.weight" in file.tensors else "token_embd.weight"


def _load_layer(file: GgufFile, ops: Ops[A], layer_id: int) -> _Layer[A]:
    def vector(name: str) -> A:
        return ops.load_vector(file, f"blk.{layer_id}.{name}.weight")

    def matrix(name: str) -> Matrix:
        return ops.load_matrix(file, f"blk.{layer_id}.{name}.weight")

    return _Layer(
        attn_norm=vector("attn_norm"),
        q=matrix("attn_q"),
        k=matrix("attn_k"),
        v=matrix("attn_v"),
        q_norm=vector("attn_q_norm"),
        k_norm=vector("attn_k_norm"),
        output=matrix("attn_output"),
        ffn_norm=vector("ffn_norm"),
        router=matrix("ffn_gate_inp"),
    )
