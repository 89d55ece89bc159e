"""`python -m tooling.token_path`: files and lines of the token's paths in docs/architecture.md.

Each path is a table with a row for each file, in the order in which a token passes them::

    | file | function | what happens |
    |---|---|---|
    | `engine/engine.py` | `Engine.generate` | … |

A sentence ``As *TITLE* up to `FILE` `` begins a path with another one's rows. Paths without a
package are those of the runtime. The kernels of a folder count as one file.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from tooling.written_lines import PACKAGES, ROOT

DOCUMENT = ROOT / "docs" / "architecture.md"
_RUNTIME = "runtime/dflash_runtime"
_KERNELS = re.compile(r"/kernels/|/ring/")
"""Folders whose code is compiled: kernels of the backends, and those of the shared-memory ring."""
_SECTION = re.compile(r"^### (?P<name>.*)\n(?P<text>(?:(?!^#).*\n?)*)", re.MULTILINE)
_BEGINNING = re.compile(r"^As \*(?P<name>[^*]+)\* up to `(?P<file>[^`]+)`", re.MULTILINE)
_ROW = re.compile(r"^\| `(?P<file>[^`]+)` \| (?P<functions>[^|]+) \|", re.MULTILINE)
_KERNEL = re.compile(r"^KERNEL\((\w+),", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Stop:
    """A file of a path, and the functions that are named in it."""

    file: Path
    functions: tuple[str, ...]

    @property
    def is_kernel(self) -> bool:
        return _KERNELS.search(self.file.as_posix()) is not None

    @property
    def num_lines(self) -> int:
        return len(self.file.read_text().splitlines())

    def missing_functions(self) -> set[str]:
        """Those that the file does not define."""
        return set(self.functions) - _defined(self.file)


def token_paths(text: str) -> dict[str, list[Stop]]:
    """The paths of a document, by the title of their section.

    Raises: ValueError for a file that is named twice in a path, or a beginning that does not exist.
    """
    paths: dict[str, list[Stop]] = {}
    for section in _SECTION.finditer(text):
        stops = []
        if beginning := _BEGINNING.search(section["text"]):
            before = paths[beginning["name"]]
            last = [stop.file for stop in before].index(_file(beginning["file"]))
            stops = before[: last + 1]
        stops += [
            Stop(_file(row["file"]), tuple(re.findall(r"`([^`]+)`", row["functions"])))
            for row in _ROW.finditer(section["text"])
        ]
        if len({stop.file for stop in stops}) != len(stops):
            raise ValueError(f"{section['name']}: a file is named twice")
        if stops:
            paths[section["name"]] = stops
    return paths


def num_files(stops: list[Stop]) -> int:
    """The number of files; all kernels of one folder count as one."""
    return len(
        {_KERNELS.split(stop.file.as_posix())[0] if stop.is_kernel else stop.file for stop in stops}
    )


def _file(name: str) -> Path:
    packages = [package for package in PACKAGES if name.startswith(package)]
    return ROOT / name if packages else ROOT / _RUNTIME / name


def _defined(file: Path) -> set[str]:
    """Functions that a file defines, as ``name`` or ``Class.name``; of CUDA files, the kernels."""
    text = file.read_text()
    if file.suffix != ".py":
        return set(_KERNEL.findall(text))
    found = set()
    for node in ast.parse(text).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        functions = (each for each in members if isinstance(each, ast.FunctionDef))
        found |= {f"{owner}{each.name}" for each in functions}
    return found


def main() -> None:
    """Print a line for each path."""
    for name, stops in token_paths(DOCUMENT.read_text()).items():
        kernels = sum(stop.num_lines for stop in stops if stop.is_kernel)
        others = sum(stop.num_lines for stop in stops if not stop.is_kernel)
        print(f"{name}: {num_files(stops)} files, {others} lines, and {kernels} of kernels")


if __name__ == "__main__":
    main()
