"""What the documents claim is so: settings, commands, folders, dependencies."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dflash_protocol.settings import VARIABLES
from dflash_runtime import Engine
from dflash_runtime.engine.demo_model import demo_model_path
from support.processes import ROOT, run_cli
from support.serving import CHAT_TEMPLATE, running_server

README = (ROOT / "README.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def test_every_setting_is_documented_and_every_documented_one_exists() -> None:
    assert set(re.findall(r"`(DFLASH_MOE_[A-Z_]+)`", OPERATIONS)) == set(VARIABLES)


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for path in ("README.md", "CONTRIBUTING.md", "bench/README.md"):
        named = re.findall(r"make ([a-z-]+)(?=[`\s])", (ROOT / path).read_text())
        code = {name for name in named if name not in ("a", "sure")}
        assert code <= targets, path


def test_every_file_that_contributing_names_in_full_exists() -> None:
    """NAME stands for the name of what is added."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    roots = "protocol|adapters|runtime|daemon|tests|docs|bench|deploy"
    named = set(re.findall(rf"`((?:{roots})/[A-Za-z0-9_/.]+)`", text))
    assert {"protocol/dflash_protocol/settings/table.py"} < named
    for path in named:
        assert "NAME" in path or (ROOT / path).exists(), path


def test_the_folder_tree_of_the_readme_is_the_real_one() -> None:
    tree = README.partition("## What is where")[2].split("```")[1].removeprefix("text")
    for line in tree.strip().splitlines():
        folder = line.split()[0]
        if "to come" not in line:
            assert (ROOT / folder).is_dir(), folder


@pytest.mark.parametrize("path", ["README.md", "docs/operations.md", "docs/security.md"])
def test_every_command_and_flag_that_is_shown_exists(path: str) -> None:
    commands = re.findall(r"dflash-moe ([a-z]+)(?= |$)([^\n`#]*)", (ROOT / path).read_text())
    assert commands
    helps = {name: run_cli(name, "--help").stdout for name in {name for name, _ in commands}}
    for name, arguments in commands:
        assert f"usage: dflash-moe {name} " in helps[name].lower()
        for flag in re.findall(r"(?<=\s)(--?[a-z][a-z-]*)", arguments):
            assert re.search(rf"(?<=[\s,]){flag}(?=[\s,])", helps[name]), (name, flag)


def test_the_example_of_verifying_writes_what_generate_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").symlink_to(demo_model_path())
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "verify.md").read_text()
    names: dict[str, Any] = {}
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    prompt, ids = names["prompt"], names["ids"]
    num_new = len(ids) - len(prompt)
    with Engine.open() as engine:
        written = [t.token_id for t in engine.generate(prompt, num_new, ignore_eos=True)]
    assert ids == [*prompt, *written]
    assert num_new > 1 + 12, "no guess was right"


@pytest.mark.slow
@pytest.mark.e2e
def test_the_example_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.gguf").symlink_to(demo_model_path())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    text = README.partition("## From Python")[2]
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    assert names["logits"].shape[0] == 3
    written = capsys.readouterr().out
    assert names["token"].text in written
    assert "cpu1" in written


@pytest.mark.slow
@pytest.mark.e2e
def test_the_example_of_the_server_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    example = text.partition("```python\n")[2].partition("```")[0]
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    with running_server(demo_model_path(), "--chat-template-file", str(template)) as server:
        assert "http://127.0.0.1:8080/v1" in example
        exec(example.replace("http://127.0.0.1:8080", server.url), {})
    assert capsys.readouterr().out.strip()


def test_links_between_documents_lead_somewhere() -> None:
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        for target in re.findall(r"\]\(([^)#:]*(?:#[^)]*)?)\)", text):
            name, _, anchor = target.partition("#")
            file = (path.parent / name) if name else path
            assert file.exists(), (path.name, target)
            if anchor:
                titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                anchors = {
                    re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles
                }
                assert anchor in anchors, (path.name, target)


def test_every_results_file_that_is_named_is_there() -> None:
    kept = {path.name for path in (ROOT / "bench" / "results").iterdir()}
    named = set()
    for path in [ROOT / "README.md", ROOT / "bench/README.md", *(ROOT / "docs").glob("*.md")]:
        named |= set(re.findall(r"`([a-z-]+-20\d{6}-\d{6})", path.read_text()))
    assert len(named) > 20
    assert {name for name in named if not any(each.startswith(name) for each in kept)} == set()


def test_every_dependency_is_justified() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "dependencies.md").read_text()
    groups = [project["dependencies"], project["optional-dependencies"]["dev"]]
    for requirement in [each for group in groups for each in group]:
        name = re.match(r"[a-z0-9-]+", requirement)
        assert name is not None
        assert name[0] in text, name[0]
