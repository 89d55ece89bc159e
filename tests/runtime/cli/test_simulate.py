"""What `dflash-moe simulate` shows of traces, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import Phase
from dflash_runtime.cli.simulate import simulate
from dflash_runtime.placement.cache.traces import TraceHeader, TraceLayer, TraceWriter
from support.examples import examples

LAYERS = TraceLayer(1, 64, 2, 1 << 20), TraceLayer(2, 32, 2, 1 << 19)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Layer 1 chooses experts 5 and 6 only, layer 2 another two each time."""
    header = TraceHeader("ab" * 32, "a model", "cd" * 32, LAYERS)
    writer = TraceWriter(tmp_path / "run.trace", header, most_bytes=1 << 20)
    for token in range(320):
        writer.add(Phase.DECODE, np.array([[5, 6, 2 * token % 32, (2 * token + 1) % 32]]))
    writer.close()
    return tmp_path / "run.trace"


def result_of(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(simulate, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result


def test_each_size_is_a_table_of_policies(path: Path) -> None:
    lines = result_of(path).output.splitlines()
    assert lines[0].endswith("run.trace: 320 tokens")
    assert lines[1].endswith("a model, identity abababababababab: 2 layers of up to 64 experts")
    heads = [line for line in lines if "experts of a layer (" in line]
    assert [line.split()[0] for line in heads] == ["7", "16", "32", "48"]
    assert heads[0].endswith("(10 MiB)")
    rows = [line.split() for line in lines if line.startswith("  lru")]
    assert rows[0] == ["lru", "50.0%", "50.0%", "2.00", "1.0"]  # layer 2 finds nothing
    assert rows[2] == ["lru", "100.0%", "100.0%", "0.00", "0.0"]
    belady = [line.split()[1] for line in lines if line.startswith("  belady")]
    assert float(belady[0][:-1]) > 55


def test_layers_may_be_shown(path: Path) -> None:
    lines = result_of(path, "--slots", "7", "--per-layer").output.splitlines()
    first, second = (line.split() for line in lines[-2:])
    assert first[:3] == ["1", "100.0%", "100.0%"]
    assert second[:2] == ["2", "0.0%"]


def test_uses_may_be_forgotten_sooner_or_later(tmp_path: Path) -> None:
    """After a while other experts are used: what was used before leaves when its uses fade."""
    writer = TraceWriter(
        tmp_path / "run.trace",
        TraceHeader("ab" * 32, "", "cd" * 32, LAYERS[:1]),
        most_bytes=1 << 20,
    )
    for token in range(400):
        first = 0 if token < 200 else 8
        writer.add(Phase.DECODE, np.array([[first + token % 4, first + 4 + token % 4]]))
    writer.close()
    options = (str(tmp_path / "run.trace"), "--slots", "8", "--json")
    found = [
        json.loads(result_of(*options, "--half-life", half_life).output)["replays"][0]
        for half_life in ("8", "1000")
    ]
    soon, late = (each["policies"]["lfu"]["found"] for each in found)
    assert soon > 0.9
    assert late < 0.7


def test_a_budget_is_for_all_layers(path: Path) -> None:
    output = result_of(path, path, "--budget-mb", "15", "--json").output
    replays = json.loads(output)["replays"]
    assert len(replays) == 2
    assert replays[0]["slots"] == [10, 10]
    assert replays[0]["tokens"] == 320
    assert replays[0]["counted_tokens"] == 288
    assert replays[0]["policies"]["lru"]["found_by_layer"] == [1.0, 0.0]
    assert {*replays[0]["policies"]} == {
        "lru", "lfu", "slru", "static", "auto", "steps", "belady",
    }  # fmt: skip


def test_steps_have_a_part_of_the_room(path: Path) -> None:
    """Layer 1 has its two experts there; of layer 2, where each token has two others, one is
    brought."""

    def shown(*options: str) -> list[list[str]]:
        lines = result_of(path, *options).output.splitlines()
        return [line.split() for line in lines if line.startswith("  steps")]

    assert shown("--slots", "9") == []  # eight slots, one for what is not kept, and none to live
    [row] = shown("--slots", "10")
    assert row[0] == "steps"
    assert float(row[3]) == pytest.approx(0.9, abs=0.1)
    assert shown("--slots", "10", "--cache-slots", "0") == []
    assert len(shown()) == 3  # not of the smallest size
    assert len(shown("--cache-slots", "2")) == 4


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--slots", "1"], r"room for 1 experts of a layer; a token uses 2"),
        (["--budget-mb", "1"], r"room for 0 experts"),
        (["--slots", "3", "--budget-mb", "1"], r"exclude each other"),
        (["--slots", "9", "--cache-slots", "8"], r"room for 9 .*10 are needed"),
    ],
)
def test_what_cannot_be_is_refused(path: Path, arguments: list[str], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        CliRunner().invoke(simulate, [str(path), *arguments], catch_exceptions=False)


def test_a_trace_must_be_named_and_be_one(tmp_path: Path) -> None:
    assert CliRunner().invoke(simulate, []).exit_code == 2
    with pytest.raises(SettingsError, match="No such file"):
        CliRunner().invoke(simulate, [str(tmp_path / "no")], catch_exceptions=False)


@st.composite
def any_trace(draw: st.DrawFn) -> tuple[tuple[TraceLayer, ...], list[list[int]]]:
    """Layers of any sizes, and what tokens chose: as files may say it, an expert more than once."""
    layers = []
    for layer_id in range(draw(st.integers(1, 3))):
        num_experts = draw(st.integers(1, 6))
        num_used = draw(st.integers(1, num_experts))
        layers.append(TraceLayer(layer_id, num_experts, num_used, draw(st.integers(0, 1 << 21))))
    token = st.tuples(
        *(st.integers(0, x.num_experts - 1) for x in layers for _ in range(x.num_experts_used))
    )
    return tuple(layers), [[*each] for each in draw(st.lists(token, max_size=30))]


@examples(60)
@given(
    written=any_trace(),
    options=st.lists(
        st.sampled_from(["--slots=2", "--budget-mb=4", "--cache-slots=1", "--half-life=1"]),
        unique=True,
    ),
    phase=st.sampled_from(Phase),
)
def test_any_trace_is_shown_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    written: tuple[tuple[TraceLayer, ...], list[list[int]]],
    options: list[str],
    phase: Phase,
) -> None:
    layers, tokens = written
    path = tmp_path_factory.mktemp("trace") / "run.trace"
    writer = TraceWriter(path, TraceHeader("ab" * 32, "", "cd" * 32, layers), most_bytes=1 << 20)
    if tokens:
        writer.add(phase, np.array(tokens))
    writer.close()
    try:
        result_of(path, "--per-layer", *options)
        replays = json.loads(result_of(path, "--json", *options).output)["replays"]
    except SettingsError as error:
        if not re.search("room for|exclude", str(error)):
            raise
        return
    for replay in replays:
        assert replay["tokens"] == len(tokens)
        for row in replay["policies"].values():
            assert 0 <= row["found"] <= 1
            assert all(0 <= each <= 1 for each in row["found_by_layer"])
            assert row["brought_bytes"] >= 0
