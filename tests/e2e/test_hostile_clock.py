"""The wall clock is set by an hour, either way, while real processes work: nothing waits for it."""

from __future__ import annotations

import shutil
import struct
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from support.asked_parent import asked_parent
from support.processes import START_S, environment, running_daemon
from support.random_models import BLOCK_32_SHAPE, write_qwen3moe
from support.serving import NO_TLS, running_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHAPE = replace(BLOCK_32_SHAPE, vocab_size=300, context_length=4096)
NUM_TOKENS = 40
HOUR_S = 3600


class Clock:
    """The wall clock of processes that have `variables` in their environment."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("there is no C compiler")
        library = folder / "stepped_clock.so"
        source = Path(__file__).parents[1] / "support" / "stepped_clock.c"
        subprocess.run(
            [
                compiler,
                "-shared",
                "-fPIC",
                "-O1",
                "-Wall",
                "-Werror",
                source,
                "-o",
                library,
                "-ldl",
            ],
            check=True,
        )
        self._file = folder / "offset"
        self._file.write_bytes(bytes(8))
        self.variables = {"LD_PRELOAD": str(library), "DFLASHTEST_CLOCK": str(self._file)}

    def set(self, offset_s: int) -> None:
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", offset_s))


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Clock:
    return Clock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    return write_qwen3moe(path, SHAPE, seed=3, tensor_type="Q8_0", tokenizer="bytes")


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_a_parent_and_its_daemon_do_not_notice(
    model: Path, run_dir: Path, clock: Clock, transport: str
) -> None:
    extra = {
        **clock.variables,
        "DFLASH_MOE_EXPERT_COMPUTE_IPC_TRANSPORT": transport,
        "DFLASH_MOE_EXPERT_COMPUTE_HEARTBEAT_MS": "100",
    }
    endpoint = f"ipc://{run_dir}/daemon.sock"
    clock.set(0)
    with (
        running_daemon(model, endpoint, **extra) as daemon,
        asked_parent(model, extra=extra, connect=[endpoint]) as parent,
    ):
        expected, _ = parent.ask(NUM_TOKENS)
        for offset_s in (HOUR_S, -HOUR_S, 0):
            begin_s = time.monotonic()
            parent.begin(NUM_TOKENS)
            tokens = [parent.read() for _ in range(5)]
            clock.set(offset_s)
            time.sleep(1.0)  # five heartbeats are missed within half of this
            rest, _ = parent.read_all()
            assert tokens + rest == expected
            tokens, record = parent.ask(NUM_TOKENS)
            assert tokens == expected
            assert time.monotonic() - begin_s < START_S
        assert record["events"] == []
        assert record["restarts"]["link0"] == 0
        assert daemon.poll() is None


def test_a_server_does_not_notice_but_for_the_date(model: Path, clock: Clock) -> None:
    clock.set(0)
    body = {"prompt": "Once", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    with running_server(model, "--daemon", "cpu", is_ready=True, **clock.variables) as server:
        url = f"{server.url}/v1/completions"
        with httpx.Client(verify=NO_TLS, timeout=START_S) as client:
            expected = client.post(url, json=body).json()["choices"][0]["text"]
            for offset_s in (HOUR_S, -HOUR_S, 0):
                with client.stream("POST", url, json={**body, "stream": True}) as response:
                    chunks = response.iter_text()
                    text = next(chunks)
                    clock.set(offset_s)
                    text += "".join(chunks)
                assert text.endswith("data: [DONE]\n\n")
                answer = client.post(url, json=body)
                assert answer.json()["choices"][0]["text"] == expected
                # The clock was set: what tells the time tells the new one.
                assert abs(answer.json()["created"] - time.time() - offset_s) < START_S
        for kind in ("prefill", "decode"):
            took_s = server.metric(f"dflash_moe_request_{kind}_time_seconds_sum")
            assert 0 < took_s < START_S
        begin_s = time.monotonic()
        server.process.terminate()
        assert server.process.wait(START_S) == 0
        assert time.monotonic() - begin_s < START_S / 2


def test_the_clock_of_these_tests_can_be_set(clock: Clock) -> None:
    program = "import time; print(int(time.time()), time.monotonic())"
    for offset_s in (HOUR_S, -HOUR_S):
        clock.set(offset_s)
        done = subprocess.run(
            ["python3", "-c", program], env=environment(**clock.variables),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        wall_s, monotonic_s = map(float, done.stdout.split())
        assert abs(wall_s - time.time() - offset_s) < 5
        assert abs(monotonic_s - time.monotonic()) < 5
