"""Starts a server as a user would, and clients for it."""

from __future__ import annotations

import contextlib
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from support.imported_later import openai
from support.processes import START_S, cli_command, environment, wait_until
from support.random_models import Qwen3MoeShape, write_qwen3moe

CHAT_TEMPLATE = (
    "{%- for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of plain HTTP, which would otherwise load the system's certificates (40 ms)."""


@dataclass
class RunningServer:
    """A server's process. `lines` is its stderr so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return next(line for line in self.lines if "listening on" in line).split()[-1]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, key: str = "none") -> openai.OpenAI:
        """OpenAI's client without retries. The caller closes it."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            max_retries=0,
            timeout=60,
            http_client=openai.DefaultHttpxClient(verify=NO_TLS),
        )

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", verify=NO_TLS)

    def metric(self, sample: str) -> float:
        """The value of a metric; `sample` is its name and labels as in the text format."""
        text = self.get("/metrics").raise_for_status().text
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        return 0.0


@contextlib.contextmanager
def running_server(
    model: Path | None,
    *arguments: str,
    is_ready: bool = True,
    program: Sequence[str] | None = None,
    **extra: str,
) -> Iterator[RunningServer]:
    """A server on a free port; ended with SIGTERM if it still runs.

    `program` replaces our command line.
    """
    command = [
        *(program or cli_command()),
        "serve",
        *([str(model)] if model else []),
        "--port",
        "0",
    ]
    with subprocess.Popen(
        [*command, *arguments], env=environment(**extra), stderr=subprocess.PIPE, text=True
    ) as process:
        server = RunningServer(process)
        assert process.stderr is not None
        reader = threading.Thread(target=_read, args=(process.stderr, server.lines))
        reader.start()
        try:
            word = "ready:" if is_ready else "listening on"

            def has_started() -> bool:
                assert process.poll() is None, server.lines
                return any(word in line for line in list(server.lines))

            wait_until(has_started, "the server to start", within_s=2 * START_S)
            yield server
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=START_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise
            reader.join()


@contextlib.contextmanager
def small_chat_server(
    folder: Path, shape: Qwen3MoeShape, template: str, *arguments: str
) -> Iterator[RunningServer]:
    """A server of a random model with a token for each byte, and this chat template; both files are
    in `folder`."""
    model = write_qwen3moe(folder / "small.gguf", shape, seed=1, tokenizer="bytes")
    file = folder / "chat.jinja"
    file.write_text(template)
    with running_server(
        model, "--backend", "reference", "--chat-template-file", str(file), *arguments
    ) as server:
        yield server


def wire_request(path: str, body: dict[str, Any]) -> bytes:
    """The bytes of an HTTP request."""
    request = httpx.Request("POST", f"http://127.0.0.1{path}", json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.read()


def _read(stream: object, lines: list[str]) -> None:
    for line in stream:  # type: ignore[attr-defined]
        lines.append(line.rstrip("\n"))
