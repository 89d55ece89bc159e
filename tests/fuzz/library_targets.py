"""Fuzz targets of models by name: what users type, and the hub's lists of files."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from dflash_adapters.library.file_sets import choose, file_sets, short_name
from dflash_adapters.library.names import ModelName, parse_name
from dflash_protocol.errors import PullFailed, SettingsError
from dflash_runtime.tools.pulling.hub import read_listing
from fuzz.mutation import ODD_VALUES, Mutator
from fuzz.target import Target

_NAMES = (
    "hf://some-owner/Some-Model-GGUF/Q8_0/Some-Model-Q8_0-00001-of-00003.gguf",
    "some-owner/Some-Model-GGUF:Q4_K_M",
    "some-owner/Some-Model-GGUF@v1.0:UD-Q4_K_XL",
    "hf://some-owner/Some-Model-GGUF",
    "some-model:30b-a3b",
    "folder/model.gguf",
)
_PIECES = (b"../", b"/", b"hf://", b"http://", b":", b"@", b"--", b"..", b".gguf", b"\0", b"\\")
_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_FILES = (
    "Some-Model-Q4_K_M.gguf",
    "Q8_0/Some-Model-Q8_0-00001-of-00002.gguf",
    "Q8_0/Some-Model-Q8_0-00002-of-00002.gguf",
)


def harmless(path: str) -> bool:
    """Whether a path stays below the folder that it is put to."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path


class ModelNames(Target):
    """One frame: what is typed."""

    refusals = (SettingsError,)

    def make(self, mutator: Mutator) -> list[bytes]:
        text = mutator.choose(_NAMES).encode()
        if mutator.chance(0.5):
            place = mutator.below(len(text) + 1)
            return [text[:place] + mutator.choose(_PIECES) + text[place:]]
        return [mutator.damage(text, mutator.choose(_NAMES).encode())]

    def feed(self, frames: list[bytes]) -> None:
        name = parse_name(frames[0].decode(errors="replace"))
        if name is None:
            return
        assert harmless(name.repository)
        assert "--" not in name.repository
        assert not name.file or (harmless(name.file) and name.file.endswith(".gguf"))
        for part in (name.owner, name.model, name.tag, name.revision):
            assert "/" not in part
            assert part.isascii()
        assert parse_name(str(name)) == name

    def serve_good(self) -> None:
        name = parse_name(_NAMES[1])
        assert name == ModelName("some-owner", "Some-Model-GGUF", "Q4_K_M")


class HubLists(Target):
    """One frame: a repository's list of files, as the hub sends it."""

    refusals = (PullFailed, SettingsError)

    def make(self, mutator: Mutator) -> list[bytes]:
        record = _record()
        if mutator.chance(0.5):
            return [mutator.damage(json.dumps(record).encode())]
        sibling = mutator.choose(record["siblings"])
        where = mutator.choose([record, sibling, sibling["lfs"]])
        where[mutator.choose(list(where))] = mutator.choose(ODD_VALUES)
        return [json.dumps(record).encode()]

    def feed(self, frames: list[bytes]) -> None:
        listing = read_listing(frames[0], "some-owner/Some-Model-GGUF")
        assert harmless(listing.commit)
        for name, file in listing.files.items():
            assert name == file.name
            assert harmless(name)
            assert file.blob.isalnum()
            assert 0 <= file.size_bytes < 1 << 62
        sets = file_sets(listing.files)
        chosen = choose(sets, ModelName("some-owner", "Some-Model-GGUF", "Q8_0"))
        assert short_name("a/b", chosen, sets)

    def serve_good(self) -> None:
        listing = read_listing(json.dumps(_record()).encode(), "some-owner/Some-Model-GGUF")
        assert sorted(listing.files) == sorted(_FILES)


def _record() -> dict[str, Any]:
    siblings: list[dict[str, Any]] = [
        {"rfilename": name, "size": 99, "blobId": "1" * 40, "lfs": {"sha256": "a" * 64, "size": 99}}
        for name in _FILES
    ]
    return {"id": "some-owner/Some-Model-GGUF", "sha": _COMMIT, "siblings": siblings}
