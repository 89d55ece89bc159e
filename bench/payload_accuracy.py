"""What 16-bit payloads cost in accuracy: logits of the demo model with its experts in one daemon.

Teacher-forced over a text that the model has never seen: a prompt in chunks, then tokens one by one
as at decode. f16 and bf16 are compared with f32, whose sums travel as float64 without loss; as a
yardstick, the CPU's kernels are compared with the float reference. Errors, not times: a busy
machine does not matter.
"""

from __future__ import annotations

import itertools
import json
import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from bench.daemons import PATIENT_DEADLINE_MS
from bench.options import add_save_option, bench_parser

from bench import report
from dflash_protocol.ids import F32Array
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine

EXACT, ROUNDED = "f32", ("f16", "bf16")
GOAL = 0.99
_CHUNK = 512
EXAMPLES = """examples:
  python -m bench.payload_accuracy --save              # a minute; kept in bench/results/
  python -m bench.payload_accuracy --tokens 400 --single 16 --json
  python -m bench.payload_accuracy --reference 200     # how far the kernels are from float32
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far logits are from exact ones, over all positions."""

    relative_rms: float
    """RMS of the differences over the RMS of the exact logits."""
    worst_position: float
    """The same at the position where it is largest."""
    top_1_agreement: float
    """Share of positions with the same best token."""
    widened: int = 0
    """Messages sent in a wider type, since f16 would not hold their values."""

    @classmethod
    def between(cls, logits: F32Array, exact: F32Array, *, widened: int = 0) -> Difference:
        """Shapes: both [T, V]."""
        wide = exact.astype(np.float64)
        errors = np.linalg.norm(logits - wide, axis=1)
        sizes = np.linalg.norm(wide, axis=1)
        return cls(
            relative_rms=float(np.linalg.norm(errors) / np.linalg.norm(sizes)),
            worst_position=float(np.max(errors / sizes)),
            top_1_agreement=float(np.mean(logits.argmax(axis=1) == exact.argmax(axis=1))),
            widened=widened,
        )


def held_out_ids(num_tokens: int) -> list[int]:
    """Tokens of a module of Python's library that the demo model was not trained on.

    Raises: SystemExit if it has fewer.
    """
    with Engine.open(daemons=[]) as engine:
        ids = engine.encode_prompt(Path(textwrap.__file__).read_text())
    if len(ids) < num_tokens:
        raise SystemExit(f"error: the text has {len(ids)} tokens, fewer than {num_tokens}")
    return ids[:num_tokens]


def logits_by(payload: str, ids: list[int], num_single: int) -> tuple[F32Array, int]:
    """Logits with that payload type, and the number of widened messages. Shapes: [T, V]."""
    settings = replace(load_settings(), ipc_dtype=payload, deadline_ms=PATIENT_DEADLINE_MS)
    num_prompt = len(ids) - num_single
    whole = [min(_CHUNK, num_prompt - first) for first in range(0, num_prompt, _CHUNK)]
    with Engine.open(daemons=["cpu"], require_daemons=True, settings=settings) as engine:
        logits = engine.logits(ids, itertools.chain(whole, [1] * num_single))
        owners = engine.stats().owners.values()
        return logits, sum(owner.widened for owner in owners)


def kernel_difference(ids: list[int]) -> Difference:
    """How far the CPU's kernels are from the float reference, without daemons."""
    logits = {}
    for backend in ("cpu", "reference"):
        with Engine.open(daemons=[], backend=backend) as engine:
            logits[backend] = engine.logits(ids)
    return Difference.between(logits["cpu"], logits["reference"])


def main() -> None:
    parser = bench_parser(__file__, __doc__, EXAMPLES)
    parser.add_argument("--tokens", type=int, default=3000, help="of the text (default 3000)")
    parser.add_argument(
        "--single", type=int, default=256, help="the last so many one by one (default 256)"
    )
    parser.add_argument(
        "--reference", type=int, default=0, metavar="N",
        help="compare the kernels with the float reference over N tokens, which is slow",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_save_option(parser)
    options = parser.parse_args()
    if not 0 <= options.single < options.tokens:
        parser.error("--single must be less than --tokens")
    ids = held_out_ids(options.tokens)
    exact, _ = logits_by(EXACT, ids, options.single)
    differences = {}
    for payload in ROUNDED:
        logits, widened = logits_by(payload, ids, options.single)
        differences[payload] = Difference.between(logits, exact, widened=widened)
    if options.reference:
        differences["kernels"] = kernel_difference(ids[: options.reference])
    figures = {name: asdict(difference) for name, difference in differences.items()}
    if options.json:
        print(json.dumps(figures))
        return
    rows = [
        [
            f"payload {name}, against f32" if name in ROUNDED else "CPU kernels, against float",
            f"{each.relative_rms:.2e}",
            f"{each.worst_position:.2e}",
            f"{each.top_1_agreement:.2%}",
            f"{each.widened}",
        ]
        for name, each in differences.items()
    ]
    columns = ["logits", "relative RMS", "worst position", f"same top token (goal {GOAL:.0%})"]
    text = report.table([*columns, "messages widened"], rows)
    record = report.head("Accuracy of 16-bit payloads, demo model") | {
        "tokens": options.tokens,
        "single": options.single,
        "differences": figures,
    }
    report.finish("payload-accuracy", record, text, options.save)


if __name__ == "__main__":
    main()
