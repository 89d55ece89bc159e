"""Processes that run out of memory, are killed or stopped in the middle of their work: each ends
with a reason or goes on, tokens are right, and nothing of it is left.

The kernel's killer for lack of memory sends SIGKILL, as is done here. More: test_faults.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from dflash_protocol.errors import DaemonUnavailable, HandshakeRefused
from dflash_runtime import Engine
from support import undisturbed as rig
from support.asked_parent import asked_parent
from support.descriptors import num_descriptors
from support.faults import greedy, shared_memory_of, soft_limit, spawned_daemons
from support.processes import (
    START_S,
    cli_command,
    environment,
    running_daemon,
    stop,
    wait_until,
)
from support.serving import NO_TLS, RunningServer, running_server
from support.undisturbed import FAULT_AFTER, NUM_TOKENS, PROMPT, settings_with

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

model = rig.model
undisturbed = rig.undisturbed
endpoint = rig.endpoint

STOPPED_S = 30.0
SILENCE_S = 1.0
DEADLINE = "DFLASH_MOE_EXPERT_COMPUTE_IPC_DEADLINE_MS"
HEARTBEAT = "DFLASH_MOE_EXPERT_COMPUTE_HEARTBEAT_MS"
LIBRARIES_BYTES = 2 << 20
"""For thread-local data of libraries that a thread uses for the first time: glibc ends the process
if it cannot allocate them, and nothing can prevent that."""


# Memory


@pytest.mark.parametrize("transport", ["shared", "stream"])
@pytest.mark.parametrize("extra_bytes", [0, 1 << 20, 16 << 20])
def test_a_daemon_without_memory_serves_or_refuses_and_goes_on(
    model: Path, undisturbed: list[int], endpoint: str, transport: str, extra_bytes: int
) -> None:
    settings = settings_with(ipc_transport=transport, connect_timeout_ms=5000)
    with running_daemon(model, endpoint) as daemon:
        with Engine.open(model, connect=[endpoint], settings=settings) as engine:
            assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        num_idle = num_descriptors(daemon.pid)
        most_bytes = psutil.Process(daemon.pid).memory_info().vms + extra_bytes
        with soft_limit(resource.RLIMIT_AS, most_bytes, pid=daemon.pid):
            try:
                with Engine.open(model, connect=[endpoint], settings=settings) as engine:
                    assert greedy(engine, 40 * PROMPT, 1)
                    assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
            except HandshakeRefused as error:
                assert "Cannot allocate memory" in str(error)  # noqa: PT017
            except DaemonUnavailable:
                assert transport == "shared"
        assert daemon.poll() is None
        with Engine.open(model, connect=[endpoint], settings=settings) as engine:
            assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
            assert engine.stats().events == []
        wait_until(lambda: num_descriptors(daemon.pid) <= num_idle, "descriptors to be free")


def completed(server: RunningServer) -> str:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    url = f"{server.url}/v1/completions"
    answer = httpx.post(url, json=body, verify=NO_TLS, timeout=START_S)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_a_server_without_memory_answers_what_it_can_and_goes_on(model: Path) -> None:
    body = json.dumps({"prompt": "x" * 4_000_000, "max_tokens": 1})
    with running_server(model, "--daemon", "cpu") as server:
        expected = completed(server)
        process = psutil.Process(server.process.pid)
        num_before = process.num_fds()
        most_bytes = process.memory_info().vms + LIBRARIES_BYTES
        with soft_limit(resource.RLIMIT_AS, most_bytes, pid=process.pid):
            assert completed(server) == expected
            try:
                answer = httpx.post(
                    f"{server.url}/v1/completions", content=body, verify=NO_TLS, timeout=START_S
                )
                assert answer.status_code >= 400
            except httpx.TransportError:
                pass  # its bytes could not be taken
            process.children()[0].kill()
            assert completed(server) == expected
        assert completed(server) == expected
        assert server.process.poll() is None
        wait_until(lambda: process.num_fds() <= num_before, "descriptors to be given back")


@pytest.mark.parametrize("most_mb", [300, 450, 600])
def test_a_start_without_memory_ends_with_a_reason_and_leaves_nothing(
    model: Path, undisturbed: list[int], run_dir: Path, most_mb: int
) -> None:
    """How far it comes depends on the machine; it never hangs, nor says wrong things."""
    command = [*cli_command(), "generate", str(model), "--token-ids", ",".join(map(str, PROMPT)),
               "-n", str(NUM_TOKENS), "--json", "--daemon", "cpu"]  # fmt: skip
    done = subprocess.run(
        ["sh", "-c", f'ulimit -v {most_mb << 10}; "$@"', "sh", *command],
        env=environment(), capture_output=True, text=True, timeout=2 * START_S, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        assert json.loads(done.stdout)["tokens"] == undisturbed
    else:
        assert done.stdout == ""
        assert "rror" in done.stderr.splitlines()[-1]
    if done.returncode < 0:  # a library's own end: what was made before it the next start removes
        with Engine.open(model, daemons=["cpu"]):
            pass
    assert list(run_dir.iterdir()) == []


# Kills


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_daemon_killed_within_a_prompt_costs_time_and_no_token(
    model: Path, transport: str
) -> None:
    prompt = 60 * PROMPT
    settings = settings_with(ipc_transport=transport, batch_capacity=64)
    with Engine.open(model) as engine:
        expected = greedy(engine, prompt, NUM_TOKENS)
    with Engine.open(model, daemons=["cpu"], settings=settings) as engine:

        def on_prefill(num_done: int, num_total: int) -> None:
            if 0 < num_done < num_total and engine.stats().events == []:
                for daemon in spawned_daemons():
                    daemon.kill()

        tokens = engine.generate(prompt, NUM_TOKENS, on_prefill=on_prefill)
        assert [token.token_id for token in tokens] == expected
        [event] = engine.stats().events
        assert (event.kind, event.owner) == ("daemon_lost", "cpu0")
        assert "SIGKILL" in event.reason or "connection" in event.reason

        def is_back() -> bool:
            assert greedy(engine, prompt, NUM_TOKENS) == expected
            return engine.stats().owners["cpu0"].restarts == 1

        wait_until(is_back, "the daemon to be used again", pause_s=0.3)


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_parent_killed_within_a_text_costs_others_nothing(
    model: Path, undisturbed: list[int], endpoint: str, transport: str
) -> None:
    settings = settings_with(ipc_transport=transport)
    extra = {"DFLASH_MOE_EXPERT_COMPUTE_IPC_TRANSPORT": transport}
    silence = {"DFLASHTEST_LINK_SILENCE_S": str(SILENCE_S)}
    with (
        running_daemon(model, endpoint, module="support.watched_daemon", **silence) as daemon,
        Engine.open(model, connect=[endpoint], settings=settings) as engine,
    ):
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        num_before, shared_before = num_descriptors(daemon.pid), len(shared_memory_of(daemon.pid))
        for _ in range(3):
            with asked_parent(model, extra=extra, connect=[endpoint]) as parent:
                parent.begin(2000)
                for token in undisturbed[:FAULT_AFTER]:
                    assert parent.read() == token
                assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
                parent.process.kill()
                assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        assert engine.stats().events == []
        wait_until(
            lambda: (
                num_descriptors(daemon.pid) <= num_before
                and len(shared_memory_of(daemon.pid)) <= shared_before
            ),
            "what the dead parents had to be given back",
        )


# Stops


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_parent_that_was_stopped_until_its_daemon_forgot_it_comes_back(
    model: Path, undisturbed: list[int], endpoint: str, transport: str
) -> None:
    extra = {"DFLASH_MOE_EXPERT_COMPUTE_IPC_TRANSPORT": transport, HEARTBEAT: "200"}
    silence = {"DFLASHTEST_LINK_SILENCE_S": str(SILENCE_S)}
    with running_daemon(model, endpoint, module="support.watched_daemon", **silence) as daemon:
        num_idle = num_descriptors(daemon.pid)
        with asked_parent(model, extra=extra, connect=[endpoint]) as parent:
            assert parent.ask(NUM_TOKENS)[0] == undisturbed
            for round_idx in range(2):
                parent.begin(NUM_TOKENS)
                tokens = [parent.read() for _ in range(FAULT_AFTER)]
                stop(parent.pid)
                if transport == "shared":
                    wait_until(lambda: not shared_memory_of(daemon.pid), "it to be forgotten")
                else:
                    time.sleep(3 * SILENCE_S)
                os.kill(parent.pid, signal.SIGCONT)
                rest, _ = parent.read_all()
                assert tokens + rest == undisturbed

                def is_back(num_restarts: int = round_idx + 1) -> bool:
                    before = parent.ask(1)[1]
                    tokens, after = parent.ask(NUM_TOKENS)
                    assert tokens == undisturbed
                    remote = [each["requests"].get("fallback", 0) for each in (before, after)]
                    is_new = after["restarts"]["link0"] == num_restarts
                    return bool(is_new and remote[0] == remote[1])

                wait_until(is_back, "the daemon to be used again", pause_s=0.2)
        wait_until(lambda: num_descriptors(daemon.pid) <= num_idle, "descriptors to be free")


def test_thirty_seconds_of_a_stopped_daemon_and_of_a_stopped_parent_cost_no_token(
    model: Path, undisturbed: list[int], run_dir: Path
) -> None:
    """At the settings that users have; both pairs at once."""
    extra = {DEADLINE: "250"}

    def through(who: str) -> dict[str, Any]:
        """The record after a text that one of the two was stopped within."""
        listen = f"ipc://{run_dir}/{who}"
        with (
            running_daemon(model, listen, **extra) as daemon,
            asked_parent(model, extra=extra, connect=[listen]) as parent,
        ):
            assert parent.ask(NUM_TOKENS)[0] == undisturbed
            victim = parent.pid if who == "parent" else daemon.pid
            parent.begin(NUM_TOKENS)
            tokens = [parent.read() for _ in range(FAULT_AFTER)]
            stop(victim)
            begin_s = time.monotonic()
            try:
                if who == "daemon":
                    tokens += parent.read_all()[0]
                    assert tokens == undisturbed
                    assert time.monotonic() - begin_s < STOPPED_S / 3
                time.sleep(max(0.0, begin_s + STOPPED_S - time.monotonic()))
            finally:
                os.kill(victim, signal.SIGCONT)
            if who == "parent":
                tokens += parent.read_all()[0]
                assert tokens == undisturbed

            def is_used() -> bool:
                before = parent.ask(1)[1]["requests"].get("fallback", 0)
                tokens, record = parent.ask(NUM_TOKENS)
                assert tokens == undisturbed
                return bool(record["requests"].get("fallback", 0) == before)

            wait_until(is_used, "the daemon to be used again", pause_s=0.2)
            assert daemon.poll() is None
            return parent.ask(1)[1]

    with ThreadPoolExecutor(2) as pool:
        records = dict(
            zip(("daemon", "parent"), pool.map(through, ("daemon", "parent")), strict=True)
        )
    assert records["daemon"]["events"] == ["daemon_lost", "daemon_back"]
    assert records["daemon"]["restarts"]["link0"] == 1
    # The daemon waits longer than that; its pongs may be taken for missing, or may not.
    assert records["parent"]["restarts"]["link0"] <= 1
