"""systemd's service units as systemd reads them, to run their commands without it.

Supports what our units use: sections, repeated keys, specifiers, environment files, ExecStart.
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
    """A service unit with its folders in other places.

    `etc` stands for /etc, `runtime` for /run and `cache` for /var/cache.
    """

    unit: Unit
    instance: str
    etc: Path
    runtime: Path
    cache: Path

    def expanded(self, text: str) -> str:
        """The text with specifiers expanded. Fails the test for an unknown one."""
        known = {"i": self.instance, "t": str(self.runtime), "C": str(self.cache), "%": "%"}
        return re.sub("%(.)", lambda match: known[match[1]], text)

    def environment(self) -> dict[str, str]:
        """The environment of the unit's process; a file overrides earlier assignments."""
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
        """ExecStart with the variables of `environment` expanded."""
        return expand_words(
            self.expanded(self.unit.one("Service", "ExecStart")), self.environment()
        )

    def make_folders(self) -> None:
        """Make the folders of RuntimeDirectory and CacheDirectory."""
        for key, folder in (("Runtime", self.runtime), ("Cache", self.cache)):
            name = self.unit.one("Service", f"{key}Directory")
            mode = int(self.unit.one("Service", f"{key}DirectoryMode"), 8)
            (folder / name).mkdir(mode=mode, exist_ok=True)

    def _moved(self, value: str) -> str:
        """Replace /run/dflash-moe, which environment files write without a specifier."""
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
    """The folder that is `prefix` below `root`; makes `prefix` a link to it here.

    The caller makes the folder. Units that run without a root find programs through the link.
    """
    folder = root / prefix.relative_to("/")
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix.symlink_to(folder)
    return folder


def write_program(path: Path, python: str) -> Path:
    """Write the script that pip would make for our console script, without an installation."""
    lines = (
        "#!/bin/sh",
        f"export PYTHONPATH={os.pathsep.join(_SOURCE_ROOTS)}",
        f"exec {python} -c 'from dflash_runtime.cli import main; main()' \"$@\"",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path
