"""Engines and daemons on emulated GPUs that use mailboxes."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dflash_protocol.ring.segment import Segment
from dflash_protocol.settings import Settings, load_settings
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.mailbox.parent import ParentMail
from dflash_runtime.compute.gpu.run import step_runner
from dflash_runtime.engine.penalties import Penalties
from support.emulated_device.peer_memory import EmulatedPeerMemory
from support.emulated_gpu import TINY, EmulatedGpus, install_emulated_gpus
from support.processes import START_S

PROMPT = [int(i) for i in np.random.default_rng(2).integers(0, TINY.vocab_size, 12)]
NUM_TOKENS = 9
_LONGEST_STEP_S = 0.5
"""A longer gap means that a new text has begun."""
TRIED_STEPS = 2
"""Steps that are tried in each kind of memory."""


class Rings:
    """Counts steps that go through mailboxes; `then` is called after each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.segment: Segment | None = None
        """The segment of the mailbox that was used last."""
        self.then: Callable[[], None] = lambda: None
        self._rung_s = self._step_s = 0.0
        ring = ParentMail.ring

        def counted(mail: ParentMail, num_tokens: int = 1) -> None:
            now_s = time.monotonic()
            self._rung_s, self._step_s = now_s, now_s - (self._rung_s or now_s)
            self.count += 1
            self.segment = mail.routes[0].segment
            ring(mail, num_tokens)
            self.then()

        monkeypatch.setattr(ParentMail, "ring", counted)

    def at(self, count: int, action: Callable[[], None]) -> None:
        """Run `action` when `count` more steps were requested, before the parent's step begins."""
        wanted = self.count + count

        def act() -> None:
            if self.count == wanted:
                action()

        self.then = act

    def within(self, count: int, action: Callable[[], None]) -> None:
        """The same, in the middle of that step, by the duration of the step before."""

        def begin() -> None:
            timer = threading.Timer(min(self._step_s, _LONGEST_STEP_S) / 2, action)
            timer.daemon = True
            timer.start()

        self.at(count, begin)


def install_mailing_gpus(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpus:
    """Emulated GPUs with a short trial of each kind of memory, as their steps are slow."""
    monkeypatch.setattr(step_runner, "_TIMED_STEPS", TRIED_STEPS)
    monkeypatch.setattr(step_runner, "_TIMED_RUNS", 1)
    monkeypatch.setattr(EmulatedPeerMemory, "freed_while_open", [])
    return install_emulated_gpus(monkeypatch)


def patient_settings(*, step_limit_ms: int = 20_000) -> Settings:
    """Settings with deadlines that suit emulated kernels."""
    return replace(load_settings(), step_limit_ms=step_limit_ms, deadline_ms=20_000)


def opened(model: Path, *, device: str = "cuda:0", context: int = 32, **options: Any) -> Engine:
    """An engine on the first GPU."""
    return Engine.open(model, device=device, context=context, **options)


def tokens(
    engine: Engine, count: int = NUM_TOKENS, penalties: Penalties | None = None
) -> list[int]:
    """The greedy tokens after the prompt."""
    texts = engine.generate(PROMPT, count, penalties=penalties, ignore_eos=True)
    return [token.token_id for token in texts]


def check_text(engine: Engine, found: list[int]) -> None:
    """Check tokens by their logits, as the CPU's fallback has other bits than the daemon: each must
    have the largest logit after those before it, or nearly so."""
    assert len(found) == NUM_TOKENS
    logits = engine.logits([*PROMPT, *found])[len(PROMPT) - 1 : -1]
    chosen = logits[np.arange(NUM_TOKENS), found]
    assert (logits.max(axis=1) - chosen < 0.05 * np.abs(logits).max()).all()


def ended(process: subprocess.Popen[str]) -> str:
    """The output of a process that was told to end."""
    process.terminate()
    process.wait(START_S)
    assert process.stderr is not None
    return process.stderr.read()


def shared_things(process: psutil.Process) -> dict[str, int]:
    """The number of a process's descriptors, and bytes of shared memory that it has mapped."""
    maps = process.memory_maps(grouped=False)
    shared = [each for each in maps if "ring-" in each.path or "dflash-peer" in each.path]
    return {
        "descriptors": process.num_fds(),
        "mappings": len(shared),
        "threads": process.num_threads(),
    }
