"""The training loop: multi-epoch language modelling, the last part at full context length."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from demo.architectures import make_model
from demo.config import ModelConfig
from demo.data import VALIDATION_SPLIT, Corpus
from demo.model import EXACT, Model, Rounding
from demo.optim import make_optimizers


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of a run; the `_from` fields are shares of the steps."""

    steps: int = 9000
    batch_tokens: int = 65536
    short_length: int = 1024
    long_from: float = 0.4
    decay_from: float = 0.4
    warmup_steps: int = 200
    matrix_lr: float = 0.02
    other_lr: float = 0.003
    weight_decay: float = 0.1
    dropout: float = 0.1
    balance: float = 6e-4
    warmup_balance: float = 1e-2
    z: float = 1e-4
    activation_levels: int = 2
    seed: int = 1

    def learning_rate(self, step: int) -> float:
        """Multiplier of the peak rates: linear warm-up, constant, linear decay to zero."""
        left = (self.steps - step) / (self.steps * (1 - self.decay_from))
        return min((step + 1) / self.warmup_steps, 1.0, left)

    def rounding(self, step: int) -> Rounding:
        """Roundings imitated at a step: none, then those of the exported file and coarser."""
        return Rounding(True, self.activation_levels) if self.is_long(step) else EXACT

    def is_long(self, step: int) -> bool:
        """Whether a step trains at full context length, with rounding."""
        return step >= self.long_from * self.steps


def windows(
    corpus: Corpus, eos: int, length: int, per_batch: int, rng: np.random.Generator
) -> Iterator[npt.NDArray[np.int64]]:
    """Endless batches (per_batch, length + 1) cut from freshly drawn epochs."""
    while True:
        stream = corpus.stream(corpus.epoch(rng), eos)
        starts = np.arange(rng.integers(length), len(stream) - length - 1, length)
        rng.shuffle(starts)
        usable = len(starts) // per_batch * per_batch
        if not usable:
            raise ValueError("the corpus is shorter than one batch")
        for chosen in starts[:usable].reshape(-1, per_batch):
            yield stream[chosen[:, None] + np.arange(length + 1)].astype(np.int64)


@torch.no_grad()
def bits_per_byte(
    model: Model, stream: npt.NDArray[np.uint16], n_bytes: int, rounding: Rounding
) -> float:
    """Compression of a token stream (n,) that stands for n_bytes of text.

    Windows of the full context length advance by half; a token is scored in the first window that
    gives it at least half a context of history (or all there is). End-of-text tokens count.
    """
    length = model.config.context_length
    device = model.token_embd.device
    tokens = torch.from_numpy(stream.astype(np.int64)).to(device)
    nats, scored = 0.0, 1
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for start in range(0, len(tokens) - 1, length // 2):
            window = tokens[start : start + length + 1]
            logits = model(window[None, :-1], rounding)[0][0]
            skip = scored - start - 1
            loss = F.cross_entropy(logits[skip:].float(), window[1:][skip:], reduction="sum")
            nats += loss.item()
            scored = start + len(window)
            if scored == len(tokens):
                break
    return nats / math.log(2) / n_bytes


@torch.no_grad()
def top_1_agreement(model: Model, stream: npt.NDArray[np.uint16]) -> float:
    """Share of positions whose most likely token stays the same when activations are Q8_0."""
    tokens = torch.from_numpy(stream.astype(np.int64)).to(model.token_embd.device)
    same = 0
    torch.set_float32_matmul_precision("highest")
    for window in tokens.split(model.config.context_length):
        exact = model(window[None], Rounding(True))[0].argmax(-1)
        rounded = model(window[None], Rounding(True, 127))[0].argmax(-1)
        same += int((exact == rounded).sum())
    torch.set_float32_matmul_precision("high")
    return same / len(tokens)


def make_loss(
    model: Model, config: TrainingConfig
) -> Callable[[Tensor, float, Rounding], tuple[Tensor, Tensor, Tensor]]:
    """The training objective as a function that torch.compile can take."""

    def loss(batch: Tensor, balance: float, rounding: Rounding) -> tuple[Tensor, Tensor, Tensor]:
        """Objective, cross entropy, and expert shares (layers, experts) of a batch."""
        logits, stats = model(batch[:, :-1], rounding, config.dropout)
        entropy = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        extra = balance * sum(s.balance for s in stats) + config.z * sum(s.z for s in stats)
        return entropy + extra, entropy.detach(), torch.stack([s.share for s in stats])

    return loss


def top_quarter(share: Tensor) -> float:
    """What part of the selections goes to the most chosen quarter of the experts."""
    most = share.topk(share.shape[-1] // 4).values
    return float((most.sum(-1) / share.sum(-1)).mean())


def train(
    corpus: Corpus,
    eos: int,
    model_config: ModelConfig,
    config: TrainingConfig,
    device: torch.device,
    log: Path,
) -> Model:
    """Train a model from scratch; progress goes to `log` as JSON lines."""
    torch.manual_seed(config.seed)
    rng = np.random.default_rng(config.seed)
    torch.set_float32_matmul_precision("high")
    model = make_model(model_config).to(device)
    optimizers = make_optimizers(model, config.matrix_lr, config.other_lr, config.weight_decay)
    peaks = [[g["lr"] for g in o.param_groups] for o in optimizers]
    on_gpu = device.type == "cuda"
    loss_of = make_loss(model, config)
    if on_gpu:
        loss_of = torch.compile(loss_of, dynamic=False)

    def batches(length: int) -> Iterator[npt.NDArray[np.int64]]:
        return windows(corpus, eos, length, config.batch_tokens // length, rng)

    validation = corpus.newest(VALIDATION_SPLIT)
    held = corpus.stream(validation, eos), int(corpus.n_bytes[validation].sum())
    source = batches(config.short_length)
    started = time.monotonic()
    for step in range(config.steps):
        is_long = config.is_long(step)
        if is_long and not config.is_long(step - 1):
            source = batches(model_config.context_length)
        batch = torch.from_numpy(next(source)).to(device, non_blocking=True)
        balance = config.warmup_balance if step < config.warmup_steps else config.balance
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            objective, entropy, share = loss_of(batch, balance, config.rounding(step))
        objective.backward()
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * config.learning_rate(step)
            optimizer.step()
            optimizer.zero_grad()
        model.after_step(share)
        last = step + 1 == config.steps
        if step % 100 == 0 or last:
            record = {
                "step": step,
                "seconds": round(time.monotonic() - started, 1),
                "nats_per_token": round(entropy.item(), 4),
                "least_share": round(share.min().item(), 5),
                "top_quarter_share": round(top_quarter(share), 4),
            }
            if (step and step % 1000 == 0) or last:
                model.eval()
                record["validation_bpb"] = round(bits_per_byte(model, *held, Rounding(is_long)), 4)
                record["validation_agreement"] = round(top_1_agreement(model, held[0]), 5)
                model.train()
            with log.open("a") as out:
                out.write(json.dumps(record) + "\n")
    model.eval()
    return model
