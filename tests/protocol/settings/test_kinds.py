"""Unknown names: which known ones are suggested."""

from __future__ import annotations

import pytest

from dflash_protocol.settings.kinds import unknown


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("contxt", "did you mean context?"),
        ("CONTEXT", "did you mean context?"),
        ("part_a", "did you mean part_b?"),
        ("something else", "docs/operations.md lists them all"),
        ("", "docs/operations.md lists them all"),
    ],
)
def test_names_that_are_near_are_named(name: str, advice: str) -> None:
    known = ["context", "part_b", "threads"]
    assert unknown("key", name, known) == f"unknown key {name!r}; {advice}"


def test_what_all_names_begin_with_makes_none_near() -> None:
    known = ["OUR_LONG_PREFIX_THREADS", "OUR_LONG_PREFIX_CONTEXT"]
    said = unknown("variable", "OUR_LONG_PREFIX_XYZ", known, prefixes=("OUR_LONG_PREFIX_",))
    assert said == "unknown variable 'OUR_LONG_PREFIX_XYZ'; docs/operations.md lists them all"
