"""systemd's service units as systemd reads them, to run their commands without it.

As far as ours go: sections, repeated keys, specifiers, environment files, words of ExecStart.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from support.processes import ROOT

UNITS = ROOT / "deploy" / "systemd"
_SOURCE_ROOTS = [str(ROOT / name) for name in ("protocol", "adapters", "daemon", "runtime")]


@dataclass(frozen=True)
class Unit:
    """One unit file: values by section and key, in order, with continued lines joined."""

    values: dict[tuple[str, str], list[str]]

    @classmethod
    def read(cls, path: Path) -> Unit:
        values: dict[tuple[str, str], list[str]] = {}
        section = ""
        for line in path.read_text().replace("\\\n", " ").splitlines():
            if line.startswith("["):
                section = line.strip("[]")
            elif line.strip() and not line.startswith(("#", ";")):
                key, _, value = line.partition("=")
                values.setdefault((section, key), []).append(value)
        return cls(values)

    def all(self, section: str, key: str) -> list[str]:
        return self.values.get((section, key), [])

    def one(self, section: str, key: str) -> str:
        (value,) = self.all(section, key)
        return value


@dataclass(frozen=True)
class Service:
    """A service unit on a machine whose folders lie elsewhere.

    `etc` stands for /etc, `runtime` for /run and `cache` for /var/cache.
    """

    unit: Unit
    instance: str
    etc: Path
    runtime: Path
    cache: Path

    def expanded(self, text: str) -> str:
        """With specifiers put in. Fails the test for one that it does not know."""
        known = {"i": self.instance, "t": str(self.runtime), "C": str(self.cache), "%": "%"}
        return re.sub("%(.)", lambda match: known[match[1]], text)

    def environment(self) -> dict[str, str]:
        """What the unit gives its process; a file counts more than what stood before it."""
        given: dict[str, str] = {}
        for line in self.unit.all("Service", "Environment"):
            for assignment in shlex.split(self.expanded(line)):
                name, _, value = assignment.partition("=")
                given[name] = value
        for name in self.unit.all("Service", "EnvironmentFile"):
            path = self.etc / Path(self.expanded(name.removeprefix("-"))).relative_to("/etc")
            if path.exists() or not name.startswith("-"):
                read = read_environment_file(path)
                given.update({name: self._moved(value) for name, value in read.items()})
        return given

    def command(self) -> list[str]:
        """ExecStart, with the variables of `environment` put in."""
        return expand_words(
            self.expanded(self.unit.one("Service", "ExecStart")), self.environment()
        )

    def make_folders(self) -> None:
        """What RuntimeDirectory and CacheDirectory make."""
        for key, folder in (("Runtime", self.runtime), ("Cache", self.cache)):
            name = self.unit.one("Service", f"{key}Directory")
            mode = int(self.unit.one("Service", f"{key}DirectoryMode"), 8)
            (folder / name).mkdir(mode=mode, exist_ok=True)

    def _moved(self, value: str) -> str:
        """What a file says of /run, which knows no specifiers."""
        return value.replace("/run/dflash-moe", f"{self.runtime}/dflash-moe")


def read_environment_file(path: Path) -> dict[str, str]:
    """Assignments of an EnvironmentFile; quoted ones lose quotes and backslashes."""
    given = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.lstrip().startswith(("#", ";")):
            name, _, value = line.partition("=")
            assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name), line
            if value.startswith('"'):
                value = re.sub(r'\\(["\\`$])', r"\1", value[1:-1])
            given[name] = value
    return given


def expand_words(line: str, variables: Mapping[str, str]) -> list[str]:
    """Words of a command line: ``${NAME}`` within a word as it is, ``$NAME`` alone as words."""
    words: list[str] = []
    for word in shlex.split(line):
        if re.fullmatch(r"\$[A-Za-z_]\w*", word):
            words += variables.get(word[1:], "").split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda match: variables.get(match[1], ""), word))
    return words


def link_into(root: Path, prefix: Path) -> Path:
    """The folder below a root that is seen from there as `prefix`, which leads to it here too.

    It is for who makes it to make. Units that are run without a root find programs by the link.
    """
    folder = root / prefix.relative_to("/")
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix.symlink_to(folder)
    return folder


def write_program(path: Path, python: str) -> Path:
    """What pip makes of our console script, for packages that are not installed."""
    lines = (
        "#!/bin/sh",
        f"export PYTHONPATH={os.pathsep.join(_SOURCE_ROOTS)}",
        f"exec {python} -c 'from dflash_runtime.cli import main; main()' \"$@\"",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path
