"""Trains the demo model that chats on made talks, and writes it as a GGUF file.

    python -m demo.chat.train --out demo/dflash-demo-chat.gguf --minutes 4

goes on from `dflash-demo.gguf`; with `--shape small` it starts with new weights of a model a
quarter as large, and takes only the vocabulary. At the end it says how many answers to held-out
talks are right.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo.chat.checks import counts
from demo.chat.samples import NO_LOSS, batches, samples
from demo.chat.talks import Asked, talks
from demo.chat.template import CHAT_TOKENS, CONTROL_TOKENS, END, TAGS, TEMPLATE, prompt_of
from demo.config import ModelConfig
from demo.export import ChatFacts, export, read_weights
from demo.model import Model, Rounding
from demo.optim import make_optimizers
from demo.training import TrainingConfig
from demo.vocab import end_of_text_id, read_vocabulary
from demo.weights import save_weights

SMALL = ModelConfig(
    context_length=2048,
    embedding_length=128,
    key_length=32,
    expert_count=16,
    expert_used_count=2,
)
TINY = ModelConfig(
    context_length=1024,
    block_count=2,
    embedding_length=64,
    head_count=2,
    head_count_kv=1,
    key_length=32,
    expert_count=8,
    expert_used_count=2,
    expert_feed_forward_length=32,
)
"""To try the code."""
_TOLD_EVERY_S = 10.0

SHAPES = {"demo": None, "small": SMALL, "tiny": TINY}


@dataclasses.dataclass(frozen=True)
class Run:
    """Bounds of a run: it ends with the steps, or with the minutes, not counting compilation."""

    steps: int
    minutes: float
    row_length: int
    batch_tokens: int
    n_talks: int
    is_compiled: bool
    seed: int = 1


def make_model(base: Path, shape: ModelConfig | None) -> Model:
    """A model with the base's weights, or a new one of another shape."""
    if shape is not None:
        return Model(shape)
    config, arrays = read_weights(base)
    model = Model(config)
    model.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})
    first = config.vocab_size - 1 - len(CHAT_TOKENS)
    with torch.no_grad():
        # The new tokens begin near the mean, so that none is likely at first.
        embedding = model.token_embd
        mean, spread = embedding.mean(0), embedding.std(0)
        noise = torch.randn(len(CHAT_TOKENS), config.embedding_length)
        embedding[first:-1] = mean + 0.3 * spread * noise
    return model


def train(model: Model, run: Run, settings: TrainingConfig, tokenizer: Tokenizer) -> None:
    """Train; progress is printed as JSON lines."""
    device = model.token_embd.device
    on_gpu = device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    made = samples(run.n_talks, tokenizer, seed=run.seed)
    learned = sum(len(each.tokens) - each.n_prompt for each in made)
    print(json.dumps({"answers": len(made), "learned_tokens": learned}), flush=True)
    optimizers = make_optimizers(
        model, settings.matrix_lr, settings.other_lr, settings.weight_decay
    )
    peaks = [[group["lr"] for group in each.param_groups] for each in optimizers]

    def loss(
        tokens: Tensor, targets: Tensor, balance: Tensor, rounding: Rounding
    ) -> tuple[Tensor, Tensor]:
        """Objective, and cross entropy of the answers' tokens."""
        logits, stats = model(tokens, rounding, settings.dropout)
        entropy = F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=NO_LOSS
        )
        extra = balance * sum(s.balance for s in stats) + settings.z * sum(s.z for s in stats)
        return entropy + extra, entropy.detach()

    loss_of = torch.compile(loss, dynamic=False) if run.is_compiled else loss
    source = batches(
        made,
        run.row_length,
        run.batch_tokens // run.row_length,
        pad=end_of_text_id(tokenizer),
        seed=run.seed,
    )
    balances = [
        torch.tensor(each, device=device) for each in (settings.warmup_balance, settings.balance)
    ]

    def backward(done: int) -> Tensor:
        """Add the gradients of one batch; returns its cross entropy."""
        tokens, targets = (torch.from_numpy(each).to(device) for each in next(source))
        balance = balances[done >= settings.warmup_steps]
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            objective, entropy = loss_of(tokens, targets, balance, settings.rounding(done))
        objective.backward()
        return entropy

    model.train()
    if run.is_compiled:
        for done in (0, run.steps - 1):
            backward(done)
        for optimizer in optimizers:
            optimizer.zero_grad()
    started = time.monotonic()
    step = done = 0
    told = -_TOLD_EVERY_S
    while done < run.steps:
        entropy = backward(done)
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * settings.learning_rate(done)
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.monotonic() - started
        step += 1
        # Where time ends the run, the schedule follows it.
        done = max(step, int(run.steps * seconds / (60 * run.minutes)))
        if seconds >= told + _TOLD_EVERY_S or done >= run.steps:
            told = seconds
            nats = round(entropy.item(), 4)
            record = {"step": step, "of": run.steps, "seconds": round(seconds, 1), "nats": nats}
            print(json.dumps(record), flush=True)
    model.eval()


@torch.no_grad()
def answered(model: Model, asked: list[Asked], tokenizer: Tokenizer, n_most: int) -> list[str]:
    """The most likely answers, computed as a runtime with 8-bit activations does."""
    device = model.token_embd.device
    prompts = [tokenizer.encode(prompt_of(each), add_special_tokens=False).ids for each in asked]
    end = tokenizer.token_to_id(END)
    lengths = torch.tensor([len(each) for each in prompts], device=device)
    rows = np.full((len(prompts), int(lengths.max()) + n_most), end, np.int64)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    tokens = torch.from_numpy(rows).to(device)
    places = torch.arange(len(prompts), device=device)
    is_done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for i in range(n_most):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens[:, : int(lengths.max()) + i], Rounding(True, 127))[0]
        chosen = logits[places, lengths - 1 + i].argmax(-1)
        tokens[places, lengths + i] = torch.where(is_done, end, chosen)
        is_done |= chosen == end
        if is_done.all():
            break
    texts = []
    for row, prompt in zip(tokens.tolist(), prompts, strict=True):
        text: str = tokenizer.decode(row[len(prompt) :], skip_special_tokens=False)
        texts.append(text.partition(END)[0])
    return texts


def held_out(n: int) -> list[Asked]:
    """The first answers of held-out talks."""
    return [*islice((asked for talk in talks(1, held_out=True) for asked in talk.asked()), n)]


def evaluate(model: Model, tokenizer: Tokenizer, n: int) -> None:
    """Print how many of so many held-out answers are right, and some answers that are wrong."""
    asked = held_out(n)
    texts: list[str] = []
    for at in range(0, n, 64):
        texts += answered(model, asked[at : at + 64], tokenizer, n_most=96)
    pairs = [*zip(asked, texts, strict=True)]
    print(json.dumps({"right": counts(pairs)}), flush=True)
    wrong = [pair for pair in pairs if counts([pair])["all"] == "0/1"]
    for each, text in wrong[:8]:
        last = each.messages[-1]["content"]
        print(json.dumps({"asked": last, "answered": text, "key": each.answer.key}), flush=True)


def write(model: Model, tokenizer: Tokenizer, out: Path) -> None:
    """Quantise into a GGUF file."""
    facts = ChatFacts(TEMPLATE, END, CONTROL_TOKENS, TAGS)
    with tempfile.TemporaryDirectory() as folder:
        save_weights(model, Path(folder))
        export(Path(folder), tokenizer, out, chat=facts)
    print(json.dumps({"file": str(out), "bytes": out.stat().st_size}), flush=True)


def parse_args() -> argparse.Namespace:
    """The command line."""
    here = Path(__file__).resolve().parents[1]
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m demo.chat.train",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--base", type=Path, default=here / "dflash-demo.gguf", help="GGUF file")
    parser.add_argument("--shape", choices=[*SHAPES], default="demo")
    parser.add_argument(
        "--out", type=Path, default=here / "dflash-demo-chat.gguf", help="GGUF file"
    )
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="of training, without compilation"
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--talks", type=int, default=20000)
    parser.add_argument("--row-length", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--matrix-lr", type=float, help="default: 0.02, or 0.005 from a base")
    parser.add_argument("--other-lr", type=float, help="default: 0.003, or 0.001 from a base")
    parser.add_argument("--held-out", type=int, default=512, help="answers that are looked at")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
    return parser.parse_args()


def main() -> None:
    """Train, write, evaluate."""
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    tokenizer = read_vocabulary(args.base, CHAT_TOKENS)
    shape = SHAPES[args.shape]
    model = make_model(args.base, shape).to(device)
    is_new = shape is not None
    settings = TrainingConfig(
        steps=args.steps,
        long_from=0.5 if is_new else 0.0,
        warmup_steps=100,
        matrix_lr=args.matrix_lr or (0.02 if is_new else 0.005),
        other_lr=args.other_lr or (0.003 if is_new else 0.001),
        dropout=0.0 if is_new else 0.05,
    )
    run = Run(
        steps=args.steps,
        minutes=args.minutes,
        row_length=args.row_length,
        batch_tokens=args.batch_tokens,
        n_talks=args.talks,
        is_compiled=device.type == "cuda" if args.compile is None else args.compile,
    )
    train(model, run, settings, tokenizer)
    write(model, tokenizer, args.out)
    evaluate(model, tokenizer, args.held_out)


if __name__ == "__main__":
    main()
