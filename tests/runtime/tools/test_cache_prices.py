"""tokens/s of a cache's steps, from a file of measured speeds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import Phase
from dflash_runtime.cli.simulate import simulate
from dflash_runtime.placement.box import AskedSpeed, Box, CopySpeed
from dflash_runtime.placement.cache.prices import StepPrices
from dflash_runtime.placement.cache.simulation import Replay
from dflash_runtime.placement.cache.traces import TraceHeader, TraceWriter
from dflash_runtime.placement.speeds import READ_S, SLOTS_S
from dflash_runtime.tools.cache_prices import prices_of
from dflash_runtime.tools.doctor_measure import MeasuredBox
from support.emulated_gpu import TINY
from support.planned_boxes import CORES_16, H100, line
from support.random_models import write_qwen3moe

USED, LAYERS = TINY.num_experts_used, TINY.num_layers
ASKED = AskedSpeed(line(1e-3, 1e9), line(1e-3, 1e9))
BOX = Box(
    "key",
    {"cpu": CORES_16.of("cpu"), "cuda:0": H100.of("cuda:0")},
    copies={"cuda:0": CopySpeed("cuda:0", from_locked=1e9)},
    host_asked={"cuda:0": ASKED},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(tmp_path_factory.mktemp("m") / "m.gguf", TINY, seed=4)


@pytest.fixture
def header(model: Path) -> TraceHeader:
    with GgufFile.open(model) as file:
        return TraceHeader.of(read_spec(file), file.identity())


def written(path: Path, model: Path, box: Box = BOX) -> Path:
    path.write_text(MeasuredBox(model, box, 1.5).as_json())
    return path


def replay(num_missing: list[int], brought_bytes: int = 0) -> Replay:
    """Tokens by how many experts were missing, the same in each layer."""
    missing = np.array([num_missing] * LAYERS)
    none = np.zeros(LAYERS, np.int64)
    return Replay(none, none, none, brought_bytes=brought_bytes, num_missing=missing)


def step_s(prices: StepPrices, found: Replay) -> float:
    speed = prices.tokens_per_s(found)
    assert speed is not None
    return 1.0 / speed


def test_layers_take_what_was_measured(tmp_path: Path, model: Path, header: TraceHeader) -> None:
    prices = prices_of(written(tmp_path / "box.json", model), header)
    assert prices.layers_s.shape == (LAYERS, USED + 1)
    assert prices.trunk_s > 0.0
    all_here, one_missing = [10, *[0] * USED], [5, 5, *[0] * (USED - 1)]
    here_s, missing_s = (step_s(prices, replay(each)) for each in (all_here, one_missing))
    [layer] = {each.expert_bytes for each in header.layers}
    asked_s = ASKED.beyond.at(layer)
    expected_s = prices.trunk_s + LAYERS * prices.layers_s[0, 0]
    assert here_s == pytest.approx(expected_s)
    more_s = LAYERS * 0.5 * (asked_s - prices.layers_s[0, 0])
    assert missing_s == pytest.approx(expected_s + more_s)


def test_what_is_brought_takes_as_long_as_the_bus(
    tmp_path: Path, model: Path, header: TraceHeader
) -> None:
    prices = prices_of(written(tmp_path / "box.json", model), header)
    found = replay([10, *[0] * USED], brought_bytes=10 * 2_000_000_000)
    assert step_s(prices, found) == pytest.approx(2.0)
    unknown = prices_of(written(tmp_path / "b.json", model, replace(BOX, copies={})), header)
    assert step_s(unknown, found) < 0.01


def test_steps_read_one_of_two_missing_experts_meanwhile(
    tmp_path: Path, model: Path, header: TraceHeader
) -> None:
    """Whatever they bring crosses the bus within their layers."""
    [layer] = {each.expert_bytes for each in header.layers}
    two_missing = replay([0, 0, 10, *[0] * (USED - 2)], brought_bytes=1 << 40)
    of_steps = replace(two_missing, step_slots=np.array([8] * LAYERS))
    whole = replace(replay([10, *[0] * USED]), step_slots=np.zeros(LAYERS, np.int64))
    asked_s = ASKED.beyond.at(layer)
    for times in (0.5, 1.0, 3.0):
        read_s, expected_s = times * asked_s, asked_s * (1.0 + times**3) ** (1 / 3)
        copies = {"cuda:0": CopySpeed("cuda:0", 1e9, kernel_reads=layer / read_s)}
        prices = prices_of(written(tmp_path / "b.json", model, replace(BOX, copies=copies)), header)
        layers_s = step_s(prices, of_steps) - prices.trunk_s
        assert layers_s == pytest.approx(LAYERS * (SLOTS_S + READ_S + expected_s))
        whole_s = step_s(prices, whole) - prices.trunk_s
        assert whole_s == pytest.approx(LAYERS * prices.layers_s[0, 0])
    unknown = prices_of(written(tmp_path / "box.json", model), header)
    assert unknown.tokens_per_s(of_steps) is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-9], "box .*box.json"),
        (lambda text: text.replace('"elapsed_s"', '"elapsed"'), "doctor --measure --json"),
        (lambda text: text.replace('"cpu"', '"cuda:1"', 1), "were not measured"),
    ],
)
def test_what_is_no_box_of_a_gpu_is_refused(
    tmp_path: Path, model: Path, header: TraceHeader, damage: object, message: str
) -> None:
    path = written(tmp_path / "box.json", model)
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with pytest.raises(SettingsError, match=message):
        prices_of(path, header)


def test_a_box_without_a_gpu_is_refused(tmp_path: Path, model: Path, header: TraceHeader) -> None:
    path = written(tmp_path / "box.json", model, Box("key", {"cpu": CORES_16.of("cpu")}))
    with pytest.raises(SettingsError, match="no GPU was measured"):
        prices_of(path, header)


def test_a_box_of_another_model_is_refused(
    tmp_path: Path, model: Path, header: TraceHeader
) -> None:
    path = written(tmp_path / "box.json", model)
    with pytest.raises(SettingsError, match="another model"):
        prices_of(path, replace(header, identity="0" * 64))


def test_the_command_shows_tokens_per_second(
    tmp_path: Path, model: Path, header: TraceHeader
) -> None:
    writer = TraceWriter(tmp_path / "run.trace", header, most_bytes=1 << 20)
    for token in range(50):
        chosen = [[(token + each) % TINY.num_experts for each in range(USED)] * LAYERS]
        writer.add(Phase.DECODE, np.array(chosen))
    writer.close()
    box = written(tmp_path / "box.json", model)
    arguments = [str(tmp_path / "run.trace"), "--slots", str(USED), "--box", str(box)]
    shown = CliRunner().invoke(simulate, arguments, catch_exceptions=False)
    assert shown.exit_code == 0
    assert "tokens/s" in shown.output
    row = next(line.split() for line in shown.output.splitlines() if line.startswith("  lru"))
    as_json = CliRunner().invoke(simulate, [*arguments, "--json"], catch_exceptions=False)
    [found] = json.loads(as_json.output)["replays"]
    assert float(row[-1]) == pytest.approx(found["policies"]["lru"]["tokens_per_s"], abs=0.06)
    assert found["policies"]["belady"]["tokens_per_s"] >= found["policies"]["lru"]["tokens_per_s"]
