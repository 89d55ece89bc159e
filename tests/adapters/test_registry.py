"""From an architecture's name to its adapter, or to a reason why there is none."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import ARCHITECTURES, describe
from dflash_protocol.errors import ModelFileError, UnsupportedModel


def model_of(folder: Path, architecture: str, expert_count: int | str | None) -> GgufFile:
    """A file that says no more than this."""
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    key = f"{architecture}.expert_count"
    if isinstance(expert_count, int):
        writer.add_uint32(key, expert_count)
    elif expert_count is not None:
        writer.add_string(key, expert_count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile.open(path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_known_architecture_has_an_adapter(tmp_path: Path, architecture: str) -> None:
    """It asks for the first of its keys."""
    with model_of(tmp_path, architecture, 8) as file, pytest.raises(ModelFileError) as caught:
        describe(file)
    assert (caught.value.field or "").startswith(f"{architecture}.")


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "gemma3"])
@pytest.mark.parametrize("expert_count", [None, 0])
def test_a_dense_model_is_told_that_it_is_one(
    tmp_path: Path, expert_count: int | None, architecture: str
) -> None:
    with (
        model_of(tmp_path, architecture, expert_count) as file,
        pytest.raises(UnsupportedModel, match=rf"'{architecture}'.*\bdense\b") as caught,
    ):
        describe(file)
    assert caught.value.field == "general.architecture"
    assert f"supported: {', '.join(ARCHITECTURES)}" in str(caught.value)
    assert caught.value.path == tmp_path / "model.gguf"


@pytest.mark.parametrize("architecture", ["mixtral", "registry", "..qwen3moe", "qwen3moe.x", "Ä"])
def test_an_unknown_architecture_is_told_the_known_ones(tmp_path: Path, architecture: str) -> None:
    """Also one that would name another module."""
    with (
        model_of(tmp_path, architecture, 8) as file,
        pytest.raises(
            UnsupportedModel, match=rf"{re.escape(repr(architecture))}.*supported: glm4moe"
        ),
    ):
        describe(file)


def test_an_architecture_cannot_break_the_line_of_its_error(tmp_path: Path) -> None:
    with model_of(tmp_path, "a\nb", 8) as file, pytest.raises(UnsupportedModel) as caught:
        describe(file)
    assert len(str(caught.value).splitlines()) == 1


def test_an_expert_count_that_is_no_number_is_a_damaged_file(tmp_path: Path) -> None:
    with (
        model_of(tmp_path, "mixtral", "eight") as file,
        pytest.raises(ModelFileError, match=r"mixtral\.expert_count"),
    ):
        describe(file)
