"""A server's life: what it is started with, what it does with its daemons, how it ends."""

from __future__ import annotations

import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dflash_runtime.cli.main import main
from support.faults import spawned_by
from support.imported_later import openai
from support.processes import START_S, run_cli, run_main, running_daemon, wait_until
from support.random_models import Qwen3MoeShape, write_qwen3moe
from support.serving import RunningServer, running_server

pytestmark = pytest.mark.e2e

TRANSPORT = "DFLASH_MOE_EXPERT_COMPUTE_IPC_TRANSPORT"

SHAPE = Qwen3MoeShape(
    num_layers=2, num_experts=4, num_experts_used=2, vocab_size=300, context_length=16384
)
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    return write_qwen3moe(path, SHAPE, seed=1, tokenizer="bytes")


@pytest.fixture(autouse=True)
def sockets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on shared memory, whose libraries take a second to load."""
    monkeypatch.setenv(TRANSPORT, "stream")


def text_of(server: RunningServer, prompt: str, max_tokens: int) -> str:
    with server.client() as client:
        answer = client.completions.create(
            model="any", prompt=prompt, max_tokens=max_tokens, **GREEDY
        )
    return str(answer.choices[0].text)


def has_one(server: RunningServer, metric: str) -> bool:
    return server.metric(metric) == 1


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_lets_running_requests_end_and_refuses_others(
    model: Path, number: signal.Signals
) -> None:
    with running_server(model, "--backend", "reference", "--daemon", "cpu") as server:
        expected = text_of(server, "hello", 300)
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(text_of, server, "hello", 300) for _ in range(2)]
            # The first to come waits too, until it is begun.
            for state in ("running", "waiting"):
                name = f"dflash_moe_num_requests_{state}"
                wait_until(partial(has_one, server, name), f"one that is {state}")
            server.process.send_signal(number)
            wait_until(lambda: server.get("/ready").status_code == 503, "it to drain")
            with pytest.raises(openai.InternalServerError) as caught:
                text_of(server, "x", 1)
            assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
            # Also the one that had not begun: it was taken.
            assert [each.result() for each in running] == [expected] * 2
        ended_s = time.monotonic()
        assert server.process.wait(START_S) == 0
        assert time.monotonic() - ended_s < 5
    assert any(re.search(r"\b2 requests", line) for line in server.lines)
    assert not any("Traceback" in line for line in server.lines), server.lines


def test_a_second_signal_waits_for_nobody(model: Path) -> None:
    with running_server(model, "--backend", "reference") as server, server.client() as client:
        with client.completions.create(
            model="any", prompt="a", max_tokens=16000, stream=True, **GREEDY
        ) as stream:
            next(stream)
            server.process.terminate()
            wait_until(
                lambda: any(re.search(r"\b1 request\b", line) for line in server.lines), "the first"
            )
            server.process.terminate()
            with pytest.raises(openai.APIError, match="shutting"):
                list(stream)
        assert server.process.wait(5) == 0


def test_daemons_are_started_once_and_lost_ones_lose_nobody(model: Path) -> None:
    with running_server(
        model, "--backend", "reference", "--daemon", "cpu", "--daemon", "cpu"
    ) as server:
        prompts = [f"number {index % 5}" for index in range(32)]
        alone = {prompt: text_of(server, prompt, 20) for prompt in set(prompts)}
        daemons = spawned_by(server.process.pid)
        assert len(daemons) == 2
        killed = threading.Event()

        def kill_one() -> None:
            wait_until(lambda: server.metric("dflash_moe_num_requests_waiting") > 10, "load")
            daemons[0].kill()
            killed.set()

        killer = threading.Thread(target=kill_one)
        killer.start()
        with ThreadPoolExecutor(32) as pool:
            texts = list(pool.map(lambda prompt: text_of(server, prompt, 20), prompts))
        killer.join()
        assert killed.is_set()
        assert texts == [alone[prompt] for prompt in prompts]
        props = server.get("/props").json()
        assert [event["kind"] for event in props["events"]].count("daemon_lost") == 1
        assert daemons[1].is_running()
        metric = 'dflash_moe_owner_restarts_total{kind="daemon",owner="cpu0"}'
        wait_until(
            lambda: text_of(server, "x", 1) and server.metric(metric) == 1,
            "it to be back",
            pause_s=0.2,
        )


def test_a_daemon_that_is_not_there_yet_is_used_once_it_comes(model: Path, run_dir: Path) -> None:
    endpoint = f"ipc://{run_dir}/later.sock"
    arguments = ["--backend", "reference", "--connect", endpoint, "--connect-timeout-ms", "300"]
    with running_server(model, *arguments) as server:
        expected = text_of(server, "a", 8)
        props = server.get("/props").json()
        assert [event["kind"] for event in props["events"]] == ["daemon_absent"]
        assert any("link0" in line and endpoint in line for line in server.lines)
        with running_daemon(model, endpoint, ["--backend", "reference"]):
            metric = 'dflash_moe_owner_up{kind="daemon",owner="link0"}'
            wait_until(lambda: server.metric(metric) == 1, "the daemon to be used", within_s=30)
            requests = 'dflash_moe_owner_requests_total{kind="daemon",owner="link0"}'
            before = server.metric(requests)
            assert text_of(server, "a", 8) == expected
            assert server.metric(requests) > before
            events = server.get("/props").json()["events"]
            assert [event["kind"] for event in events] == ["daemon_absent", "daemon_back"]
            assert events[1]["owner"] == "link0"
            told = re.compile(rf"\blink0\b.*{re.escape(events[1]['reason'])}")
            wait_until(lambda: any(map(told.search, server.lines)), "the line")


@pytest.mark.parametrize("mode", ["stream", pytest.param("batched", marks=pytest.mark.slow)])
def test_the_mode_in_the_environment_shows_in_the_metrics(model: Path, mode: str) -> None:
    with running_server(
        model,
        "--backend",
        "reference",
        "--daemon",
        "cpu",
        DFLASH_MOE_EXPERT_COMPUTE_IPC_MODE=mode,
    ) as server:
        text_of(server, "x" * 120, 1)
        requests = server.metric(
            'dflash_moe_owner_phase_requests_total{owner="cpu0",phase="prefill"}'
        )
        assert server.get("/props").json()["settings"]["ipc_mode"] == mode
    if mode == "batched":
        assert requests == SHAPE.num_layers
    else:
        assert requests >= 20 * SHAPE.num_layers


def test_a_full_queue_is_429_with_a_time_to_come_back(model: Path) -> None:
    with (
        running_server(model, "--backend", "reference", "--queue-capacity", "1") as server,
        ThreadPoolExecutor(2) as pool,
    ):
        answers = [pool.submit(text_of, server, "a", 600)]
        wait_until(lambda: server.metric("dflash_moe_num_requests_running") == 1, "its turn")
        answers.append(pool.submit(text_of, server, "a", 600))
        wait_until(lambda: server.metric("dflash_moe_num_requests_waiting") == 1, "a full queue")
        with pytest.raises(openai.RateLimitError) as caught:
            text_of(server, "x", 1)
        assert caught.value.code == "queue_full"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert all(answer.result() for answer in answers)


def test_a_key_file_is_asked_for_beyond_this_machine(model: Path, tmp_path: Path) -> None:
    refused = run_main(main, "serve", model, "--host", "0.0.0.0", "--port", "0")
    assert refused.returncode == 2
    assert "API key file" in refused.stderr
    keys = tmp_path / "keys"
    keys.write_text("a-key-that-is-long-enough\n")
    keys.chmod(0o644)
    refused = run_main(main, "serve", model, "--api-key-file", keys, "--port", "0")
    assert (refused.returncode, "chmod 600" in refused.stderr) == (2, True)
    keys.chmod(0o600)
    with running_server(
        model,
        "--backend",
        "reference",
        DFLASH_MOE_API_KEY_FILE=str(keys),
        DFLASH_MOE_HOST="0.0.0.0",
    ) as server:
        with (
            pytest.raises(openai.AuthenticationError),
            server.client("a-key-that-is-long-enough-but-another") as client,
        ):
            client.models.list()
        with server.client("a-key-that-is-long-enough") as client:
            assert [model.id for model in client.models.list()] == ["small"]


def test_what_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"no model")
    failed = run_cli("serve", tmp_path / "no.gguf", "--port", "0")
    assert failed.returncode == 1
    assert "no.gguf" in failed.stderr.splitlines()[-1]
    assert "Traceback" not in failed.stderr


def test_probes_answer_while_the_model_is_loaded(model: Path, run_dir: Path) -> None:
    """It waits for a daemon that does not come."""
    with running_server(
        model,
        "--connect",
        f"ipc://{run_dir}/nobody.sock",
        "--require-daemons",
        "--connect-timeout-ms",
        "4000",
        is_ready=False,
    ) as server:
        wait_until(lambda: server.get("/health").status_code == 200, "it to be up")
        response = server.get("/ready")
        assert (response.status_code, response.json()["status"]) == (503, "loading")
        assert server.process.wait(30) == 1
    assert f"ipc://{run_dir}/nobody.sock" in server.lines[-1]


def test_a_signal_while_the_model_is_loaded_ends_it(model: Path, run_dir: Path) -> None:
    with running_server(
        model,
        "--connect",
        f"ipc://{run_dir}/nobody.sock",
        "--connect-timeout-ms",
        "2000",
        is_ready=False,
    ) as server:
        wait_until(lambda: server.get("/health").status_code == 200, "it to be up")
        server.process.terminate()
        assert server.process.wait(30) == 0
    assert not any("Traceback" in line or "ready:" in line for line in server.lines), server.lines
