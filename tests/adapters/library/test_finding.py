"""Models are found by name in the hub's cache, LM Studio's and Ollama's folders."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.library.finding import (
    all_models,
    find_model,
    is_kept_for_others,
    model_file,
)
from dflash_adapters.library.found_model import Library
from dflash_adapters.library.names import require_name
from dflash_adapters.library.ollama import ollama_model_of
from dflash_adapters.library.pulled_files import PulledFile, notes_of, write_note
from dflash_protocol.errors import SettingsError

GGUF = b"GGUF" + bytes(20)
COMMIT, OLDER = "a" * 40, "b" * 40
DIGEST, CONFIG = "c" * 64, "d" * 64


def put(path: Path, content: bytes = GGUF) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


class Home:
    """A home with the folders of all three."""

    def __init__(self, folder: Path) -> None:
        self.hub = folder / "hub"
        self.studio = folder / ".lmstudio" / "models"
        self.ollama = folder / ".ollama" / "models"

    def in_cache(self, name: str, *, repository: str = "own/M-GGUF", commit: str = COMMIT) -> Path:
        folder = self.hub / f"models--{repository.replace('/', '--')}"
        blob = put(folder / "blobs" / f"{abs(hash((name, commit))):064x}")
        link = folder / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
        put(folder / "refs" / "main", commit.encode())
        return link

    def in_ollama(self, name: str, layers: Any = None, *, registry: str = "some.registry") -> Path:
        """`name`: OWNER/MODEL/TAG."""
        layers = layers or [
            {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{CONFIG}"},
            {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{DIGEST}"},
        ]
        manifest = {"config": {"digest": f"sha256:{CONFIG}"}, "layers": layers}
        put(self.ollama / "manifests" / registry / name, json.dumps(manifest).encode())
        put(self.ollama / "blobs" / f"sha256-{CONFIG}", json.dumps({"file_type": "Q6_K"}).encode())
        return put(self.ollama / "blobs" / f"sha256-{DIGEST}")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", "")
    monkeypatch.chdir(tmp_path)
    made = Home(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(made.hub))
    return made


def test_a_path_that_exists_wins(home: Home, tmp_path: Path) -> None:
    home.in_cache("M-Q4_K_M.gguf")
    for name in ("own/M-GGUF:Q4_K_M", "qwen3:4b", "own/M-GGUF"):
        assert model_file(put(tmp_path / name).relative_to(tmp_path).as_posix()) == Path(name)
        (tmp_path / name).unlink()
    assert model_file(Path("own/M-GGUF:Q4_K_M")) == Path("own/M-GGUF:Q4_K_M")


@pytest.mark.parametrize("text", ["none.gguf", "/none", "./a/b", "../x", "folder/none.gguf", "a b"])
def test_a_path_that_does_not_exist_stays_one(home: Home, text: str) -> None:
    assert model_file(text) == Path(text)


def test_the_hub_s_cache(home: Home) -> None:
    one = home.in_cache("M-Q4_K_M.gguf")
    first = home.in_cache("Q8_0/M-Q8_0-00001-of-00002.gguf")
    home.in_cache("mmproj-F16.gguf")
    with pytest.raises(SettingsError, match=r"no such model; own/M-GGUF has M-Q4_K_M.gguf"):
        model_file("own/M-GGUF:Q8_0")  # half of it
    home.in_cache("Q8_0/M-Q8_0-00002-of-00002.gguf")
    assert model_file("own/M-GGUF:q8_0") == first
    for text in ("own/M-GGUF:Q4_K_M", "own/M-GGUF", "hf://own/M-GGUF/M-Q4_K_M.gguf"):
        assert model_file(text) == one
    assert [(each.name, each.quantisation) for each in all_models()] == [
        ("own/M-GGUF:Q4_K_M", "Q4_K_M"), ("own/M-GGUF:Q8_0", "Q8_0"),
    ]  # fmt: skip
    with pytest.raises(SettingsError, match="dflash-moe pull own/Other:Q4_K_M fetches it"):
        model_file("own/Other:Q4_K_M")


def test_the_newest_snapshot_is_used_and_older_ones_by_revision(home: Home) -> None:
    older = home.in_cache("M-Q4_K_M.gguf", commit=OLDER)
    old_alone = home.in_cache("M-Q2_K.gguf", commit=OLDER)
    newer = home.in_cache("M-Q4_K_M.gguf")
    assert model_file("own/M-GGUF:Q4_K_M") == newer
    assert model_file("own/M-GGUF:Q2_K") == old_alone
    assert model_file(f"own/M-GGUF@{OLDER}:Q4_K_M") == older
    assert model_file("own/M-GGUF@main:Q4_K_M") == newer
    assert find_model(require_name("own/M-GGUF@other:Q4_K_M")) is None


def test_files_without_the_magic_are_no_models(home: Home) -> None:
    home.in_cache("M-Q4_K_M.gguf").resolve().write_bytes(b"<html>")
    home.in_cache("M-Q8_0.gguf").resolve().unlink()
    os.mkfifo(home.hub / "models--own--M-GGUF" / "snapshots" / COMMIT / "M-F16.gguf")
    assert all_models() == []
    assert find_model(require_name("own/M-GGUF:Q4_K_M")) is None


def test_lm_studio_s_folder(home: Home) -> None:
    path = put(home.studio / "own" / "M-GGUF" / "M-Q4_K_M.gguf")
    put(home.studio / "own" / "M-GGUF" / "mmproj-M-F16.gguf")
    assert model_file("own/M-GGUF:Q4_K_M") == path
    assert model_file("own/M-GGUF/M-Q4_K_M.gguf") == path
    (found,) = all_models()
    assert (found.name, found.library) == ("own/M-GGUF:Q4_K_M", Library.LM_STUDIO)
    with pytest.raises(SettingsError, match="neither a file nor a model"):
        model_file("hf://own/M-GGUF:Q4_K_M")
    cached = home.in_cache("M-Q8_0.gguf")
    assert model_file("own/M-GGUF:Q4_K_M") == path  # though the cache has others
    assert model_file("own/M-GGUF:Q8_0") == cached


def test_ollama_s_folder(home: Home) -> None:
    blob = home.in_ollama("library/qwen3/30b")
    home.in_ollama("library/qwen3/latest")
    home.in_ollama("own/M-GGUF/Q4_K_M", registry="other.registry")
    for text in ("qwen3:30b", "qwen3", "own/M-GGUF:q4_k_m"):
        assert model_file(text) == blob
    assert [(each.name, each.quantisation) for each in all_models()] == [
        ("own/M-GGUF:Q4_K_M", "Q6_K"), ("qwen3:30b", "Q6_K"), ("qwen3:latest", "Q6_K"),
    ]  # fmt: skip
    with pytest.raises(SettingsError, match="dflash-moe list shows them"):
        model_file("qwen3:4b")


def test_the_variable_names_ollama_s_folder(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.in_ollama("library/qwen3/30b")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "elsewhere"))
    assert all_models() == []
    home.ollama.rename(tmp_path / "elsewhere")
    assert [each.name for each in all_models()] == ["qwen3:30b"]


MODEL = "application/vnd.ollama.image.model"


@pytest.mark.parametrize(
    "layers",
    [
        [{"mediaType": MODEL, "digest": "sha256:../../../etc/passwd"}],
        [{"mediaType": MODEL, "digest": f"sha256:{'e' * 64}"}],  # is not there
        [{"mediaType": MODEL, "digest": 7}], [{"mediaType": MODEL}], [None], "text", {"a": 1},
        [{"mediaType": MODEL, "digest": f"sha256:{DIGEST}"}] * 2,
    ],
)  # fmt: skip
def test_manifests_that_name_no_model(home: Home, layers: Any) -> None:
    home.in_ollama("library/qwen3/30b", layers)
    assert all_models() == []


@given(st.one_of(st.binary(max_size=200), st.recursive(st.none() | st.text(), st.lists).map(
    lambda value: json.dumps({"layers": value, "config": value}).encode()
)))  # fmt: skip
def test_no_manifest_harms(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile-manifest"
    put(folder / "manifests" / "some.registry" / "library" / "m" / "latest", content)
    assert ollama_model_of(require_name("m"), [folder]) is None


def test_nothing_is_put_beside_other_programs_files(home: Home) -> None:
    assert is_kept_for_others(home.in_cache("M-Q4_K_M.gguf"))
    assert is_kept_for_others(home.in_ollama("library/qwen3/30b"))
    assert not is_kept_for_others(home.studio / "own" / "M" / "m.gguf")
    assert not is_kept_for_others(Path("/models/m.gguf"))


def test_notes_that_are_damaged_are_left_out(tmp_path: Path) -> None:
    note = PulledFile("e" * 64, "M.gguf", 9, COMMIT, "own/M:Q8_0")
    write_note(tmp_path, note)
    assert notes_of(tmp_path) == {note.blob: note}
    for content in (b"", b"[]", b"{}", b"\xff", b'{"blob": 1}', b"[" * 9999):
        put(tmp_path / ".dflash-moe" / f"{'f' * 64}.json", content)
        assert notes_of(tmp_path) == {note.blob: note}
    for wrong in ({"name": "../x.gguf"}, {"blob": "../x"}, {"size_bytes": "9"}, {"commit": None}):
        record = {"blob": "f" * 64, "name": "a.gguf", "size_bytes": 9, "commit": "", "chosen": ""}
        content = json.dumps({**record, **wrong}).encode()
        put(tmp_path / ".dflash-moe" / f"{'f' * 64}.json", content)
        assert notes_of(tmp_path) == {note.blob: note}
