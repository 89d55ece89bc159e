"""Models in Ollama's folders: ``manifests/REGISTRY/OWNER/MODEL/TAG`` names a file of ``blobs``.

Ollama's own models have the owner ``library``, which their names leave out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dflash_adapters.library.file_sets import quantisation_of
from dflash_adapters.library.found_model import FoundModel, Library, found_model, subfolders
from dflash_adapters.library.names import ModelName
from dflash_protocol.errors import SettingsError, one_line
from dflash_protocol.process.text_files import read_file

DEFAULT_TAG = "latest"

_OWN = "library"
_MODEL = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
_LIMIT_BYTES = 1 << 20
_LONGEST_TYPE = 24


def ollama_models(folders: Iterable[Path]) -> Iterator[FoundModel]:
    """All models in these folders."""
    for root in folders:
        for registry in subfolders(root / "manifests"):
            for owner in subfolders(registry):
                for model in subfolders(owner):
                    for manifest in _files(model):
                        shown = model.name if owner.name == _OWN else f"{owner.name}/{model.name}"
                        found = _model(f"{shown}:{manifest.name}", manifest, root)
                        if found is not None:
                            yield found


def ollama_model_of(name: ModelName, folders: Iterable[Path]) -> FoundModel | None:
    """The model that a name stands for: with this tag, or ``latest``, of the first registry that
    has it. The tag's case does not matter."""
    wanted = (name.tag or DEFAULT_TAG).casefold()
    for root in folders:
        for registry in subfolders(root / "manifests"):
            for manifest in _files(registry / (name.owner or _OWN) / name.model):
                if manifest.name.casefold() == wanted:
                    found = _model(f"{name.repository}:{manifest.name}", manifest, root)
                    if found is not None:
                        return found
    return None


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if each.name[0] != "." and each.is_file())
    except OSError:
        return []


def _model(name: str, manifest: Path, root: Path) -> FoundModel | None:
    """The model of a manifest; None unless it has exactly one file with weights."""
    record = _json(manifest)
    layers = record.get("layers")
    if not isinstance(layers, list):
        return None
    blobs = [
        _blob(root, layer.get("digest"))
        for layer in layers
        if isinstance(layer, dict) and layer.get("mediaType") == _MODEL
    ]
    if len(blobs) != 1 or blobs[0] is None:
        return None
    return found_model(name, Library.OLLAMA, [blobs[0]], quantisation=_type(record, root, name))


def _type(record: dict[str, object], root: Path, name: str) -> str:
    """The quantisation that a manifest's configuration says, else what the tag ends with."""
    config = record.get("config")
    blob = _blob(root, config.get("digest")) if isinstance(config, dict) else None
    said = _json(blob).get("file_type") if blob is not None else None
    if isinstance(said, str):
        return one_line(said, _LONGEST_TYPE)
    return quantisation_of(name.partition(":")[2]).upper()


def _blob(root: Path, digest: object) -> Path | None:
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    return None if match is None else root / "blobs" / f"sha256-{match[1]}"


def _json(path: Path) -> dict[str, object]:
    """A file's JSON object; empty if it has none."""
    try:
        value = json.loads(read_file("manifest", path, limit_bytes=_LIMIT_BYTES))
    except (SettingsError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
