"""What goes wrong outside: memory and descriptors that run out, stopped and killed processes.

Through shared memory and through sockets: each has its defined result, and a good one after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dflash_protocol.errors import DaemonUnavailable, HandshakeRefused
from dflash_runtime import Engine
from support import undisturbed as rig
from support.descriptors import num_descriptors
from support.faults import (
    greedy,
    no_more_descriptors,
    shared_memory_of,
    small_file_system,
    soft_limit,
    spawned_daemons,
)
from support.processes import (
    START_S,
    environment,
    running_daemon,
    stop,
    wait_for_ends,
    wait_until,
)
from support.undisturbed import FAULT_AFTER, NUM_TOKENS, PROMPT, settings_with

pytestmark = pytest.mark.e2e

model = rig.model
undisturbed = rig.undisturbed
endpoint = rig.endpoint

MOSTLY_SHARED = ("shared", pytest.param("stream", marks=pytest.mark.slow))
LITTLE_BYTES = 256 << 10
"""Less than a ring of these models needs."""


def transport_of(engine: Engine) -> set[str]:
    """What the daemons were reached through last."""
    return {x.transport for x in engine.stats().owners.values() if x.kind == "daemon"}


def assert_comes_back(engine: Engine, expected: list[int], *, transport: str) -> None:
    """Daemons are used again, and nothing but them."""

    def is_back() -> bool:
        before = engine.stats().owners.get("fallback")
        num_before = before.requests if before else 0
        assert greedy(engine, PROMPT, NUM_TOKENS) == expected
        after = engine.stats().owners.get("fallback")
        return (after.requests if after else 0) == num_before

    wait_until(is_back, "the daemons to be used again", pause_s=0.3)
    assert transport_of(engine) == {transport}


# Memory to share


@contextlib.contextmanager
def little_room(how: str, folder: Path) -> Iterator[None]:
    """Where sockets are, no file of ours may be larger than `LITTLE_BYTES`."""
    if how == "limit":
        with soft_limit(resource.RLIMIT_FSIZE, LITTLE_BYTES):
            yield
        return
    with small_file_system(folder, LITTLE_BYTES) as is_mounted:
        if not is_mounted:
            pytest.skip("may not mount a tmpfs")
        yield


@pytest.mark.parametrize("how", ["limit", pytest.param("full", marks=pytest.mark.slow)])
def test_without_room_for_shared_memory_sockets_are_used_and_the_log_says_why(
    model: Path,
    undisturbed: list[int],
    run_dir: Path,
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = run_dir / "little"
    folder.mkdir(mode=0o700)
    listen = f"ipc://{folder}/d"
    try:
        with little_room(how, folder), running_daemon(model, listen):
            with Engine.open(model, connect=[listen], settings=settings_with()) as engine:
                assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
                assert transport_of(engine) == {"stream"}
                assert engine.stats().events == []
            [message] = caplog.messages
            reason = {"limit": "File too large", "full": "No space left on device"}[how]
            assert str(folder) in message
            assert message.endswith(reason)
            required = settings_with(ipc_transport="shared")
            with pytest.raises(HandshakeRefused, match=f"{folder}.*{reason}"):
                Engine.open(model, connect=[listen], settings=required)
            assert not list(folder.glob("ring-*"))
        with running_daemon(model, listen), Engine.open(model, connect=[listen]) as engine:
            assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
            assert transport_of(engine) == {"shared"}
    finally:
        folder.rmdir()


def test_a_daemon_that_comes_back_when_there_is_no_room_is_reached_through_sockets(
    model: Path, undisturbed: list[int]
) -> None:
    with Engine.open(model, daemons=["cpu"], settings=settings_with()) as engine:
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        assert transport_of(engine) == {"shared"}
        with soft_limit(resource.RLIMIT_FSIZE, LITTLE_BYTES):
            spawned_daemons()[0].kill()
            wait_until(lambda: engine.stats().owners["cpu0"].restarts == 1, "the daemon's return")
        assert_comes_back(engine, undisturbed, transport="stream")
        spawned_daemons()[0].kill()
        wait_until(lambda: engine.stats().owners["cpu0"].restarts == 2, "the daemon's return")
        assert_comes_back(engine, undisturbed, transport="shared")


# Descriptors


@pytest.mark.parametrize("transport", MOSTLY_SHARED)
@pytest.mark.parametrize(
    "num_left", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (3, 5))]
)
def test_a_parent_without_descriptors_computes_itself_and_reconnects_when_it_has_some(
    model: Path, undisturbed: list[int], transport: str, num_left: int
) -> None:
    """Each number is too few for another step of starting, greeting and sharing."""
    settings = settings_with(ipc_transport=transport, connect_timeout_ms=2000)
    with Engine.open(model, daemons=["cpu"], settings=settings) as engine:
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        num_before = num_descriptors()
        [daemon] = spawned_daemons()
        with no_more_descriptors(num_left=num_left):
            os.kill(daemon.pid, signal.SIGKILL)  # psutil would need a descriptor
            end_s = time.monotonic() + 1.0
            while time.monotonic() < end_s:
                assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
            assert engine.stats().owners["cpu0"].restarts == 0
            assert [event.kind for event in engine.stats().events] == ["daemon_lost"]
        assert_comes_back(engine, undisturbed, transport=transport)
        wait_until(lambda: num_descriptors() <= num_before, "descriptors to be given back")


@pytest.mark.parametrize("transport", MOSTLY_SHARED)
def test_a_daemon_without_descriptors_says_so_or_does_with_less_and_leaks_none(
    model: Path, undisturbed: list[int], endpoint: str, transport: str
) -> None:
    settings = settings_with(ipc_transport=transport, connect_timeout_ms=1000)
    with running_daemon(model, endpoint) as daemon:
        with Engine.open(model, connect=[endpoint], settings=settings) as engine:
            assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        num_idle = num_descriptors(daemon.pid)
        wait_until(lambda: not shared_memory_of(daemon.pid), "the first link to be forgotten")
        num_refused = 0
        for num_left in range(2, 7):
            wait_until(lambda: num_descriptors(daemon.pid) <= num_idle, "descriptors to be free")
            with no_more_descriptors(num_left=num_left, pid=daemon.pid):
                try:
                    with Engine.open(model, connect=[endpoint], settings=settings) as engine:
                        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
                except (DaemonUnavailable, HandshakeRefused):
                    num_refused += 1
        assert num_refused < 5
        assert (num_refused > 0) >= (transport == "shared")
        assert daemon.poll() is None
        with Engine.open(model, connect=[endpoint], settings=settings) as engine:
            assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
            assert transport_of(engine) == {transport}
        wait_until(lambda: num_descriptors(daemon.pid) <= num_idle, "descriptors to be free")


# Two daemons on one endpoint


@pytest.mark.parametrize("transport", MOSTLY_SHARED)
def test_a_second_daemon_on_an_endpoint_ends_and_the_first_goes_on(
    model: Path, undisturbed: list[int], endpoint: str, transport: str
) -> None:
    settings = settings_with(ipc_transport=transport)
    second = [sys.executable, "-m", "dflash_daemon", str(model), "--listen", endpoint]
    with (
        running_daemon(model, endpoint) as first,
        Engine.open(model, connect=[endpoint], settings=settings) as engine,
    ):
        tokens = []
        for token in engine.generate(PROMPT, NUM_TOKENS):
            tokens.append(token.token_id)
            if len(tokens) == FAULT_AFTER:
                done = subprocess.run(
                    second, env=environment(), capture_output=True, text=True, timeout=START_S
                )
                assert done.returncode == 1
                [line] = done.stderr.splitlines()
                assert line.startswith("dflash-daemon: error: ")
                assert endpoint in line
        assert tokens == undisturbed
        assert first.poll() is None
        stats = engine.stats()
        assert (stats.events, stats.owners["link0"].restarts) == ([], 0)
        assert transport_of(engine) == {transport}
        with Engine.open(model, connect=[endpoint], settings=settings) as another:
            assert greedy(another, PROMPT, NUM_TOKENS) == undisturbed


# Stopped processes


@pytest.mark.parametrize("transport", MOSTLY_SHARED)
def test_a_daemon_stopped_in_mid_generation_costs_two_deadlines_at_most_and_is_used_again(
    model: Path, undisturbed: list[int], endpoint: str, transport: str
) -> None:
    deadline_s = 1.0
    settings = settings_with(
        ipc_transport=transport, deadline_ms=int(1e3 * deadline_s), connect_timeout_ms=5000
    )
    with (
        running_daemon(model, endpoint) as daemon,
        Engine.open(model, connect=[endpoint], settings=settings) as engine,
    ):
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        tokens, waits_s = [], []
        last_s = time.monotonic()
        try:
            for token in engine.generate(PROMPT, NUM_TOKENS):
                tokens.append(token.token_id)
                waits_s.append(time.monotonic() - last_s)
                if len(tokens) == FAULT_AFTER:
                    stop(daemon.pid)
                last_s = time.monotonic()
            assert tokens == undisturbed
            longest_s = max(waits_s[FAULT_AFTER:])
            assert longest_s < 2 * deadline_s
            [event] = engine.stats().events
            assert event.kind == "daemon_lost"
            assert re.search("reply|heartbeat", event.reason)
        finally:
            daemon.send_signal(signal.SIGCONT)
        assert_comes_back(engine, undisturbed, transport=transport)
        assert engine.stats().owners["link0"].restarts == 1


@pytest.mark.slow
def test_a_daemon_that_is_stopped_again_and_again_never_costs_a_token(
    model: Path, undisturbed: list[int], endpoint: str
) -> None:
    settings = settings_with(deadline_ms=150, connect_timeout_ms=5000)
    with (
        running_daemon(model, endpoint) as daemon,
        Engine.open(model, connect=[endpoint], settings=settings) as engine,
    ):
        for _ in range(3):
            stop(daemon.pid)
            try:
                assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
            finally:
                daemon.send_signal(signal.SIGCONT)
            assert_comes_back(engine, undisturbed, transport="shared")


# Processes that end


_PARENT = """
import json, sys
from dflash_runtime import Engine

if __name__ == "__main__":
    with Engine.open(sys.argv[1], **json.loads(sys.argv[2])) as engine:
        list(engine.generate([1, 2], 5))
        print("has computed", flush=True)
        sys.stdin.read()
"""


@contextlib.contextmanager
def parent_process(model: Path, transport: str, **options: object) -> Iterator[psutil.Process]:
    """A parent that has used its daemons and keeps its links; killed at the end if not before."""
    command = [sys.executable, "-c", _PARENT, str(model), json.dumps(options)]
    variables = {"DFLASH_MOE_EXPERT_COMPUTE_IPC_TRANSPORT": transport}
    with subprocess.Popen(
        command,
        env=environment(**variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "has computed\n"
            yield psutil.Process(process.pid)
        finally:
            process.kill()


@pytest.mark.parametrize("transport", MOSTLY_SHARED)
def test_spawned_daemons_end_with_a_parent_that_is_killed_and_leave_nothing(
    model: Path, transport: str, run_dir: Path
) -> None:
    with parent_process(model, transport, daemons=["cpu", "cpu"]) as parent:
        daemons = parent.children()
        assert len(daemons) == 2
        assert all(bool(shared_memory_of(d.pid)) == (transport == "shared") for d in daemons)
        parent.kill()
        wait_for_ends(daemons)
    wait_until(lambda: not list(run_dir.iterdir()), "the sockets' folder to be removed")


@pytest.mark.parametrize("transport", MOSTLY_SHARED)
def test_a_daemon_gives_back_what_a_killed_parent_shared_and_serves_the_next_one(
    model: Path, undisturbed: list[int], endpoint: str, transport: str, tmp_path: Path
) -> None:
    silence_s = 1.0
    (tmp_path / "sitecustomize.py").write_text(
        f"from dflash_daemon import control\ncontrol._LINK_SILENCE_S = {silence_s}\n"
    )
    paths = f"{tmp_path}:{environment()['PYTHONPATH']}"
    with running_daemon(model, endpoint, PYTHONPATH=paths) as daemon:
        num_idle = num_descriptors(daemon.pid)
        with parent_process(model, transport, connect=[endpoint]) as parent:
            held_by_a_link = len(shared_memory_of(daemon.pid))
            assert bool(held_by_a_link) == (transport == "shared")
            parent.kill()
            parent.wait()
        wait_until(lambda: not shared_memory_of(daemon.pid), "what the dead parent shared to go")
        settings = settings_with(ipc_transport=transport)
        with Engine.open(model, connect=[endpoint], settings=settings) as engine:
            assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        wait_until(lambda: not shared_memory_of(daemon.pid), "all shared memory to be given back")
        wait_until(lambda: num_descriptors(daemon.pid) <= num_idle, "descriptors to be given back")


@pytest.mark.parametrize("transport", MOSTLY_SHARED)
def test_a_parent_gives_back_what_it_shared_with_a_daemon_that_ended(
    model: Path, undisturbed: list[int], endpoint: str, transport: str
) -> None:
    settings = settings_with(ipc_transport=transport)
    with (
        running_daemon(model, endpoint) as daemon,
        Engine.open(model, connect=[endpoint], settings=settings) as engine,
    ):
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        num_allowed = num_descriptors() + 1  # from the second daemon's stderr
        daemon.terminate()
        assert daemon.wait(START_S) == 0
        assert greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
        assert shared_memory_of(os.getpid()) == []
        with running_daemon(model, endpoint):
            assert_comes_back(engine, undisturbed, transport=transport)
            wait_until(lambda: num_descriptors() <= num_allowed, "descriptors to be given back")


# Daemons that are required


@pytest.mark.parametrize("transport", MOSTLY_SHARED)
@pytest.mark.parametrize("phase", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
def test_a_required_daemon_that_is_lost_is_an_error_in_either_phase_until_it_is_back(
    model: Path, undisturbed: list[int], transport: str, phase: str
) -> None:
    settings = settings_with(ipc_transport=transport, ipc_required=True)
    with Engine.open(model, daemons=["cpu"], settings=settings) as engine:
        tokens = engine.generate(PROMPT, NUM_TOKENS)
        assert phase == "prefill" or next(tokens).token_id == undisturbed[0]
        spawned_daemons()[0].kill()
        with pytest.raises(DaemonUnavailable, match=r"\bcpu0: .*required"):
            list(tokens)

        def is_back() -> bool:
            try:
                return greedy(engine, PROMPT, NUM_TOKENS) == undisturbed
            except DaemonUnavailable:
                return False

        wait_until(is_back, "the required daemon to be used again", pause_s=0.3)
        assert "fallback" not in engine.stats().owners
