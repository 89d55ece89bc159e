"""Every command takes a model's name where it takes its path; lists and bars are readable."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from huggingface_hub import constants
from rich.console import Console

from dflash_daemon.__main__ import main as daemon_main
from dflash_runtime.cli.main import main
from dflash_runtime.cli.terminal import TransferBar
from dflash_runtime.engine.demo_model import demo_model_path
from dflash_runtime.engine.engine import Engine
from dflash_runtime.serving.status import model_id
from support.processes import run_main

NAME = "own/M-GGUF:Q4_K_M"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(cache: Path) -> Path:
    link = cache / "models--own--M-GGUF" / "snapshots" / ("a" * 40) / "M-Q4_K_M.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to(demo_model_path())
    return link


@pytest.mark.parametrize(
    "command",
    [
        ("generate", NAME, "-p", "x"), ("serve", NAME), ("plan", NAME), ("inspect", NAME),
        ("doctor", "--measure", NAME), ("rm", NAME),
    ],
)  # fmt: skip
def test_a_name_that_is_not_here_is_told_how_to_be_fetched(
    cache: Path, command: tuple[str, ...]
) -> None:
    done = run_main(main, *command)
    assert done.returncode == 2
    assert done.stderr == (
        f"dflash-moe: error: {NAME}: neither a file nor a model of this machine; "
        f"dflash-moe pull {NAME} fetches it\n"
    )


def test_a_daemon_and_the_doctor_take_names(cache: Path) -> None:
    done = run_main(daemon_main, NAME)
    assert done.returncode == 2
    assert f"dflash-moe pull {NAME} fetches it" in done.stderr
    examined = run_main(main, "doctor", "--json", DFLASH_MOE_EXPERT_COMPUTE_MODEL=NAME)
    assert examined.returncode == 1
    assert f"dflash-moe pull {NAME} fetches it" in json.loads(examined.stdout)["problems"][0]


@pytest.mark.parametrize("name", ["http://x/m.gguf", "s3://b/m.gguf", "hf://own/../M"])
def test_names_that_are_refused_everywhere(cache: Path, name: str) -> None:
    for command in (("generate", name, "-p", "x"), ("inspect", name), ("pull", name), ("rm", name)):
        done = run_main(main, *command)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1


def test_inspect_by_name(cache: Path) -> None:
    link = put(cache)
    assert json.loads(run_main(main, "inspect", NAME, "--json").stdout)["path"] == str(link)


def test_a_path_that_does_not_exist_is_told_as_before(cache: Path) -> None:
    done = run_main(main, "inspect", "none.gguf")
    assert done.returncode == 1
    assert "none.gguf: cannot be opened: No such file or directory" in done.stderr


def test_a_list(cache: Path) -> None:
    empty = run_main(main, "list")
    assert empty.stdout == "no models; dflash-moe pull OWNER/MODEL:QUANTISATION fetches one\n"
    link = put(cache)
    header, row = run_main(main, "list").stdout.splitlines()
    assert header.split() == ["NAME", "SIZE", "TYPE", "USED", "WHERE"]
    assert row.split()[:4] == [NAME, "11.3", "MiB", "Q4_K_M"]
    assert row.endswith("  hub")
    (record,) = json.loads(run_main(main, "list", "--json").stdout)["models"]
    assert record["bytes"] == link.stat().st_size
    assert record["paths"] == [str(link)]
    assert (record["library"], record["pulled"]) == ("hub", False)


def test_what_others_brought_is_not_removed(cache: Path, tmp_path: Path) -> None:
    link = put(cache)
    studio = tmp_path / ".lmstudio" / "models" / "own" / "Other" / "O-Q8_0.gguf"
    studio.parent.mkdir(parents=True)
    studio.write_bytes(b"GGUF" + bytes(20))
    for name, owner in ((NAME, "another program"), ("own/Other:Q8_0", "LM Studio")):
        done = run_main(main, "rm", name, "--yes")
        assert done.returncode == 2
        assert f"was brought by {owner}" in done.stderr
    assert link.exists()
    assert studio.exists()


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("no_color", [False, True])
def test_a_transfer_is_one_line_with_rate_and_time_left(width: int, no_color: bool) -> None:
    output, ticks = io.StringIO(), [0.0]
    console = Console(file=output, width=width, force_terminal=True, no_color=no_color)
    bar = TransferBar(console=console, clock=lambda: ticks[-1])
    bar.show("waiting", 0, 0)
    for time_s, num_gib in ((0.0, 5), (10.0, 6), (20.0, 7)):
        ticks.append(time_s)
        bar.show("12/13", num_gib << 30, 19 << 30)
    bar.finish()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", output.getvalue())
    words = " ".join(plain.split())
    assert "12/13 " in words
    assert "7.0/19.0 GiB 102.4 MiB/s 02:00" in words


def test_what_is_shown_of_a_transfer_cannot_control_the_terminal() -> None:
    output = io.StringIO()
    bar = TransferBar(console=Console(file=output, width=80, force_terminal=True))
    bar.show("1/1\x1b[31;5m", 1, 9)
    bar.finish()
    assert "\x1b[31;5m" not in output.getvalue()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/models/M-Q4_K_M.gguf", "M-Q4_K_M"),
        ("/hub/models--own--M/snapshots/abc/M-Q4_K_M.gguf", "M-Q4_K_M"),
        ("/ollama/blobs/sha256-0123", "A Name\\x1b"),
    ],
)
def test_the_server_s_name_of_a_model_is_no_hash(path: str, expected: str) -> None:
    engine = SimpleNamespace(model_path=Path(path), spec=SimpleNamespace(name="A Name\x1b"))
    assert model_id(cast(Engine, engine)) == expected
