"""Trains the demo model from Python's own sources and writes it as a GGUF file.

    python -m demo.train --sources ~/.pyenv/versions/3.13.0/lib/python3.13 [older ones ...]

runs every stage: `prepare` (collect the text, learn the vocabulary, tokenise), `train`, and
`export`. Stages keep what they make in the work folder, so they can run one at a time and on
different machines. `python -m demo.evaluate` measures the file that comes out.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from demo import data, vocab
from demo.config import CONFIGS


def prepare(args: argparse.Namespace) -> None:
    """Collect the sources, learn the vocabulary, and tokenise everything."""
    files = data.collect(args.sources or data.default_sources())
    newest = {f.path: f for f in reversed(files) if f.split == data.TRAIN_SPLIT}
    if args.vocabulary is None:
        tokenizer = vocab.train_vocabulary((f.text for f in newest.values()), args.vocab_size)
    else:
        tokenizer = vocab.read_vocabulary(args.vocabulary)
    tokenizer.save(str(args.work / "tokenizer.json"))
    data.Corpus.build(files, tokenizer).save(args.work / "corpus.npz")
    (args.work / "corpus.json").write_text(data.summary(files) + "\n")


def train(args: argparse.Namespace) -> None:
    """Train on the prepared corpus and save the weights."""
    import torch

    from demo.training import TrainingConfig
    from demo.training import train as run
    from demo.weights import save_weights

    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    names = {f.name for f in dataclasses.fields(TrainingConfig)}
    settings = {k: v for k, v in vars(args).items() if k in names}
    model = run(
        data.Corpus.load(args.work / "corpus.npz"),
        vocab.end_of_text_id(tokenizer),
        CONFIGS[args.architecture](
            vocab_size=tokenizer.get_vocab_size(), context_length=args.context_length
        ),
        TrainingConfig(**settings),
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        args.work / "log.jsonl",
    )
    save_weights(model, args.work / "weights")


def export(args: argparse.Namespace) -> None:
    """Quantise the saved weights into the GGUF file."""
    from demo.export import export as write

    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    write(args.work / "weights", tokenizer, args.out)


STAGES: dict[str, Callable[[argparse.Namespace], None]] = {
    "prepare": prepare,
    "train": train,
    "export": export,
}


def parse_args() -> argparse.Namespace:
    """The command line."""
    here = Path(__file__).resolve().parent
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m demo.train",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sources", type=Path, nargs="+", metavar="DIR",
        help="library folders, newest first (default: this interpreter's own)",
    )  # fmt: skip
    parser.add_argument("--work", type=Path, default=here / "work", help="folder for stage outputs")
    parser.add_argument("--out", type=Path, default=here / "dflash-demo.gguf", help="GGUF file")
    parser.add_argument("--stages", nargs="+", choices=[*STAGES], default=[*STAGES])
    parser.add_argument("--architecture", choices=[*CONFIGS], default=next(iter(CONFIGS)))
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--vocabulary", type=Path, help="GGUF file whose tokens are taken instead")
    parser.add_argument("--context-length", type=int, default=4096)
    add_training_options(parser)
    return parser.parse_args()


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """One option per field of TrainingConfig, with its default."""
    from demo.training import TrainingConfig

    group = parser.add_argument_group("training")
    for field in dataclasses.fields(TrainingConfig):
        flag = "--" + field.name.replace("_", "-")
        group.add_argument(
            flag, type=type(field.default), default=field.default, help="%(default)s"
        )


def main() -> None:
    """Run the chosen stages in order."""
    args = parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for name, stage in STAGES.items():
        if name in args.stages:
            stage(args)


if __name__ == "__main__":
    main()
