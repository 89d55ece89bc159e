"""A daemon with other weights is refused, and a file that is changed during a run ends it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_adapters.gguf import watch as file_watch
from dflash_adapters.gguf.file import GgufFile, sample_places
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import ExpertProjection
from dflash_protocol.errors import HandshakeRefused, ModelFileError
from dflash_runtime import Engine
from support.processes import running_daemon
from support.random_models import ODD_SHAPES, write_qwen3moe

pytestmark = pytest.mark.e2e

SHAPE = replace(ODD_SHAPES[0], num_layers=2, num_experts=128, hidden_size=64, ffn_size=64)
PROMPT = list(range(1, 20))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3moe(tmp_path_factory.mktemp("model") / "m.gguf", SHAPE, seed=10)


def projections(model: Path) -> list[ExpertProjection]:
    with GgufFile.open(model) as file:
        return [each for layer in read_spec(file).moe.layers for each in layer.projections]


def sampled(model: Path, name: str) -> list[range]:
    """Places in the file of what `GgufFile.identity` hashes of a tensor."""
    with GgufFile.open(model) as file:
        info = file.tensor(name)
        return [
            range(info.offset_bytes + place, info.offset_bytes + place + length)
            for place, length in sample_places(info.num_bytes)
        ]


def with_another_expert(model: Path, path: Path) -> Path:
    """A copy in which one matrix of one expert is another expert's; no sampled byte differs."""
    shutil.copyfile(model, path)
    up = projections(model)[-2]
    samples = sampled(model, up.tensor_name)

    def is_sampled(expert: int) -> bool:
        first = up.place_of(expert)[1]
        return any(s.start < first + up.num_bytes and s.stop > first for s in samples)

    expert = next(each for each in range(40, 128) if not is_sampled(each))
    data = bytearray(path.read_bytes())
    (_, ours), (_, others) = up.place_of(expert), up.place_of(expert - 1)
    data[ours : ours + up.num_bytes] = data[others : others + up.num_bytes]
    path.write_bytes(data)
    return path


def with_zeros(model: Path, path: Path) -> Path:
    """A copy whose experts are zero wherever the old identity did not look."""
    data = bytearray(model.read_bytes())
    num_kept = num_all = 0
    for each in projections(model):
        first, last = each.place_of(0)[1], each.place_of(SHAPE.num_experts - 1)[1] + each.num_bytes
        kept = [(s, data[s.start : s.stop]) for s in sampled(model, each.tensor_name)]
        data[first:last] = bytes(last - first)
        for place, sample in kept:
            data[place.start : place.stop] = sample
            num_kept += len(sample)
        num_all += last - first
    assert 1 - num_kept / num_all > 0.98
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("changed", [with_another_expert, with_zeros])
def test_a_daemon_with_other_weights_is_refused_at_the_first_handshake(
    model: Path, tmp_path: Path, run_dir: Path, changed: Callable[[Path, Path], Path]
) -> None:
    other, endpoint = changed(model, tmp_path / "other.gguf"), f"ipc://{run_dir}/daemon.sock"
    with GgufFile.open(model) as file, GgufFile.open(other) as other_file:
        assert file.identity() == other_file.identity()
    with (
        running_daemon(other, endpoint),
        pytest.raises(HandshakeRefused) as caught,
    ):
        Engine.open(model, connect=[endpoint])
    assert caught.value.code == "weights"


def zeroed(path: Path) -> None:
    """Every weight is overwritten in place."""
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.seek(size // 2)
        file.write(bytes(size - size // 2))


def zeroed_with_its_time_put_back(path: Path) -> None:
    """As rsync --inplace --times does."""
    before = path.stat()
    zeroed(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("happens", [zeroed, zeroed_with_its_time_put_back])
def test_a_run_ends_with_an_error_when_its_file_is_overwritten(
    model: Path, tmp_path: Path, happens: Callable[[Path], None]
) -> None:
    path = Path(shutil.copyfile(model, tmp_path / "m.gguf"))
    with Engine.open(path) as engine:
        time.sleep(0.3)
        tokens = engine.generate(PROMPT, 3)
        next(tokens)
        happens(path)
        with pytest.raises(ModelFileError, match=r"\bwritten\b"):
            list(tokens)


def test_a_run_goes_on_when_its_file_is_only_made_read_only(model: Path, tmp_path: Path) -> None:
    path = Path(shutil.copyfile(model, tmp_path / "m.gguf"))
    with Engine.open(path) as engine:
        undisturbed = [each.token_id for each in engine.generate(PROMPT, 5)]
        tokens = engine.generate(PROMPT, 5)
        found = [next(tokens).token_id]
        path.chmod(0o400)
        found += [each.token_id for each in tokens]
        assert found == undisturbed
        assert engine.stats().events == []


def test_a_long_prompt_ends_between_two_layers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_watch, "LOOK_S", 0.0)
    path = Path(shutil.copyfile(model, tmp_path / "m.gguf"))
    layers = []

    def before_layer() -> bool:
        layers.append(1)
        if len(layers) == 1:
            zeroed_with_its_time_put_back(path)
        return False

    with Engine.open(path) as engine, pytest.raises(ModelFileError, match=r"\bwritten\b"):
        list(engine.generate(PROMPT, 1, is_cancelled=before_layer))
    assert len(layers) == 1
