"""Files of the product import each other in one direction: no circles, of type hints and imports
inside functions either."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE_ROOTS = ("protocol", "adapters", "daemon", "runtime")


def modules() -> dict[str, Path]:
    """Every module of ours, by name."""
    found = {}
    for root in SOURCE_ROOTS:
        for path in (ROOT / root).rglob("*.py"):
            *packages, name = path.relative_to(ROOT / root).with_suffix("").parts
            found[".".join(packages if name == "__init__" else [*packages, name])] = path
    return found


def imported(source: str, known: set[str]) -> Iterator[str]:
    """Modules that are named in any import statement, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for each in node.names:
                module = f"{node.module}.{each.name}"
                if module in known or node.module in known:
                    yield module if module in known else node.module


def circle(sources: dict[str, str]) -> list[str]:
    """Modules that import each other in turn, the first again at the end; empty if none do."""
    known = set(sources)
    graph = {name: set(imported(text, known)) - {name} for name, text in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_files_do_not_import_in_circles() -> None:
    sources = {name: path.read_text() for name, path in modules().items()}
    assert len(sources) > 300
    assert circle(sources) == []


@pytest.mark.parametrize(
    "back",
    [
        "from ours import a",
        "import ours.a",
        "if TYPE_CHECKING:\n    from ours.a import Thing",
        "def f():\n    from ours.a import thing",
    ],
)
def test_a_circle_is_found(back: str) -> None:
    sources = {"ours": "", "ours.a": "from ours.b import other", "ours.b": back}
    assert sorted(set(circle(sources))) == ["ours.a", "ours.b"]
    assert circle({**sources, "ours.b": "import os"}) == []


def test_imports_name_their_package() -> None:
    """Relative ones would not be seen."""
    for name, path in modules().items():
        nodes = ast.walk(ast.parse(path.read_text()))
        assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes), name


def test_an_engine_imports_nothing_that_only_some_requests_need() -> None:
    """Chat templates are rendered in processes of their own, grammars compiled for who asks."""
    program = "import sys, dflash_runtime.engine.engine as _, dflash_runtime.cli.generate as _; "
    program += "print(*{each.partition('.')[0] for each in sys.modules})"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    packages = set(found.stdout.split())
    assert "numpy" in packages
    unneeded = {"jinja2", "llguidance", "fastapi", "opentelemetry", "rich", "huggingface_hub"}
    assert packages & unneeded == set()
