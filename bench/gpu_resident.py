"""All experts on one GPU: our engine and llama.cpp in turns, on the same file and tokens.

Decode is timed at several contexts, which real prompts have filled; prompts are computed whole,
from an empty state. Each side is a process; every other round runs them in the reverse order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench.gpu_engine import EngineSide
from bench.gpu_parts import Result, say
from bench.gpu_peer import MICRO_BATCHES, GpuPeer
from bench.gpu_record import OURS, PEER
from bench.pairs import Sample, interleave, ratio
from bench.sides import Side, SideError

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import ModelSpec

TEMPERATURE = 0.8
_CHECKED_TOKENS = 64
_LONG = 8192
"""From so many tokens on, prompts are computed in fewer rounds."""
_ROW_S = 60.0
_NUM_IDS = 1 << 16

Runner = Callable[[int], Sample]


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured: contexts for decode, prompts, tokens a sample of decode, rounds."""

    contexts: Sequence[int]
    prompts: Sequence[int]
    num_tokens: int
    rounds: int

    @property
    def positions(self) -> int:
        """Positions that an engine needs for it."""
        return max([*(each + self.num_tokens + 2 for each in self.contexts), *self.prompts, 0]) + 64

    def rounds_of(self, num_tokens: int) -> int:
        return max(2, self.rounds // 2) if num_tokens >= _LONG else self.rounds


def spec_of(path: Path) -> ModelSpec:
    """What a file says of its model. Raises: ModelFileError."""
    with GgufFile.open(path) as file:
        return read_spec(file)


def random_ids(vocab_size: int) -> list[int]:
    """The tokens that all prompts are taken of, the same in every part of a run."""
    ids: list[int] = np.random.default_rng(0).integers(0, vocab_size, _NUM_IDS).tolist()
    return ids


def prompt_of(ids: Sequence[int], num_tokens: int, number: int = 0) -> Sequence[int]:
    """A prompt; those of other numbers begin otherwise."""
    first = 7 * number
    return ids[first : first + num_tokens]


class ResidentBench:
    """The rows, as far as the sides that are left allow; `result` is filled as they come."""

    def __init__(
        self,
        sides: dict[str, Side],
        work: Work,
        result: Result,
        *,
        vocab_size: int,
        until_s: float,
    ) -> None:
        self._sides, self._work, self._result = sides, work, result
        self._vocab_size, self._until_s = vocab_size, until_s
        self._result["rows"] = []

    def run(self) -> None:
        """All rows."""
        ids = random_ids(self._vocab_size)
        for name in list(self._sides):
            self._result[name] = self._call(name, "opened")
        if OURS in self._sides and PEER in self._sides:
            self._compare_logits(ids)
        for context in self._work.contexts:
            self._decode(ids, context)
        if OURS in self._sides and self._work.contexts:
            self._decode_at_random(ids)
        for num_tokens in self._work.prompts:
            self._prefill(ids, num_tokens)

    def _compare_logits(self, ids: Sequence[int]) -> None:
        """Relative RMS between ours and llama.cpp's after a short prompt."""
        prompt = prompt_of(ids, _CHECKED_TOKENS)
        try:
            ours = self._call(OURS, "logits", prompt).astype(np.float64)
            theirs = self._call(PEER, "logits", prompt, self._vocab_size).astype(np.float64)
        except SideError:
            return
        difference = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
        self._result["logits_difference"] = difference
        say(f"logits after {len(prompt)} tokens differ by {difference:.4f} (relative RMS)")

    def _decode(self, ids: Sequence[int], context: int) -> None:
        num_tokens = self._work.num_tokens
        prompt = prompt_of(ids, context)
        following = prompt_of(ids, num_tokens, 1)
        if OURS in self._sides:
            try:
                following = self._call(OURS, "text", prompt, num_tokens + 1)
            except SideError:
                pass
            else:
                texts = self._result.setdefault("texts", {})
                texts[str(context)] = following
        runners: dict[str, Callable[[int], float]] = {
            OURS: lambda _number: self._call(OURS, "decode", prompt, num_tokens),
            PEER: lambda _number: self._call(PEER, "decode", prompt, following[:num_tokens]),
        }
        self._row(f"decode at {context}", runners, self._work.rounds_of(context))

    def _decode_at_random(self, ids: Sequence[int]) -> None:
        context, num_tokens = min(self._work.contexts), self._work.num_tokens
        prompt = prompt_of(ids, context)
        self._row(
            f"decode at {context}, temperature {TEMPERATURE}, top-p 0.9",
            {OURS: lambda _number: self._call(OURS, "decode", prompt, num_tokens, TEMPERATURE)},
            self._work.rounds,
        )

    def _prefill(self, ids: Sequence[int], num_tokens: int) -> None:
        def prompt(number: int) -> Sequence[int]:
            return prompt_of(ids, num_tokens, number + 1)

        def of_peer(micro_batch: int) -> Callable[[int], float]:
            return lambda number: self._call(PEER, "prefill", micro_batch, prompt(number))

        runners: dict[str, Callable[[int], float]] = {
            OURS: lambda number: self._call(OURS, "prefill", prompt(number))
        }
        for micro_batch in MICRO_BATCHES:
            runners[f"{PEER}, {micro_batch} at once"] = of_peer(micro_batch)
        self._row(f"prefill {num_tokens}", runners, self._work.rounds_of(num_tokens))

    def _row(self, name: str, runners: dict[str, Callable[[int], float]], num_rounds: int) -> None:
        """A row of whatever sides are there until its end."""

        rounds: dict[str, list[float]] = {}

        def sample(label: str, run: Callable[[int], float]) -> Runner:
            def sampled(number: int) -> Sample:
                value = run(number)
                rounds[label].append(value)
                return Sample(value, 0.0)

            return sampled

        while True:
            there = {
                label: sample(label, run)
                for label, run in runners.items()
                if label.partition(",")[0] in self._sides
            }
            if not there:
                break
            rounds = {label: [] for label in there}
            try:
                interleave(there, num_rounds, timeout_s=0.0)
                break
            except SideError:
                continue  # without the side that failed
        # The first round warms up; of the last one, which a side may not have ended, none counts.
        num_whole = min((len(values) for values in rounds.values()), default=0)
        if num_whole < 2:
            return
        values = {label: each[1:num_whole] for label, each in rounds.items()}
        self._result["rows"].append(row_of(name, values))
        medians = {label: statistics.median(each) for label, each in values.items()}
        say(f"{name}: " + ", ".join(f"{label} {each:.0f}" for label, each in medians.items()))

    def _call(self, side: str, method: str, *args: Any) -> Any:
        """Raises: SideError, having given the side up."""
        try:
            self._sides[side].until_s = min(self._until_s, time.monotonic() + _ROW_S)
            return self._sides[side].call(method, *args)
        except SideError as error:
            self._result["errors"].append(str(error))
            self._sides.pop(side).close()
            raise


def row_of(name: str, values: dict[str, list[float]]) -> dict[str, Any]:
    """One row: tokens per second of each side, and ours over the better of llama.cpp's."""
    of_peer = [label for label in values if label != OURS]
    row: dict[str, Any] = {"work": name, "tokens_per_s": values}
    if OURS in values and of_peer:
        better = max(of_peer, key=lambda label: statistics.median(values[label]))
        row["peer"] = better
        row["ratio"] = ratio(values[OURS], values[better]).as_dict()
    return row


def measure_resident(
    result: Result,
    until_s: float,
    *,
    path: Path,
    device: str,
    peer: Path | None,
    with_ours: bool,
    work: Work,
) -> None:
    """Fill `result` with rows. `peer` is the folder of a build of llama.cpp, None: without it."""

    def open_ours() -> Side:
        return Side(OURS, EngineSide, path, device=device, context=work.positions, until_s=until_s)

    def open_peer() -> Side:
        assert peer is not None
        return Side(PEER, GpuPeer, peer, path, context=work.positions, until_s=until_s)

    wanted = {OURS: open_ours} if with_ours else {}
    if peer is not None:
        wanted[PEER] = open_peer
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        futures = {name: pool.submit(opened) for name, opened in wanted.items()}
        sides: dict[str, Side] = {}
        for name, future in futures.items():
            try:
                sides[name] = stack.enter_context(future.result())
            except SideError as error:
                result["errors"].append(str(error))
        say(f"open: {', '.join(sides) or 'nothing'}")
        vocab_size = spec_of(path).vocab_size
        ResidentBench(sides, work, result, vocab_size=vocab_size, until_s=until_s).run()
