"""A whole model in our engine, with experts in this process or in daemons: prefill, decode, and
memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dflash_protocol.ids import F32Array
from dflash_protocol.settings import DaemonSetting, load_settings
from dflash_runtime import Engine
from dflash_runtime.engine.engine import GeneratedToken

_MEMORY_INTERVAL_S = 0.002


class OurModel:
    """One file with one sequence. Times are the engine's own, sampling included."""

    def __init__(
        self,
        path: Path,
        *,
        num_threads: int,
        context: int,
        kv_type: str,
        num_daemons: int = 0,
        transport: str = "auto",
        cores: Sequence[int] = (),
        prefetches: bool = True,
    ) -> None:
        """All experts go to the daemons, if any, each with as many threads as this process.
        `cores`: what this process and the daemons are bound to, if not empty. `prefetches`: see
        --moe-predict-prefetch.

        Raises: DflashError if the engine cannot be opened.
        """
        if cores:
            os.sched_setaffinity(0, cores)
        self._bytes_before = anonymous_bytes()
        self._engine = Engine.open(
            path,
            daemons=[DaemonSetting("cpu", threads=num_threads)] * num_daemons,
            backend="cpu",
            threads=num_threads,
            context=context,
            kv_type=kv_type,
            settings=replace(
                load_settings(), ipc_transport=transport, moe_predict_prefetch=prefetches
            ),
        )
        self._run: Iterator[GeneratedToken] = iter(())

    def logits(self, token_ids: Sequence[int]) -> F32Array:
        """Logits after the last token, from an empty state. Shapes: result [V] float32."""
        row: F32Array = self._engine.logits(token_ids)[-1]
        return row

    def prefill(self, token_ids: Sequence[int]) -> float:
        """Tokens per second of one prompt from an empty state, with logits after its last token."""
        self._take(self._engine.generate(token_ids, 1, ignore_eos=True), 1)
        return self._engine.last_generation.prefill_tokens_per_s

    def decode_after(self, token_ids: Sequence[int], num_tokens: int) -> float:
        """Tokens per second of tokens one by one after a prompt, whose time is not included."""
        run = self._engine.generate(token_ids, num_tokens + 1, ignore_eos=True)
        self._take(run, num_tokens + 1)
        return self._engine.last_generation.decode_tokens_per_s

    def text_after(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Token ids after a prompt."""
        run = self._engine.generate(token_ids, num_tokens, ignore_eos=True)
        return [token.token_id for token in run]

    def owners(self) -> dict[str, dict[str, Any]]:
        """See `owners_of`."""
        return owners_of(self._engine)

    def fill(self, token_ids: Sequence[int]) -> None:
        """Begin a generation that `decode` continues."""
        left = self._engine.num_positions - len(token_ids)
        self._run = self._engine.generate(token_ids, left, ignore_eos=True)
        next(self._run)

    def decode(self, num_tokens: int) -> float:
        """Tokens per second of the next tokens of the generation."""
        before_s = self._engine.last_generation.decode_s
        self._take(self._run, num_tokens)
        return num_tokens / (self._engine.last_generation.decode_s - before_s)

    def disk(self) -> dict[str, float]:
        """What was read from the disk so far; empty if all experts are in memory."""
        found = self._engine.stats().disk
        return {} if found is None else asdict(found)

    def kv_bytes_per_position(self) -> int:
        """Bytes of one position's keys and values."""
        width = 2 if self._engine.kv_type.value == "f16" else 4
        return sum(
            kv.num_heads * (kv.key_dim + kv.value_dim) * width for kv in self._engine.spec.kv_layers
        )

    def largest_expert_bytes(self) -> int:
        return max(layer.expert_bytes for layer in self._engine.spec.moe.layers)

    def bytes_before_opening(self) -> int:
        """Memory of the interpreter and the libraries loaded before the engine."""
        return self._bytes_before

    def peak_bytes(self, method: str, *args: Any) -> int:
        """Peak of the memory not backed by files while a method of this object ran."""
        done, peak = threading.Event(), anonymous_bytes()

        def watch() -> None:
            nonlocal peak
            while not done.wait(_MEMORY_INTERVAL_S):
                peak = max(peak, anonymous_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        call: Callable[..., object] = getattr(self, method)
        try:
            call(*args)
        finally:
            done.set()
            watcher.join()
        return max(peak, anonymous_bytes())

    @staticmethod
    def _take(run: Iterator[GeneratedToken], num_tokens: int) -> None:
        for _ in range(num_tokens):
            next(run)


def owners_of(engine: Engine) -> dict[str, dict[str, Any]]:
    """What each owner of experts did so far, by name.

    Raises: RuntimeError if a daemon was lost or experts fell back: such times mean nothing.
    """
    stats = engine.stats()
    disturbances = [event for event in stats.events if event.kind != "numeric_class_differs"]
    if disturbances:
        raise RuntimeError(f"the run was disturbed: {disturbances}")
    return {name: owner.as_record() for name, owner in stats.owners.items()}


def anonymous_bytes() -> int:
    """Resident bytes of this process that are not backed by files."""
    total = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            total += 1024 * int(line.split()[1])
    return total
