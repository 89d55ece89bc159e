"""Engines with daemons for benches: texts with the time of each token, daemons found and restarted,
daemons made slower."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
from bench.machine import ROOT

from dflash_protocol.settings import child_environment, package_roots
from dflash_runtime import Engine

_PACKAGES = ("dflash_protocol", "dflash_adapters", "dflash_runtime", "dflash_daemon")
PATIENT_DEADLINE_MS = 60_000
"""For benches that count rather than measure times: a busy machine must not disturb them."""
_RECOVERY_S = 60.0
_END_S = 20.0


def made_up_prompt(num_tokens: int) -> list[int]:
    """A prompt for the demo model, whose vocabulary has 4096 tokens."""
    return [(7 * position) % 4000 for position in range(num_tokens)]


def timed_tokens(
    engine: Engine,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    on_token: Callable[[float], None] = lambda wait_ms: None,
) -> list[int]:
    """Token ids of a greedy text. `on_token` gets the wait for each, in ms."""
    token_ids = []
    last_s = time.perf_counter()
    for token in engine.generate(prompt, num_tokens, ignore_eos=True):
        wait_ms = 1e3 * (time.perf_counter() - last_s)
        token_ids.append(token.token_id)
        on_token(wait_ms)
        last_s = time.perf_counter()
    return token_ids


def living_daemons() -> list[psutil.Process]:
    """Our running daemons, those still loading included."""
    found = []
    for child in psutil.Process().children():
        try:
            if "dflash_daemon" in " ".join(child.cmdline()):
                child.create_time()
                found.append(child)
        except psutil.Error:
            continue
    return found


def time_to_recover(engine: Engine, work: Callable[[], object]) -> float | None:
    """Seconds until all daemons compute again and nothing falls back; None after a minute."""
    started_s = time.monotonic()
    while time.monotonic() - started_s < _RECOVERY_S:
        before = {name: owner.requests for name, owner in engine.stats().owners.items()}
        work()
        new = {
            name: owner.requests - before.get(name, 0)
            for name, owner in engine.stats().owners.items()
        }
        if not new["fallback"] and all(new[name] for name in new if name.startswith("cpu")):
            return round(time.monotonic() - started_s, 2)
    return None


@contextlib.contextmanager
def imposed_daemon(
    model: Path, folder: Path, *, name: str, arguments: Sequence[str] = ()
) -> Iterator[str]:
    """The address of a daemon process with `arguments` of bench.imposed_daemon.

    Owns the process within the ``with`` block.
    """
    address = f"ipc://{folder}/{name}.sock"
    command = [sys.executable, "-m", "bench.imposed_daemon", *arguments, "--", str(model)]
    lifeline, ours = os.pipe()
    try:
        with subprocess.Popen(
            [*command, "--listen", address, "--lifeline-fd", str(lifeline)],
            cwd=ROOT,
            env=child_environment(package_roots(_PACKAGES)),
            pass_fds=(lifeline,),
        ) as process:
            try:
                yield address
            finally:
                process.terminate()
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
    finally:
        os.close(lifeline)
        os.close(ours)
