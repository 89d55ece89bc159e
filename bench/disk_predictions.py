"""What is predicted for a model that is larger than memory, on the processor, beside real runs.

Heat is learnt on other text first. For each limit of memory `dflash-moe plan`'s forecast is
compared with decode behind 448 tokens, and with prompts of 512 and 4,096; the first prompt of an
engine is not counted.

The file needs planted routing, and a disk (not tmpfs):
  python -m bench.random_moe q4_k_m --layers 24 --routing qwen3 --out m24.gguf

Examples:
  python -m bench.disk_predictions m24.gguf --host-memory-mb 4000 5600 8000 --save
  python -m bench.disk_predictions m24.gguf --host-memory-mb 5600 --samples 1
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.options import add_save_option, bench_parser
from bench.planted_routing import Walk
from bench.report import finish, head, table
from bench.texts import Texts, written_s

from dflash_protocol.device import CPU
from dflash_protocol.settings import Settings, load_settings
from dflash_runtime import Engine
from dflash_runtime.engine.deciding import plan_of_file

WRITTEN, LEARNT, LEARNT_PROMPT = 96, 60, 700
PROMPTS = (512, 4096)
COLUMNS = ["memory, work", "predicted tokens/s", "measured", "error"]


def learn(settings: Settings, texts: Texts) -> None:
    """Read and write other texts than are measured."""
    with Engine.open(settings=settings) as engine:
        for text in texts.learnt:
            written_s(engine, text[:LEARNT_PROMPT], LEARNT)


def measure(settings: Settings, texts: Texts) -> dict[str, Any]:
    """The forecast, and the seconds of a token and of prompts."""
    forecast = asdict(plan_of_file(settings, on_progress=lambda *_: None).forecast)
    found: dict[str, Any] = {"forecast": forecast}
    with Engine.open(settings=settings) as engine:
        read_s(engine, texts.learnt[0][:LEARNT_PROMPT])
        for length, prompts in texts.prompts.items():
            found[f"prompt_{length}"] = [read_s(engine, prompt) for prompt in prompts]
        found["decode"] = [written_s(engine, prompt, WRITTEN)[1] for prompt in texts.decode]
    return found


def read_s(engine: Engine, prompt: Sequence[int]) -> float:
    """Seconds of a prompt."""
    list(engine.generate(prompt, 1, ignore_eos=True))
    return engine.last_generation.prefill_s


def rows_of(megabytes: int, found: dict[str, Any]) -> list[list[str]]:
    """A row for each kind of work, of medians."""
    rows = []
    for what, num_tokens in (("decode", 1), *((f"prompt_{each}", each) for each in PROMPTS)):
        speed = num_tokens / statistics.median(found[what])
        predicted = found["forecast"][what]
        cells = f"{predicted:.1f}", f"{speed:.1f}", f"{predicted / speed - 1:+.0%}"
        rows.append([f"{megabytes} MiB, {what.replace('_', ' of ')}", *cells])
    return rows


def main() -> None:
    """Print the table, and save it with `--save`."""
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--host-memory-mb", type=int, nargs="+", required=True)
    parser.add_argument("--samples", type=int, default=3, help="of each kind (default 3)")
    add_save_option(parser)
    options = parser.parse_args()
    walk, rows = Walk.of_file(options.model), list[list[str]]()
    texts = Texts.of(walk, lengths=PROMPTS, samples=options.samples, request=None)
    record = head("Predictions for a model that is larger than memory")
    settings = replace(load_settings(), model=str(options.model), device=CPU, context=8192)
    with tempfile.TemporaryDirectory(prefix="predictions-") as folder:
        learnt = Path(folder) / "learnt.heat"
        most = max(options.host_memory_mb)
        learn(replace(settings, heat=str(learnt), host_memory_mb=most), texts)
        for megabytes in options.host_memory_mb:
            used = Path(folder) / f"{megabytes}.heat"
            shutil.copy(learnt, used)
            within = replace(settings, heat=str(used), host_memory_mb=megabytes)
            record[str(megabytes)] = measure(within, texts)
            rows += rows_of(megabytes, record[str(megabytes)])
            print(table(COLUMNS, rows), flush=True)
    finish("disk-predictions", record, table(COLUMNS, rows), options.save)


if __name__ == "__main__":
    main()
