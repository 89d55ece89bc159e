"""Every command of the README and of docs/ runs as it stands there, with a small model.

The documents are read by code. What cannot run here is said in a table, with the reason: a command
that is neither run nor in it fails, and so does a row that stands for none.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dflash_protocol.settings import Settings, cache_directory
from support.environments import build_wheel
from support.processes import ROOT, free_port
from support.random_models import CHAT_TEMPLATE, Qwen3MoeShape, write_qwen3moe
from support.shell_commands import Command, Reader, commands_of
from support.unit_files import write_program

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FAST = ("README.md",)
"""Documents whose commands take a second each. The others run in `make test-all`."""

GPU = "needs a GPU"
SYSTEMD = "needs systemd as the first process, and root"
DOCKER = "needs docker's engine, and downloads images of gigabytes"
ELSEWHERE = [
    # document, pattern of its commands, why they are not run here
    ("README.md", r"^make demo\b", "runs in a test of its own below, with compiled kernels"),
    ("README.md", r"^make chat\b", "tests/e2e/test_demo_chat.py asks the same"),
    ("README.md", r"^make test\b", "this is a part of it"),
    ("README.md", r"pip install -e", "downloads a gigabyte of CUDA's libraries"),
    ("README.md", r"--device cuda", GPU),
    ("README.md", r"OWNER/MODEL", "fetches from the hub, and stands for any name"),
    ("models.md", r"OWNER/MODEL", "fetches from the hub, and stands for any name"),
    ("amd-registers.md", r"check_kernels", "compiles for minutes, in make check-kernels"),
    ("operations.md", r"^make build\b", "has run already: what it makes lies there"),
    ("operations.md", r"--device cuda", GPU),
    ("operations.md", r"--box box\.json", "the command that makes the file needs a GPU"),
    ("operations.md", r"doctor --mailbox", "needs two GPUs"),
    ("deployment.md", r"^(sudo )?(systemctl|journalctl) ", SYSTEMD),
    ("deployment.md", r"^curl .*8080/(ready|metrics)", SYSTEMD),
    ("deployment.md", r"install -m 600 -o dflash-moe", "needs the account that systemd makes"),
    ("deployment.md", r"chown 10001", "needs root"),
    ("deployment.md", r"^docker ", DOCKER),
    ("deployment.md", r"^curl -H", DOCKER),
]  # fmt: skip

SHAPE = Qwen3MoeShape(
    "of the documents", num_layers=1, num_experts=80, num_experts_used=2, vocab_size=300,
    context_length=512,
)  # fmt: skip


def all_commands() -> list[Command]:
    return [command for path in DOCUMENTS for command in commands_of(path)]


def reasons(command: Command) -> list[str]:
    """Why a command is not run here, by each row that says so."""
    return [
        reason
        for document, pattern, reason in ELSEWHERE
        if document == command.document and re.search(pattern, command.text)
    ]


def commands_to_run(document: str) -> list[Command]:
    return [each for each in all_commands() if each.document == document and not reasons(each)]


@dataclass(frozen=True)
class Machine:
    """Where commands run: a clone, a home, and what the documents take of a machine besides."""

    folder: Path
    reader: Reader


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A clone with `model.gguf` in it, and our program, which computes with the slow kernels that
    need no compiling. Its ports are free ones; nothing of the real machine is written to."""
    folder = Path(tempfile.mkdtemp(prefix="dflash-doc-"))  # short enough for sockets
    clone = folder / "clone"
    for name in ("home", "run", "bin", "clone/dist", "etc", "opt"):
        (folder / name).mkdir(parents=True, mode=0o700)
    for path in (clone / ".venv/bin/dflash-moe", folder / "bin/dflash-moe"):
        write_program(path, sys.executable)
    (folder / "bin/python3").symlink_to(sys.executable)
    sudo = folder / "bin/sudo"
    sudo.write_text('#!/bin/sh\nexec "$@"\n')
    sudo.chmod(0o755)
    shutil.copytree(ROOT / "deploy", clone / "deploy")
    for name in ("pyproject.toml", "Makefile", "demo"):
        (clone / name).symlink_to(ROOT / name)
    (clone / ".venv/.ready").touch()  # newer than what it is made of
    (folder / "keys").mkdir()
    write_qwen3moe(
        clone / "model.gguf", SHAPE, seed=1, tokenizer="bytes",
        keys={"tokenizer.chat_template": CHAT_TEMPLATE},
    )  # fmt: skip
    for name in ("XDG_CONFIG_HOME", "DFLASH_MOE_EXPERT_COMPUTE_IPC_WORK_DIR", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("DFLASH_MOE_EXPERT_COMPUTE_HEAT", raising=False)  # as a user has it
    for name in ("MAKEFLAGS", "MAKELEVEL"):  # of the make that runs the tests: it would say more
        monkeypatch.delenv(name, raising=False)
    port, tcp_port = free_port(), free_port()
    reader = Reader(
        clone,
        {
            **os.environ,
            "HOME": str(folder / "home"),
            "XDG_CACHE_HOME": str(cache_directory(Settings()).parent),  # what is compiled already
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "DFLASH_MOE_EXPERT_COMPUTE_BACKEND": "reference",
            "DFLASH_MOE_PORT": str(port),
            "PIP_NO_DEPS": "1",  # dependencies are those of this environment, CUDA's are left out
        },
        {
            "/tmp/my-moe": f"{folder}/my-moe",
            "/run/user/1000": f"{folder}/run",
            "127.0.0.1:8080": f"127.0.0.1:{port}",
            ":7777": f":{tcp_port}",
            "box.example": "127.0.0.1",
            "--cores 0-7": f"--cores {min(os.sched_getaffinity(0))}",
            "install.py install": f"install.py install --root {folder}",
            " /etc/": f" {folder}/etc/",
            "venv /opt/": f"venv {folder}/opt/",
            "/opt/moe-cuda/bin/": f"{folder}/opt/moe-cuda/bin/",
            "/opt/dflash-moe-cuda/bin/pip": f"{folder}/opt/dflash-moe-cuda/bin/pip",
        },
    )
    try:
        yield Machine(folder, reader)
    finally:
        reader.close()
        shutil.rmtree(folder)


def test_what_is_not_run_is_in_the_table_and_each_row_stands_for_a_command() -> None:
    commands = all_commands()
    assert {each.document for each in commands} >= {"README.md", "operations.md", "deployment.md"}
    assert [str(each) for each in commands if len(reasons(each)) > 1] == []
    for document, pattern, reason in ELSEWHERE:
        found = [each for each in commands if each.document == document]
        assert any(re.search(pattern, each.text) for each in found), (document, pattern, reason)


def test_a_block_is_read_as_a_shell_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "some.md"
    path.write_text(
        "Text\n\n    one \\\n        more\n    # a remark\n    two |\n      three\n\n"
        "```sh\nfour\n```\n```python\nprint()\n```\n"
    )
    assert [(each.line, each.text) for each in commands_of(path)] == [
        (3, "one \\\n    more"), (6, "two |\n  three"), (10, "four"),
    ]  # fmt: skip
    path.write_text("```\nwhat is this\n```\n")
    with pytest.raises(AssertionError, match=r"some\.md:1: say what it holds"):
        list(commands_of(path))


@pytest.mark.e2e
def test_the_commands_of_the_readme_run_as_they_stand_there(machine: Machine) -> None:
    commands = commands_to_run("README.md")
    assert len(commands) >= 5
    for command in commands:
        machine.reader.run(command)


@pytest.mark.slow
@pytest.mark.e2e
def test_make_demo_writes_python(machine: Machine) -> None:
    (command,) = [each for each in all_commands() if each.text.startswith("make demo")]
    with_kernels = f"export DFLASH_MOE_EXPERT_COMPUTE_BACKEND=auto\n{command.text}"
    said = machine.reader.run(replace(command, text=with_kernels))
    assert said.startswith((ROOT / "demo/prompt.txt").read_text())
    assert re.search(r"^decode +\d+ tokens +[0-9.]+ tokens/s", said, re.MULTILINE)
    assert re.search(r"^cpu1 +daemon ", said, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    "document",
    sorted({each.document for each in all_commands() if not reasons(each)} - set(FAST)),
)
def test_the_commands_of_the_documents_run_as_they_stand_there(
    machine: Machine, document: str
) -> None:
    reader = machine.reader
    if document in ("deployment.md", "operations.md"):
        build_wheel(machine.folder / "clone/dist")
    for command in commands_to_run(document):
        text = command.text
        if "public-key" in text and "…" in text:  # of whoever reads it
            key = (machine.folder / "home/.config/dflash-moe/keys/public.key").read_text().split()
            text = re.sub(r"dflash-public-key [0-9a-f]+….*'", f"{' '.join(key[:2])}'", text)
        reader.run(replace(command, text=text))
        for site_packages in machine.folder.glob("opt/*/lib/python3*/site-packages"):
            dependencies = site_packages / "dependencies.pth"
            dependencies.write_text(f"{sysconfig.get_path('purelib')}\n")
