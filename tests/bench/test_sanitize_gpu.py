"""The check of every kernel with compute-sanitizer: none is left out, and what it says is told."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
from bench.sanitize_cases import CASES

from bench import sanitize_gpu
from dflash_runtime.compute.gpu.device.kernel_sources import KERNELS_FOLDER

FAKE = """#!{python}
import sys
tool = sys.argv[sys.argv.index("--tool") + 1]
names = [word[4:] for word in sys.argv if word.startswith("kne=")]
count = {counts}.get((tool, *names), 0)
print("========= COMPUTE-SANITIZER")
words = {{"memcheck": "ERROR SUMMARY: %d errors"}}
print("=========", words.get(tool, "RACECHECK SUMMARY: %d hazards displayed") % count)
sys.exit(9 if count else 0)
"""
Counts = dict[tuple[str, ...], int]

MISTAKES: Counts = {("memcheck", "writes_behind"): 1, ("racecheck", "misses_a_barrier"): 2}


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, counts: Counts) -> None:
    """A tool that finds so much, and a GPU on which all kernels of embed.cu and draw.cu are run."""
    fake = folder / "compute-sanitizer"
    fake.write_text(FAKE.format(python=sys.executable, counts=counts))
    fake.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sanitize_gpu, "describe_gpus", lambda kind: ([], None))
    launched = [
        f"launched {file} {kernel}"
        for file in ("embed.cu", "sample.cu")
        for kernel in sanitize_gpu.kernels_of(file)
    ]
    program = f"print({chr(10).join(launched)!r})"
    monkeypatch.setattr(
        sanitize_gpu, "_tests", lambda names, is_emulated: [sys.executable, "-c", program]
    )


def test_every_kernel_file_has_tests_that_are_there() -> None:
    assert sorted(CASES) == sorted(each.name for each in KERNELS_FOLDER.rglob("*.cu"))
    for name, tests in CASES.items():
        assert sanitize_gpu.kernels_of(name)
        for test in tests:
            file, _, function = test.partition("::")
            text = (sanitize_gpu._TESTS / file).read_text(encoding="utf-8")
            assert f"def {function.partition('[')[0]}" in text


@pytest.mark.slow
def test_these_tests_launch_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize_gpu.main(["--rehearse", "--jobs", "2", "--limit-s", "200"]) == 0, (
        capsys.readouterr().out
    )


def test_nothing_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, tmp_path, MISTAKES)
    assert sanitize_gpu.main(["--file", "embed.cu", "--file", "sample.cu", "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert "embed.cu                 results are right\n" in said
    assert "memcheck 0 found in 0 s, racecheck 0 found in 0 s" in said
    assert "2 of 2 files clean" in said


def test_what_is_found_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, tmp_path, {**MISTAKES, ("racecheck", "embed"): 3})
    assert sanitize_gpu.main(["--file", "embed.cu", "--file", "sample.cu", "--jobs", "2"]) == 1
    said = capsys.readouterr().out
    assert "racecheck: 3 found, status 9\n" in said
    assert "1 of 2 files clean" in said


def test_a_kernel_that_is_not_launched_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, tmp_path, MISTAKES)
    assert sanitize_gpu.main(["--file", "router.cu", "--tool", "memcheck"]) == 1
    assert "router.cu                not launched: router\n" in capsys.readouterr().out


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_a_tool_that_sees_nothing_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    install(monkeypatch, tmp_path, {})
    with pytest.raises(SystemExit, match=f"{tool} does not see what"):
        sanitize_gpu.main(["--file", "embed.cu", "--tool", tool])


def test_whatever_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, tmp_path, MISTAKES)
    (tmp_path / "compute-sanitizer").write_text(
        f"#!/bin/sh\n{sys.executable} -c 'import time; time.sleep(60)'\n"
    )
    with pytest.raises(SystemExit, match="ended after 1 s"):
        sanitize_gpu.main(["--file", "embed.cu", "--tool", "memcheck", "--limit-s", "1"])
    assert "memcheck: no summary found" not in capsys.readouterr().out


def test_without_a_gpu_or_the_tool_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, MISTAKES)
    (tmp_path / "compute-sanitizer").unlink()
    monkeypatch.setattr(sanitize_gpu, "_PLACES", ())
    with pytest.raises(SystemExit, match="compute-sanitizer is neither in PATH"):
        sanitize_gpu.main(["--file", "embed.cu"])
    monkeypatch.setattr(sanitize_gpu, "describe_gpus", lambda kind: ([], "no driver"))
    with pytest.raises(SystemExit, match="no GPU to run on: no driver"):
        sanitize_gpu.main([])
