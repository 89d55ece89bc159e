"""aider edits a file as a server's answer says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from support.clients import VENV, program_of, run
from support.serving import RunningServer

pytestmark = pytest.mark.e2e

WANTED = "def add(a, b):\n    return a + b\n"


def test_aider_applies_an_edit(server: RunningServer, tmp_path: Path) -> None:
    program = program_of(VENV / "aider" / "bin" / "aider")
    folder = tmp_path / "project"
    folder.mkdir()
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    edited = folder / "add.py"
    edited.write_text(WANTED.replace("+", "-"))
    # So small a model writes no edit; it is held to one, by a field that aider passes on.
    settings = {
        "name": "openai/dflash-demo",
        "edit_format": "whole",
        "extra_params": {
            "max_tokens": 200,
            "extra_body": {"choice": [f"add.py\n```\n{WANTED}```\n"]},
        },
    }
    (tmp_path / "settings.yml").write_text(json.dumps([settings]))
    written = run(
        [
            program,
            *("--model", "openai/dflash-demo"),
            *("--model-settings-file", str(tmp_path / "settings.yml")),
            *("--message", "add has a mistake"),
            *("--map-tokens", "0"),
            *("--no-show-model-warnings", "--no-check-update", "--no-analytics"),
            *("--no-auto-commits", "--no-gitignore", "--no-pretty", "--yes-always"),
            "add.py",
        ],
        tmp_path,
        cwd=folder,
        OPENAI_API_BASE=f"{server.url}/v1",
    )
    assert edited.read_text() == WANTED, written
