"""A lost daemon costs time, never a token; a wrong daemon is never used."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_adapters.gguf.file import GgufFile, sample_places
from dflash_adapters.registry import read_spec
from dflash_protocol.errors import DaemonUnavailable, HandshakeRefused
from dflash_runtime import Engine
from support.faults import spawned_daemons
from support.processes import START_S, running_daemon, wait_until
from support.random_models import ODD_SHAPES, write_qwen3moe

pytestmark = pytest.mark.e2e

PROMPT = list(range(1, 30))
NUM_TOKENS = 60
KILL_AFTER = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(tmp_path_factory.mktemp("model") / "m.gguf", ODD_SHAPES[0], seed=10)


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[int]:
    with Engine.open(model) as engine:
        return [token.token_id for token in engine.generate(PROMPT, NUM_TOKENS)]


@pytest.fixture
def endpoint(run_dir: Path) -> str:
    return f"ipc://{run_dir}/daemon.sock"


def generate(engine: Engine, *, kill: psutil.Process | None = None) -> list[int]:
    """Token ids; `kill` is ended without warning after some of them."""
    tokens = []
    for token in engine.generate(PROMPT, NUM_TOKENS):
        tokens.append(token.token_id)
        if len(tokens) == KILL_AFTER and kill is not None:
            kill.send_signal(signal.SIGKILL)
    return tokens


def test_the_only_daemon_comes_back_after_it_was_told_to_end(
    model: Path, undisturbed: list[int]
) -> None:
    """It leaves an empty folder behind, and takes that for a dead parent's."""
    with Engine.open(model, daemons=["cpu"]) as engine:
        (victim,) = spawned_daemons()
        victim.terminate()
        victim.wait(START_S)

        def is_back() -> bool:
            assert generate(engine) == undisturbed
            stats = engine.stats()
            return stats.owners["cpu0"].restarts == 1

        wait_until(is_back, "the daemon to be started again", pause_s=0.3)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
def test_a_spawned_daemon_killed_in_mid_generation_costs_no_token(
    model: Path, backend: str
) -> None:
    with Engine.open(model, backend=backend) as engine:
        expected = generate(engine)
    with Engine.open(model, daemons=["cpu", "cpu"], backend=backend) as engine:
        victim = spawned_daemons()[0]
        assert generate(engine, kill=victim) == expected
        stats = engine.stats()
        assert stats.events[0].kind == "daemon_lost"
        assert "SIGKILL" in stats.events[0].reason or "connection" in stats.events[0].reason
        assert stats.owners["fallback"].requests > 0

        def is_back() -> bool:
            fallback_before = engine.stats().owners["fallback"].requests
            assert generate(engine) == expected
            return engine.stats().owners["fallback"].requests == fallback_before

        wait_until(is_back, "the killed daemon to be restarted and used again", pause_s=0.3)
        stats = engine.stats()
        assert sorted(owner.restarts for owner in stats.owners.values()) == [0, 0, 1]
        assert [event.kind for event in stats.events] == ["daemon_lost", "daemon_back"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_kills", "options", "reason"),
    [
        (1, {}, ""),
        (2, {}, ""),
        (3, {}, r"\bcpu0\b.*SIGKILL.*\b3 times"),
        (1, {"require_daemons": True}, r"\bcpu0\b.*SIGKILL"),
        (1, {"require_daemons": True, "tolerates_absent": True}, ""),  # a server's
    ],
)
def test_a_daemon_killed_while_it_and_another_one_start_is_replaced(
    model: Path, undisturbed: list[int], num_kills: int, options: dict[str, Any], reason: str
) -> None:
    """Unless it is killed each time, or a generation requires it."""
    ended = threading.Event()

    def kill() -> None:
        killed: set[int] = set()
        while len(killed) < num_kills and not ended.is_set():
            with suppress(psutil.Error):  # one that is just ending
                for each in spawned_daemons():
                    if each.pid not in killed and "/cpu0" in " ".join(each.cmdline()):
                        each.kill()
                        killed.add(each.pid)
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        try:
            if reason:
                with pytest.raises(DaemonUnavailable, match=reason):
                    Engine.open(model, daemons=["cpu", "cpu"], **options)
                return
            with Engine.open(model, daemons=["cpu", "cpu"], **options) as engine:
                events = [event.kind for event in engine.stats().events]
                assert events == [*["daemon_lost"] * num_kills, "daemon_back"]
                assert generate(engine) == undisturbed
                assert "fallback" not in engine.stats().owners
        finally:
            ended.set()
            killing.result()


def test_a_connected_daemon_is_used_again_when_it_comes_back(
    model: Path, undisturbed: list[int], endpoint: str
) -> None:
    with running_daemon(model, endpoint) as first, Engine.open(model, connect=[endpoint]) as engine:
        assert generate(engine, kill=psutil.Process(first.pid)) == undisturbed
        assert [event.kind for event in engine.stats().events] == ["daemon_lost"]
        assert engine.stats().owners["link0"].restarts == 0
        first.wait()
        with running_daemon(model, endpoint):

            def is_back() -> bool:
                assert generate(engine) == undisturbed
                return engine.stats().owners["link0"].restarts == 1

            wait_until(is_back, "the new daemon to be connected to", pause_s=0.3)
            fallback_requests = engine.stats().owners["fallback"].requests
            assert generate(engine) == undisturbed
            assert engine.stats().owners["fallback"].requests == fallback_requests


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    return write_qwen3moe(tmp_path / "other.gguf", ODD_SHAPES[0], seed=11)


def test_a_daemon_with_another_model_is_refused_naming_both(
    model: Path, other_model: Path, endpoint: str, undisturbed: list[int]
) -> None:
    identities = []
    for path in (model, other_model):
        with GgufFile.open(path) as file:
            identities.append(file.identity())
    with running_daemon(other_model, endpoint):
        with pytest.raises(HandshakeRefused) as caught:
            Engine.open(model, connect=[endpoint])
        assert all(identity[:16] in str(caught.value) for identity in identities)
        with Engine.open(other_model, connect=[endpoint]) as engine:
            assert len(generate(engine)) == NUM_TOKENS
    with running_daemon(model, endpoint), Engine.open(model, connect=[endpoint]) as engine:
        assert generate(engine) == undisturbed


def test_files_that_differ_in_one_sampled_byte_of_one_expert_are_different_models(
    model: Path, tmp_path: Path, endpoint: str
) -> None:
    with GgufFile.open(model) as file:
        down = read_spec(file).moe.layers[2].down
        # A sampled place in the middle of the stack, and so inside the slab of one expert.
        places = sample_places(file.tensor(down.tensor_name).num_bytes)
        offset, _ = places[len(places) // 2]
        place = file.tensor(down.tensor_name).offset_bytes + offset
    changed = tmp_path / "changed.gguf"
    data = bytearray(model.read_bytes())
    data[place] ^= 1
    changed.write_bytes(data)
    with running_daemon(changed, endpoint), pytest.raises(HandshakeRefused, match="model"):
        Engine.open(model, connect=[endpoint])


def test_another_placement_of_the_same_model_is_served(
    model: Path, endpoint: str, undisturbed: list[int]
) -> None:
    with running_daemon(model, endpoint):
        with Engine.open(model, connect=[endpoint]) as engine:
            assert generate(engine) == undisturbed
        with Engine.open(
            model, connect=[endpoint], local_experts=3, require_daemons=True
        ) as engine:
            assert generate(engine) == undisturbed
        with Engine.open(model, connect=[endpoint]) as engine:
            assert generate(engine) == undisturbed


def test_several_parents_use_one_daemon(model: Path, endpoint: str, undisturbed: list[int]) -> None:
    with (
        running_daemon(model, endpoint),
        Engine.open(model, connect=[endpoint]) as first,
        Engine.open(model, connect=[endpoint]) as second,
    ):
        pairs = list(
            zip(
                first.generate(PROMPT, NUM_TOKENS), second.generate(PROMPT, NUM_TOKENS), strict=True
            )
        )
        assert [a.token_id for a, _ in pairs] == [b.token_id for _, b in pairs] == undisturbed
        assert first.stats().events == second.stats().events == []
