"""What our programs write for people, read from their source: the texts of logger calls and lines.

Places where a value is put in are shown as ``…``, and so are words in capitals, which is how the
documents write them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.processes import ROOT

PACKAGES = (
    "protocol/dflash_protocol",
    "adapters/dflash_adapters",
    "runtime/dflash_runtime",
    "daemon/dflash_daemon",
)
_LEVELS = {
    "info": "info", "warning": "warning", "error": "error", "exception": "error",
    "critical": "critical", "log": "any",
}  # fmt: skip
_VALUE = re.compile(r"%(?:\.\d+)?[srdfx]|\{[^{}]*\}|\b[A-Z][A-Z0-9_]*\b|…")
_PROGRAM = re.compile(r"^dflash-(?:moe|daemon): ")


@dataclass(frozen=True)
class Line:
    """A line that may be written. `level` is ``any`` where it is chosen at run time, and empty for
    what is not logged but said."""

    text: str
    level: str
    where: str
    """File and line, for people."""
    package: str


def normalised(text: str) -> str:
    """With every value and every word in capitals as ``…``."""
    return _VALUE.sub("…", text)


def template_of(node: ast.expr) -> str | None:
    """The text of a literal or an f-string, normalised; None if it is neither."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return normalised(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            normalised(str(part.value)) if isinstance(part, ast.Constant) else "…"
            for part in node.values
        )
    return None


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def lines_of(path: Path, *, root: Path = ROOT) -> Iterator[Line]:
    """All lines that a module may log at level INFO or above, or say on stderr.

    `root` is the folder that holds those of the packages.
    Raises: ValueError for a logger call whose text is not written where it is called.
    """
    tree = ast.parse(path.read_text())
    package = path.relative_to(root).parts[1]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        where = f"{path.relative_to(root)}:{node.lineno}"
        level = _level_of(node)
        if level:
            argument = node.args[1 if level == "any" else 0]
            text = template_of(argument)
            if text == "…" and len(node.args) > 1:
                text = _assigned(node.args[-1], tree)
            if text is None:
                raise ValueError(f"{where}: the text is not at the call")
            yield Line(text, level, where, package)
        elif _is_said(node):
            [argument, *_] = node.args
            if isinstance(argument, ast.Name):
                text = _assigned(argument, tree)
            else:
                text = _PROGRAM.sub("", template_of(argument) or "")
            if text is not None:  # else it hands on what others have written
                yield Line(text, "", where, package)


def _level_of(call: ast.Call) -> str:
    """The level of a logger call of INFO or above; empty for any other call."""
    function = call.func
    is_logger = (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id.strip("_").lower() in ("log", "logger", "logging")
    )
    return _LEVELS.get(function.attr, "") if is_logger else ""  # type: ignore[attr-defined]


def _is_said(call: ast.Call) -> bool:
    """Whether it writes a line of ours to stderr: what begins with the program's name, or is handed
    to who puts that before it."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if not call.args:
        return False
    if name in ("say", "_say"):
        return isinstance(call.args[0], ast.Constant | ast.JoinedStr | ast.Name)
    return name in ("print", "echo") and bool(_PROGRAM.match(template_of(call.args[0]) or ""))


def _assigned(node: ast.expr, tree: ast.Module) -> str | None:
    """The text that a variable of this name is set to somewhere in the module."""
    for each in ast.walk(tree):
        if isinstance(each, ast.Assign) and ast.dump(each.targets[0]).replace(
            "Store", "Load"
        ) == ast.dump(node):
            return template_of(each.value)
    return None
