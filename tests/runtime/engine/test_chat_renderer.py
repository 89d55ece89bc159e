"""Conversations are rendered in processes that can be killed, which costs no other request."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_adapters.text.chat import render_chat
from dflash_adapters.text.chat_messages import ChatRequest, encode_request
from dflash_protocol.errors import (
    DflashError,
    RenderingUnavailable,
    SettingsError,
    UnsupportedModel,
)
from dflash_runtime.engine import chat_renderer
from dflash_runtime.engine.chat_renderer import ChatRenderer, RenderingEnded, RenderingProcess
from support import chat_templates
from support.hostile_renderer import ASLEEP, STUCK, STUCK_IN_C, escaped_command
from support.processes import environment, wait_for_ends, wait_until

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Größe?"}]
NOW = datetime(2025, 2, 3)
DEADLINE_S = 0.2


@pytest.fixture(scope="module")
def sound() -> Iterator[ChatRenderer]:
    renderer = ChatRenderer()
    renderer.prepare()
    yield renderer
    renderer.close()


@pytest.fixture
def escaped() -> Iterator[ChatRenderer]:
    renderer = ChatRenderer(escaped_command())
    yield renderer
    renderer.close()


def run(renderer: ChatRenderer, program: str, messages: list[Any] | None = None) -> str:
    return renderer.render(ChatRequest(program, messages or [], deadline_s=DEADLINE_S))


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


# What is rendered.


@pytest.mark.parametrize("name", ["LAGUNA", "MIXTRAL", "QWEN36"])
def test_a_conversation_is_what_it_is_in_our_own_process(sound: ChatRenderer, name: str) -> None:
    template = getattr(chat_templates, name)
    options: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "now": NOW}
    request = ChatRequest(template, ASKED, extra={"enable_thinking": False}, **options)
    assert sound.render(request) == render_chat(request)
    big = [{"role": "user", "content": "😀" * (1 << 19)}]
    assert sound.render(ChatRequest("{{ messages[0].content }}", big)) == big[0]["content"]


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('No.\\nReally.') }}", "{% if %}", "{{ x | nosuch }}", "{{ 1 / 0 }}"],
)
def test_errors_are_those_of_our_own_process(sound: ChatRenderer, template: str) -> None:
    with pytest.raises(DflashError) as expected:
        render_chat(ChatRequest(template, ASKED), path="m.gguf")
    with pytest.raises(DflashError) as caught:
        sound.render(ChatRequest(template, ASKED), path="m.gguf")
    assert (type(caught.value), str(caught.value)) == (type(expected.value), str(expected.value))
    assert sound.render(ChatRequest("x", ASKED)) == "x"


@pytest.mark.parametrize("depth", [100, *range(1018, 1026)])
def test_messages_nested_too_deeply_are_the_callers_to_change(
    sound: ChatRenderer, depth: int
) -> None:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    with pytest.raises(SettingsError, match="messages"):
        sound.render(ChatRequest("x", nested))
    assert sound.render(ChatRequest("x", ASKED)) == "x"


# What bounds the process.


@pytest.mark.parametrize(
    "program", [pytest.param(STUCK, marks=pytest.mark.slow), STUCK_IN_C, ASLEEP]
)
def test_one_that_hangs_is_killed_and_the_next_waits_for_nothing(
    escaped: ChatRenderer, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(chat_renderer, "LATE_S", 0.1)
    first, second = (run(escaped, "result = os.getpid()") for _ in range(2))
    assert first != second  # one is to spare, and has worked
    started_s = time.monotonic()
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.chat_template: .*\blong\b"):
        run(escaped, program)
    assert time.monotonic() - started_s < DEADLINE_S + 0.1 + 1.0
    assert run(escaped, "result = os.getpid()") == second
    assert not psutil.pid_exists(int(first))


def test_memory_is_bounded_by_what_was_asked(escaped: ChatRenderer) -> None:
    take = "result = len(bytearray({} << 20))"
    assert run(escaped, take.format(150)) == str(150 << 20)
    with pytest.raises(UnsupportedModel, match=r"\bexit code 1\b"):
        run(escaped, take.format(300))
    assert run(escaped, take.format(300), ["a" * (4 << 20)]) == str(300 << 20)


@pytest.mark.slow
def test_the_kernel_ends_one_whose_parent_does_not_look() -> None:
    process = RenderingProcess(escaped_command())
    try:
        process.await_ready()
        message = encode_request(ChatRequest(STUCK, [], deadline_s=0.1))
        with pytest.raises(RenderingEnded, match="processor"):
            process.ask(message, deadline_s=60, max_reply_bytes=0)
    finally:
        process.end()


_PARENT = """
import sys, time
from dflash_adapters.text.chat_messages import ChatRequest, encode_request
from dflash_runtime.engine.chat_renderer import RenderingProcess
from support.hostile_renderer import STUCK_IN_C, escaped_command
process = RenderingProcess(escaped_command())
process.await_ready()
process._write(encode_request(ChatRequest(STUCK_IN_C, [], deadline_s=1000)), time.monotonic() + 60)
print(process._process.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_its_parent_even_in_the_middle_of_a_rendering() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        # Not in Python any more.
        wait_until(lambda: child.cpu_times().user > 0.15, "it to be computing")
        parent.kill()
    wait_for_ends([child], within_s=2)
    with contextlib.suppress(ChildProcessError):  # where orphans come to us, as in a container
        os.waitpid(child.pid, 0)


def test_it_has_nothing_of_ours_and_writes_no_file(
    escaped: ChatRenderer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("A_SECRET", "of ours")
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    try:
        fds = run(escaped, "result = sorted(map(int, os.listdir('/proc/self/fd')))[:-1]")
        assert fds == "[0, 1, 2]"
    finally:
        os.close(reading)
        os.close(writing)
    assert "A_SECRET" not in run(escaped, "result = dict(os.environ)")
    assert run(escaped, "result = os.getsid(0) == os.getpid() != os.getppid()") == "True"
    assert run(escaped, "result = os.getcwd()") == "/"
    path = tmp_path / "file"
    path.touch()
    assert run(escaped, f"result = open({str(path)!r}, 'rb').read()") == "b''"
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.chat_template: .*\bended\b"):
        run(escaped, f"result = os.write(os.open({str(path)!r}, os.O_WRONLY), b'x')")
    assert path.read_bytes() == b""
    assert run(escaped, "result = resource.getrlimit(resource.RLIMIT_CORE)") == "(0, 0)"


def test_it_imports_what_jinja_needs_and_no_more(escaped: ChatRenderer) -> None:
    modules = run(escaped, "result = ' '.join(sys.modules)").split()
    assert "jinja2" in modules
    ours = {name for name in modules if name.startswith("dflash_")}
    assert ours == {
        *("dflash_protocol", "dflash_protocol.errors"),
        *(
            "dflash_adapters",
            "dflash_adapters.text",
            "dflash_adapters.text.chat",
        ),
        *("dflash_adapters.text.chat_child", "dflash_adapters.text.chat_messages"),
        *("dflash_adapters.text.chat_sandbox", "dflash_adapters.text.child_loop"),
    }
    assert not {"numpy", "numba", "zmq", "tokenizers", "asyncio"} & set(modules)
    resident = run(escaped, "result = int(open('/proc/self/statm').read().split()[1]) * 4096")
    assert int(resident) < 48 << 20


# Its life.


def test_nothing_is_started_before_it_is_needed_and_all_is_ended() -> None:
    before = children()
    renderer = ChatRenderer()
    assert children() == before
    renderer.prepare()
    assert len(children() - before) == 2
    renderer.close()
    assert children() == before
    renderer.close()
    with pytest.raises(RenderingUnavailable, match="closed"):
        renderer.render(ChatRequest("x", ASKED))


def test_closing_ends_a_stuck_one_at_once(escaped: ChatRenderer) -> None:
    caught: list[BaseException] = []
    ready = run(escaped, "result = 'ready'")

    def ask() -> None:
        try:
            escaped.render(ChatRequest(STUCK_IN_C, [], deadline_s=1000))
        except DflashError as error:
            caught.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: len(escaped._busy) == 1, ready)
    started_s = time.monotonic()
    escaped.close()
    asking.join(5)
    assert time.monotonic() - started_s < 1
    (error,) = caught
    assert isinstance(error, RenderingUnavailable)


def test_an_idle_one_that_was_killed_is_replaced(escaped: ChatRenderer) -> None:
    pids = [int(run(escaped, "result = os.getpid()")) for _ in range(2)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for_ends([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])
    assert int(run(escaped, "result = os.getpid()")) not in pids


def test_one_that_has_held_a_large_conversation_is_replaced(
    escaped: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_renderer, "_LARGE_BYTES", 1000)
    large = run(escaped, "result = os.getpid()", ["a" * 1000])
    assert large not in {run(escaped, "result = os.getpid()") for _ in range(2)}


def test_many_conversations_at_once_share_a_few_processes(escaped: ChatRenderer) -> None:
    before = children()
    with ThreadPoolExecutor(8) as pool:
        program = "time.sleep(0.02); result = os.getpid()"
        pids = set(pool.map(lambda _: run(escaped, program), range(24)))
    assert 2 <= len(pids) <= 3
    assert len(children() - before) <= 3


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("os.write(1, b'R' + b'\\xff' * 4); time.sleep(9)", r"\blong\b"),
        ("os.write(1, b'R' + b'\\x01\\0\\0\\0\\xc1'); time.sleep(9)", "msgpack"),
        (
            "os.write(1, b'R' + b'\\x09\\0\\0\\0'); os.read(0, 9)",
            r"\bexit code 0\b",
        ),
        ("os.write(1, b'R'); os.read(0, 9); os.kill(os.getpid(), 11)", "SIGSEGV"),
    ],
)
def test_answers_that_are_none_are_the_templates_fault(program: str, reason: str) -> None:
    renderer = ChatRenderer(escaped_command(f"import os, time\n{program}"))
    try:
        with pytest.raises(UnsupportedModel, match=reason):
            renderer.render(ChatRequest("x", []))
    finally:
        renderer.close()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["/nowhere/python"], "No such file"),
        (["/bin/false"], r"\bexit code 1\b"),
        (["/bin/echo", "hello"], r"\bstart\b"),
    ],
)
def test_one_that_cannot_be_started_is_no_fault_of_the_template(
    command: list[str], reason: str
) -> None:
    renderer = ChatRenderer(command)
    with pytest.raises(RenderingUnavailable, match=reason):
        renderer.render(ChatRequest("x", []))
    renderer.close()


def test_what_the_process_says_is_shown_escaped() -> None:
    answer = (
        "import os\nfrom dflash_adapters.text.chat_messages import *\n"
        "os.write(1, b'R'); os.read(0, 9)\n"
    )
    said = (
        "os.write(1, encode_reply(ReplyKind.{}, 'a\\n\\x1b[2J\\u202e' + 'b' * 5000)); os.read(0, 9)"
    )
    for kind, error in (("REFUSED", SettingsError), ("FAILED", UnsupportedModel)):
        renderer = ChatRenderer(escaped_command(answer + said.format(kind)))
        try:
            with pytest.raises(error) as caught:
                renderer.render(ChatRequest("x", []))
        finally:
            renderer.close()
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1100
