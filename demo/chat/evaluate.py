"""Says how many answers to held-out talks are right, written by this runtime from the GGUF file.

python -m demo.chat.evaluate --model demo/dflash-demo-chat.gguf

Answers are the most likely ones. Figures are printed as JSON, wrong answers with `--show`.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

from demo.chat.checks import counts, is_right
from demo.chat.talks import Asked, talks
from dflash_runtime import Engine


def answer(engine: Engine, asked: Asked, n_most: int) -> str:
    """What the model writes, with its markers."""
    text = engine.chat_text(asked.messages, extra={"tools": asked.tools} if asked.tools else None)
    prompt = [token for part in engine.prompt_parts(text, is_chat=True) for token in part]
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ValueError("the file has no tokenizer")
    return "".join(token.text for token in engine.generate(prompt, n_most))


def main() -> None:
    """Print the counts."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m demo.chat.evaluate",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--model", type=Path, default=here / "dflash-demo-chat.gguf")
    parser.add_argument("--answers", type=int, default=512)
    parser.add_argument("--show", action="store_true", help="print wrong answers too")
    args = parser.parse_args()
    made = (asked for talk in talks(1, held_out=True) for asked in talk.asked())
    pairs = []
    with Engine.open(args.model) as engine:
        for asked in islice(made, args.answers):
            text = answer(engine, asked, 96)
            pairs.append((asked, text))
            if args.show and not is_right(asked, text):
                shown = {"asked": asked.messages[-1]["content"], "answered": text}
                print(json.dumps(shown), flush=True)
    print(json.dumps({"bytes": args.model.stat().st_size, "right": counts(pairs)}))


if __name__ == "__main__":
    main()
