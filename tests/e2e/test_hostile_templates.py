"""A chat template that has left its sandbox holds neither a server nor ``generate``."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from support.hostile_renderer import ASLEEP, STUCK_IN_C, cli_with_escaped_templates
from support.processes import START_S, environment, wait_for_ends, wait_until
from support.random_gguf import write_model
from support.random_models import Qwen3MoeShape
from support.serving import NO_TLS, running_server

pytestmark = pytest.mark.e2e

SHAPE = Qwen3MoeShape(num_layers=1, num_experts=4, num_experts_used=2, vocab_size=300)
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
NUM_CHATS = 24  # more than there are threads


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {"tokenizer.chat_template": ASLEEP}
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    return write_model(path, SHAPE, seed=1, tokenizer="bytes", keys=keys)


def test_a_stuck_template_holds_up_no_other_request_and_no_end(model: Path) -> None:
    answers: list[httpx.Response] = []
    with (
        running_server(
            model, "--backend", "reference", program=cli_with_escaped_templates()
        ) as server,
        httpx.Client(base_url=server.url, verify=NO_TLS, timeout=60) as client,
    ):
        children = psutil.Process(server.process.pid).children()
        # Started before the first chat, beside the one that tries grammars.
        assert len(children) == 2 + 1

        def chat() -> None:
            answers.append(client.post("/v1/chat/completions", json=CHAT))

        chats = [threading.Thread(target=chat) for _ in range(NUM_CHATS)]
        for thread in chats:
            thread.start()
        wait_until(lambda: len(psutil.Process(server.process.pid).children()) == 3 + 1, "two chats")
        children = psutil.Process(server.process.pid).children()
        started_s = time.monotonic()
        for _ in range(5):
            assert client.post("/tokenize", json={"content": "x"}).json() == {"tokens": [ord("x")]}
        assert time.monotonic() - started_s < 2  # a rendering is given up after six
        started_s = time.monotonic()
        server.process.terminate()
        assert server.process.wait(START_S) == 0
        assert time.monotonic() - started_s < 4
        for thread in chats:
            thread.join()
    assert {answer.status_code for answer in answers} == {503}
    wait_for_ends(children)
    assert not any("Traceback" in line for line in server.lines), server.lines


def test_ctrl_c_ends_a_stuck_template(model: Path, tmp_path: Path) -> None:
    keys = {"tokenizer.chat_template": STUCK_IN_C}
    model = write_model(tmp_path / "m.gguf", SHAPE, seed=1, tokenizer="bytes", keys=keys)
    command = [*cli_with_escaped_templates(), "generate", str(model), "--chat", "-p", "x"]
    with subprocess.Popen(
        [*command, "--backend", "reference"], env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            parent = psutil.Process(process.pid)

            def is_computing() -> bool:
                return any(child.cpu_times().user > 0.2 for child in parent.children())

            wait_until(is_computing, "the template to be stuck")
            children = parent.children()
            started_s = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=START_S)
        finally:
            process.kill()
    assert time.monotonic() - started_s < 3
    assert (process.returncode, errors.splitlines()[-1]) == (130, "dflash-moe: error: interrupted")
    wait_for_ends(children)
