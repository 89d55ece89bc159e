"""`make docs`: tables in docs/ are written from the code.

A document marks where each table goes; the rest is its own text::

    <!-- begin: settings -->
    <!-- end: settings -->
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping

from tooling import tables
from tooling.written_lines import ROOT

DOCS = ROOT / "docs"
_TABLES: Mapping[str, Callable[[], str]] = {
    "settings": tables.settings,
    "log lines": tables.log_lines,
    "errors": tables.errors,
    "events": tables.events,
    "metrics": tables.metrics,
}
_REGION = re.compile(
    r"(?P<begin><!-- begin: (?P<name>[a-z ]+) -->\n).*?(?P<end><!-- end: (?P=name) -->)", re.DOTALL
)


def filled(text: str) -> str:
    """A document with each of its tables generated from the code.

    Raises: KeyError for an unknown table; ValueError for a logged line without an explanation.
    """
    return _REGION.sub(
        lambda found: f"{found['begin']}{_TABLES[found['name']]()}\n{found['end']}", text
    )


def names_of(text: str) -> list[str]:
    """Names of a document's tables."""
    return [found["name"] for found in _REGION.finditer(text)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tooling.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if stale")
    options = parser.parse_args(arguments)
    texts = {path: path.read_text() for path in sorted(DOCS.glob("*.md"))}
    missing = set(_TABLES) - {name for text in texts.values() for name in names_of(text)}
    if missing:
        print(f"no document has the table of {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    stale = {path: new for path, text in texts.items() if (new := filled(text)) != text}
    for path, text in stale.items():
        if options.check:
            print(f"{path.relative_to(ROOT)} is out of date: run make docs")
        else:
            path.write_text(text)
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
