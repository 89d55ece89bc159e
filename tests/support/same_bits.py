"""Digests of the results of every architecture, on each backend and in several splits: saved before
a change and compared after it, to show that the change does not affect a single bit.

Besides logits, tokens and probabilities they include the launches of each captured graph, in order,
of the GPU backend in the emulation.

Examples:
  PYTHONPATH=protocol:adapters:daemon:runtime:tests:. python -m support.same_bits --save FILE
  PYTHONPATH=protocol:adapters:daemon:runtime:tests:. python -m support.same_bits --compare FILE
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_runtime import Engine
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import TINY, install_emulated_gpus
from support.gpu_models import SHAPES
from support.random_gguf import RandomShape, write_model

DEMO = Path(__file__).parents[2] / "demo"
_SPLITS: dict[str, dict[str, Any]] = {
    "all local": {},
    "one daemon": {"daemons": ["cpu"], "local_experts": 3},
    "two daemons": {"daemons": ["cpu", "cpu"]},
}
_SIDES: dict[str, dict[str, Any]] = {
    "reference": {"backend": "reference", "device": "cpu"},
    "cpu": {"backend": "cpu", "device": "cpu"},
    "emulated gpu": {"device": "cuda:0"},
}
_TYPES = "F32", "Q8_0"
_NUM_TOKENS = 40


def models(folder: Path) -> Iterator[tuple[str, Path]]:
    """Random models of every architecture, in floats and quantised, and the demo models."""
    shapes: dict[str, RandomShape] = {"qwen3moe": TINY, **SHAPES}
    for name, shape in shapes.items():
        for tensor_type in _TYPES:
            path = folder / f"{name}-{tensor_type}.gguf"
            yield f"{name} {tensor_type}", write_model(path, shape, seed=2, tensor_type=tensor_type)
    for path in sorted(DEMO.glob("*.gguf")):
        yield path.stem, path


def found(path: Path, options: dict[str, Any], *, is_short: bool) -> dict[str, str]:
    """Digests of an engine's results, computed in several ways."""
    captures: list[list[tuple[Any, ...]]] = []
    with pytest.MonkeyPatch.context() as patch:
        install_emulated_gpus(patch)
        _note_captures(patch, captures)
        with Engine.open(path, context=128, **options) as engine:
            size = 16 if is_short else _NUM_TOKENS
            random = np.random.default_rng(3)
            ids = random.integers(0, engine.spec.vocab_size, size).tolist()
            digests = {
                "logits": _digest(engine.logits(ids).tobytes()),
                "logits in chunks": _digest(engine.logits(ids, [size - 9, 6, 1, 1, 1]).tobytes()),
            }
            for name, temperature in (("greedy", 0.0), ("sampled", 0.8)):
                tokens = engine.generate(
                    ids, 6, temperature=temperature, seed=1, top_logprobs=3, ignore_eos=True
                )
                digests[name] = _digest(repr([(t.token_id, t.logprobs) for t in tokens]).encode())
            plain = [t.token_id for t in engine.generate(ids, 6, ignore_eos=True)]
            digests["without probabilities"] = _digest(repr(plain).encode())
            engine.prefill(ids)
            verified = engine.verify(plain[:4] + plain[:2], [-1, 0, 1, 2, -1, 4])
            digests["tree"] = _digest(repr(np.asarray(verified.next_token_ids).tolist()).encode())
    if captures:
        digests["captures"] = f"{len(captures)} of {sum(map(len, captures))} launches"
        digests["launches"] = _digest(repr(captures).encode())
    return digests


def _note_captures(patch: pytest.MonkeyPatch, captures: list[list[tuple[Any, ...]]]) -> None:
    capture, launch = EmulatedDevice.capture, EmulatedDevice.launch

    def noted_capture(self: EmulatedDevice, record: Callable[[], None]) -> Any:
        captures.append([])
        return capture(self, record)

    def noted_launch(self: EmulatedDevice, kernel: Any, *args: Any, **options: Any) -> None:
        if self._captured is not None:
            grid, block = args[:2]
            said = {"shared_bytes": 0, "overlaps_previous": True, **options}
            captures[-1].append((kernel.name, tuple(grid), block, *sorted(said.items())))
        launch(self, kernel, *args, **options)

    patch.setattr(EmulatedDevice, "capture", noted_capture)
    patch.setattr(EmulatedDevice, "launch", noted_launch)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--save", type=Path, help="write all digests to this file")
    what.add_argument("--compare", type=Path, help="compare with those of this file")
    parser.add_argument("--only", default="", help="models whose name contains this")
    options = parser.parse_args()
    digests: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model, path in models(Path(folder)):
            if options.only not in model:
                continue
            for side, of_side in _SIDES.items():
                for split, of_split in _SPLITS.items():
                    is_short = path.parent == DEMO and side != "cpu"
                    name = f"{model}, {side}, {split}"
                    digests[name] = found(path, {**of_side, **of_split}, is_short=is_short)
                    print(name, *digests[name].values(), file=sys.stderr, flush=True)
    if options.save is not None:
        options.save.write_text(json.dumps(digests, indent=1) + "\n")
        return 0
    expected = json.loads(options.compare.read_text())
    known = {name: each for name, each in digests.items() if name in expected}
    different = [
        f"{name}: {what}"
        for name, each in known.items()
        for what in {*each, *expected[name]}
        if expected[name].get(what) != each.get(what)
    ]
    new = f"{len(digests) - len(known)} new"
    print(*different, f"{len(known)} cases, {len(different)} differences, {new}", sep="\n")
    return 1 if different or not known else 0


if __name__ == "__main__":
    sys.exit(main())
