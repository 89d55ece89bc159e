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
_SECRET = re.compile(r"(?i)secret|token|passw|passphrase|credential|(api|private|access)_?key")
_ONCE = ("CMD", "ENTRYPOINT", "HEALTHCHECK")
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
    stages, names = stages_of(path), list[str]()
    for stage in stages:
        base, _, name = stage[0].arguments.partition(" AS ")
        if name in names:
            yield f"{stage[0].line}: there are two stages {name}"
        yield from (f"{stage[0].line}: {each}" for each in complaints_about_base(base))
        for instruction in stage:
            for each in complaints_about_instruction(instruction, names):
                yield f"{instruction.line}: {each}"
        yield from complaints_about_stage(stage)
        names.append(name)
    if len(stages) < 2:
        yield "what builds is not left behind"
    yield from complaints_about_image(stages[-1])


def complaints_about_base(base: str) -> Iterator[str]:
    if not _PINNED.fullmatch(base) or base.endswith(":latest"):
        yield f"{base} is not pinned to a version"
    host = base.split("/")[0]
    if "/" in base and ("." in host or ":" in host):
        yield f"{base} names a registry's host"


def complaints_about_instruction(instruction: Instruction, stages: list[str]) -> Iterator[str]:
    """`stages` are the names of those before this one."""
    name, text = instruction.name, instruction.arguments
    if name not in _KNOWN:  # ADD, MAINTAINER, ONBUILD, a typing error
        yield f"{name} has no place here"
    if name in ("CMD", "ENTRYPOINT") and not is_list(text):
        yield f"{name} is run by a shell"
    if name in ("ENV", "ARG") and any(map(_SECRET.search, names_set_by(text))):
        yield "a secret stays in the image"
    if name == "EXPOSE" and not is_port(text):
        yield f"{text} is no port"
    if name == "WORKDIR" and not text.startswith("/"):
        yield "WORKDIR is relative"
    if name == "RUN":
        yield from complaints_about_command(text)
    if name == "COPY":
        *sources, target = [each for each in shlex.split(text) if not each.startswith("--")]
        if len(sources) > 1 and not target.endswith("/"):
            yield "several files are copied to one"
        stage = re.search(r"--from=(\S+)", text)
        if stage and stage[1] not in stages:
            yield f"there is no stage {stage[1]} before this one"
        for each in sources:
            if stage is None and (each.startswith("/") or not (ROOT / each).exists()):
                yield f"{each} is not in the sources"


def complaints_about_stage(stage: list[Instruction]) -> Iterator[str]:
    names = [each.name for each in stage]
    yield from (f"{stage[0].line}: two {name}" for name in _ONCE if names.count(name) > 1)
    for number, each in enumerate(stage):
        is_relative = each.name == "COPY" and not shlex.split(each.arguments)[-1].startswith("/")
        if is_relative and "WORKDIR" not in names[:number]:
            yield f"{each.line}: copied to wherever the base image is"


def complaints_about_image(stage: list[Instruction]) -> Iterator[str]:
    """Of the last stage, which is what runs."""
    last = {each.name: each.arguments for each in stage}
    user = last.get("USER", "root")
    for name, value in re.findall(r"(\w+)=(\S+)", last.get("ARG", "")):
        user = user.replace(f"${{{name}}}", value)
    if user.split(":")[0] in ("root", "0") or "$" in user:
        yield "runs as root, or as nobody knows whom"
    for name in ("HEALTHCHECK", "ENTRYPOINT", "STOPSIGNAL"):
        if name not in last:
            yield f"has no {name}"
    if "HEALTHCHECK" in last and not re.search(r'CMD \["/', last["HEALTHCHECK"]):
        yield "its health check is run by a shell, or from a path that may change"


def is_list(text: str) -> bool:
    """Whether a command is in the form that no shell takes apart."""
    try:
        return isinstance(json.loads(text), list)
    except json.JSONDecodeError:
        return False


def names_set_by(text: str) -> list[str]:
    """Names of an ARG or ENV."""
    return [each.partition("=")[0] for each in shlex.split(text)]


def is_port(text: str) -> bool:
    return text.isdigit() and 0 < int(text) < 1 << 16


def complaints_about_command(text: str) -> Iterator[str]:
    if "apt-get install" in text:
        if "--no-install-recommends" not in text or " -y " not in text:
            yield "apt-get install asks, or installs what was not asked for"
        if "apt-get update &&" not in text or "rm -rf /var/lib/apt/lists/*" not in text:
            yield "lists of packages are old, or stay in the image"
    if " pip install" in text and "--no-cache-dir" not in text:
        yield "pip's cache stays in the image"
    if re.search(r"\b(sudo|ssh|curl|wget|apt|chmod 777)\b(?!-)", text.replace("/apt/", "/")):
        yield "sudo, downloads by hand, apt and chmod 777 have no place here"
    if re.search(r"(^|&&|;)\s*cd\b", text):
        yield "cd does what WORKDIR should"
    if re.search(r"apt-get (dist-)?upgrade", text):
        yield "another base image is what upgrades"
    if ";" in text:
        yield "a semicolon hides failures of what stands before it"
    if "useradd" in text and "--no-log-init" not in text:
        yield "useradd makes a log as long as the account's number"
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
        ('CMD ["serve"]', "CMD dflash-moe serve", "run by a shell"),
        ('CMD ["serve"]', 'CMD ["serve"]\nCMD ["daemon"]', "two CMD"),
        ('ENTRYPOINT ["dflash-moe"]', "ENTRYPOINT dflash-moe", "run by a shell"),
        ("HEALTHCHECK --", "LABEL x=y\nHEALTHCHECK --", "LABEL has no place"),
        ("HOME=/tmp", "HOME=/tmp HF_TOKEN=abc", "a secret"),
        ("ARG UID=10001", "ARG UID=10001\nARG API_KEY", "a secret"),
        ("EXPOSE 8080", "EXPOSE 80800", "no port"),
        ("AS run", "AS build", "two stages build"),
        ("--from=build", "--from=run", "no stage run before"),
        ("README.md LICENSE ./", "README.md LICENSE .", "copied to one"),
        ("WORKDIR /src\n", "", "wherever the base image is"),
        ("ARG UID=10001", "ARG UID=0", "runs as root"),
        ("ARG UID=10001", "ARG OTHER=10001", "nobody knows whom"),
        ("USER ${UID}:${UID}\n", "USER ${UID}:${UID}\nUSER 0\n", "runs as root"),
        ("RUN groupadd", "RUN cd /tmp && groupadd", "WORKDIR"),
        ("RUN groupadd", "RUN set +e; groupadd", "hides failures"),
        ("RUN groupadd", "RUN printf x | groupadd", "hides failures"),
        ("RUN groupadd", "RUN apt-get update && apt-get upgrade -y && groupadd", "base image"),
        ("RUN groupadd", "RUN apt-get install -y --no-install-recommends x && groupadd", "lists"),
        ("RUN groupadd", "RUN apt-get update && apt-get install -y x && groupadd", "not asked for"),
        (" --no-log-init", "", "as long as the account's number"),
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
