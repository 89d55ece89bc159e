"""Heat files: what is written is read, the older CSV too, and everything else is refused."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import ModelSpec, MoeSpec
from dflash_protocol.errors import SettingsError
from dflash_protocol.hotness import Hotness, read_hotness, write_hotness
from dflash_protocol.ids import Phase
from dflash_runtime.placement.heat import HalfLives, Heat, HeatLayer, layers_of
from dflash_runtime.placement.heat_file import HeatFile, heat_for_model, read_heat_file
from support.examples import examples
from support.random_models import Qwen3MoeShape, write_qwen3moe

LAYERS = (HeatLayer(1, 3, 2), HeatLayer(2, 4, 1))
IDENTITY = "0123456789abcdef" * 4
ARRAYS = ("totals", "slow", "fast")


def heat_with_counts() -> Heat:
    heat = Heat(LAYERS, HalfLives(100, 1000))
    for seed in range(3):
        selections = np.random.default_rng(seed).integers(0, 90, heat.shape)
        selections[:, 0, 3] = 0  # that layer has three experts
        heat.add(selections)
    heat.add_pairs({"local": [5, 6], "cpu0": [0, 7]})
    return heat


def written(path: Path, heat: Heat | None = None) -> Path:
    heat = heat_with_counts() if heat is None else heat
    path.write_bytes(HeatFile(heat, 4, IDENTITY, "a model").as_bytes())
    return path


def refuse(path: Path, reason: str) -> None:
    """Reading raises one short line that names the file and the reason."""
    with pytest.raises(SettingsError, match=reason) as caught:
        read_heat_file(path)
    message = str(caught.value)
    assert message.startswith(f"heat file {path}: ")
    assert len(message.splitlines()) == 1
    assert len(message) < len(str(path)) + 200


def check_equal(found: Heat, expected: Heat) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert found.layers == expected.layers
    assert found.pairs_of_owner == expected.pairs_of_owner


def test_what_is_written_is_read(tmp_path: Path) -> None:
    expected = heat_with_counts()
    file = read_heat_file(written(tmp_path / "a.heat", expected))
    check_equal(file.heat, expected)
    assert file.heat.half_lives == HalfLives(100, 1000)
    assert (file.num_layers, file.identity, file.model_name) == (4, IDENTITY, "a model")
    other = read_heat_file(tmp_path / "a.heat", half_lives=HalfLives(7, 8))
    assert other.heat.half_lives == HalfLives(7, 8)


def of_version_1(path: Path, num_odds: int) -> Path:
    """A file as it was written before: behind the counts a number for each phase and layer."""
    content = written(path).read_bytes()[:-32].replace(b"heat 2\n", b"heat 1\n", 1)
    path.write_bytes(with_digest(content + np.full(num_odds, -3.5).tobytes()))
    return path


def test_files_of_version_1_are_read(tmp_path: Path) -> None:
    file = read_heat_file(of_version_1(tmp_path / "a.heat", 2 * len(LAYERS)))
    check_equal(file.heat, heat_with_counts())
    (tmp_path / "b.heat").write_bytes(file.as_bytes())
    check_equal(read_heat_file(tmp_path / "b.heat").heat, heat_with_counts())
    for num_odds in (0, 3, 5):
        refuse(of_version_1(tmp_path / "a.heat", num_odds), "bytes of counts")


def test_names_that_are_too_long_or_hostile_are_kept_within_bounds(tmp_path: Path) -> None:
    heat = heat_with_counts()
    heat.pairs_of_owner = {f"\x1b[31m{index}" * 100: [0, index] for index in range(400)}
    path = tmp_path / "a.heat"
    path.write_bytes(HeatFile(heat, 4, IDENTITY, "m\n\x1b[0m" * 200).as_bytes())
    file = read_heat_file(path)
    assert "\x1b" not in file.model_name + "".join(file.heat.pairs_of_owner)
    assert len(file.heat.pairs_of_owner) <= 256


@pytest.mark.parametrize("keep", [0, 10, 18, 100, -40, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = written(tmp_path / "a.heat")
    path.write_bytes(path.read_bytes()[:keep])
    refuse(path, "damaged|neither")


def test_a_doubled_or_changed_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.heat")
    content = path.read_bytes()
    path.write_bytes(2 * content)
    refuse(path, "damaged")
    for place in range(len(b"dflash-moe heat 2\n"), len(content), 37):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        refuse(path, "damaged")
    path.write_bytes(content.replace(b"heat 2\n", b"heat 3\n", 1))
    refuse(path, "version '?b?'3', this program reads versions 1 and 2")


def test_a_file_that_is_too_large_or_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.heat"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    refuse(path, "larger than 16 MiB")
    for content in (b"GGUF\x03\0\0\0", b"{}", b"\0" * 100, b"hello\n", b""):
        path.write_bytes(content)
        refuse(path, "neither a heat file nor")
    refuse(tmp_path / "none", "No such file")
    refuse(tmp_path, "Is a directory")


def with_digest(content: bytes) -> bytes:
    return content + hashlib.sha256(content).digest()


def with_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Replace the header of a good file, under a right digest."""
    first, text, body = written(path).read_bytes()[:-32].split(b"\n", 2)
    header = json.loads(text)
    change(header)
    path.write_bytes(with_digest(b"\n".join((first, json.dumps(header).encode(), body))))


BAD_HEADERS: list[tuple[str, Any, str]] = [
    ("layers", None, "layers must be a list"),
    ("layers", [], "layers must be a list"),
    ("layers", [[1, 3, 2]] * 5000, "too long|layers must be"),
    ("layers", [[1, 3, 2], [1, 4, 1]], "layer 1 occurs twice"),
    ("layers", [[2, 3, 2], [1, 4, 1]], "layer 1 .* out of order"),
    ("layers", [[1, 3], [2, 4, 1]], "must be its id, experts, experts used"),
    ("layers", [[-1, 3, 2], [2, 4, 1]], "must be its id"),
    ("layers", [[1, 3, 4], [2, 4, 1]], "must be its id"),
    ("layers", [[1, 3, True], [2, 4, 1]], "must be its id"),
    ("layers", [[1, 1 << 17, 2], [2, 1 << 18, 1]], "more than 262144 experts"),
    ("layers", [[1, 1 << 90, 2], [2, 4, 1]], "must be its id"),
    ("layers", [[1, 4, 2], [2, 8, 1]], "bytes of counts"),
    ("num_layers", 2, "num_layers"),
    ("num_layers", 1 << 40, "num_layers"),
    ("num_layers", "4", "num_layers"),
    ("identity", "xyz", "identity"),
    ("identity", None, "identity"),
    ("model", "a" * 1000, "model must be"),
    ("half_lives", [0, 5], "half_lives"),
    ("half_lives", [float("nan"), 5], "NaN"),
    ("half_lives", [1e300, 5], "half_lives"),
    ("half_lives", [5], "half_lives"),
    ("owners", [], "owners must be"),
    ("owners", {"local": [1]}, "owner 'local'"),
    ("owners", {"local": [1, -1]}, "owner 'local'"),
    ("owners", {"local": [1, 1 << 63]}, "owner 'local'"),
    ("owners", {"a" * 1000: [1, 1]}, "owner 'a"),
    ("owners", {str(i): [1, 1] for i in range(300)}, "too long|owners must be"),
]


@pytest.mark.parametrize(("key", "value", "reason"), BAD_HEADERS)
def test_a_header_that_makes_no_sense_is_refused(
    tmp_path: Path, key: str, value: Any, reason: str
) -> None:
    path = tmp_path / "a.heat"
    with_header(path, lambda header: header.update({key: value}))
    refuse(path, reason)


@pytest.mark.parametrize(
    "text", [b"[" * 4000, b"[]", b"{", b"\xff", b'{"a": ' + b"9" * 9000 + b"}"]
)
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.heat"
    path.write_bytes(with_digest(b"dflash-moe heat 2\n" + text + b"\n" + bytes(100)))
    refuse(path, "header")


BAD_NUMBERS: list[tuple[str, tuple[int, ...], float, str]] = [
    ("totals", (0, 0, 0), -1, "layer 1: a count"),
    ("totals", (0, 1, 0), 1 << 41, "layer 2: a count"),
    ("totals", (1, 0, 3), 1, "layer 1: counts of experts that it does not have"),
    ("slow", (0, 0, 0), -0.5, "layer 1: a decayed count"),
    ("slow", (1, 1, 2), float("nan"), "layer 2: a decayed count"),
    ("fast", (1, 1, 2), float("inf"), "layer 2: a decayed count"),
    ("fast", (1, 1, 2), 1e6, "layer 2: a decayed count"),
]


@pytest.mark.parametrize(("name", "place", "value", "reason"), BAD_NUMBERS)
def test_absurd_numbers_are_refused(
    tmp_path: Path, name: str, place: tuple[int, ...], value: float, reason: str
) -> None:
    heat = heat_with_counts()
    getattr(heat, name)[place] = value
    refuse(written(tmp_path / "a.heat", heat), reason)


@examples(200)
@given(st.binary(max_size=300), st.booleans())
def test_bytes_are_read_or_refused(tmp_path_factory: Any, noise: bytes, has_digest: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.heat"
    content = b"dflash-moe heat 2\n" + noise
    path.write_bytes(with_digest(content) if has_digest else content)
    refuse(path, "heat file")


# -- models ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    shape = Qwen3MoeShape(num_layers=3, num_experts=4, num_experts_used=2)
    with GgufFile.open(write_qwen3moe(path, shape, seed=0)) as file:
        return read_spec(file)


def test_heat_of_another_model_is_refused(tmp_path: Path, spec: ModelSpec) -> None:
    path = tmp_path / "a.heat"
    heat = Heat(layers_of(spec.moe), HalfLives())
    file = HeatFile(heat, spec.num_layers, IDENTITY, "this")
    assert heat_for_model(path, file, spec, identity=IDENTITY) is heat
    with pytest.raises(SettingsError, match=r"a\.heat: is of another model: 0123456789abcdef"):
        heat_for_model(path, file, spec, identity=IDENTITY[::-1])
    other = HeatFile(Heat(LAYERS, HalfLives()), 3, IDENTITY)
    with pytest.raises(SettingsError, match="its layers are not those"):
        heat_for_model(path, other, spec, identity=IDENTITY)


def test_the_older_csv_goes_in_and_out(tmp_path: Path, spec: ModelSpec) -> None:
    path, again = tmp_path / "a.csv", tmp_path / "b.csv"
    counts = np.array([[10, 0, 3, 7], [0, 0, 0, 0], [5, 5, 5, 5]], np.uint64)
    write_hotness(path, Hotness(counts, 2))
    file = read_heat_file(path, half_lives=HalfLives(5, 50))
    heat = heat_for_model(path, file, spec, identity=IDENTITY)
    assert heat.half_lives == HalfLives(5, 50)
    assert heat.num_tokens(Phase.DECODE, 0) == 10
    assert heat.selections(Phase.DECODE, 1) is None  # never reported, not invented
    assert heat.probabilities(Phase.PREFILL, 0).argmax() == 0
    write_hotness(again, HeatFile(heat, spec.num_layers).as_hotness())
    assert again.read_text() == path.read_text()
    np.testing.assert_array_equal(read_hotness(again).counts, counts)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([[1, 2, 3, 4]], "1 layers of 4 experts, the model has 3 of 4"),
        ([[1, 2, 3]] * 3, "3 layers of 3 experts"),
        ([[1, 2, 3, 4 << 40]] * 3, "layer 0: 4398046511104 selections"),
        ([[1, 2, 3, 2**64 - 1]] * 3, "selections of one expert"),
    ],
)
def test_a_csv_of_another_model_or_absurd_counts_is_refused(
    tmp_path: Path, spec: ModelSpec, rows: list[list[int]], reason: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\n".join(",".join(map(str, row)) for row in rows))
    with pytest.raises(SettingsError, match=reason) as caught:
        heat_for_model(path, read_heat_file(path), spec, identity=IDENTITY)
    assert re.fullmatch(rf"heat file {re.escape(str(path))}: [^\n]+", str(caught.value))


def test_layers_without_experts_are_zero_in_a_csv_and_must_be(
    tmp_path: Path, spec: ModelSpec
) -> None:
    first, _, last = spec.moe.layers
    some = replace(spec, moe=MoeSpec((first, last)))
    heat = Heat(layers_of(some.moe), HalfLives())
    heat.add(np.ones(heat.shape, np.int64))
    path = tmp_path / "a.csv"
    write_hotness(path, HeatFile(heat, 3).as_hotness())
    assert read_hotness(path).counts.tolist() == [[2] * 4, [0] * 4, [2] * 4]
    assert heat_for_model(path, read_heat_file(path), some, identity=IDENTITY).num_tokens() == 4
    path.write_text("1,1,1,1\n0,0,0,9\n1,1,1,1\n")
    with pytest.raises(SettingsError, match="layer 1: the model has no expert 3 there"):
        heat_for_model(path, read_heat_file(path), some, identity=IDENTITY)


def test_a_large_file_is_read_in_bounded_time(tmp_path: Path) -> None:
    layers = [HeatLayer(layer_id, 64, 8) for layer_id in range(4096)]
    heat = Heat(layers, HalfLives())
    heat.add(np.ones(heat.shape, np.int64))
    path = tmp_path / "a.heat"
    path.write_bytes(HeatFile(heat, 4096, IDENTITY, "large").as_bytes())
    started_s = time.monotonic()
    check_equal(read_heat_file(path).heat, heat)
    assert time.monotonic() - started_s < 5.0
