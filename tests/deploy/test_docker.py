"""Dockerfiles: small, closed, repeatable, and in step with what is built. hadolint's points that
matter here are checked by ourselves, and by it where it is installed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_protocol.settings import load_settings
from support.container_files import DOCKERFILES, Instruction, image_environment, read_dockerfile
from support.processes import ROOT

CONFIG = ROOT / "deploy" / "docker" / "hadolint.yaml"
_PINNED = re.compile(r"[a-z0-9][a-z0-9._/-]*:[0-9][A-Za-z0-9._-]*")
_KNOWN = {
    "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL",
    "USER", "WORKDIR",
}  # fmt: skip
every_file = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def stages_of(path: Path) -> list[list[Instruction]]:
    stages: list[list[Instruction]] = []
    for instruction in read_dockerfile(path):
        if instruction.name == "FROM":
            stages.append([])
        stages[-1].append(instruction)
    return stages


def complaints(path: Path) -> Iterator[str]:
    """What is wrong with a Dockerfile."""
    stages = stages_of(path)
    names = []
    for stage in stages:
        base, _, name = stage[0].arguments.partition(" AS ")
        names.append(name)
        if not _PINNED.fullmatch(base) or base.endswith(":latest"):
            yield f"{stage[0].line}: {base} is not pinned to a version"
        host = base.split("/")[0]
        if "/" in base and ("." in host or ":" in host):
            yield f"{stage[0].line}: {base} names a registry's host"
    for instruction in (each for stage in stages for each in stage):
        where, text = instruction.line, instruction.arguments
        if instruction.name not in _KNOWN:  # ADD, MAINTAINER, ONBUILD, a typing error
            yield f"{where}: {instruction.name} has no place here"
        if instruction.name in ("CMD", "ENTRYPOINT") and not isinstance(json.loads(text), list):
            yield f"{where}: {instruction.name} is run by a shell"
        if instruction.name == "WORKDIR" and not text.startswith("/"):
            yield f"{where}: WORKDIR is relative"
        if instruction.name == "RUN":
            yield from (f"{where}: {each}" for each in complaints_about_command(text))
        if instruction.name == "COPY":
            source = re.search(r"--from=(\S+)", text)
            if source and source[1] not in names:
                yield f"{where}: there is no stage {source[1]}"
            if source is None:
                for each in shlex.split(text)[:-1]:
                    if each.startswith("/") or not (ROOT / each).exists():
                        yield f"{where}: {each} is not in the sources"
    if len(stages) < 2:
        yield "what builds is not left behind"
    last = {each.name: each for each in stages[-1]}
    user = last["USER"].arguments if "USER" in last else "root"
    if user.split(":")[0] in ("root", "0"):
        yield "runs as root"
    for name in ("HEALTHCHECK", "ENTRYPOINT", "STOPSIGNAL"):
        if name not in last:
            yield f"has no {name}"
    if last.get("HEALTHCHECK") and not re.search(r'CMD \["/', last["HEALTHCHECK"].arguments):
        yield "its health check is run by a shell, or from a path that may change"


def complaints_about_command(text: str) -> Iterator[str]:
    if "apt-get install" in text:
        if "--no-install-recommends" not in text or " -y " not in text:
            yield "apt-get install asks, or installs what was not asked for"
        if "apt-get update &&" not in text or "rm -rf /var/lib/apt/lists/*" not in text:
            yield "lists of packages are old, or stay in the image"
    if " pip install" in text and "--no-cache-dir" not in text:
        yield "pip's cache stays in the image"
    if re.search(r"\b(sudo|curl|wget|apt|chmod 777)\b(?!-)", text.replace("/apt/", "/")):
        yield "sudo, downloads by hand, apt and chmod 777 have no place here"
    if "|" in text.replace("||", ""):
        yield "a pipe hides failures of its first command"


@every_file
def test_nothing_is_wrong_with_a_dockerfile(path: Path) -> None:
    assert list(complaints(path)) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("python:3.12.11-slim-bookworm AS run", "python:latest AS run", "not pinned"),
        ("python:3.12.11-slim-bookworm AS run", "python AS run", "not pinned"),
        ("FROM python:3", "FROM my.example/python:3", "registry"),
        ("USER ${UID}:${UID}", "USER root", "runs as root"),
        ("USER ${UID}:${UID}\n", "", "runs as root"),
        ("HEALTHCHECK", "ONBUILD HEALTHCHECK", "ONBUILD has no place"),
        ('CMD ["serve"]', 'CMD "serve"', "run by a shell"),
        ("COPY daemon daemon", "ADD http://a/b b", "ADD has no place"),
        ("COPY daemon daemon", "COPY deamon daemon", "deamon is not in the sources"),
        ("--from=build", "--from=built", "no stage built"),
        ("--no-cache-dir ", "", "pip's cache"),
        ("RUN groupadd", "RUN curl x && groupadd", "no place here"),
        ("STOPSIGNAL SIGTERM\n", "", "no STOPSIGNAL"),
        ("WORKDIR /src", "WORKDIR src", "relative"),
    ],
)
def test_what_is_wrong_is_found(old: str, new: str, complaint: str, tmp_path: Path) -> None:
    text = (ROOT / "deploy/docker/Dockerfile.cpu").read_text()
    assert old in text
    bad = tmp_path / "Dockerfile.bad"
    bad.write_text(text.replace(old, new))
    assert any(complaint in each for each in complaints(bad))


@every_file
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed here; the points that matter are checked above")
    done = subprocess.run(
        ["hadolint", "--config", str(CONFIG), str(path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")


@every_file
def test_everything_that_the_build_needs_is_copied(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [
        "pyproject.toml",
        project["project"]["readme"],
        *project["project"]["license-files"],
        *wheel["packages"],
        *wheel["force-include"],
    ]
    copied = [
        source
        for instruction in stages_of(path)[0]
        if instruction.name == "COPY"
        for source in shlex.split(instruction.arguments)[:-1]
    ]
    for each in needed:
        assert any(each == source or each.startswith(f"{source}/") for source in copied), each


@every_file
def test_the_extra_that_a_dockerfile_installs_exists(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r'"\.\[(\w+)\]"', path.read_text())
    kind = path.name.partition(".")[2]
    assert extras == ([] if kind == "cpu" else [kind])
    assert set(extras) <= set(project["optional-dependencies"])


@every_file
def test_what_an_image_sets_are_settings(path: Path) -> None:
    settings = load_settings(image_environment(path))
    assert settings.run_dir == "/run/dflash-moe"
    assert settings.cache_dir == "/var/cache/dflash-moe"


def test_images_differ_in_nothing_but_their_base_and_device() -> None:
    """From the account on, apart from what a vendor needs."""

    def shared(path: Path) -> list[tuple[str, str]]:
        text = [(each.name, each.arguments) for each in stages_of(path)[-1]]
        vendor = ("NVIDIA_", "ROCM_HOME")
        return [each for each in text[text.index(("ARG", "UID=10001")) :]
                if not each[1].startswith(vendor)]  # fmt: skip

    first, *others = map(shared, DOCKERFILES)
    assert len(DOCKERFILES) == 3
    assert all(other == first for other in others)
