"""docs/architecture.md names files, functions and folders that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tooling.token_path import DOCUMENT, Stop, num_files, token_paths
from tooling.written_lines import PACKAGES

from support.processes import ROOT

TEXT = DOCUMENT.read_text()
PATHS = token_paths(TEXT)
MOST_LINES = 600
"""Of a file that a reader of a path has to open."""


@pytest.mark.parametrize("name", PATHS)
def test_every_file_and_function_of_a_path_exists(name: str) -> None:
    for stop in PATHS[name]:
        assert stop.functions, stop.file
        assert not stop.missing_functions(), stop.file
        assert stop.num_lines <= MOST_LINES, stop.file


@pytest.mark.parametrize("name", PATHS)
def test_a_path_leads_from_generate_to_a_kernel(name: str) -> None:
    first, last = PATHS[name][0], PATHS[name][-1]
    assert first.functions == ("Engine.generate",)
    assert last.is_kernel


def test_there_is_a_path_for_each_kind_of_owner() -> None:
    """Two for daemons: from compiled code, and through the host."""
    assert len(PATHS) == 4


def test_rooms_are_the_folders_of_the_packages() -> None:
    """Each package's folders, and the two levels of the runtime, have a line."""
    rooms = TEXT.partition("## Rooms")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `([a-z_/]+)/` \|", rooms, re.MULTILINE))
    for name in named:
        assert (ROOT / name).is_dir(), name
    for package in PACKAGES:
        folders = [path for path in (ROOT / package).iterdir() if (path / "__init__.py").exists()]
        assert {path.relative_to(ROOT).as_posix() for path in folders} <= named | {package}
    backends = ROOT / "runtime/dflash_runtime/compute"
    for backend in ("cpu", "gpu"):
        folders = [path for path in (backends / backend).iterdir() if path.is_dir()]
        inside = {path.name for path in folders if not path.name.startswith("__")}
        line = next(line for line in rooms.splitlines() if f"compute/{backend}/` |" in line)
        assert inside <= set(re.findall(r"`([a-z]+)/`", line)), backend


def test_a_missing_function_is_found(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text("def first(): ...\n\nclass Some:\n    def second(self): ...\n")
    assert not Stop(file, ("first", "Some.second")).missing_functions()
    assert Stop(file, ("second",)).missing_functions() == {"second"}
    kernel = tmp_path / "kernels" / "some.cu"
    kernel.parent.mkdir()
    kernel.write_text("KERNEL(some_kernel, SomeArgs, THREADS, 1) {\n")
    assert not Stop(kernel, ("some_kernel",)).missing_functions()
    assert num_files([Stop(file, ()), Stop(kernel, ()), Stop(kernel.with_name("b.cu"), ())]) == 2
