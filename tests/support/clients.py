"""Clients of other projects, installed by `make test-clients`, and how they are run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.serving import CHAT_TEMPLATE

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "clients" / "programs"
VENV = ROOT / ".venv-clients"
NODE = VENV / "node"
_LONGEST_S = 240.0

TOOLS_TEMPLATE = (
    "{% if tools %}Call tools in <tool_call>.\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
) + CHAT_TEMPLATE
"""Of a model that calls tools as Qwen3 does."""


def program_of(path: Path) -> str:
    """A client's program. Skips the test if it is not installed."""
    if not path.exists():
        pytest.skip(f"{path.name} is not installed: `make test-clients` does that")
    return str(path)


def outside(home: Path, **extra: str) -> dict[str, str]:
    """An environment without our packages, with a home directory of its own, for programs that are
    not to look for anything in the network."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    return {
        **kept,
        "HOME": str(home),
        "OPENAI_API_KEY": "none",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        **extra,
    }


def run(
    command: Sequence[str], home: Path, *, cwd: Path | None = None, text: str = "", **extra: str
) -> str:
    """What a program writes to stdout. Fails the test with its stderr if it fails."""
    done = subprocess.run(
        command,
        env=outside(home, **extra),
        cwd=cwd or home,
        input=text,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout


def run_python(program: str, url: str, home: Path) -> dict[str, Any]:
    """What one of `PROGRAMS` found, by name."""
    python = program_of(VENV / "bin" / "python")
    found: dict[str, Any] = json.loads(
        run([python, str(PROGRAMS / program), url], home).splitlines()[-1]
    )
    return found


def run_node(program: str, url: str, home: Path) -> dict[str, Any]:
    """The same of one for Node."""
    program_of(NODE / "node_modules" / "ai")
    # Read from stdin, a module finds packages from the working directory on.
    command = ["node", "--input-type=module", "-", url]
    written = run(command, home, cwd=NODE, text=(PROGRAMS / program).read_text())
    found: dict[str, Any] = json.loads(written.splitlines()[-1])
    return found
