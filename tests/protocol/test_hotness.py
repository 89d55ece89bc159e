"""Hotness files: the older system's CSV, read and written, and everything that is none."""

from __future__ import annotations

import re
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import SettingsError
from dflash_protocol.hotness import MAX_COUNTS, Hotness, read_hotness, write_hotness
from support.examples import examples

# Word for word what the older system's writer writes.
OLDER_FILE = """\
# hotness table: n_layer=2 n_expert=4 n_expert_used=2
# format: one row per layer, columns are expert activation counts (expert 0..N-1)
7,0,3,12
0,0,21,18446744073709551615
"""
HEADER = OLDER_FILE.splitlines(keepends=True)[0]
COUNTS = [[7, 0, 3, 12], [0, 0, 21, 2**64 - 1]]


def hotness_of(rows: list[list[int]], num_experts_used: int = 1) -> Hotness:
    return Hotness(np.array(rows, dtype=np.uint64), num_experts_used)


def read_text(folder: Path, text: str | bytes) -> Hotness:
    path = folder / "hotness.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_hotness(path)


def refuse(folder: Path, text: str | bytes, reason: str) -> None:
    """Reading raises one short line with the file and the reason; a good file is read after it."""
    with pytest.raises(SettingsError, match=reason) as caught:
        read_text(folder, text)
    message = str(caught.value)
    assert message.startswith(f"hotness file {folder / 'hotness.csv'}: ")
    assert len(message.splitlines()) == 1
    assert len(message) < len(str(folder)) + 200
    assert read_text(folder, OLDER_FILE).counts.tolist() == COUNTS


def test_the_older_systems_file_is_read_and_written_word_for_word(tmp_path: Path) -> None:
    hotness = read_text(tmp_path, OLDER_FILE)
    assert hotness.counts.tolist() == COUNTS
    assert hotness.counts.dtype == np.uint64
    assert (hotness.num_layers, hotness.num_experts, hotness.num_experts_used) == (2, 4, 2)
    write_hotness(tmp_path / "written.csv", hotness)
    assert (tmp_path / "written.csv").read_text() == OLDER_FILE


@st.composite
def tables(draw: st.DrawFn) -> Hotness:
    num_experts = draw(st.integers(1, 9))
    numbers = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**63, 2**64 - 1])
    row = st.lists(numbers, min_size=num_experts, max_size=num_experts)
    rows = draw(st.lists(row, min_size=1, max_size=6))
    return hotness_of(rows, draw(st.integers(1, num_experts)))


@examples(100)
@given(tables())
def test_a_file_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, hotness: Hotness
) -> None:
    path = tmp_path_factory.mktemp("hotness") / "hotness.csv"
    write_hotness(path, hotness)
    again = read_hotness(path, num_layers=hotness.num_layers, num_experts=hotness.num_experts)
    np.testing.assert_array_equal(again.counts, hotness.counts, strict=True)
    assert again.num_experts_used == hotness.num_experts_used


@examples(300)
@given(
    st.text("0123456789,,,, \t\n\r#-+.x=é", max_size=40)
    | st.from_regex(r"\A(# hotness table: n_layer=\d n_expert=\d n_expert_used=\d\n)?[\d, \n]*\Z")
)
def test_any_text_is_a_table_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder = tmp_path_factory.mktemp("hotness")
    try:
        hotness = read_text(folder, text)
    except SettingsError as error:
        reason = str(error)
        assert len(reason.splitlines()) == 1
        return
    # The naive reading: every number that is in no comment.
    rows = [line for line in text.split("\n") if not line.startswith("#") and line.strip(" \t\r")]
    naive = [[int(number) for number in re.findall(r"[0-9]+", row)] for row in rows]
    assert hotness.counts.tolist() == naive


@pytest.mark.parametrize(
    ("text", "counts", "num_experts_used"),
    [
        ("1,2\n3,4\n", [[1, 2], [3, 4]], 2),
        ("1,2\n3,4", [[1, 2], [3, 4]], 2),
        ("1,2,\n", [[1, 2]], 2),
        ("1 2\t3\n", [[1, 2, 3]], 3),
        (" 1 ,\t2 \r\n", [[1, 2]], 2),
        ("\n\n1\n\n# a remark\n2\n", [[1], [2]], 1),
        ("0,0,0,0,0,0,0,0,0,0\n", [[0] * 10], 8),
        ("# hotness table: n_layer=1 n_expert=9 n_expert_used=3\n" + "1," * 9, [[1] * 9], 3),
    ],
)
def test_what_the_older_reader_takes_is_read(
    tmp_path: Path, text: str, counts: list[list[int]], num_experts_used: int
) -> None:
    hotness = read_text(tmp_path, text)
    assert hotness.counts.tolist() == counts
    assert hotness.num_experts_used == num_experts_used


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no rows"),
        (HEADER, "no rows"),
        ("1,2\n3\n", "line 2, layer 1.* 1 .* 2 "),
        ("1,2\n3,4,5\n", "line 2, layer 1.* 2 "),
        ("1,2\n3,,4\n", "line 2, layer 1.* ''"),
        (",1\n", "line 1, layer 0.* ''"),
        (",,,\n", "line 1, layer 0.* ''"),
        ("1,-2\n", "line 1, layer 0.* '-2'"),
        ("1,+2\n", r"line 1, layer 0.* '\+2'"),
        ("1,2.5\n", "line 1, layer 0.* '2.5'"),
        ("1,0x10\n", "line 1, layer 0.* '0x10'"),
        ("1,\N{ARABIC-INDIC DIGIT ONE}\n", "line 1, layer 0.* '.+'"),
        (b"1,\xff\n", r"line 1, layer 0.* '\\ufffd'"),
        (b"1,2\0\n", r"line 1, layer 0.* '2\\x00'"),
        ("1," + "x" * 5000, "line 1, layer 0.* 'x{24}'"),
        ("1,18446744073709551616\n", "line 1, layer 0.* 18446744073709551616 "),
        ("1," + "9" * 9999, "line 1, layer 0.* 9{24} .*64"),
        (HEADER + "1,2,3,4\n", r"n_layer\b.* 2\b.* 1 "),
        (HEADER + "1,2,3,4\n" * 3, r"n_layer\b.* 2\b.* 3 "),
        (HEADER + "1,2,3\n" * 2, "line 2, layer 0.* 3 .* 4 "),
        (HEADER + HEADER + "1,2,3,4\n" * 2, r"line 2\b.*header"),
        ("1,2,3,4\n" + HEADER, r"line 2\b.*header"),
        ("# n_layer=2\n1\n2\n", r"line 1\b.*header"),
        ("# hotness table: n_layer=-1 n_expert=4 n_expert_used=2\n", r"line 1\b.*header"),
        ("# hotness table: n_layer=1 n_expert=1 n_expert_used=" + "1" * 99, "header"),
        ("# hotness table: n_layer=0 n_expert=4 n_expert_used=2\n1,2,3,4", r"\b0 layers\b.* 4\b"),
        (
            "# hotness table: n_layer=999999999 n_expert=999999999 n_expert_used=2\n1",
            "line 1.* 999999999 layers.* 999999999 experts",
        ),
        (
            "# hotness table: n_layer=1 n_expert=2 n_expert_used=3\n1,2",
            r"n_expert_used\b.* 3\b.*n_expert\b.* 2\b",
        ),
    ],
    ids=range(28),
)
def test_a_wrong_file_is_refused_naming_the_line_and_the_value(
    tmp_path: Path, text: str | bytes, reason: str
) -> None:
    refuse(tmp_path, text, reason)


@pytest.mark.parametrize(
    "content",
    [
        b"1," * (3 << 20),
        b"1 " * (3 << 20),
        b" " * (6 << 20),
        b"1" + b" " * (5 << 20) + b"x",
        b"1" * (6 << 20),
        b"1\n" * (3 << 20),
        b"\n" * (6 << 20),
        b"#n_layer=\n" * 8000,
        b"# hotness table: n_layer=" + b" " * (5 << 20),
        b"1," * MAX_COUNTS + b"\n" + b"1," * MAX_COUNTS,
        b"1\n" * ((1 << 13) + 1),
    ],
    ids=range(11),
)
def test_what_would_take_much_time_or_memory_is_refused_first(
    tmp_path: Path, content: bytes
) -> None:
    reason = r"more|line 1, layer 0\b|no rows|header|n_layer"
    started_s = time.thread_time()
    refuse(tmp_path, content, reason)
    assert time.thread_time() - started_s < 1.0
    tracemalloc.start()  # makes each allocation several times slower, so the time is taken without
    try:
        refuse(tmp_path, content, reason)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_huge_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"/dev/zero.* 6 MiB"):
        read_hotness(Path("/dev/zero"))
    with pytest.raises(SettingsError, match="No such file or directory"):
        read_hotness(tmp_path / "nothing.csv")


def test_the_largest_file_is_read_soon(tmp_path: Path) -> None:
    path = tmp_path / "hotness.csv"
    write_hotness(path, hotness_of([[2**64 - 1] * 1024] * (MAX_COUNTS // 1024), 8))
    started_s = time.thread_time()
    assert read_hotness(path).counts.shape == (MAX_COUNTS // 1024, 1024)
    assert time.thread_time() - started_s < 2.0


@pytest.mark.parametrize(("num_layers", "num_experts"), [(3, None), (None, 5), (4, 2)])
def test_the_file_of_another_model_is_refused(
    tmp_path: Path, num_layers: int | None, num_experts: int | None
) -> None:
    path = tmp_path / "hotness.csv"
    path.write_text(OLDER_FILE)
    with pytest.raises(SettingsError, match=r"2 layers.* 4 experts.*model"):
        read_hotness(path, num_layers=num_layers, num_experts=num_experts)
    assert read_hotness(path, num_layers=2, num_experts=4).counts.tolist() == COUNTS


@pytest.mark.parametrize(
    "hotness",
    [
        Hotness(np.zeros((0, 4), np.uint64), 1),
        Hotness(np.zeros(4, np.uint64), 1),
        Hotness(np.zeros((1, MAX_COUNTS + 1), np.uint64), 1),
        hotness_of([[1, 2]], 0),
        hotness_of([[1, 2]], 3),
    ],
    ids=["no layers", "one dimension", "too many", "none used", "too many used"],
)
def test_what_no_reader_would_take_is_not_written(tmp_path: Path, hotness: Hotness) -> None:
    with pytest.raises(SettingsError, match=r"counts|experts used"):
        write_hotness(tmp_path / "hotness.csv", hotness)
    assert list(tmp_path.iterdir()) == []
