"""A share of `make fuzz` in every test run, and proof that the harness finds faults."""

from __future__ import annotations

import pytest

from fuzz.__main__ import report
from fuzz.hunt import TARGETS, load_target
from fuzz.mutation import Mutator
from fuzz.planted import BAD_CASE
from fuzz.runner import hunt_in_processes

COMPILED = {"grammars"}
"""Targets that take some milliseconds a case."""


# The same cases in each run: `make fuzz` is what tries others.
@pytest.mark.parametrize("num_cases", [4_000, pytest.param(80_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_damage_to_everything_that_is_read_harms_nothing(num_cases: int, is_compiled: bool) -> None:
    names = [name for name in TARGETS if (name in COMPILED) == is_compiled]
    num_cases //= 8 if is_compiled else 1
    tallies = hunt_in_processes(names, seed=7, num_workers=1, num_cases=num_cases)
    assert not [tally.findings for tally in tallies if tally.findings], report(tallies)
    for tally in tallies:  # nothing may be refused, or taken, always
        assert tally.num_cases == num_cases, report(tallies)
        assert 0 < tally.num_refused < num_cases, report(tallies)


@pytest.mark.parametrize("name", TARGETS)
def test_a_case_is_the_same_whenever_it_is_made(name: str) -> None:
    first, second = load_target(name), load_target(name)
    one, other = Mutator(3), Mutator(3)
    try:
        made = []
        for case in (0, 1, 2, 999_999):
            one.start(case)
            made.append(first.make(one))
        for case, frames in ((999_999, made[3]), (1, made[1])):
            other.start(case)
            assert second.make(other) == frames
        assert len({tuple(frames) for frames in made}) > 1
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Untyped", "IndexError"),
        ("OtherBranch", "SettingsError: not for messages"),
        ("LongMessage", "not one short line"),
        ("Slow", "1.5 s of them computing"),
        ("Endless", "took more than 1 s"),
        ("Greedy", "Cannot allocate memory"),
        ("Dead", "ended with -11"),
        ("Forgetful", "sound input was not taken any more"),
    ],
)
def test_a_planted_fault_is_found_with_the_case_that_shows_it(
    name: str, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    names = [f"fuzz.planted:{name}", "fuzz.planted:Sound"]
    faulty, sound = hunt_in_processes(names, seed=1, num_workers=1, num_cases=600)
    assert what in faulty.findings[0].what
    if name != "Forgetful":  # that is seen at the end of a batch
        assert faulty.findings[0].case == BAD_CASE - 1
        assert len(faulty.findings[0].frames) == 2
    if name in ("Endless", "Dead"):  # the worker is gone, and says where it was
        assert "in fail" in capfd.readouterr().err
    else:
        assert (sound.num_cases, sound.num_refused, sound.findings) == (600, 300, [])
