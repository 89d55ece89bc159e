"""A tree of draft tokens verified in one pass, against as many single steps.

The tree has 22 tokens, as a drafter might guess them, or the first so many of these; a step
computes one token of a sequence with its logits. Both go on from the same prompt of the same file,
by default one with random weights in the shape of Qwen3.6-35B-A3B (see bench.random_moe): routing
is as spread out as it can be.

Examples:
  python -m bench.verify_tree
  python -m bench.verify_tree --daemon cpu --prompt 2000
  python -m bench.verify_tree --device cuda:0 --daemon cuda:1 --tokens 8 22
  python -m bench.verify_tree --realtime --save          root, while others use the machine
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench.machine import be_realtime
from bench.options import add_realtime_option, add_save_option, bench_parser
from bench.random_moe import model_path

from bench import report
from dflash_protocol.ids import Phase
from dflash_runtime import Engine

PARENTS = [-1, 0, 0, 1, -1, 1, 2, 3, 3, 4, 7, 7, 10, 11, 0, 8, 15, 16, 16, 12, 12, 20]
"""22 tokens, the deepest of them ten below a root."""


class TreeBench:
    """One open file with a prompt computed."""

    def __init__(self, engine: Engine, prompt: list[int], num_tokens: int) -> None:
        self._engine, self._parents = engine, PARENTS[:num_tokens]
        random = np.random.default_rng(1)
        self._guesses = [int(i) for i in random.integers(0, engine.spec.vocab_size, num_tokens)]
        engine.prefill(prompt)

    def tree_s(self) -> float:
        """Seconds of one pass, whose tokens are then dropped."""
        started_s = time.perf_counter()
        self._engine.verify(self._guesses, self._parents)
        return time.perf_counter() - started_s

    def steps_s(self, prompt: list[int]) -> float:
        """Seconds of as many steps after the prompt."""
        count = len(self._parents)
        for _ in self._engine.generate(prompt, count + 1, ignore_eos=True, reuse_prefix=True):
            pass
        elapsed_s = self._engine.last_generation.decode_s
        self._engine.prefill(prompt)
        return elapsed_s


def measure(engine: Engine, num_prompt: int, *, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of each round, the two alternating; each owner's requests a layer and tree."""
    random = np.random.default_rng(0)
    prompt = [int(i) for i in random.integers(0, engine.spec.vocab_size, num_prompt)]
    before = _requests(engine)
    bench = TreeBench(engine, prompt, num_tokens)
    bench.tree_s()
    samples: dict[str, list[float]] = {"tree": [], "steps": []}
    for _ in range(rounds):
        samples["tree"].append(bench.tree_s())
        samples["steps"].append(bench.steps_s(prompt))
    passes = (rounds + 1) * engine.spec.num_layers
    requests = {
        name: (count - before.get(name, 0)) / passes for name, count in _requests(engine).items()
    }
    return {"tokens": num_tokens, "seconds": samples, "requests_a_layer": requests}


def _requests(engine: Engine) -> dict[str, int]:
    """Requests for trees so far, by owner."""
    return {
        name: owner.phases[Phase.VERIFY].requests
        for name, owner in engine.stats().owners.items()
        if Phase.VERIFY in owner.phases
    }


def main() -> None:
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("--model", type=Path, help="default: bench.random_moe's qwen35moe")
    parser.add_argument("--prompt", type=int, default=200, help="tokens (default 200)")
    parser.add_argument("--device", default="cpu", help="of the parent (default cpu)")
    parser.add_argument(
        "--daemon",
        action="append",
        default=[],
        metavar="DEVICE",
        help="where a daemon runs that has all experts; may be given again, for their shares",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[len(PARENTS)],
        metavar="N",
        help=f"of a tree, 1 to {len(PARENTS)} (default {len(PARENTS)})",
    )
    parser.add_argument("--threads", type=int, default=2, help="default 2")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    add_realtime_option(parser)
    add_save_option(parser)
    options = parser.parse_args()
    if not all(1 <= num_tokens <= len(PARENTS) for num_tokens in options.tokens):
        parser.error(f"a tree has 1 to {len(PARENTS)} tokens")
    if options.realtime:
        be_realtime()
    model = options.model or model_path("qwen35moe")
    with Engine.open(
        model,
        device=options.device,
        threads=options.threads,
        daemons=options.daemon,
        local_experts=0 if options.daemon else None,
        context=options.prompt + 100,
    ) as engine:
        num_layers = engine.spec.num_layers
        measured = [
            measure(engine, options.prompt, num_tokens=num_tokens, rounds=options.rounds)
            for num_tokens in options.tokens
        ]
    what = f"Trees of tokens against steps, {model.stem}, {num_layers} layers"
    record = report.head(what, num_threads=options.threads)
    record |= {"device": options.device, "daemons": options.daemon, "prompt": options.prompt}
    record["trees"] = measured
    rows = []
    for of_size in measured:
        steps, tree = (statistics.median(of_size["seconds"][name]) for name in ("steps", "tree"))
        owners = of_size["requests_a_layer"].items()
        counts = ", ".join(f"{name} {count:.2f}" for name, count in owners)
        times = [f"{steps * 1e3:.1f}", f"{tree * 1e3:.1f}", f"{tree / steps:.3f}"]
        rows.append([str(of_size["tokens"]), *times, counts])
    heads = ["tokens", "steps, ms", "tree, ms", "of the steps' time", "requests a layer"]
    table = f"After {options.prompt} tokens:\n\n{report.table(heads, rows)}"
    report.finish("verify-tree", record, table, options.save)


if __name__ == "__main__":
    main()
