"""The qwen35moe and laguna architectures in PyTorch, laid out as their GGUF tensors are.

What they share with qwen3moe is taken from there. Their mathematics is that of the adapters of the
same names, which name its sources.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.config import LagunaConfig, ModelConfig, Qwen35MoeConfig
from demo.model import (
    Attention,
    Block,
    Experts,
    Model,
    Rounding,
    RoutingStats,
    fake_quantise_activations,
    rms_norm,
    rope_tables,
    rotate,
)

_CHUNK = 64
_BIAS_STEP = 1e-3


def rotate_part(x: Tensor, width: int, base: float) -> Tensor:
    """NEOX rotary embedding of the first `width` values of x (batch, heads, positions, ...)."""
    cos, sin = rope_tables(x.shape[2], width, base, x.device)
    return torch.cat([rotate(x[..., :width], cos, sin), x[..., width:]], dim=-1)


def heads_of(x: Tensor, count: int) -> Tensor:
    """x (batch, positions, count * width) as (batch, positions, count, width)."""
    return x.unflatten(-1, (count, -1))


class GatedAttention(Attention):
    """qwen35moe's: each query head's values are followed by those of its gate, a sigmoid."""

    def __init__(self, config: Qwen35MoeConfig) -> None:
        super().__init__(config, has_gates=True)

    def forward(self, x: Tensor, rounding: Rounding) -> Tensor:
        """x (batch, positions, d) to the same shape."""
        c, eps = self.config, self.config.layer_norm_rms_epsilon
        x = fake_quantise_activations(x, rounding.activation_levels)
        q, gate = heads_of(F.linear(x, self.q), self.head_count).chunk(2, dim=-1)
        k, v = (heads_of(F.linear(x, w), c.head_count_kv) for w in (self.k, self.v))
        q, k = (
            rotate_part(
                rms_norm(each, norm, eps).transpose(1, 2), c.rope_dimension_count, c.rope_freq_base
            )
            for each, norm in ((q, self.q_norm), (k, self.k_norm))
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        mixed = (mixed.transpose(1, 2) * gate.sigmoid()).flatten(-2)
        return F.linear(fake_quantise_activations(mixed, rounding.activation_levels), self.output)


class DeltaNet(nn.Module):
    """A causal convolution and the gated delta rule. Value head h has key head h mod key heads."""

    def __init__(self, config: Qwen35MoeConfig) -> None:
        super().__init__()
        self.config = config
        d, size, heads = (
            config.embedding_length,
            config.ssm_state_size,
            config.ssm_time_step_rank,
        )
        channels = (2 * config.ssm_group_count + heads) * size
        self.qkv = nn.Parameter(torch.empty(channels, d))
        self.gate = nn.Parameter(torch.empty(heads * size, d))
        self.alpha = nn.Parameter(torch.empty(heads, d))
        self.beta = nn.Parameter(torch.empty(heads, d))
        self.conv = nn.Parameter(torch.empty(channels, config.ssm_conv_kernel))
        # Heads forget within some tokens, or some thousands.
        self.dt_bias = nn.Parameter(torch.linspace(-5.0, -2.0, heads))
        self.log_a = nn.Parameter(torch.linspace(0.0, 1.0, heads))
        self.norm = nn.Parameter(torch.ones(size))
        self.output = nn.Parameter(torch.empty(d, heads * size))

    def forward(self, x: Tensor, rounding: Rounding) -> Tensor:
        """x (batch, positions, d) to the same shape."""
        c = self.config
        x = fake_quantise_activations(x, rounding.activation_levels)
        mixed = F.linear(x, self.qkv).transpose(1, 2)
        mixed = F.pad(mixed, (c.ssm_conv_kernel - 1, 0))
        mixed = F.silu(F.conv1d(mixed, self.conv[:, None].to(mixed.dtype), groups=len(self.conv)))
        with torch.autocast(x.device.type, enabled=False):
            wide = mixed.transpose(1, 2).float()
            keys = c.ssm_group_count * c.ssm_state_size
            q, k, v = wide.split([keys, keys, wide.shape[-1] - 2 * keys], dim=-1)
            repeats = c.ssm_time_step_rank // c.ssm_group_count
            q, k = (
                unit(heads_of(each, c.ssm_group_count), c.layer_norm_rms_epsilon)
                .repeat(1, 1, repeats, 1)
                .transpose(1, 2)
                for each in (q, k)
            )
            v = heads_of(v, c.ssm_time_step_rank).transpose(1, 2)
            decay = F.softplus(F.linear(x.float(), self.alpha) + self.dt_bias)
            decay = -self.log_a.exp() * decay
            share = F.linear(x.float(), self.beta).sigmoid()
            heads = delta_rule(
                q * c.ssm_state_size**-0.5, k, v, decay.transpose(1, 2), share.transpose(1, 2)
            )
        normed = rms_norm(heads.transpose(1, 2), self.norm, c.layer_norm_rms_epsilon).flatten(-2)
        gated = normed.to(x.dtype) * F.silu(F.linear(x, self.gate))
        return F.linear(fake_quantise_activations(gated, rounding.activation_levels), self.output)


def unit(x: Tensor, eps: float) -> Tensor:
    """x over its length along the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, share: Tensor) -> Tensor:
    """The gated delta rule in chunks, from a state of zeros.

    Shapes: q, k, v, result (batch, heads, positions, width); decay (logarithms), share (batch,
    heads, positions). Source: Yang et al. 2024 (arXiv 2412.06464).
    """
    length = q.shape[2]
    padding = -length % _CHUNK
    q, k, v = (F.pad(each, (0, 0, 0, padding)).unflatten(2, (-1, _CHUNK)) for each in (q, k, v))
    decay, share = (F.pad(each, (0, padding)).unflatten(2, (-1, _CHUNK)) for each in (decay, share))
    share = share[..., None]
    total = decay.cumsum(-1)
    since_begin = total.exp()[..., None]
    until_end = (total[..., -1:] - total).exp()[..., None]
    apart = total[..., :, None] - total[..., None, :]
    later = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=q.device).tril()
    between = apart.masked_fill(~later, -torch.inf).exp()
    triangle = (share * (k @ k.mT) * between).tril(-1)
    # Its powers grow where keys are alike, so the inverse of 1 + triangle is not made of them.
    values, keys = torch.linalg.solve_triangular(
        torch.eye(_CHUNK, device=q.device) + triangle,
        torch.cat([share * v, share * since_begin * k], dim=-1),
        upper=False,
        unitriangular=True,
    ).split([v.shape[-1], k.shape[-1]], dim=-1)
    seen = (q @ k.mT) * between
    state = torch.zeros_like(k[:, :, 0].mT @ v[:, :, 0])
    out = []
    for chunk in range(q.shape[2]):
        new = values[:, :, chunk] - keys[:, :, chunk] @ state
        out.append((since_begin * q)[:, :, chunk] @ state + seen[:, :, chunk] @ new)
        state = state * since_begin[:, :, chunk, -1:] + (until_end * k)[:, :, chunk].mT @ new
    return torch.cat(out, dim=2)[:, :, :length]


class SharedExpert(nn.Module):
    """A SwiGLU that every token uses."""

    def __init__(self, embedding: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(width, embedding))
        self.up = nn.Parameter(torch.empty(width, embedding))
        self.down = nn.Parameter(torch.empty(embedding, width))

    def forward(self, x: Tensor, rounding: Rounding) -> Tensor:
        """x (batch, positions, d) to the same shape."""
        x = fake_quantise_activations(x, rounding.activation_levels)
        hidden = F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)
        return F.linear(fake_quantise_activations(hidden, rounding.activation_levels), self.down)


class GatedSharedExperts(Experts):
    """qwen35moe's: a shared expert beside the routed ones, times a sigmoid."""

    def __init__(self, config: Qwen35MoeConfig) -> None:
        super().__init__(config)
        d = config.embedding_length
        self.shared = SharedExpert(d, config.expert_shared_feed_forward_length)
        self.shared_gate = nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor, rounding: Rounding) -> tuple[Tensor, RoutingStats]:
        """x (batch, positions, d) to the same shape, and the routing statistics."""
        y, stats = super().forward(x, rounding)
        share = (x.float() @ self.shared_gate).sigmoid()[..., None]
        return y + share.to(y.dtype) * self.shared(x, rounding), stats


class Qwen35Moe(Model):
    """See Qwen35MoeConfig."""

    def block(self, layer: int) -> Block:
        """As Model.block."""
        c = self.config
        assert isinstance(c, Qwen35MoeConfig)
        mixer = DeltaNet(c) if c.is_recurrent(layer) else GatedAttention(c)
        return Block(c, mixer, GatedSharedExperts(c))


class LagunaAttention(Attention):
    """Over everything or a window; each head's result times the softplus of its gate."""

    def __init__(self, config: LagunaConfig, layer: int) -> None:
        super().__init__(config, head_count=config.heads_of(layer))
        self.is_windowed = config.is_windowed(layer)
        self.gate = nn.Parameter(torch.empty(self.head_count, config.embedding_length))

    def forward(self, x: Tensor, rounding: Rounding) -> Tensor:
        """x (batch, positions, d) to the same shape."""
        c, eps = self.config, self.config.layer_norm_rms_epsilon
        x = fake_quantise_activations(x, rounding.activation_levels)
        width, base, seen = c.rope_dimension_count, c.rope_freq_base, None
        if self.is_windowed:
            width, base = c.key_length, c.rope_freq_base_swa
            places = torch.arange(x.shape[1], device=x.device)
            apart = places[:, None] - places
            seen = (apart >= 0) & (apart < c.sliding_window)
        q = rms_norm(heads_of(F.linear(x, self.q), self.head_count), self.q_norm, eps)
        k = rms_norm(heads_of(F.linear(x, self.k), c.head_count_kv), self.k_norm, eps)
        v = heads_of(F.linear(x, self.v), c.head_count_kv).transpose(1, 2)
        q, k = (rotate_part(each.transpose(1, 2), width, base) for each in (q, k))
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True
        )
        gate = F.softplus(F.linear(x, self.gate))
        mixed = (mixed.transpose(1, 2) * gate[..., None]).flatten(-2)
        return F.linear(fake_quantise_activations(mixed, rounding.activation_levels), self.output)


class BiasedExperts(Experts):
    """laguna's: chosen by sigmoid and a bias, weighted by sigmoid; a shared expert beside them.

    The bias takes part in no gradient: it goes up for who is chosen too seldom.
    """

    def __init__(self, config: LagunaConfig) -> None:
        super().__init__(config)
        self.scale = config.expert_weights_scale
        self.bias = nn.Parameter(torch.zeros(config.expert_count), requires_grad=False)
        self.shared = SharedExpert(
            config.embedding_length, config.expert_shared_feed_forward_length
        )

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As Experts.choose."""
        scores = logits.sigmoid()
        return scores, (scores + self.bias).topk(self.config.expert_used_count, dim=-1).indices

    def forward(self, x: Tensor, rounding: Rounding) -> tuple[Tensor, RoutingStats]:
        """x (batch, positions, d) to the same shape, and the routing statistics."""
        y, stats = super().forward(x, rounding)
        return y + self.shared(x, rounding), stats


class Dense(SharedExpert):
    """The FFN of a layer without experts."""

    def forward(self, x: Tensor, rounding: Rounding) -> tuple[Tensor, None]:
        """x (batch, positions, d) to the same shape; there are no statistics."""
        return super().forward(x, rounding), None


class Laguna(Model):
    """See LagunaConfig."""

    def block(self, layer: int) -> Block:
        """As Model.block."""
        c = self.config
        assert isinstance(c, LagunaConfig)
        is_dense = c.is_dense(layer)
        ffn = Dense(c.embedding_length, c.feed_forward_length) if is_dense else BiasedExperts(c)
        return Block(c, LagunaAttention(c, layer), ffn)

    @torch.no_grad()
    def after_step(self, shares: Tensor) -> None:
        """As Model.after_step: biases move towards equal shares."""
        routed = [b.experts for b in self.blocks if isinstance(b.experts, BiasedExperts)]
        for experts, share in zip(routed, shares, strict=True):
            experts.bias += _BIAS_STEP * (share.mean() - share).sign()


MODELS: dict[type[ModelConfig], type[Model]] = {
    ModelConfig: Model,
    Qwen35MoeConfig: Qwen35Moe,
    LagunaConfig: Laguna,
}


def make_model(config: ModelConfig) -> Model:
    """A model with new weights."""
    return MODELS[type(config)](config)
