"""The bench of rows: what it measures of each type, and its rule."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

import pytest
from bench.cpu_rows import (
    CACHE,
    GGML,
    MEMORY,
    READ,
    RowBench,
    Samples,
    fed_share,
    repetitions,
    row_cells,
)
from bench.options import add_realtime_option, bench_parser

from bench import cpu_rows, options
from dflash_protocol.settings import AUTO_TIER


@pytest.fixture(scope="module")
def rows() -> RowBench:
    return RowBench(AUTO_TIER, 1 << 20, [1, 2], None)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("type_name", ["Q4_K", "F32"])
def test_each_kind_is_measured_in_every_round(rows: RowBench, type_name: str, threads: int) -> None:
    samples = rows.measure(type_name, 512, threads, 2)
    assert samples.keys() == {CACHE, MEMORY, READ}
    assert all(len(each) == 2 and min(each) > 0 for each in samples.values())


class FakeClock:
    """Work that takes as long as it says, and a start that takes a while too."""

    def __init__(self, start_s: float, seconds: float) -> None:
        self.start_s, self.seconds = start_s, seconds
        self.now_s = 0.0
        self.runs: list[int] = []

    def run(self, times: int) -> None:
        # The first one compiles, too.
        self.now_s += self.start_s + times * self.seconds + (0.0 if self.runs else 3.0)
        self.runs.append(times)

    def clock(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("start_s", "seconds"),
    [(0.0, 1e-7), (3e-4, 5e-6), (1e-4, 3e-4), (2e-3, 1e-4), (0.0, 0.019), (0.0, 0.02), (0.0, 1.0)],
)
def test_a_sample_is_long_enough_however_short_the_work(start_s: float, seconds: float) -> None:
    fake = FakeClock(start_s, seconds)
    times = repetitions(fake.run, fake.clock)
    assert start_s + times * seconds >= 0.02 - 1e-9
    assert times == 1 or times * seconds < 0.05  # nor much longer
    assert len(fake.runs) < 12


@pytest.mark.parametrize("is_permitted", [True, False])
def test_without_permission_for_real_time_priority_an_error_of_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_permitted: bool
) -> None:
    monkeypatch.setattr(options, "may_be_realtime", lambda: is_permitted)
    parser = bench_parser(__file__, __doc__)
    add_realtime_option(parser)
    assert parser.parse_args([]).realtime is False
    if is_permitted:
        assert parser.parse_args(["--realtime"]).realtime is True
        return
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--realtime"])
    assert ended.value.code
    (line,) = capsys.readouterr().err.splitlines()
    assert "--realtime" in line


@pytest.mark.parametrize(
    ("samples", "share"),
    [
        ({CACHE: [40.0, 60.0, 50.0], MEMORY: [8.0, 9.0, 27.0], READ: [10.0, 12.0, 30.0]}, 0.8),
        ({CACHE: [10.0, 10.0], MEMORY: [9.0, 9.0], READ: [20.0, 30.0]}, 0.9),
    ],
)
def test_memory_is_compared_with_the_smaller_of_cache_and_read(
    samples: Samples, share: float
) -> None:
    spread = fed_share(samples)
    assert spread.median == share
    row = {"type": "Q4_K", "columns": 512, "tier": "avx2", "threads": 1}
    cells = row_cells(row | {"share": spread.as_dict(), "bytes_per_s": samples})
    assert cells[-1] == ("yes" if share >= cpu_rows.FED else "NO")
    assert cells[cpu_rows.HEAD.index(GGML)] == ""


class FakeSide:
    """Rows whose memory reaches 0.9 of the bound for Q4_K, and half of it for Q8_0."""

    def __init__(self, *_arguments: Any) -> None: ...

    def call(self, method: str, *arguments: Any) -> Any:
        if method == "tier":
            return "avx2"
        memory = 9e9 if arguments[0] == "Q4_K" else 5e9
        return {CACHE: [1e10], MEMORY: [memory], READ: [2e10]}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "fails"),
    [(["Q4_K", "--check"], False), (["Q4_K", "Q8_0", "--check"], True), (["Q8_0"], False)],
)
def test_check_fails_where_a_type_is_not_fed(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], fails: bool
) -> None:
    monkeypatch.setattr(cpu_rows, "Side", FakeSide)
    monkeypatch.setattr(sys, "argv", ["cpu_rows", "--threads", "1", "--types", *arguments])
    if fails:
        with pytest.raises(SystemExit) as ended:
            cpu_rows.main()
        assert ended.value.code
    else:
        cpu_rows.main()
