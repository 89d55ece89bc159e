"""Muon for the weight matrices and AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

_NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NO_MATRICES = ("token_embd", "router", "conv", "alpha", "beta")


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrices of g (n, rows, cols)."""
    a, b, c = _NS_COEFFICIENTS
    x = g.bfloat16() if g.is_cuda else g.float()  # which processors are quicker with
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised per matrix; leading axes of a parameter are separate matrices."""

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update; parameters of equal shape go through the iteration together."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                by_shape[(p.shape[-2], p.shape[-1])].append(p)
            for (rows, cols), params in by_shape.items():
                updates: list[Tensor] = []
                for p in params:
                    if p.grad is None:
                        raise ValueError("a parameter has no gradient")
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                    update = p.grad.lerp(state["momentum"], group["momentum"])
                    updates.append(update.reshape(-1, rows, cols))
                stacked = orthogonalise(torch.cat(updates))
                scale = max(1.0, rows / cols) ** 0.5
                pieces = stacked.split([u.shape[0] for u in updates])
                for p, piece in zip(params, pieces, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(piece.view_as(p).to(p.dtype), alpha=-group["lr"] * scale)


def make_optimizers(
    model: nn.Module, matrix_lr: float, other_lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for attention and expert matrices; AdamW for embedding, routers, norms and the like."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        is_matrix = p.ndim > 1 and not name.endswith(_NO_MATRICES)
        (matrices if is_matrix else others).append(p)
    vectors = [p for p in others if p.ndim == 1]
    tables = [p for p in others if p.ndim > 1]
    adam = torch.optim.AdamW(
        [
            {"params": tables, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=other_lr,
        betas=(0.9, 0.95),
        fused=tables[0].is_cuda,
    )
    return [Muon(matrices, matrix_lr, weight_decay), adam]
