"""Measures a box with a model's formats and sizes, predicts decode and prompts from it, and
compares that with real runs of an engine.

Examples:
  python3 -m bench.predictions
  python3 -m bench.predictions model.gguf --device cuda:0 --rounds 5
  python3 -m bench.predictions model.gguf --device cuda:0 --daemon cpu --local-experts 64
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from bench.machine import be_realtime
from bench.options import add_realtime_option, bench_parser
from bench.report import table

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Attention, Description, Ffn
from dflash_adapters.registry import describe, read_spec
from dflash_protocol.device import CPU, parse_device
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.chunk_room import MAX_CHUNK
from dflash_runtime.compute.host import PREFILL_CHUNK
from dflash_runtime.compute.kv_cache import KvType, chosen_kv_type
from dflash_runtime.engine.demo_model import demo_model_path
from dflash_runtime.engine.measuring.devices import cached_bytes
from dflash_runtime.engine.measuring.kept import box_record
from dflash_runtime.engine.measuring.layers import head_bytes, trunk_bytes
from dflash_runtime.engine.measuring.links import measure_links
from dflash_runtime.engine.measuring.machine import box_of_machine
from dflash_runtime.placement.box import Box, Curve, DeviceSpeed, LinkSpeed
from dflash_runtime.tools.doctor_measure import MeasuredBox

PROMPTS = (64, 512, 1500, 4096)
CONTEXTS = (64, 448, 2048, 6000)
DECODED = 64


def at_rows(curves: dict[int, Curve], rows: int, amount_of_row: float, *, scaled: bool) -> float:
    """Seconds for a number of rows: between measured ones on a straight line, and beyond the
    largest in proportion. `scaled`: the amount grows with the rows."""

    def at(measured: int) -> float:
        return curves[measured].at(amount_of_row * (measured if scaled else 1))

    known = sorted(curves)
    if not known:
        return 0.0
    if rows <= known[0]:
        return at(known[0])
    for low, high in pairwise(known):
        if rows <= high:
            return at(low) + (at(high) - at(low)) * (rows - low) / (high - low)
    return at(known[-1]) * rows / known[-1]


@dataclass(frozen=True)
class Predicted:
    """Times of passes of one placement, from a box."""

    file: GgufFile
    description: Description
    box: Box
    device: str
    kv_type: KvType
    share: float = 1.0
    """Of the pairs that are computed on the device."""
    other: str = ""
    """The device in the box that computes the others."""
    link: LinkSpeed | None = None

    def pass_s(self, rows: int, position: int) -> float:
        """A step, or a chunk, behind so many cached positions."""
        speed, moe = self.box.devices[self.device], read_spec(self.file).moe.by_layer_id
        seconds = at_rows(
            dict(speed.head), rows, head_bytes(self.file, self.description), scaled=False
        )
        for layer_id, layer in enumerate(self.description.layers):
            trunk = trunk_bytes(self.file, layer)
            seconds += at_rows(dict(speed.trunk), rows, trunk, scaled=False)
            if isinstance(layer.mixer, Attention):
                span = layer.mixer.mask.span
                seen = position if span is None else min(position, span)
                cached = seen * cached_bytes(layer.mixer.kv_layer, self.kv_type)
                seconds += at_rows(dict(speed.attention), rows, cached, scaled=False)
            if not isinstance(layer.ffn, Ffn):
                moe_layer = moe[layer_id]
                pairs = moe_layer.num_experts_used * moe_layer.expert_bytes
                seconds += self._experts_s(speed, rows, pairs)
        return seconds

    def _experts_s(self, speed: DeviceSpeed, rows: int, bytes_of_row: float) -> float:
        here_s = at_rows(dict(speed.experts), rows, self.share * bytes_of_row, scaled=True)
        if self.share == 1.0 or self.link is None:
            return here_s
        there = self.box.devices[self.other].experts
        there_s = at_rows(dict(there), rows, (1 - self.share) * bytes_of_row, scaled=True)
        crossing = self.link.step if rows == 1 else self.link.chunk
        there_s += crossing.at(rows)
        stop = self.box.host_stop.get(self.device)
        if stop is not None:
            there_s += stop.at(rows)
        return max(here_s, there_s)

    def prompt_s(self, num_tokens: int, chunk: int) -> float:
        """A prompt in chunks."""
        firsts = range(0, num_tokens, chunk)
        return sum(self.pass_s(min(chunk, num_tokens - first), first) for first in firsts)


@dataclass(frozen=True)
class Run:
    """What an engine took: seconds of a prompt, and of a step behind it."""

    prompt_s: float
    step_s: float


def run(engine: Engine, num_prompt: int, num_tokens: int, seed: int) -> Run:
    """One generation with a random prompt."""
    random = np.random.default_rng(seed)
    prompt = [int(each) for each in random.integers(0, engine.spec.vocab_size, num_prompt)]
    for _ in engine.generate(prompt, num_tokens, ignore_eos=True):
        pass
    stats = engine.last_generation
    return Run(stats.prefill_s, stats.decode_s / max(1, num_tokens - 1))


def main() -> None:
    parser = bench_parser(__file__, __doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file (default: the demo model)")
    parser.add_argument("--device", default="cpu", help="the parent's (default cpu)")
    parser.add_argument("--local-experts", type=int, help="of each layer, with --daemon")
    parser.add_argument("--daemon", help="one daemon, DEVICE[@LAUNCHER]")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each size (default 3)")
    parser.add_argument("--context", type=int, help="positions (default: as the sizes need)")
    parser.add_argument("--box", action="store_true", help="print the box as JSON, too")
    add_realtime_option(parser)
    options = parser.parse_args()
    if options.realtime:
        be_realtime()
    path = options.model or str(demo_model_path())
    settings, device = load_settings(), parse_device(options.device)

    began_s = time.monotonic()

    def report(what: str, num_done: int, num_total: int) -> None:
        print(f"{time.monotonic() - began_s:6.1f} s  {what}")

    with GgufFile.open(path) as file:
        box = box_of_machine(
            file,
            settings,
            measures_all=True,
            devices=tuple(dict.fromkeys((CPU, device))),
            on_progress=report,
        )
        measured = MeasuredBox(file.path, box, time.monotonic() - began_s)
        print("\n".join(measured.as_lines()))
        if options.box:
            print(json.dumps(box_record(box)))
        rows = compared(file, box, options, chosen_kv_type(settings.kv_type, read_spec(file)), path)
    print(table(["", "predicted ms", "measured ms", "least ms", "error"], rows))


def compared(
    file: GgufFile, box: Box, options: argparse.Namespace, kv_type: KvType, path: str
) -> list[list[str]]:
    """Rows of the table: what was predicted and measured."""
    description = describe(file)
    largest = options.context or description.context_length
    prompts = [size for size in PROMPTS if size + DECODED < largest]
    contexts = [size for size in CONTEXTS if size + DECODED < largest]
    daemons = [options.daemon] if options.daemon else []
    rows, errors = list[list[str]](), list[float]()
    with Engine.open(
        path,
        device=options.device,
        daemons=daemons,
        local_experts=options.local_experts,
        context=min(description.context_length, max((*prompts, *contexts)) + 2 * DECODED),
    ) as engine:
        link = measured_link(engine) if daemons else None
        share = 1.0
        if daemons:
            share = share_here(engine)
        predicted = Predicted(
            file, description, box, options.device, kv_type, share, device_of(options.daemon), link
        )
        chunk = MAX_CHUNK if options.device != "cpu" else PREFILL_CHUNK
        for size in sorted({*prompts, *contexts}):
            runs = [run(engine, size, DECODED, seed) for seed in range(options.rounds + 1)][1:]
            kinds = []
            if size in prompts:
                times = [each.prompt_s for each in runs]
                kinds.append((f"prompt of {size}", predicted.prompt_s(size, chunk), times))
            if size in contexts:
                times = [each.step_s for each in runs]
                step_s = predicted.pass_s(1, size + DECODED // 2)
                kinds.append((f"step after {size}", step_s, times))
            for what, predicted_s, times in kinds:
                measured_s = statistics.median(times)
                errors.append(predicted_s / measured_s - 1)
                cells = (f"{1e3 * each:.3f}" for each in (predicted_s, measured_s, min(times)))
                rows.append([what, *cells, f"{errors[-1]:+.1%}"])
    sizes = [abs(each) for each in errors]
    rows.append(
        ["error, median and worst", "", f"{statistics.median(sizes):.1%}", "", f"{max(sizes):.1%}"]
    )
    return rows


def device_of(daemon: str | None) -> str:
    """The device of ``DEVICE[@LAUNCHER]``."""
    return "" if daemon is None else daemon.partition("@")[0]


def measured_link(engine: Engine) -> LinkSpeed | None:
    """Of the one daemon."""
    found = measure_links(
        lambda num_prompt, num_tokens: run(engine, num_prompt, num_tokens, 0),
        lambda: engine.stats().owners,
        num_positions=engine.num_positions,
        num_layers=len(engine.spec.moe.layers),
    )
    for name, link in found.items():
        print(f"link to {name}: step {link.step.points}, chunk {link.chunk.points}")
    return next(iter(found.values()), None)


def share_here(engine: Engine) -> float:
    """The share of pairs that the parent computes, as counted so far."""
    pairs = {name: owner.pairs for name, owner in engine.stats().owners.items()}
    return pairs.get("local", 0) / max(1, sum(pairs.values()))


if __name__ == "__main__":
    main()
