"""``dflash-moe pull`` within this process, with a hub on loopback: what it fetches, and what of the
hub's answers it refuses."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, hf_hub_download, scan_cache_dir

from dflash_runtime.cli.main import main
from dflash_runtime.tools.pulling import pull as pulling
from dflash_runtime.tools.pulling import transfer
from support.faults import small_file_system
from support.loopback_hub import (
    COMMIT,
    REPOSITORY,
    LoopbackHub,
    assert_nothing_named,
    assert_refused,
    gguf_like,
    hub_environment,
    linked,
    loopback_hub,
    partial,
    repository_folder,
)
from support.processes import ROOT, run_main

FILE = "Some-Model-Q4_K_M.gguf"
NAME = f"{REPOSITORY}:Q4_K_M"
SIZE = 300_000
CONTENT = gguf_like(SIZE)

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with loopback_hub(files={FILE: CONTENT}) as running:
        yield running


@pytest.fixture
def run(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command against the hub; the library has read its variables long ago."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 5)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(transfer, "_FIRST_PAUSE_S", 0.001)
    variables = hub_environment(hub, tmp_path)
    return lambda *arguments, **extra: run_main(main, *arguments, **{**variables, **extra})


@pytest.fixture(scope="module", autouse=True)
def client() -> Iterator[None]:
    """The library's client is made once: reading certificates takes longer than a test."""
    yield
    huggingface_hub.close_session()


def test_a_second_pull_fetches_nothing(hub: LoopbackHub, run: Run, tmp_path: Path) -> None:
    done = run("pull", NAME)
    assert (done.returncode, done.stdout) == (0, f"{linked(tmp_path, FILE)}\n")
    assert "fetching" in done.stderr
    again = run("pull", f"hf://{REPOSITORY}/{FILE}", "--json")
    assert json.loads(again.stdout) == {
        "name": NAME, "path": str(linked(tmp_path, FILE)), "files": 1, "bytes": SIZE,
        "fetched_bytes": 0,
    }  # fmt: skip
    assert len(hub.ranges()) == 1


def test_other_programs_find_what_was_pulled(run: Run, tmp_path: Path) -> None:
    assert run("pull", NAME).returncode == 0
    folder = str(tmp_path / "hf" / "hub")
    path = hf_hub_download(REPOSITORY, FILE, cache_dir=folder, local_files_only=True)
    assert path == str(linked(tmp_path, FILE))
    scanned = scan_cache_dir(folder)
    assert scanned.warnings == []
    assert [(each.repo_id, each.size_on_disk) for each in scanned.repos] == [(REPOSITORY, SIZE)]


def test_what_other_programs_fetched_is_not_fetched_again_nor_removed(
    hub: LoopbackHub, run: Run, tmp_path: Path
) -> None:
    hf_hub_download(REPOSITORY, FILE, cache_dir=str(tmp_path / "hf" / "hub"))
    num_asked = len(hub.ranges())
    assert run("pull", NAME).returncode == 0
    assert len(hub.ranges()) == num_asked
    refused = run("rm", NAME, "--yes")
    assert refused.returncode == 2
    assert "was brought by another program" in refused.stderr
    assert linked(tmp_path, FILE).exists()


def test_all_files_of_a_split_model_are_fetched(hub: LoopbackHub, run: Run, tmp_path: Path) -> None:
    names = [f"Q8_0/Some-Model-Q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    files = {name: gguf_like(50_000, seed) for seed, name in enumerate(names)}
    hub.files.update(files)
    done = run("pull", f"hf://{REPOSITORY}/{names[1]}")
    assert done.stdout == f"{linked(tmp_path, names[0])}\n", done.stderr
    for name, content in files.items():
        assert linked(tmp_path, name).read_bytes() == content
    assert run("rm", f"{REPOSITORY}:q8_0", "--yes").returncode == 0
    assert not repository_folder(tmp_path).exists()


def test_a_split_model_is_found_when_all_of_it_is_there(
    hub: LoopbackHub, run: Run, tmp_path: Path
) -> None:
    names = [f"Some-Model-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.files.update({name: gguf_like(50_000, seed) for seed, name in enumerate(names)})
    hub.sends[names[1]] = b"GGUF" + bytes(49_996)
    done = run("pull", f"{REPOSITORY}:Q8_0")
    assert done.returncode == 1
    assert not list(repository_folder(tmp_path).glob("snapshots/**/*.gguf"))
    listed = json.loads(run("list", "--json").stdout)
    assert listed["models"] == []
    (begun,) = listed["unfinished"]
    assert (begun["name"], begun["present_bytes"], begun["bytes"]) == (
        f"{REPOSITORY}:Q8_0", 50_000, 100_000,
    )  # fmt: skip
    assert "50% pulled" in run("list").stdout
    assert run("rm", f"{REPOSITORY}:Q8_0", "--yes").returncode == 0
    assert not repository_folder(tmp_path).exists()


def test_rm_leaves_the_repository_s_other_models(
    hub: LoopbackHub, run: Run, tmp_path: Path
) -> None:
    hub.files["Some-Model-Q8_0.gguf"] = gguf_like(1000, 9)
    for tag in ("Q4_K_M", "Q8_0"):
        assert run("pull", f"{REPOSITORY}:{tag}").returncode == 0
    asked = run("rm", NAME)
    assert asked.returncode == 2
    assert "--yes" in asked.stderr
    assert run("rm", NAME, "--yes").returncode == 0
    assert not linked(tmp_path, FILE).is_symlink()
    assert linked(tmp_path, "Some-Model-Q8_0.gguf").exists()
    assert (repository_folder(tmp_path) / "refs" / "main").read_text() == COMMIT
    assert run("rm", NAME, "--yes").returncode == 2


def test_a_git_hash_of_a_small_file(hub: LoopbackHub, run: Run, tmp_path: Path) -> None:
    content = gguf_like(100)
    digest = hashlib.sha1(b"blob 100\0" + content).hexdigest()
    hub.files = {FILE: content}
    hub.listed = {
        "sha": COMMIT, "siblings": [{"rfilename": FILE, "size": 100, "blobId": digest}]
    }  # fmt: skip
    assert run("pull", NAME).returncode == 0
    assert linked(tmp_path, FILE).resolve().name == digest


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_breaks(hub: LoopbackHub, run: Run, tmp_path: Path, ranges: bool) -> None:
    hub.most_bytes, hub.has_ranges = 120_000, ranges
    done = run("pull", NAME)
    if ranges:
        assert done.returncode == 0
        assert linked(tmp_path, FILE).read_bytes() == CONTENT
        assert hub.ranges() == ["", "bytes=120000-", "bytes=240000-"]
    else:  # each try begins anew, and comes no further
        assert_refused(done, tmp_path, "peer closed connection")
        assert len(hub.ranges()) == 6


def test_a_hub_without_ranges_gives_the_whole_again(
    hub: LoopbackHub, run: Run, tmp_path: Path
) -> None:
    partial(tmp_path, CONTENT).parent.mkdir(parents=True)
    partial(tmp_path, CONTENT).write_bytes(CONTENT[:1000])
    hub.has_ranges = False
    assert run("pull", NAME).returncode == 0
    assert linked(tmp_path, FILE).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "left", [bytes(1000), b"GGUF" + bytes(1000), CONTENT + b"more", bytes(SIZE), CONTENT]
)
def test_what_an_earlier_pull_left(hub: LoopbackHub, run: Run, tmp_path: Path, left: bytes) -> None:
    partial(tmp_path, CONTENT).parent.mkdir(parents=True)
    partial(tmp_path, CONTENT).write_bytes(left)
    assert run("pull", NAME).returncode == 0
    assert linked(tmp_path, FILE).read_bytes() == CONTENT


def test_wrong_bytes_after_wrong_bytes(hub: LoopbackHub, run: Run, tmp_path: Path) -> None:
    partial(tmp_path, CONTENT).parent.mkdir(parents=True)
    partial(tmp_path, CONTENT).write_bytes(b"GGUF" + bytes(1000))
    hub.sends[FILE] = CONTENT[:-1] + b"!"
    assert_refused(run("pull", NAME), tmp_path, "its hash is")
    assert hub.ranges() == ["bytes=1004-", ""]
    assert not partial(tmp_path, CONTENT).exists()


@pytest.mark.parametrize("says", [SIZE - 1, SIZE + 1])
def test_another_length_than_listed(hub: LoopbackHub, run: Run, tmp_path: Path, says: int) -> None:
    hub.says_length = says
    assert_refused(run("pull", NAME), tmp_path, f"sends {says:,} bytes, its list says")


def test_more_bytes_than_listed(hub: LoopbackHub, run: Run, tmp_path: Path) -> None:
    hub.sends[FILE] = CONTENT + bytes(100_000)
    hub.says_length = -1  # no length is said
    assert_refused(run("pull", NAME), tmp_path, "sends more than the 300,000 bytes")


def test_a_file_that_is_no_gguf(hub: LoopbackHub, run: Run, tmp_path: Path) -> None:
    hub.files[FILE] = b"<html>" + bytes(SIZE)
    assert_refused(run("pull", NAME), tmp_path, "is not a GGUF file")
    assert not list(repository_folder(tmp_path).glob("blobs/*"))


def test_room_is_looked_for_before_anything_is_fetched(
    hub: LoopbackHub, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "hf").mkdir()
    with small_file_system(tmp_path / "hf", 1 << 17) as is_mounted:
        if not is_mounted:
            pytest.skip("may not mount a tmpfs")
        assert_refused(run("pull", NAME), tmp_path, "are to be fetched", "GiB free")
        assert hub.ranges() == []


def test_a_file_that_the_hub_gives_by_its_own_transfer_alone(
    hub: LoopbackHub, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "MOST_FILE_BYTES", SIZE - 1)
    assert_refused(run("pull", NAME), tmp_path, "hf download")
    assert hub.ranges() == []


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "no such model, or a token is needed"),
        (403, "no such model, or a token is needed"),
        (404, "no such model"),
        (418, "answers 418"),
        (503, "answers 503"),
    ],
)
def test_answers_that_refuse(
    hub: LoopbackHub, run: Run, tmp_path: Path, status: int, words: str
) -> None:
    hub.status = status
    assert_refused(run("pull", NAME), tmp_path, words)


def sibling(**other: Any) -> dict[str, Any]:
    return {"rfilename": FILE, "lfs": {"sha256": "0" * 64, "size": 9}, **other}


@pytest.mark.parametrize(
    "listed",
    [
        b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff\xfe", b'{"sha": 1, "siblings": []}',
        {"sha": COMMIT}, {"sha": "../..", "siblings": []}, {"sha": COMMIT, "siblings": {}},
        {"sha": COMMIT, "siblings": [sibling(lfs={"sha256": "../../x", "size": 9})]},
        {"sha": COMMIT, "siblings": [sibling(lfs={"sha256": "0" * 64, "size": -1})]},
        {"sha": COMMIT, "siblings": [sibling(lfs={"sha256": "0" * 64, "size": 1 << 60})]},
        {"sha": COMMIT, "siblings": [sibling(lfs={"sha256": "0" * 64, "size": "9"})]},
        {"sha": COMMIT, "siblings": [sibling(lfs=None)]},
    ],
)  # fmt: skip
def test_lists_that_cannot_be_understood(
    hub: LoopbackHub, run: Run, tmp_path: Path, listed: Any
) -> None:
    hub.listed = listed
    assert_refused(run("pull", NAME), tmp_path, "cannot be understood")


@pytest.mark.parametrize(
    "name", ["../../../x-Q4_K_M.gguf", "/x-Q4_K_M.gguf", "a\x00-Q4_K_M.gguf", ".a/x-Q4_K_M.gguf", 3]
)
def test_names_that_lead_out_of_the_folder_are_not_seen(
    hub: LoopbackHub, run: Run, tmp_path: Path, name: Any
) -> None:
    hub.listed = {"sha": COMMIT, "siblings": [sibling(rfilename=name), "no object", None]}
    done = run("pull", NAME)
    assert_refused(done, tmp_path, "has no complete GGUF model", code=2)


def test_a_list_that_does_not_end(hub: LoopbackHub, run: Run, tmp_path: Path) -> None:
    hub.listed = b" " * (33 << 20)
    assert_refused(run("pull", NAME), tmp_path, "list of files is too long")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("http://example.org/model.gguf", "models are fetched from the hub alone"),
        ("file:///etc/passwd", "models are fetched from the hub alone"),
        ("s3://bucket/model.gguf", "models are fetched from the hub alone"),
        ("hf://owner/../model.gguf", "is no model's name"),
        ("hf:///etc/model.gguf", "is no model's name"),
        ("owner/model/../../x.gguf", "is no model's name"),
        ("/etc/model.gguf", "is no model's name"),
        ("model.gguf", "is no model's name"),
        ("some-model:4b", "Ollama fetches its own"),
        (f"{REPOSITORY}:Q2_K", f"there is no such model; {REPOSITORY} has {FILE}"),
    ],
)
def test_names_that_are_refused(run: Run, tmp_path: Path, name: str, words: str) -> None:
    assert_refused(run("pull", name), tmp_path, words, code=2)
    assert_nothing_named(tmp_path)


def test_the_token_is_for_the_hub_alone(hub: LoopbackHub, run: Run, tmp_path: Path) -> None:
    with loopback_hub(files=hub.files) as other:
        hub.files_url, hub.token = other.url, "secret"
        assert run("pull", NAME, HF_TOKEN="secret").returncode == 0
    assert set(hub.tokens) == {"Bearer secret"}
    assert other.tokens == [""]


def test_a_start_without_a_name_does_not_import_the_library() -> None:
    """It takes half a second."""
    for package in ("adapters", "daemon", "protocol", "runtime"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                named = ast.unparse(node) if isinstance(node, ast.Import | ast.ImportFrom) else ""
                assert not {"huggingface_hub", "httpx2"} & set(re.split(r"\W+", named)), path
