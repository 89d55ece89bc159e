"""Turns of our engine on one GPU: a placement is opened, measured and closed, then the next one is.

Engines cannot be open at once within one budget of memory; each turn is a process of its own.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu_engine import EngineSide
from bench.gpu_parts import Result, say
from bench.sides import Side
from bench.texts import Texts

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.device import parse_device
from dflash_runtime.compute.gpu.device.devices import VENDORS
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.placement.footprint import Memory, footprint

DECODE, LATER, REQUEST = "decode", "decode later", "request"
_STAYS_FREE = 256 << 20
_LEAST_CHUNK = 512
_WARM_UP = 24


Rows = dict[str, list[float]]
"""Seconds by row: of a step (`DECODE`), of prompts, of the request."""


def prompt_row(length: int) -> str:
    """The name of a prompt's row."""
    return f"prompt {length}"


def tokens_of(row: str) -> int:
    """How many tokens the seconds of a row are for; of the request 1."""
    last = row.split()[-1]
    return int(last) if last.isdigit() else 1


def measure(side: Any, texts: Texts, rows: Rows) -> None:
    """Add an open engine's seconds to `rows`. `side` has EngineSide's methods, by `call`."""
    call = side.call
    for length, prompts in sorted(texts.prompts.items(), reverse=True):
        call("prefill", prompts[-1])
        speeds = [call("prefill", each) for each in prompts]
        rows.setdefault(prompt_row(length), []).extend(length / each for each in speeds)
    for row, prompts in ((DECODE, texts.decode), (LATER, texts.later)):
        for number, prompt in enumerate(prompts):
            if not number:
                call("decode", prompt, _WARM_UP)
            rows.setdefault(row, []).append(1 / call("decode", prompt, texts.decoded))
    if texts.request:
        rows.setdefault(REQUEST, []).append(call("request", texts.request, texts.written))


def medians(rows: Rows) -> dict[str, float]:
    """Of each row that has a sample."""
    return {name: statistics.median(times) for name, times in rows.items() if times}


def shown(rows: Rows) -> str:
    """A line of medians, in tokens per second but for the request."""
    parts = []
    for name, seconds in medians(rows).items():
        speed = tokens_of(name) / seconds
        parts.append(f"{name} {seconds:.2f} s" if name == REQUEST else f"{name} {speed:,.1f}")
    return "; ".join(parts)


Opener = Callable[..., AbstractContextManager[Any]]
"""Opens ``(name, factory, *args, until_s=…, **kwargs)`` like `bench.sides.Side`."""


@dataclass
class Bench:
    """One model on one device: how its engines are opened. Owns nothing."""

    path: Path
    device: str
    context: int
    texts: Texts
    folder: Path
    """Of heat, plans, and their copies."""
    open_side: Opener = Side
    name: str = "ours"
    _learnt: dict[str, Path] = field(default_factory=dict)

    def learn(self, until_s: float, **options: Any) -> Path:
        """Heat of other texts than are measured, learnt at the first call; and what of the machine
        was not measured, is."""
        key = self.path.name
        if key not in self._learnt:
            heat = self.folder / f"{key}.heat"
            with self._open(heat, until_s, options) as side:
                say(f"  learning heat, open after {side.call('opened')['open_s']} s")
                for prompt in self.texts.learnt:
                    side.call("text", prompt, self.texts.written)
                side.call("close")
            self._learnt[key] = heat
        return self._learnt[key]

    @contextmanager
    def opened(self, heat: Path, until_s: float, **options: Any) -> Iterator[Any]:
        """An engine with a copy of the heat: what is measured must not be known to later ones."""
        own = self.folder / f"used-{time.monotonic_ns()}.heat"
        shutil.copy(heat, own)
        with self._open(own, until_s, options) as side:
            yield side
            side.call("close")

    def turn(self, result: Result, until_s: float, *, heat: Path, **options: Any) -> None:
        """Open, measure, close; samples are added to ``result["seconds_of"]``."""
        with self.opened(heat, until_s, **options) as side:
            result.setdefault("open_s", []).append(side.call("opened")["open_s"])
            result["plan"] = side.call("planned")
            rows: Rows = result.setdefault("seconds_of", {})
            measure(side, self.texts, rows)
            result["owners"] = side.call("owners")
            result["moved"] = side.call("moved")
        say(f"  {shown(rows)}")

    def _open(self, heat: Path, until_s: float, options: Mapping[str, Any]) -> Any:
        asked = {"device": self.device, "context": self.context, **options}
        return self.open_side(self.name, EngineSide, self.path, heat=heat, until_s=until_s, **asked)


def budget_of(path: Path, context: int, part: float) -> int:
    """Bytes of a GPU within which a part of the experts fits, with the smallest chunks."""
    with GgufFile.open(path) as file:
        spec = read_spec(file)
        found = footprint(file, spec, Memory.GPU)
        here = {each.layer_id: round(part * each.num_experts) for each in spec.moe.layers}
        needs = found.needs(
            num_positions=context,
            kv_type=KvType.F16,
            chunk=_LEAST_CHUNK,
            num_remote_layers=len(spec.moe.layers),
        )
        return needs.total + found.experts_bytes(here) + _STAYS_FREE


def is_gpu(device: str) -> bool:
    """Whether a device has memory that a ballast can hold."""
    return parse_device(device).kind in VENDORS
