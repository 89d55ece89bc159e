"""Placement files: ours, the older system's, and everything that is neither."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import SettingsError
from dflash_protocol.placement import (
    MAX_IDS,
    MOST_LISTS,
    OwnedExperts,
    read_owned_experts,
    read_placement_file,
    write_owned_experts,
)
from support.examples import examples

EXPERTS_PER_LAYER = {0: 4, 2: 3, 5: 1}

# Word for word as the older system's writer lays it out: sorted keys, two blanks, no last newline.
OLDER_FILE = """{
  "arch": "moe_remote_expert_compute",
  "hot_counts": [
    2,
    0,
    1
  ],
  "hot_expert_ids": [
    [
      3,
      0
    ],
    [],
    [
      1
    ]
  ],
  "n_expert": 4,
  "n_expert_used": 2,
  "n_layer": 3,
  "total_hot": 3,
  "version": 1
}"""


def lists_of(owned: OwnedExperts) -> dict[int, list[int]]:
    return {layer_id: ids.tolist() for layer_id, ids in owned.by_layer.items()}


def good_document() -> dict[str, Any]:
    return {
        "arch": "moe_hybrid",
        "version": 1,
        "n_layer": 3,
        "n_expert": 4,
        "n_expert_used": 2,
        "total_hot": 3,
        "hot_counts": [2, 0, 1],
        "hot_expert_ids": [[3, 0], [], [1]],
    }


def check_of_the_older_reader(document: dict[str, Any]) -> None:
    """What the older system checks before it takes a file, in our words."""
    layers, counts = document["hot_expert_ids"], document["hot_counts"]
    assert document["n_layer"] == len(layers) == len(counts) > 0
    assert 0 < document["n_expert_used"] <= document["n_expert"]
    assert counts == [len(ids) for ids in layers]
    assert document["total_hot"] == sum(counts)
    for ids in layers:
        assert len(set(ids)) == len(ids)
        assert all(0 <= global_expert_id < document["n_expert"] for global_expert_id in ids)


def refuse(folder: Path, path: Path, reason: str) -> None:
    """Reading raises one line with the file and the reason; a good file is read afterwards."""
    with pytest.raises(SettingsError, match=reason) as caught:
        read_owned_experts(path, EXPERTS_PER_LAYER)
    assert f"placement file {path}: " in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < len(str(path)) + 200
    good = folder / "good.json"
    good.write_text(json.dumps(good_document()))
    assert read_owned_experts(good, EXPERTS_PER_LAYER).num_experts == 3


@st.composite
def placed(draw: st.DrawFn) -> tuple[dict[int, int], OwnedExperts]:
    """Experts per layer, not every layer has some; and any of them, in any local order."""
    model = draw(st.dictionaries(st.integers(0, 9), st.integers(1, 8), min_size=1, max_size=5))
    lists = {
        layer_id: draw(st.lists(st.integers(0, num_experts - 1), unique=True))
        for layer_id, num_experts in model.items()
    }
    return model, OwnedExperts.from_lists(lists)


@examples(100)
@given(placed())
def test_a_file_comes_back_as_it_was_and_the_older_system_takes_it(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[dict[int, int], OwnedExperts]
) -> None:
    experts_per_layer, owned = case
    path = tmp_path_factory.mktemp("placement") / "placement.json"
    num_layers, num_experts = max(experts_per_layer) + 1, max(experts_per_layer.values())
    write_owned_experts(
        path, owned, num_layers=num_layers, num_experts=num_experts, num_experts_used=1
    )
    assert lists_of(read_owned_experts(path, experts_per_layer)) == lists_of(owned)
    assert read_owned_experts(path, experts_per_layer).fingerprint == owned.fingerprint
    file = read_placement_file(path)
    assert (file.num_layers, file.num_experts, file.num_experts_used) == (
        num_layers,
        num_experts,
        1,
    )
    check_of_the_older_reader(json.loads(path.read_text()))


def test_a_file_is_written_with_every_key_of_the_older_system(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    owned = OwnedExperts.from_lists({0: [3, 0], 2: [1]})
    write_owned_experts(path, owned, num_layers=3, num_experts=4, num_experts_used=2)
    assert json.loads(path.read_text()) == good_document()
    assert json.loads(OLDER_FILE).keys() == good_document().keys()


def test_a_file_of_the_older_system_is_read_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    path.write_text(OLDER_FILE)
    file = read_placement_file(path)
    assert lists_of(file.owned) == {0: [3, 0], 2: [1]}
    assert (file.num_layers, file.num_experts, file.num_experts_used) == (3, 4, 2)
    assert lists_of(read_owned_experts(path, EXPERTS_PER_LAYER)) == {0: [3, 0], 2: [1]}


def test_counts_may_be_missing_and_unknown_keys_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    document = {key: good_document()[key] for key in ("version", "n_layer", "n_expert")}
    path.write_text(json.dumps(document | {"hot_expert_ids": [[3, 0], [], [1]], "note": [{}]}))
    assert lists_of(read_owned_experts(path, EXPERTS_PER_LAYER)) == {0: [3, 0], 2: [1]}
    assert read_placement_file(path).num_experts_used == 0


def test_a_placement_of_no_layers_owns_nothing(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"version": 1, "n_layer": 0, "hot_expert_ids": []}))
    assert read_owned_experts(path, EXPERTS_PER_LAYER).num_experts == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 2}, r"version\b.* 1\b"),
        ({"version": "1"}, r"version\b.* 1\b"),
        ({"version": None}, r"version\b.* 1\b"),
        ({"n_layer": 2}, "n_layer"),
        ({"n_layer": None}, "n_layer"),
        ({"hot_expert_ids": None}, "n_layer"),
        ({"hot_expert_ids": {"0": [1]}}, "n_layer"),
        ({"hot_expert_ids": [[3], None, []]}, r"layer 1\b.*list"),
        ({"hot_expert_ids": [[3], [], [1.0]]}, r"layer 2\b.* 1\.0 .*0\.\.3"),
        ({"hot_expert_ids": [[True], [], []]}, r"layer 0\b.* True .*expert id"),
        ({"hot_expert_ids": [["1"], [], []]}, r"layer 0\b.* '1' .*expert id"),
        ({"hot_expert_ids": [["\n" * 500], [], []]}, r"layer 0\b.* '.*expert id"),
        ({"hot_expert_ids": [[[1]], [], []]}, r"layer 0\b.*list of 1 .*expert id"),
        ({"hot_expert_ids": [[-1], [], []]}, r"layer 0\b.* -1 .*expert id"),
        ({"hot_expert_ids": [[], [], [4]]}, r"layer 2\b.* 4 .*0\.\.3"),
        ({"hot_expert_ids": [[2**31], [], []]}, r"layer 0\b.* 2147483648 .*expert id"),
        ({"hot_expert_ids": [[10**400], [], []]}, r"layer 0\b.* 64 .*expert id"),
        ({"hot_expert_ids": [[0, 1, 1], [], []]}, r"layer 0\b.*expert 1\b.*twice"),
        ({"hot_counts": [2, 0]}, r"hot_counts\b.*n_layer"),
        ({"hot_counts": {"0": 2}}, r"hot_counts\b.*n_layer"),
        ({"hot_counts": [2, 1, 0]}, r"layer 1\b.*hot_counts .*\b1\b.*hot_expert_ids .*\b0\b"),
        ({"hot_counts": [2, 0, True]}, r"layer 2\b.*hot_counts .*\bTrue\b.*hot_expert_ids .*\b1\b"),
        ({"total_hot": 4}, r"total_hot\b.* 4\b.* 3 "),
        ({"total_hot": 3.0}, r"total_hot\b.* 3\.0\b.* 3 "),
        ({"n_expert_used": 0}, r"n_expert_used\b.* 0\b.* 1 .* 4\b"),
        ({"n_expert_used": 5}, r"n_expert_used\b.* 5\b.* 1 .* 4\b"),
        ({"n_expert": 0}, rf"n_expert\b.* 0\b.* 1 .* {MAX_IDS}\b"),
        ({"n_expert": 10**9}, rf"n_expert\b.* 1000000000\b.* 1 .* {MAX_IDS}\b"),
        ({"n_expert": "4"}, r"n_expert\b.* '4'"),
        ({"n_expert": 5}, r"n_expert\b.* 5\b.*model .*4\b"),
        ({"n_expert": None}, r"n_expert\b.*missing\b.*model .*4\b"),
    ],
)
def test_a_wrong_file_is_refused_naming_what(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    document = {k: v for k, v in (good_document() | changes).items() if v is not None}
    path = tmp_path / "placement.json"
    path.write_text(json.dumps(document))
    refuse(tmp_path, path, reason)


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([[], [0], []], r"layer 1\b.*experts"),
        ([[], [], [1, 3]], r"layer 2\b.*expert id 3\b.*0\.\.2"),
    ],
)
def test_a_sound_file_of_another_model_is_refused(
    tmp_path: Path, layers: list[list[int]], reason: str
) -> None:
    path = tmp_path / "placement.json"
    counts = [len(ids) for ids in layers]
    document = {"hot_expert_ids": layers, "hot_counts": counts, "total_hot": sum(counts)}
    path.write_text(json.dumps(good_document() | document))
    assert read_placement_file(path).owned.num_experts == sum(counts)
    refuse(tmp_path, path, reason)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"version": 1} trailing', "not JSON"),
        (b'{"version": \xff}', "not JSON"),
        (b'{"a":' * 900, "not JSON"),
        (b"[" * 100_000, rf"\b{MOST_LISTS} lists"),
        (b"9" * 5000, "not JSON"),
        (b"[1]", r"version\b.* 1\b"),
        (b"null", r"version\b.* 1\b"),
        (b'{"version": 1, "version": 1}', "'version'.*twice"),
        (b'{"version": NaN}', "NaN"),
    ],
    ids=lambda value: None if isinstance(value, str) else value[:12].decode(errors="replace"),
)
def test_what_is_no_placement_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "placement.json"
    path.write_bytes(content)
    refuse(tmp_path, path, reason)


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    refuse(tmp_path, tmp_path / "nothing.json", "No such file or directory")
    (tmp_path / "folder").mkdir()
    refuse(tmp_path, tmp_path / "folder", "Is a directory")
    with pytest.raises(SettingsError, match=r"a\\nb.*null byte"):
        read_placement_file(Path("a\nb\0"))


def test_a_huge_or_endless_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate((4 << 20) + 1)
    refuse(tmp_path, path, "4 MiB")
    refuse(tmp_path, Path("/dev/zero"), "4 MiB")


@pytest.mark.parametrize(
    "content",
    [
        b'{"hot_expert_ids": [' + b"[]," * (1 << 20) + b"[]]}",
        b'{"version": 1, "hot_expert_ids": [[' + b"0," * (1 << 20) + b"0]]}",
        b'{"version": 1, "x": [' + b'"abcd",' * MAX_IDS + b"0]}",
        b'{"version": 1, "x": [' + b"1e9," * (MAX_IDS - 9) + b"0]}",
        b'{"version": 1, ' + b",".join(b'"%d":1' % i for i in range(MAX_IDS - 9)) + b"}",
        ('{"version": 1, "x": "' + "a" * 4_000_000 + '\N{GRINNING FACE}"}').encode(),
    ],
    ids=["lists", "ids", "strings", "floats", "keys", "text"],
)
def test_what_would_take_much_memory_is_refused_first(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "hostile.json"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        refuse(tmp_path, path, f"{MAX_IDS}|{MOST_LISTS}|n_layer")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_the_largest_file_is_read_soon(tmp_path: Path) -> None:
    experts_per_layer = dict.fromkeys(range(256), 1000)
    owned = OwnedExperts.from_lists({layer: range(1000) for layer in experts_per_layer})
    path = tmp_path / "placement.json"
    write_owned_experts(path, owned, num_layers=256, num_experts=1000, num_experts_used=8)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    started_s = time.thread_time()
    assert read_owned_experts(path, experts_per_layer).num_experts == 256_000
    assert time.thread_time() - started_s < 2.0


@pytest.mark.parametrize(
    ("lists", "sizes", "reason"),
    [
        ({0: [4]}, (3, 4, 2), r"layer 0: 4 is not an expert id in 0\.\.3"),
        ({0: [1, 1]}, (3, 4, 2), r"layer 0\b.*expert 1\b.*twice"),
        ({3: [1]}, (3, 4, 2), r"layer 3\b.* 3 "),
        ({0: [1]}, (3, 4, 5), r"n_expert_used\b.* 5\b"),
        ({}, (3, 4, 0), r"\b1 or more"),
        ({}, (0, 4, 1), r"\b1 or more"),
        ({}, (10**12, 4, 1), "n_layer"),
        ({}, (1, 10**12, 1), r"n_expert\b.* 1000000000000\b"),
    ],
)
def test_what_no_reader_would_take_is_not_written(
    tmp_path: Path, lists: dict[int, list[int]], sizes: tuple[int, int, int], reason: str
) -> None:
    path = tmp_path / "placement.json"
    path.write_text("what was there")
    num_layers, num_experts, num_experts_used = sizes
    with pytest.raises(SettingsError, match=reason) as caught:
        write_owned_experts(
            path,
            OwnedExperts.from_lists(lists),
            num_layers=num_layers,
            num_experts=num_experts,
            num_experts_used=num_experts_used,
        )
    assert f"placement file {path}: " in str(caught.value)
    assert path.read_text() == "what was there"
    assert [each.name for each in tmp_path.iterdir()] == ["placement.json"]
