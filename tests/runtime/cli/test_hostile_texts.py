"""Whatever a file, a launcher or a peer calls itself, no command prints it as it is."""

from __future__ import annotations

import functools
import io
import json
import os
import pty
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rich.console

from dflash_daemon.__main__ import main as daemon_main
from dflash_protocol.notify import Notifier
from dflash_protocol.wire.messages import AskOffer, Hello, Message, Progress, Refused
from dflash_runtime.cli import terminal as cli_terminal
from dflash_runtime.cli.main import main
from dflash_runtime.cli.terminal import write_text
from dflash_runtime.experts.events import EventKind, EventLog
from support import gguf_builder as raw
from support.hostile_texts import FORGED, HOSTILE, HOSTILE_LONG, assert_harmless
from support.processes import run_main, wait_until
from support.random_gguf import write_model
from support.random_models import Qwen3MoeShape
from support.scripted_daemon import ScriptedDaemon

SHAPE = Qwen3MoeShape(num_layers=1, num_experts=4, num_experts_used=2, vocab_size=300)
REFERENCE = ["--backend", "reference"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sound, but for its texts; its name is as bad as theirs."""
    keys = {
        "general.name": HOSTILE_LONG,
        "tokenizer.chat_template": "{{ raise_exception(messages[0].content) }}",
    }
    folder = tmp_path_factory.mktemp("model")
    name = HOSTILE.replace("\0", "").replace("/", "")[:60]
    return write_model(folder / f"{name}.gguf", SHAPE, seed=1, tokenizer="bytes", keys=keys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "--json"],
        ["generate", "-p", "x", "-n", "2", *REFERENCE],
        ["generate", "-p", "x", "-n", "2", "--json", *REFERENCE],
        ["generate", "--chat", "-p", HOSTILE.replace("\0", ""), *REFERENCE],
        ["generate", "-p", "x", "--context", "1", *REFERENCE],
        ["daemon-with-a-placement"],
    ],
)
def test_a_model_cannot_write_to_the_terminal(
    model: Path, tmp_path: Path, arguments: list[str]
) -> None:
    command, *options = arguments
    if command == "daemon-with-a-placement":
        (tmp_path / "p.json").write_text(json.dumps({HOSTILE: HOSTILE}))
        done = run_main(daemon_main, model, "--placement", tmp_path / "p.json", *REFERENCE)
    else:
        done = run_main(main, command, model, *options)
    is_text = command == "generate" and "--json" not in options  # the model's own: see below
    said = done.stderr if is_text else done.stdout + done.stderr
    assert_harmless(said)
    assert said
    if options == ["--json"]:
        assert json.loads(done.stdout)["name"].startswith("A\\x1b[2J")


def damaged(key: str, value: str) -> Callable[[Path], Path]:
    return lambda path: write_model(path, SHAPE, seed=1, tokenizer="bytes", keys={key: value})


def of_another_architecture(path: Path) -> Path:
    builder = raw.GgufBuilder()
    builder.add("general.architecture", raw.string(HOSTILE))
    return builder.write(path)


def with_a_key_twice(path: Path) -> Path:
    builder = raw.GgufBuilder()
    builder.add("general.architecture", raw.string("qwen3moe"))
    for _ in range(2):
        builder.add(HOSTILE[:200], raw.string(HOSTILE))
    return builder.write(path)


@pytest.mark.parametrize(
    "write",
    [
        of_another_architecture,
        with_a_key_twice,
        damaged("tokenizer.ggml.model", HOSTILE),
        damaged("tokenizer.ggml.pre", HOSTILE),
        damaged("qwen3moe.rope.scaling.type", HOSTILE),
        damaged("general.name", HOSTILE),
        damaged("tokenizer.chat_template", "{% if '" + HOSTILE.replace("\0", "") + "' | " + "x %}"),
    ],
)
def test_a_file_that_is_refused_is_named_on_one_line(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    path = write(tmp_path / f"m{HOSTILE[1:20]}.gguf")
    for command, options in (
        ("inspect", []),
        ("generate", ["--chat", "-p", "x", "-n", "1", "--json", *REFERENCE]),
    ):
        done = run_main(main, command, path, *options)
        assert_harmless(done.stdout + done.stderr)
        assert done.stderr.count("dflash-moe: error:") == (done.returncode != 0)


def test_misuse_quotes_its_arguments_on_one_line(tmp_path: Path) -> None:
    text = HOSTILE.replace("\0", "")
    for arguments in (
        [text],
        ["inspect", f"/nowhere/{text}"],
        ["generate", f"--{text}"],
        ["generate", "-p", "x", "--backend", text],
        ["generate", "-p", "x", "--daemon", text],
        ["generate", "-p", "x", "--connect", text],
        ["generate", "--prompt-file", f"/nowhere/{text}"],
        ["generate", "--token-ids", text],
        ["serve", "--chat-template-file", f"/nowhere/{text}"],
        ["serve", "--api-key-file", f"/nowhere/{text}"],
        ["doctor", "--settings", f"/nowhere/{text}"],
        ["keygen", "--comment", text, str(tmp_path / text.replace("/", "")[:60])],
    ):
        done = run_main(main, *arguments)
        assert_harmless(done.stdout + done.stderr)
        assert done.stdout + done.stderr
    done = run_main(daemon_main, f"/nowhere/{text}")
    assert_harmless(done.stdout + done.stderr)
    done = run_main(daemon_main, "m.gguf", "--backend", text)
    assert_harmless(done.stdout + done.stderr)


def test_doctor_shows_what_a_launcher_says_on_one_line(tmp_path: Path) -> None:
    report: dict[str, Any] = {
        "version": HOSTILE,
        "python": HOSTILE,
        "packages": {HOSTILE: HOSTILE},
        "cpu": {"name": HOSTILE, "processors": HOSTILE, "tier": HOSTILE},
        "memory": None,
        "gpus": [],
        "why_no_gpu": HOSTILE,
        "backends": {"cpu": None, "reference": HOSTILE, HOSTILE: HOSTILE},
        "transports": {"shared": None, HOSTILE: HOSTILE},
    }
    launchers = []
    for name, script in (
        ("says", f"#!{sys.executable}\nprint({json.dumps(report)!r})\n"),
        ("fails", f"#!{sys.executable}\nimport sys\nsys.exit({HOSTILE!r})\n"),
        ("babbles", f"#!{sys.executable}\nprint({HOSTILE!r})\n"),
    ):
        path = tmp_path / name
        path.write_text(script)
        path.chmod(0o700)
        launchers += ["--daemon", f"cpu@{path}"]
    done = run_main(main, "doctor", *launchers)
    assert_harmless(done.stdout + done.stderr)
    assert done.stdout.count("A\\x1b[2J") >= 8


@pytest.mark.parametrize(("as_json", "stage"), [(False, Hello), (True, Hello), (False, AskOffer)])
def test_generate_shows_a_daemons_refusal_on_one_line(
    model: Path, run_dir: Path, tmp_path: Path, as_json: bool, stage: type[Message]
) -> None:
    address = f"ipc://{run_dir}/hostile.sock"
    named = tmp_path / "m.gguf"  # a model's path must be printable where it is a setting
    named.symlink_to(model)
    with ScriptedDaemon(address) as daemon:

        def refuse() -> None:
            daemon.expect(stage)
            daemon.say(Progress(HOSTILE, 1, 2))
            daemon.say(Refused(HOSTILE, HOSTILE))

        refusing = threading.Thread(target=refuse)
        refusing.start()
        options = ["-p", "x", "-n", "1", "--connect", address, *REFERENCE]
        done = run_main(main, "generate", named, *options, *(["--json"] if as_json else []))
        refusing.join()
    assert done.returncode == 1
    assert "refused: A\\x1b[2J" in done.stderr
    assert_harmless(done.stdout + done.stderr)


def test_events_and_stages_are_escaped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events = EventLog()
    events.add(EventKind.DAEMON_LOST, "cpu0", HOSTILE_LONG)
    (event,) = events.latest()
    assert_harmless(event.reason)
    assert_harmless(caplog.messages[0])
    sent: list[bytes] = []
    monkeypatch.setattr("socket.socket.sendto", lambda _, data, *__: sent.append(data))
    Notifier("/nowhere").starting(HOSTILE)
    (datagram,) = sent
    assert datagram.count(b"\n") == 1
    assert_harmless(datagram.decode())


def test_progress_bars_obey_no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    console = functools.partial(rich.console.Console, file=shown, force_terminal=True, width=200)
    monkeypatch.setattr(rich.console, "Console", lambda **_: console())
    monkeypatch.setattr(cli_terminal, "_DELAY_S", 0.0)
    with cli_terminal.ProgressReporter(enabled=True) as reporter:
        reporter.update("cpu0", f"[red]{HOSTILE}", 1, 2)
        wait_until(lambda: "cpu0: [red]A\\x1b[2J" in shown.getvalue(), "the bar", within_s=5)
    assert FORGED not in [line[: len(FORGED)] for line in shown.getvalue().splitlines()]


@pytest.fixture
def terminal() -> Iterator[tuple[int, Any]]:
    reading, writing = pty.openpty()
    with os.fdopen(writing, "w") as stream:
        yield reading, stream
    os.close(reading)


def test_a_models_own_text_is_escaped_for_a_terminal_and_nothing_else(
    terminal: tuple[int, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reading, stream = terminal
    monkeypatch.setattr(sys, "stdout", stream)
    write_text("a\n\tb\x1b[2J\x07é")
    assert os.read(reading, 1000).decode() == "a\r\n\tb\\x1b[2J\\x07é"
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        write_text("a\x1b[2J")
    assert (tmp_path / "out").read_text() == "a\x1b[2J"
