"""The qwen3moe architecture in PyTorch, laid out as its GGUF tensors are, and what others share.

The feed-forward experts run as one dense SwiGLU of width n_expert * expert_ff whose hidden units
are scaled by the router's weight for their expert (zero when it is not selected). That is the same
function as routing tokens to experts, and at this size it is the quicker one to train.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.config import ModelConfig


@dataclass(frozen=True)
class RoutingStats:
    """What the router did in one forward pass, averaged over positions.

    Shapes: share (n_expert,) is the share of positions that selected each expert (sums to the
    number of experts used); balance and z are scalars to be weighted into the loss.
    """

    share: Tensor
    balance: Tensor
    z: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32, returned in the type of x."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def rope_tables(
    length: int, width: int, base: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles: two tensors (length, width / 2), float32."""
    inverse = base ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inverse
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """NEOX rotary embedding of x (batch, heads, positions, width)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def fake_quantise(weight: Tensor) -> Tensor:
    """Round to the values Q5_0 can hold (blocks of 32 along the last axis); gradients pass through.

    A block's scale is its value of largest magnitude divided by -16, stored in half precision.
    """
    blocks = weight.detach().float().unflatten(-1, (-1, 32))
    peak = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = peak / -16
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    codes = (blocks * inverse + 16.5).clamp(0, 31).floor() - 16
    rounded = (codes * scale.half().float()).flatten(-2)
    return weight + (rounded.to(weight.dtype) - weight).detach()


def fake_quantise_activations(x: Tensor, levels: int) -> Tensor:
    """Round x to integers times a scale per block of 32, `levels` being the largest integer.

    Runtimes that multiply in integers round so with levels = 127 (Q8_0); training with fewer makes
    the model insensitive to it. 0 leaves x as it is. Gradients pass through.
    """
    if not levels:
        return x
    blocks = x.detach().float().unflatten(-1, (-1, 32))
    scale = (blocks.abs().amax(-1, keepdim=True) / levels).clamp_min(1e-12)
    rounded = ((blocks / scale).round() * scale).flatten(-2)
    return x + (rounded.to(x.dtype) - x).detach()


@dataclass(frozen=True)
class Rounding:
    """Which roundings a forward pass imitates: experts to Q5_0, and activations (see above)."""

    experts: bool = False
    activation_levels: int = 0


EXACT = Rounding()


class Attention(nn.Module):
    """Causal grouped-query attention with per-head q and k norms."""

    def __init__(
        self, config: ModelConfig, *, head_count: int | None = None, has_gates: bool = False
    ) -> None:
        """Other architectures may have another number of query heads, or gates beside queries."""
        super().__init__()
        self.config = config
        self.head_count = head_count or config.head_count
        d, width = config.embedding_length, config.key_length
        self.q = nn.Parameter(torch.empty((1 + has_gates) * self.head_count * width, d))
        self.k = nn.Parameter(torch.empty(config.head_count_kv * width, d))
        self.v = nn.Parameter(torch.empty(config.head_count_kv * width, d))
        self.output = nn.Parameter(torch.empty(d, self.head_count * width))
        self.q_norm = nn.Parameter(torch.ones(width))
        self.k_norm = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, rounding: Rounding) -> Tensor:
        """x (batch, positions, d) to the same shape."""
        c = self.config
        cos, sin = rope_tables(x.shape[1], c.key_length, c.rope_freq_base, x.device)
        x = fake_quantise_activations(x, rounding.activation_levels)
        batch, length, _ = x.shape
        q = F.linear(x, self.q).view(batch, length, c.head_count, c.key_length)
        k = F.linear(x, self.k).view(batch, length, c.head_count_kv, c.key_length)
        v = F.linear(x, self.v).view(batch, length, c.head_count_kv, c.key_length)
        q = rms_norm(q, self.q_norm, c.layer_norm_rms_epsilon).transpose(1, 2)
        k = rms_norm(k, self.k_norm, c.layer_norm_rms_epsilon).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        return F.linear(fake_quantise_activations(mixed, rounding.activation_levels), self.output)


class Experts(nn.Module):
    """Routed SwiGLU experts: softmax over all, top-k, renormalised weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.scale = 1.0
        n, d, ff = config.expert_count, config.embedding_length, config.expert_feed_forward_length
        self.router = nn.Parameter(torch.empty(n, d))
        self.gate = nn.Parameter(torch.empty(n, ff, d))
        self.up = nn.Parameter(torch.empty(n, ff, d))
        self.down = nn.Parameter(torch.empty(n, d, ff))

    def forward(self, x: Tensor, rounding: Rounding) -> tuple[Tensor, RoutingStats]:
        """x (batch, positions, d) to the same shape, and the routing statistics."""
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.router)
            scores, ids = self.choose(logits)
            probs = scores / scores.sum(-1, keepdim=True)
            top = scores.gather(-1, ids)
            top = self.scale * top / top.sum(-1, keepdim=True)
            weights = torch.zeros_like(probs).scatter(-1, ids, top)
            share = (weights > 0).float().flatten(0, 1).mean(0)
            used = share / c.expert_used_count
            balance = c.expert_count * (used * probs.flatten(0, 1).mean(0)).sum()
            z = logits.logsumexp(-1).square().mean()
        gate, up, down = self.gate, self.up, self.down
        x = fake_quantise_activations(x, rounding.activation_levels)
        if rounding.experts:
            gate, up, down = fake_quantise(gate), fake_quantise(up), fake_quantise(down)
        hidden = F.silu(F.linear(x, gate.flatten(0, 1))) * F.linear(x, up.flatten(0, 1))
        hidden = fake_quantise_activations(hidden, rounding.activation_levels)
        hidden = hidden.unflatten(-1, (c.expert_count, -1)) * weights.to(hidden.dtype)[..., None]
        y = F.linear(hidden.flatten(-2), down.permute(1, 0, 2).flatten(1))
        return y, RoutingStats(share.detach(), balance, z)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What experts are weighted by (..., n_expert), and the ids of the chosen ones."""
        scores = logits.softmax(-1)
        return scores, scores.topk(self.config.expert_used_count, dim=-1).indices


class Block(nn.Module):
    """One layer: attention and experts, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, attention: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.eps = config.layer_norm_rms_epsilon
        self.attn_norm = nn.Parameter(torch.ones(config.embedding_length))
        self.ffn_norm = nn.Parameter(torch.ones(config.embedding_length))
        self.attention = attention
        self.experts = experts

    def forward(
        self, x: Tensor, dropout: float, rounding: Rounding
    ) -> tuple[Tensor, RoutingStats | None]:
        """x (batch, positions, d) to the same shape, and the routing statistics if it routes."""
        y = self.attention(rms_norm(x, self.attn_norm, self.eps), rounding)
        x = x + F.dropout(y, dropout, self.training)
        y, stats = self.experts(rms_norm(x, self.ffn_norm, self.eps), rounding)
        return x + F.dropout(y, dropout, self.training), stats


class Model(nn.Module):
    """Token embedding, blocks, final norm; the output matrix is the embedding (tied)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Parameter(torch.empty(config.vocab_size, config.embedding_length))
        self.blocks = nn.ModuleList(self.block(layer) for layer in range(config.block_count))
        self.output_norm = nn.Parameter(torch.ones(config.embedding_length))
        self.reset_parameters()

    def block(self, layer: int) -> Block:
        """A new block of the architecture."""
        return Block(self.config, Attention(self.config), Experts(self.config))

    def after_step(self, shares: Tensor) -> None:
        """Told after each step of training what share of positions (layers, experts) chose whom."""

    def reset_parameters(self) -> None:
        """Normal initialisation; matrices that write to the residual stream start small."""
        nn.init.normal_(self.token_embd, std=0.02)
        for name, p in self.blocks.named_parameters():
            if p.ndim > 1:
                writes = name.endswith(("output", "down"))
                std = p.shape[-1] ** -0.5
                nn.init.normal_(
                    p, std=std / (2 * self.config.block_count) ** 0.5 if writes else std
                )

    def forward(
        self, tokens: Tensor, rounding: Rounding = EXACT, dropout: float = 0.0
    ) -> tuple[Tensor, list[RoutingStats]]:
        """Logits (batch, positions, vocab) of tokens (batch, positions), and routing per layer."""
        c = self.config
        x = F.dropout(F.embedding(tokens, self.token_embd), dropout, self.training)
        if torch.is_autocast_enabled(tokens.device.type):
            x = x.to(torch.get_autocast_dtype(tokens.device.type))
        stats: list[RoutingStats] = []
        for block in self.blocks:
            x, layer_stats = block(x, dropout, rounding)
            if layer_stats is not None:
                stats.append(layer_stats)
        x = rms_norm(x, self.output_norm, c.layer_norm_rms_epsilon)
        x = fake_quantise_activations(x, rounding.activation_levels)
        return F.linear(x, self.token_embd), stats
