"""Compose files and Dockerfiles as Docker reads them, to run their commands without it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from support.processes import ROOT

COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("Dockerfile.*"))
PROFILES = ("cpu", "cuda", "rocm", "mixed")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")


def read_compose(values: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The compose file with variables (`values`, then defaults) and anchors resolved."""

    def value_of(match: re.Match[str]) -> str:
        given = (values or {}).get(match[1])
        return given if given else match[2] or ""

    text = "\n".join(
        line for line in COMPOSE.read_text().splitlines() if not line.lstrip().startswith("#")
    )
    read: dict[str, Any] = yaml.safe_load(_VARIABLE.sub(value_of, text))
    return read


def compose_variables() -> dict[str, str]:
    """Every variable of the file with its default."""
    return {match[1]: match[2] or "" for match in _VARIABLE.finditer(COMPOSE.read_text())}


def services_of(compose: Mapping[str, Any], profile: str) -> dict[str, dict[str, Any]]:
    """Services of one profile, by name."""
    return {
        name: service
        for name, service in compose["services"].items()
        if profile in service["profiles"]
    }


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile with continued lines joined; `line` counts from 1."""

    name: str
    arguments: str
    line: int


def read_dockerfile(path: Path) -> list[Instruction]:
    instructions: list[Instruction] = []
    parts: list[str] = []
    started = 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        started = started if parts else number
        parts.append(line.strip().removesuffix("\\").strip())
        if not line.rstrip().endswith("\\"):
            name, _, arguments = " ".join(parts).partition(" ")
            instructions.append(Instruction(name, arguments, started))
            parts = []
    assert not parts, f"{path.name} ends in the middle of an instruction"
    return instructions


def image_environment(path: Path) -> dict[str, str]:
    """The environment that ENV instructions of the last stage set."""
    environment: dict[str, str] = {}
    for instruction in read_dockerfile(path):
        if instruction.name == "FROM":
            environment = {}
        elif instruction.name == "ENV":
            for assignment in shlex.split(instruction.arguments):
                name, _, value = assignment.partition("=")
                environment[name] = value
    return environment
